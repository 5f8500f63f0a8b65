//! The page of a job: progress, speed, accuracy and problems.

mod settings;

use crate::{
    jobs::ELSEWHERE,
    layout::CurrentUser,
    numbers::{ShortText, bytes, clock, count, percent, plural, rate, value},
};
use askama::Template;
use lockstep_protocol::{
    agent::{CheckpointInfo, RankReport},
    best::best_words,
    checkpoint::Checkpoint,
    job::{External, Job, JobId, JobState, RunFile},
    numbers::uncertainty,
    panels::JobPanels,
    queue::reason_for_waiting,
    reason::{Reason, ReasonKind},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;

/// An entry of the list of ranks: the rank's agent and newest report.
#[derive(Debug, Clone, Serialize)]
pub struct RankEntry {
    /// The rank, from 0.
    pub rank: u32,
    /// Name of the rank's agent; empty if unknown.
    pub agent: String,
    /// The rank's newest report; `None` before its first report.
    pub report: Option<RankReport>,
}

/// `GET /jobs/{id}`. The page contains the serialized fields for its script.
#[derive(Debug, Clone, Serialize, Template)]
#[template(path = "job.html")]
pub struct JobPage {
    /// The job's current state.
    pub job: Job,
    /// Ranks of the newest attempt, in order. If empty, the script shows ranks from the stream.
    pub ranks: Vec<RankEntry>,
    /// Newest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Files of a run from elsewhere.
    #[serde(skip)]
    pub files: Vec<RunFile>,
    /// The person or token that looks at the page.
    #[serde(skip)]
    pub user: CurrentUser,
    /// Whether the user may change the job.
    pub may_change: bool,
    /// Panels that people have configured.
    pub panels: JobPanels,
    /// Whether the job has histograms of its layers.
    #[serde(skip)]
    pub has_histograms: bool,
    /// Whether the job has a description of its network.
    #[serde(skip)]
    pub has_network: bool,
    /// Whether the server also keeps checkpoints in an object store.
    pub has_object_store: bool,
}

impl JobPage {
    /// Whether the job has a checkpoint whose files exist.
    fn has_usable_checkpoint(&self) -> bool {
        self.checkpoints.iter().any(|checkpoint| !checkpoint.missing)
    }

    /// The validation accuracy of a checkpoint. Empty for a checkpoint without validation.
    fn accuracy(&self, info: &CheckpointInfo) -> String {
        let pictures = info.validation.as_ref().map(|set| set.pictures);
        let words = |share| percent(share) + &uncertainty(share, pictures);
        info.val_accuracy.map(words).unwrap_or_default()
    }

    /// Describes the newest attempt: `attempt 2 · 4 ranks on h200-a · resnet50 on pets`. The script adds the start time in the reader's
    /// time zone.
    fn about(&self) -> String {
        let job = &self.job;
        if job.external.is_some() {
            return ELSEWHERE.to_owned();
        }
        let mut parts = Vec::new();
        if job.attempt > 0 {
            parts.push(format!("attempt {}", job.attempt));
        }
        let ranks = match job.rank_count_now() {
            now if now < job.ranks => format!("{now} of {} ranks", job.ranks),
            _ => plural(job.ranks.into(), "rank"),
        };
        parts.push(if job.agents.is_empty() {
            ranks
        } else {
            format!("{ranks} on {}", job.agents.join(", "))
        });
        parts.push(format!("{} on {}", job.spec.model.arch.as_str(), job.spec.data.dataset));
        parts.join(" · ")
    }

    /// Returns the job and the name (`3-60`) of the checkpoint with whose weights the job began, if the weights are from this server.
    fn weights(&self) -> Option<(&str, &str)> {
        let (source, checkpoint) = self.job.spec.model.pretrained.as_deref()?.split_once('-')?;
        source.parse::<JobId>().is_ok().then_some((source, checkpoint))
    }

    /// Returns the specification as TOML with its defaults, or the configuration of a run from elsewhere as JSON.
    fn spec(&self) -> String {
        if let Some(external) = &self.job.external {
            return serde_json::to_string_pretty(&external.config).unwrap_or_default();
        }
        // Every field of a specification has a TOML form.
        toml::to_string(&self.job.spec).unwrap_or_default()
    }

    /// Returns settings that differ from the defaults or have no default, by their keys in a job file.
    fn settings(&self) -> Vec<(String, String)> {
        match &self.job.external {
            Some(external) => settings::flatten(&external.config),
            None => settings::non_default(&self.job.spec),
        }
    }

    /// Returns the results of a run from elsewhere for the row of numbers: first results with an entry in the run's summary, then the
    /// newest values of other metrics. In both groups, losses and accuracies come first. Names that begin with `_` are left out, because
    /// W&B writes these entries for its own use. The same as `externalResults` in `static/job/facts.js`.
    fn external_results(&self) -> Vec<(String, String)> {
        const MAX_RESULTS: usize = 4;
        let Some(External { summary, .. }) = &self.job.external else { return Vec::new() };
        let numbers = summary.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?)));
        let mut results: Vec<(&str, f64)> = Vec::new();
        for (name, value) in numbers.chain(self.job.last.by_name()) {
            if !name.starts_with('_') && !results.iter().any(|(known, _)| *known == name) {
                results.push((name, value));
            }
        }
        let is_result =
            |name: &str| ["loss", "acc"].iter().any(|word| name.to_ascii_lowercase().contains(word));
        results.sort_by_key(|&(name, _)| (!summary.contains_key(name), !is_result(name)));
        results.truncate(MAX_RESULTS);
        results.into_iter().map(|(name, value)| (name.to_owned(), format_result(name, value))).collect()
    }

    /// Returns all entries in the summary of a run from elsewhere, and the run's tags that have values.
    fn summary(&self) -> Vec<(String, String)> {
        let Some(External { summary, values, .. }) = &self.job.external else { return Vec::new() };
        let values = values.iter().map(|(key, value)| (key.clone(), value.clone()));
        settings::flatten(summary).into_iter().chain(values).collect()
    }

    /// Returns URL, path and size of each file of a run from elsewhere.
    fn files(&self) -> Vec<(String, &str, String)> {
        let url = |file: &RunFile| {
            let path = utf8_percent_encode(&file.path, NON_ALPHANUMERIC);
            format!("/api/v1/runs/{}/file?path={path}", self.job.id)
        };
        self.files.iter().map(|file| (url(file), file.path.as_str(), bytes(file.size_bytes))).collect()
    }

    /// Whether there is nothing to chart: the job has not trained yet, or ended before its first step. The same as `isBare` in
    /// `static/job/facts.js`.
    fn is_bare(&self) -> bool {
        use JobState::{Cancelled, Failed, Paused, Queued, Restarting};
        let (job, idle) = (&self.job, [Queued, Restarting, Paused, Failed, Cancelled]);
        job.external.is_none() && job.step == 0 && job.sparkline.is_empty() && idle.contains(&job.state)
    }

    /// Whether the job's priority has an effect: the job waits, or can be preempted by jobs of higher priority. The same as `hasPriority`
    /// in `static/job/actions.js`.
    fn has_priority(&self) -> bool {
        let state = self.job.state;
        state.is_waiting() || (state.is_active() && self.job.spec.preemptible)
    }

    /// Returns the title and the sentence of the banner, if the job has a problem.
    fn banner(&self) -> Option<(String, ShortText)> {
        let reason = self.job.reason.clone().unwrap_or_default();
        // Checked before the state, because an unknown state of another version counts as failed.
        if let Some(flaw) = &self.job.unreadable {
            return Some((
                "Not all of this job can be read.".to_owned(),
                ShortText::sentence(&describe_unreadable(flaw, &self.job, &reason)),
            ));
        }
        let (mut title, sentence) = match self.job.state {
            JobState::Failed => ("The job failed.".to_owned(), reason),
            JobState::Lost => ("The job's machine is silent.".to_owned(), reason),
            JobState::Restarting | JobState::Queued => waiting_banner(&self.job)?,
            JobState::Succeeded => {
                let Some(ReasonKind::StoppedEarly { detail, .. }) = self.job.cause.as_ref().map(Reason::kind)
                else {
                    return None;
                };
                ("Stopped early.".to_owned(), detail.to_string())
            }
            JobState::Cancelled => {
                let newest = self.checkpoints.first()?;
                ("Cancelled.".to_owned(), format!("Retry continues from step {}.", count(newest.info.step)))
            }
            _ => return None,
        };
        // If the sentence is in lower case, the title ends with a colon.
        if sentence.starts_with(|c: char| c.is_ascii_lowercase()) && title.ends_with('.') {
            title.pop();
            title.push(':');
        }
        Some((title, ShortText::sentence(&sentence)))
    }

    /// Returns the banner's colour: `bad` (red) or `warn` (yellow).
    fn tone(&self) -> &'static str {
        if self.job.state == JobState::Failed && self.job.unreadable.is_none() { "bad" } else { "warn" }
    }
}

/// Formats a result of a run from elsewhere. The same as `formatResult` in `static/job/facts.js`.
fn format_result(name: &str, v: f64) -> String {
    match name {
        "accuracy" | "val_accuracy" if (0.0..=1.0).contains(&v) => percent(v),
        _ if v.fract() == 0.0 && (0.0..1e15).contains(&v) => count(v as u64),
        _ => value(v),
    }
}

/// Returns the banner of a waiting job: the job's place in the queue, and the current reason for waiting. The same as `#waitingBanner` in
/// `static/job/facts.js`.
fn waiting_banner(job: &Job) -> Option<(String, String)> {
    let is_restart = job.state == JobState::Restarting;
    let reason = reason_for_waiting(job);
    if job.queue.is_none() && reason.is_none() && !is_restart {
        return None;
    }
    let place = job.queue.as_ref().map(|queue| format!(", number {} in the queue", queue.place));
    let title = if is_restart { "Starting again" } else { "Waiting" };
    Some((format!("{title}{}.", place.unwrap_or_default()), reason.unwrap_or_default()))
}

/// Describes a job that this version cannot read completely, and what to do.
fn describe_unreadable(flaw: &str, job: &Job, reason: &str) -> String {
    let description = format!(
        "Another version of lockstep stored this job, and this version does not understand: {flaw}. The page shows what it can \
         read, with defaults for the rest."
    );
    // Unknown states count as failed, without `finished_at`.
    let is_waiting = matches!(job.state, JobState::Queued | JobState::Restarting | JobState::Paused)
        || (job.state == JobState::Failed && job.finished_at.is_none());
    match job.state {
        _ if is_waiting => format!(
            "{description} This version does not start it: use the version that stored it, or submit the job again and delete this one."
        ),
        JobState::Failed => format!("{description} The job failed: {reason}"),
        _ => description,
    }
}

/// The row of numbers below the title. Each pair has a value and the small text beside the value.
#[derive(Debug, Clone)]
struct Facts {
    step: u64,
    total_steps: u64,
    epoch: (String, String),
    steps: (String, String),
    time_label: &'static str,
    time: (String, String),
    speed: (String, String),
    loss: (String, String),
    accuracy: (String, String),
}

impl JobPage {
    fn facts(&self) -> Facts {
        let job = &self.job;
        let dash = || "–".to_owned();
        let empty = String::new;
        let is_length_known = job.total_steps > 0;
        let epochs = job.total_steps.div_ceil(job.steps_per_epoch.max(1));
        let is_over = job.state.is_final();
        Facts {
            step: job.step.min(job.total_steps),
            total_steps: job.total_steps.max(1),
            epoch: if is_length_known {
                (count(job.epoch.into()), format!("of {}", count(epochs)))
            } else {
                (dash(), empty())
            },
            steps: if is_length_known {
                (count(job.step), format!("of {}", count(job.total_steps)))
            } else if job.external.is_some() {
                (count(job.step), empty())
            } else {
                (dash(), empty())
            },
            time_label: if is_over { "Ran for" } else { "Left" },
            time: (if is_over { job.ran_secs } else { job.eta_secs }.map_or_else(dash, clock), empty()),
            speed: match (job.images_per_second, job.rank_count_now()) {
                (None, _) => (dash(), empty()),
                (Some(all), ..=1) => (rate(all), empty()),
                (Some(all), ranks) => (rate(all), format!("{} per rank", rate(all / f64::from(ranks)))),
            },
            loss: job.last.loss.map_or_else(|| (dash(), empty()), |loss| (value(loss), "newest step".into())),
            accuracy: (
                job.last.val_accuracy.map_or_else(dash, |accuracy| {
                    percent(accuracy) + &uncertainty(accuracy, job.last.val_pictures)
                }),
                job.best
                    .map_or_else(empty, |best| best_words(best, self.checkpoints.iter().map(|c| &c.info))),
            ),
        }
    }
}
