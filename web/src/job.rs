//! One job: how far, how fast, how good, and whether anything is wrong.

mod own_settings;

use crate::{
    layout::{Bar, Nav, Viewer, data_block},
    numbers::{Shown, bytes, clock, count, percent, plural, rate, value},
};
use askama::Template;
use lockstep_protocol::{
    agent::{CheckpointInfo, RankReport},
    attempt::Attempt,
    best::best_words,
    job::{Job, JobState},
    numbers::standard_error,
    panels::Panel,
    queue::waits_for,
};
use serde::Serialize;

/// A checkpoint with the id that its download link needs.
#[derive(Debug, Clone, Serialize)]
pub struct Checkpoint {
    /// The id in `/api/v1/checkpoints/{id}`.
    pub id: String,
    /// That wrote it.
    pub attempt: u32,
    #[serde(flatten)]
    /// What is known of it.
    pub info: CheckpointInfo,
    /// Whether the object store has it (`uploading` or `stored`), where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<&'static str>,
}

/// Where a rank runs, and its newest report if it has made one.
#[derive(Debug, Clone, Serialize)]
pub struct RankSeat {
    /// From 0.
    pub rank: u32,
    /// Name of the agent that holds its slot; empty when unknown.
    pub agent: String,
    /// Its newest report.
    pub report: Option<RankReport>,
}

/// The panels that a job's page shows.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Panels {
    /// Whose they are: `job`, `project` or `none`.
    pub from: &'static str,
    /// As they follow each other.
    pub panels: Vec<Panel>,
}

/// `GET /jobs/{id}`.
#[derive(Debug, Clone)]
pub struct JobPage {
    /// As it now stands.
    pub job: Job,
    /// In rank order, of the newest attempt; may be empty: the script then shows what the stream says.
    pub ranks: Vec<RankSeat>,
    /// Newest first.
    pub checkpoints: Vec<Checkpoint>,
    /// In order.
    pub attempts: Vec<Attempt>,
    /// Bytes that deleting the job frees (checkpoints, logs, metrics), if known.
    pub size_bytes: Option<u64>,
    /// This server's address as the browser sees it, for commands to copy.
    pub server_url: String,
    /// Who looks.
    pub viewer: Viewer,
    /// Whether who looks may change it.
    pub may_change: bool,
    /// Charts that people put together.
    pub panels: Panels,
    /// Whether there are histograms of its layers.
    pub has_histograms: bool,
    /// Whether its network is described.
    pub has_network: bool,
    /// Whether the server keeps checkpoints in an object store, too.
    pub has_artifact_store: bool,
}

impl JobPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        #[derive(Serialize)]
        struct Data<'a> {
            job: &'a Job,
            ranks: &'a [RankSeat],
            checkpoints: &'a [Checkpoint],
            panels: &'a Panels,
            may_change: bool,
            has_artifact_store: bool,
        }
        let data = data_block(&Data {
            job: &self.job,
            ranks: &self.ranks,
            checkpoints: &self.checkpoints,
            panels: &self.panels,
            may_change: self.may_change,
            has_artifact_store: self.has_artifact_store,
        })?;
        JobTemplate { facts: Facts::new(self), page: self, job: &self.job, data }.render()
    }
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobTemplate<'a> {
    page: &'a JobPage,
    job: &'a Job,
    facts: Facts,
    data: String,
}

impl JobTemplate<'_> {
    fn nav(&self) -> Bar {
        Nav::Jobs.seen_by(self.page.viewer)
    }

    /// `attempt 2 · 4 ranks on h200-a · bf16`; the script adds when it started, in the reader's time.
    fn about(&self) -> String {
        let job = self.job;
        let mut parts = Vec::new();
        if job.attempt > 0 {
            parts.push(format!("attempt {}", job.attempt));
        }
        let ranks = match job.ranks_now() {
            now if now < job.ranks => format!("{now} of {} ranks", job.ranks),
            _ => plural(job.ranks.into(), "rank"),
        };
        parts.push(if job.agents.is_empty() {
            ranks
        } else {
            format!("{ranks} on {}", job.agents.join(", "))
        });
        parts.push(format!("{} on {}", job.spec.model.arch.name(), job.spec.data.dataset));
        parts.join(" · ")
    }

    /// The specification as TOML, complete with its defaults.
    fn spec(&self) -> String {
        // Every field of a specification has a TOML form; should one not, JSON shows as much.
        toml::to_string(&self.job.spec)
            .or_else(|_| serde_json::to_string_pretty(&self.job.spec))
            .unwrap_or_default()
    }

    /// Those that differ from the defaults, and those that have none, by their keys in a job file.
    fn own_settings(&self) -> Vec<(String, String)> {
        own_settings::of(&self.job.spec)
    }

    /// The banner's first words and its sentence, when something is wrong.
    fn banner(&self) -> Option<(String, Shown)> {
        let reason = self.job.reason.clone().unwrap_or_default();
        // Before the state, which another version may have called something else.
        if let Some(flaw) = &self.job.unreadable {
            return Some((
                "Not all of this job can be read.".to_owned(),
                Shown::sentence(&unreadable(flaw, self.job, &reason)),
            ));
        }
        let (mut what, why) = match self.job.state {
            JobState::Failed => ("The job failed.".to_owned(), reason),
            JobState::Lost => ("Its machine is silent.".to_owned(), reason),
            JobState::Restarting | JobState::Queued => waiting(self.job)?,
            _ => return None,
        };
        // The sentence goes on.
        if why.starts_with(|c: char| c.is_ascii_lowercase()) && what.ends_with('.') {
            what.pop();
            what.push(':');
        }
        Some((what, Shown::sentence(&why)))
    }

    /// `bad`, `warn`: how the banner is coloured.
    fn tone(&self) -> &'static str {
        if self.job.state == JobState::Failed && self.job.unreadable.is_none() { "bad" } else { "warn" }
    }

    fn size(&self) -> String {
        self.page.size_bytes.map(bytes).unwrap_or_default()
    }

    fn checkpoint_rows(&self) -> Vec<CheckpointRow> {
        self.page
            .checkpoints
            .iter()
            .map(|c| CheckpointRow {
                id: c.id.clone(),
                label: format!("{}-{}", c.info.epoch, c.info.step),
                best: c.info.best,
                is_uploading: c.stored == Some("uploading"),
                accuracy: c.info.accuracy_in_words().unwrap_or_default(),
                sharded: self.job.spec.checkpoint.sharded,
                averaged: self.is_averaged(),
                averaged_from: self.job.spec.train.ema_steps,
                step: c.info.step,
                size: bytes(c.info.size_bytes),
                size_bytes: c.info.size_bytes,
            })
            .collect()
    }

    fn is_averaged(&self) -> bool {
        self.job.spec.train.ema_decay > 0.0
    }

    /// An empty row for the script to fill and insert.
    fn blank(&self) -> CheckpointRow {
        let averaged_from = self.job.spec.train.ema_steps;
        let sharded = self.job.spec.checkpoint.sharded;
        CheckpointRow { sharded, averaged: self.is_averaged(), averaged_from, ..CheckpointRow::default() }
    }
}

/// Its place in the queue, and what it waits for now. As `#waiting` in `static/job/facts.js`.
fn waiting(job: &Job) -> Option<(String, String)> {
    let again = job.state == JobState::Restarting;
    let why = waits_for(job);
    if job.queue.is_none() && why.is_none() && !again {
        return None;
    }
    let place = job.queue.as_ref().map(|queue| format!(", number {} in the queue", queue.place));
    let what = if again { "Starting again" } else { "Waiting" };
    Some((format!("{what}{}.", place.unwrap_or_default()), why.unwrap_or_default()))
}

/// As `unreadable` in `static/job/facts.js`.
fn unreadable(flaw: &str, job: &Job, reason: &str) -> String {
    let shown = format!(
        "Another version of lockstep stored it, and this one does not understand: {flaw}. It is shown as far as it can be \
         read, with defaults for the rest."
    );
    // A state of another version is given as failed, without an end.
    let waits = matches!(job.state, JobState::Queued | JobState::Restarting | JobState::Paused)
        || (job.state == JobState::Failed && job.finished_at.is_none());
    match job.state {
        _ if waits => format!(
            "{shown} This version does not start it: run the one that stored it, or submit the job anew and delete this one."
        ),
        JobState::Failed => format!("{shown} The job failed: {reason}"),
        _ => shown,
    }
}

#[derive(Debug, Clone, Default)]
struct CheckpointRow {
    id: String,
    label: String,
    best: bool,
    /// The object store does not have it yet.
    is_uploading: bool,
    accuracy: String,
    /// Its job's ranks write parts with names of their own.
    sharded: bool,
    /// Its job keeps a running average of the weights.
    averaged: bool,
    /// Checkpoints of earlier steps have no average.
    averaged_from: u64,
    step: u64,
    size: String,
    size_bytes: u64,
}

/// The row of numbers under the title: each value with the small words next to it.
#[derive(Debug, Clone)]
struct Facts {
    step: u64,
    total_steps: u64,
    epoch: (String, String),
    steps: (String, String),
    left_label: &'static str,
    left: (String, String),
    speed: (String, String),
    loss: (String, String),
    accuracy: (String, String),
}

impl Facts {
    fn new(page: &JobPage) -> Self {
        let job = &page.job;
        let dash = || "–".to_owned();
        let none = String::new;
        let known = job.total_steps > 0;
        let epochs = job.total_steps.div_ceil(job.steps_per_epoch.max(1));
        let ran = job.ran_secs.filter(|_| job.state.is_final()).map(clock);
        Self {
            step: job.step.min(job.total_steps),
            total_steps: job.total_steps.max(1),
            epoch: if known {
                (count(job.epoch.into()), format!("of {}", count(epochs)))
            } else {
                (dash(), none())
            },
            steps: if known {
                (count(job.step), format!("of {}", count(job.total_steps)))
            } else {
                (dash(), none())
            },
            left_label: if ran.is_some() { "Ran for" } else { "Left" },
            left: match (ran, job.eta_secs) {
                (Some(ran), _) => (ran, none()),
                (None, Some(left)) => (clock(left), none()),
                (None, None) => (dash(), none()),
            },
            speed: job.images_per_second.map_or_else(
                || (dash(), none()),
                |all| (rate(all), format!("{} a rank", rate(all / f64::from(job.ranks_now().max(1))))),
            ),
            loss: (job.last.loss.map_or_else(dash, value), none()),
            accuracy: (
                job.last.val_accuracy.map_or_else(dash, |accuracy| {
                    let error = job.last.val_pictures.map(|pictures| standard_error(accuracy, pictures));
                    percent(accuracy) + &error.unwrap_or_default()
                }),
                job.best.map_or_else(none, |best| best_words(best, page.checkpoints.iter().map(|c| &c.info))),
            ),
        }
    }
}
