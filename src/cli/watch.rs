//! `lockstep watch`: a job's progress, live.

use super::{
    api::{Api, PATIENCE, ServerArgs},
    block_on, output, sentence, wrong,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockstep_protocol::{
    Job, JobState,
    stream::{Event, EventBody, Frame},
};
use std::{
    collections::BTreeMap,
    io::IsTerminal,
    time::{Duration, Instant},
};

/// Show a job's progress until it ends
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its id, the start of its id, or its name
    job: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Without a terminal a line of progress is printed this often.
const LINE_EVERY: Duration = Duration::from_secs(2);
/// First pause before connecting again, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Watches a job.
///
/// # Errors
/// Exit status 1 when the job ends in another way than `succeeded`.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        announce(&job);
        to_the_end(&api, job, args.server.json).await
    })
}

/// Says what Ctrl-C does and what it does not.
pub(crate) fn announce(job: &Job) {
    if !job.state.is_final() {
        output::warn(format_args!(
            "Ctrl-C ends this display and not the job: `lockstep watch {0}` shows it again, `lockstep cancel {0}` stops it",
            job.id
        ));
    }
}

/// Shows a job's progress until it is over, then how it ended. With `json`, every frame of its stream
/// from now on is a line.
///
/// # Errors
/// The job did not succeed, or the server went away.
pub(crate) async fn to_the_end(api: &Api, job: Job, json: bool) -> anyhow::Result<()> {
    let mut progress = Progress::new(&job, json);
    let job = follow(api, job, |frame| progress.show(frame)).await?;
    progress.finish();
    if json {
        output::json(&job)?;
    } else {
        output::line(summary(&job))?;
    }
    match job.state {
        JobState::Succeeded => Ok(()),
        // Why, the line above has said.
        _ => Err(NotSucceeded(job.state).into()),
    }
}

/// Waits without a word until a job is as it should be.
///
/// # Errors
/// The server went away.
pub(crate) async fn until(api: &Api, mut job: Job, done: impl Fn(&Job) -> bool) -> anyhow::Result<Job> {
    let began = Instant::now();
    while !done(&job) {
        if began.elapsed() > PATIENCE {
            anyhow::bail!("{} is still {}", job.id, job.state);
        }
        let mut stream = api.stream(&job, job.last_seq).await?;
        loop {
            let frame = match tokio::time::timeout(Duration::from_secs(5), stream.next()).await {
                Ok(frame) => frame?,
                Err(_) => break,
            };
            match frame {
                Some(Frame::Event(Event { body: EventBody::State { .. }, .. })) | None => break,
                Some(_) => {}
            }
        }
        job = api.get(&format!("/jobs/{}", job.id)).await?;
    }
    Ok(job)
}

/// A job that ended otherwise; `watch` exits with 1.
#[derive(Debug)]
pub(crate) struct NotSucceeded(JobState);

impl std::fmt::Display for NotSucceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the job is {}", self.0)
    }
}

impl std::error::Error for NotSucceeded {}

/// Hands every frame of a job's stream to `see`, each event once, however often the connection breaks;
/// returns the job when it is over.
async fn follow(
    api: &Api,
    job: Job,
    mut see: impl FnMut(&Frame) -> anyhow::Result<()>,
) -> anyhow::Result<Job> {
    let mut since = job.last_seq;
    let mut over = job.state.is_final();
    let mut pause = RETRY.0;
    let mut away_since: Option<Instant> = None;
    while !over {
        let lost = match api.stream(&job, since).await {
            Err(error) => Some(error),
            Ok(mut stream) => loop {
                match stream.next().await {
                    Err(error) => break Some(error),
                    Ok(None) => break None,
                    Ok(Some(frame)) => {
                        away_since = None;
                        pause = RETRY.0;
                        if let Frame::Hello { last_seq, .. } = &frame
                            && *last_seq < since
                        {
                            // An older database was put back: its events are new ones.
                            since = *last_seq;
                            break None;
                        }
                        if let Frame::Event(event) = &frame {
                            since = event.seq;
                            if let EventBody::State { state, .. } = event.body {
                                over = state.is_final();
                            }
                        }
                        see(&frame)?;
                        if over {
                            break None;
                        }
                    }
                }
            },
        };
        if !over {
            let away = *away_since.get_or_insert_with(Instant::now);
            if away.elapsed() > PATIENCE {
                let why = lost.map_or_else(|| "the stream was closed".to_owned(), |e| sentence(&e));
                anyhow::bail!("lost the server: {why}; `lockstep watch {}` continues from here", job.id);
            }
            // The job may be over, or gone, without a stream that says so.
            match api.get::<Job>(&format!("/jobs/{}", job.id)).await {
                Ok(now) => over = now.state.is_final() && now.last_seq <= since,
                Err(error) if error.is::<super::WrongRequest>() => {
                    return Err(wrong(format!("{}: {error}", job.id)));
                }
                Err(_) => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY.1);
        }
    }
    api.get(&format!("/jobs/{}", job.id)).await
}

/// `succeeded: validation accuracy 84.2 % in 41 s`.
pub(crate) fn summary(job: &Job) -> String {
    let mut line = job.state.to_string();
    match (&job.reason, job.state) {
        (Some(reason), state) if state != JobState::Succeeded => line += &format!(": {reason}"),
        _ => {
            if let Some(accuracy) = job.last.val_accuracy.or(job.best.map(|best| best.value)) {
                line += &format!(": validation accuracy {}", lockstep_protocol::numbers::percent(accuracy));
            }
        }
    }
    if let (Some(started), Some(finished)) = (job.started_at, job.finished_at) {
        let secs = (finished.as_millisecond() - started.as_millisecond()).max(0) as f64 / 1000.0;
        line += &format!(" in {secs:.0} s");
    }
    line
}

/// What is shown while a job runs: a bar on a terminal, else lines; or every frame as JSON.
struct Progress {
    json: bool,
    bar: Option<ProgressBar>,
    steps_per_epoch: u64,
    total_steps: u64,
    step: u64,
    /// The newest loss of each rank.
    losses: BTreeMap<u32, f32>,
    images_per_second: Option<f64>,
    last_line: Option<Instant>,
}

impl Progress {
    fn new(job: &Job, json: bool) -> Self {
        let bar = (!json && std::io::stderr().is_terminal() && std::io::stdout().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            if let Ok(style) =
                ProgressStyle::with_template("{prefix:.bold} {wide_bar} {pos}/{len} {msg} {eta} left")
            {
                bar.set_style(style);
            }
            bar.set_prefix(job.state.as_str());
            bar
        });
        let mut this = Self {
            json,
            bar,
            steps_per_epoch: 0,
            total_steps: 0,
            step: job.step,
            losses: BTreeMap::new(),
            images_per_second: job.images_per_second,
            last_line: None,
        };
        this.plan(job.total_steps, job.steps_per_epoch, job.step);
        this
    }

    fn plan(&mut self, total_steps: u64, steps_per_epoch: u64, step: u64) {
        (self.total_steps, self.steps_per_epoch, self.step) = (total_steps, steps_per_epoch, step);
        if let Some(bar) = &self.bar {
            bar.set_length(total_steps);
            bar.set_position(step);
            bar.reset_eta();
        }
    }

    fn show(&mut self, frame: &Frame) -> anyhow::Result<()> {
        if self.json {
            return output::line(serde_json::to_string(frame)?);
        }
        let event = match frame {
            Frame::Event(event) => event,
            Frame::Progress(pace) => {
                self.images_per_second = pace.images_per_second;
                return Ok(());
            }
            _ => return Ok(()),
        };
        match &event.body {
            EventBody::State { state, reason, .. } => {
                if let Some(bar) = &self.bar {
                    bar.set_prefix(state.as_str());
                }
                if !state.is_final() {
                    let reason = reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default();
                    self.say(format!("{state}{reason}"))?;
                }
            }
            EventBody::Plan { total_steps, steps_per_epoch, start_step, .. } => {
                self.plan(*total_steps, *steps_per_epoch, *start_step);
            }
            EventBody::Metrics { rank, name, steps, values, .. } => {
                let Some((step, value)) = steps.last().zip(values.last()) else { return Ok(()) };
                if name == "loss" {
                    self.losses.insert(*rank, value.unwrap_or(f32::NAN));
                    self.step = self.step.max(*step);
                    self.moved()?;
                }
            }
            EventBody::Evaluation { evaluation, .. } => {
                self.say(format!(
                    "epoch {}: validation accuracy {}, loss {:.4}",
                    evaluation.epoch,
                    lockstep_protocol::numbers::percent(evaluation.accuracy),
                    evaluation.loss
                ))?;
            }
            _ => {}
        }
        Ok(())
    }

    /// A line that stays.
    fn say(&mut self, text: String) -> anyhow::Result<()> {
        match &self.bar {
            Some(bar) => {
                bar.suspend(|| output::line(text))?;
            }
            None => output::line(text)?,
        }
        Ok(())
    }

    fn moved(&mut self) -> anyhow::Result<()> {
        let loss = self.losses.values().sum::<f32>() / self.losses.len().max(1) as f32;
        let speed = self.images_per_second.map(|v| format!(", {v:.0} images/s")).unwrap_or_default();
        if let Some(bar) = &self.bar {
            bar.set_position(self.step);
            bar.set_message(format!("loss {loss:.4}{speed}"));
        } else if self.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY) {
            self.last_line = Some(Instant::now());
            let epoch = self.step.saturating_sub(1).checked_div(self.steps_per_epoch).map_or(1, |e| e + 1);
            output::line(format_args!(
                "epoch {epoch}, step {} of {}: loss {loss:.4}{speed}",
                self.step, self.total_steps
            ))?;
        }
        Ok(())
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
