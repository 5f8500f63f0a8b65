//! Jobs: what is stored of a new one, what a change returns, and how they are listed.

use super::EventRow;
use crate::lifecycle::Fork;
use jiff::Timestamp;
use lockstep_protocol::{
    job::{Job, JobId, JobState},
    spec::JobSpec,
};
use std::{fmt, str::FromStr};

/// A job about to be stored.
#[derive(Debug, Clone)]
pub struct NewJob {
    /// Its id.
    pub id: JobId,
    /// Checked.
    pub spec: JobSpec,
    /// Now.
    pub at: Timestamp,
    /// The client's key and the hash of its request.
    pub idempotency: Option<(String, String)>,
    /// The checkpoint of another job that it continues from.
    pub fork: Option<Fork>,
    /// Who submits it: a person's or a token's name.
    pub owner: Option<String>,
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

/// Which jobs to list.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// In this state.
    pub state: Option<JobState>,
    /// Part of the name.
    pub name: Option<String>,
    /// Of this person or token.
    pub owner: Option<String>,
    /// As this person or token sees them: without what is private to others. `None` sees all.
    pub seen_by: Option<String>,
    /// At most so many; 0 counts as 50.
    pub limit: u32,
    /// Older than this.
    pub cursor: Option<Cursor>,
}

/// A place in the list of jobs, which stays one when the job that it was taken from is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// Milliseconds since 1970.
    pub created_at: i64,
    /// Orders jobs of the same millisecond.
    pub id: String,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.created_at, self.id)
    }
}

impl FromStr for Cursor {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts = text.rsplit_once('-').and_then(|(at, id)| {
            id.parse::<JobId>().ok()?;
            Some(Cursor { created_at: at.parse().ok()?, id: id.to_owned() })
        });
        parts.ok_or_else(|| "the cursor is none of this server's".to_owned())
    }
}

/// A page of jobs.
#[derive(Debug, Clone)]
pub struct Page {
    /// Newest first.
    pub jobs: Vec<Job>,
    /// There are older ones, after this.
    pub next: Option<Cursor>,
}
