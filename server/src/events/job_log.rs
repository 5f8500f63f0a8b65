//! Lines that the server writes into logs of jobs.

use super::Events;
use crate::{lifecycle, store::JobRow, util::remember};
use lockstep_protocol::{
    JobId,
    agent::{AttemptEvent, LogLine},
};
use std::{collections::HashSet, sync::Mutex};

/// Lines that were written: job, attempt and topic.
pub(super) type WrittenLines = Mutex<HashSet<(JobId, u32, &'static str)>>;

impl Events {
    /// Writes a line into a job's log, unless a line about this topic was already written for the attempt.
    pub(crate) async fn log_once(&self, job: &JobId, attempt: u32, topic: &'static str, text: String) {
        if remember(&self.written_lines, (job.clone(), attempt, topic)) {
            self.log(job, text).await;
        }
    }

    /// Writes a line into a job's log.
    pub(crate) async fn log(&self, job: &JobId, text: String) {
        // Lines of rank 0 are numbered from 1. Number 0 marks a line of the server.
        let line = LogLine { number: 0, at: crate::now(), text };
        let event = AttemptEvent::Log { rank: 0, lines: vec![line] };
        let change = move |row: &mut JobRow| lifecycle::report(row, event.clone(), None, crate::now());
        if let Err(error) = self.change_job(job, Box::new(change)).await {
            tracing::warn!(%error, %job, "a line of a job's log could not be stored");
        }
    }
}
