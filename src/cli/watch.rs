//! `lockstep watch`: shows a job's progress until the job ends.

mod progress;

use super::{
    api::{Api, JobArgs, Outage, RETRY, SERVER_TIMEOUT},
    block_on, describe_error, output, usage_error,
};
use lockstep_protocol::{
    Job, JobState,
    agent::CheckpointInfo,
    best::best_checkpoint,
    job::{LastValues, Measured},
    numbers::percent,
    stream::{EventBody, Frame},
};
use progress::Progress;
use std::time::{Duration, Instant};

/// Interval between two polls of a job that has no events: its place in the queue depends on other jobs, and its events may not be stored.
const QUEUE_INTERVAL: Duration = Duration::from_secs(2);
/// Interval between two requests for a job whose state is about to change.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Shows the job until it ends.
///
/// # Errors
/// Exit status 1 if the job does not succeed.
pub(crate) fn run(args: JobArgs) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job_preferring(&args.job, |state| !state.is_final()).await?;
        show_to_end(&api, job, args.server.json).await
    })
}

/// Like [`follow_to_end`]. Also explains the effect of Ctrl-C, and prints the diagnosis of a job that succeeded and a command that uses its
/// network.
pub(crate) async fn show_to_end(api: &Api, job: Job, as_json: bool) -> anyhow::Result<()> {
    if !job.state.is_final() {
        output::warn(format_args!(
            "Ctrl-C ends this display and not the job: `lockstep watch {0}` shows the job again, `lockstep cancel {0}` stops the job",
            job.id
        ));
    }
    let job = follow_to_end(api, job, as_json).await?;
    if !as_json && job.external.is_none() {
        if let Some(diagnosis) = &job.diagnosis {
            output::warn(diagnosis);
        }
        output::warn(format_args!("next: `lockstep predict {} IMAGE` classifies pictures", job.id));
    }
    Ok(())
}

/// Shows a job's progress until the job is over, then its outcome. With `as_json`, prints every new frame of the job's stream as a line
/// instead, and at the end the job, whose line has the type `job`. Returns the job that succeeded.
///
/// # Errors
/// The job did not succeed, or the connection to the server was lost.
pub(crate) async fn follow_to_end(api: &Api, job: Job, as_json: bool) -> anyhow::Result<Job> {
    let mut progress = Progress::new(&job, as_json);
    progress.show_job(&job)?;
    let job = follow(api, job, &mut progress).await?;
    progress.finish();
    if as_json {
        #[derive(serde::Serialize)]
        struct LastLine<'a> {
            r#type: &'static str,
            #[serde(flatten)]
            job: &'a Job,
        }
        output::line(serde_json::to_string(&LastLine { r#type: "job", job: &job })?)?;
    } else {
        // If the server no longer responds, the summary does not name a checkpoint.
        let checkpoints = api.list::<CheckpointInfo>(&format!("/jobs/{}/checkpoints", job.id)).await;
        output::line(describe_outcome(&job, &checkpoints.unwrap_or_default()))?;
    }
    match job.state {
        JobState::Succeeded => Ok(job),
        // The line above contains the reason.
        state => Err(anyhow::anyhow!("the job {}", state.predicate())),
    }
}

/// Waits until `is_done` is true for the job; prints nothing.
///
/// # Errors
/// The server is unreachable, or `is_done` is still false after a minute.
pub(crate) async fn wait_until(
    api: &Api,
    mut job: Job,
    is_done: impl Fn(&Job) -> bool,
) -> anyhow::Result<Job> {
    let began = Instant::now();
    while !is_done(&job) {
        if began.elapsed() > SERVER_TIMEOUT {
            anyhow::bail!("{} is still {}", job.id, job.state);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        job = api.get(&format!("/jobs/{}", job.id)).await?;
    }
    Ok(job)
}

/// The display of a command that follows a job's stream.
pub(crate) trait Display {
    /// Shows a new frame of the stream.
    fn show(&mut self, frame: &Frame) -> anyhow::Result<()>;

    /// Prints a line to standard error.
    fn warn(&self, text: &str);

    /// Whether the job must be polled while no event arrives.
    fn needs_polling(&self) -> bool {
        false
    }

    /// Shows a polled job: its place in the queue, or why its events cannot be stored.
    fn show_job(&mut self, _job: &Job) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Passes every frame of a job's stream after the event `job.last_seq` to `display`, each event once even if the connection breaks. Returns
/// the job that has ended.
///
/// # Errors
/// The job was deleted, or the connection to the server was lost.
pub(crate) async fn follow(api: &Api, job: Job, display: &mut impl Display) -> anyhow::Result<Job> {
    let mut since = job.last_seq;
    let mut is_over = job.state.is_final();
    let mut backoff = RETRY;
    // `stream_lost_at` is the time since which no stream is connected, `outage` the time since which the server does not respond.
    let (mut stream_lost_at, mut outage) = (None::<Instant>, Outage::default());
    while !is_over {
        let error = match api.open_stream(&job, since).await {
            Err(error) => Some(error),
            Ok(mut stream) => loop {
                let received = if display.needs_polling() {
                    match tokio::time::timeout(QUEUE_INTERVAL, stream.next()).await {
                        Ok(received) => received,
                        Err(_) => match api.get(&format!("/jobs/{}", job.id)).await {
                            Ok(job) => {
                                display.show_job(&job)?;
                                continue;
                            }
                            Err(error) => Err(error),
                        },
                    }
                } else {
                    stream.next().await
                };
                match received {
                    Err(error) => break Some(error),
                    Ok(None) => break None,
                    Ok(Some(frame)) => {
                        stream_lost_at = None;
                        outage.report_restored(|text| display.warn(text));
                        backoff = RETRY;
                        if let Frame::Hello { last_seq, .. } = &frame
                            && *last_seq < since
                        {
                            // An older database was restored, so new events reuse earlier numbers.
                            since = *last_seq;
                            break None;
                        }
                        if let Frame::Event(event) = &frame {
                            since = event.seq;
                            if let EventBody::State { state, .. } = event.body {
                                is_over = state.is_final();
                            }
                        }
                        display.show(&frame)?;
                        if is_over {
                            break None;
                        }
                    }
                }
            },
        };
        if !is_over {
            let lost_at = *stream_lost_at.get_or_insert_with(Instant::now);
            if lost_at.elapsed() > SERVER_TIMEOUT {
                let why = error.map_or_else(|| "the stream was closed".to_owned(), |e| describe_error(&e));
                anyhow::bail!(
                    "the connection to the server is lost: {why}; `lockstep watch {}` shows the job",
                    job.id
                );
            }
            // The job may have ended or been deleted while no stream was connected.
            match api.get::<Job>(&format!("/jobs/{}", job.id)).await {
                Ok(job) => is_over = job.state.is_final() && job.last_seq <= since,
                Err(error) if error.is::<super::WrongRequest>() => {
                    return Err(usage_error(format!("{}: {error}", job.id)));
                }
                Err(error) => outage.tolerate(error, |text| display.warn(text))?,
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    }
    api.get(&format!("/jobs/{}", job.id)).await
}

/// Describes the outcome of a job in a sentence: `succeeded after 41 s: validation accuracy 84.2 % ± 2.6 of 200 pictures (best 86.0 % at
/// epoch 3; best checkpoint 4-216 with 85.1 %)`, `failed after 0 s: <reason>`. Names a best checkpoint only if it is in `checkpoints`.
pub(crate) fn describe_outcome(job: &Job, checkpoints: &[CheckpointInfo]) -> String {
    let duration = job.ran_secs.map(|secs| format!(" after {secs:.0} s")).unwrap_or_default();
    let outcome = match &job.reason {
        Some(reason) if job.state != JobState::Succeeded => Some(reason.clone()),
        _ => describe_accuracy(&job.last, job.best, checkpoints),
    };
    let outcome = outcome.map(|outcome| format!(": {outcome}")).unwrap_or_default();
    let early_end = job.reason.as_ref().filter(|_| job.state == JobState::Succeeded);
    let early_end = early_end.map(|reason| format!("; {reason}")).unwrap_or_default();
    format!("{}{duration}{outcome}{early_end}", job.state_in_words())
}

fn describe_accuracy(
    values: &LastValues,
    best: Option<Measured>,
    checkpoints: &[CheckpointInfo],
) -> Option<String> {
    let best = best.map(|best| (percent(best.value), best.epoch_or_step()));
    let last = values.val_accuracy.map(percent).or_else(|| best.as_ref().map(|(best, _)| best.clone()))?;
    let (best, at) = best.unwrap_or_else(|| (last.clone(), String::new()));
    let mut notes = Vec::new();
    if best != last {
        notes.push(format!("best {best} at {at}"));
    }
    notes.extend(best_checkpoint(checkpoints).map(|(checkpoint, accuracy)| {
        let accuracy = Some(percent(accuracy)).filter(|accuracy| *accuracy != best);
        let suffix = accuracy.map(|accuracy| format!(" with {accuracy}")).unwrap_or_default();
        format!("best checkpoint {}-{}{suffix}", checkpoint.epoch, checkpoint.step)
    }));
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
    Some(format!("validation accuracy {}{notes}", values.accuracy_in_words().unwrap_or(last)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_existing_checkpoint_is_named() {
        let best = Some(Measured { value: 0.417, loss: None, step: 336, epoch: 28 });
        let checkpoint = |epoch: u32, accuracy| CheckpointInfo {
            epoch,
            step: u64::from(epoch) * 12,
            val_accuracy: Some(accuracy),
            best: true,
            size_bytes: 1,
            ..CheckpointInfo::default()
        };
        for (last, best, checkpoints, words) in [
            (None, None, &[][..], None),
            (Some(0.4), None, &[], Some("validation accuracy 40.0 %")),
            (Some(0.417), best, &[], Some("validation accuracy 41.7 %")),
            (Some(0.4), best, &[], Some("validation accuracy 40.0 % (best 41.7 % at epoch 28)")),
            (
                Some(0.4),
                best,
                &[checkpoint(28, 0.417)],
                Some("validation accuracy 40.0 % (best 41.7 % at epoch 28; best checkpoint 28-336)"),
            ),
            (
                Some(0.4),
                best,
                &[checkpoint(30, 0.41)],
                Some(
                    "validation accuracy 40.0 % (best 41.7 % at epoch 28; best checkpoint 30-360 with 41.0 %)",
                ),
            ),
        ] {
            let last = LastValues { val_accuracy: last, ..LastValues::default() };
            assert_eq!(describe_accuracy(&last, best, checkpoints).as_deref(), words);
        }
    }
}
