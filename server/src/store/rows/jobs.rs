//! Jobs: what is stored of a new one, and what a change returns.

use super::{Annotation, EventRow};
use crate::lifecycle::Fork;
use jiff::Timestamp;
use lockstep_protocol::{
    job::{External, Job, JobId},
    spec::JobSpec,
};

/// A job about to be stored.
#[derive(Debug, Clone)]
pub struct NewJob {
    /// Its id.
    pub id: JobId,
    /// Checked; its tags and notes are in `annotation`.
    pub spec: JobSpec,
    /// Its tags and notes.
    pub annotation: Annotation,
    /// Now.
    pub at: Timestamp,
    /// The client's key and the hash of its request.
    pub idempotency: Option<(String, String)>,
    /// The checkpoint of another job that it continues from.
    pub fork: Option<Fork>,
    /// Who submits it: a person's or a token's name.
    pub owner: Option<String>,
    /// What it is for the sweep that starts it.
    pub trial: Option<NewTrial>,
    /// What only a run from elsewhere has; such a job runs at once.
    pub external: Option<External>,
}

/// The job after a change, and the events that the change stored.
#[derive(Debug, Clone)]
pub struct Changed {
    /// After the change.
    pub job: Job,
    /// In order; may be empty.
    pub events: Vec<EventRow>,
}

/// What [`crate::store::Store::create_job`] did.
#[derive(Debug, Clone)]
pub enum Created {
    /// A new job.
    New(Box<Changed>),
    /// The job that the same request made before.
    Before(Box<Job>),
}
