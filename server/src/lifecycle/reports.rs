//! The rules by which records of ranks and agents change a job.

use super::{
    ChangeResult, JobRow, change_state, checkpoint_id, preemption::pause_or_requeue, requeue,
    restart_or_fail, state_event, trial,
};
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{AttemptEvent, AxisTimes, Ending},
    best::is_better,
    job::{JobState, Measured},
    metric::{self, MetricColumn},
    reason::{Reason, ReasonKind},
    stream::EventBody,
    throughput::Throughput,
};
use std::collections::BTreeMap;

/// Maximum number of steps of a run: 2^53 - 1, the largest integer that all JSON parsers represent exactly. Every valid specification has
/// fewer steps.
const MAX_STEPS: u64 = (1 << 53) - 1;
/// Maximum length of a stored line of a log, in bytes.
const MAX_LINE_BYTES: usize = 4096;
/// Maximum number of consecutive attempts that end before any rank has begun and do not count as restarts.
pub(super) const MAX_NOT_BEGUN: u32 = 5;

/// The mean over ranks. `None` if a value is not finite, because a run that diverges on one rank has diverged.
fn mean(values: &BTreeMap<u32, Option<f64>>) -> Option<f64> {
    let sum = values.values().copied().sum::<Option<f64>>()?;
    (!values.is_empty()).then(|| sum / values.len() as f64)
}

/// Applies a record of a rank or its agent to a job, and returns the events to store. Invalid records have no effect, such as points of an
/// unknown metric, or records of a rank that the job does not have. `leaving`: the reason if the agent itself is stopping.
pub fn report(
    row: &mut JobRow,
    event: AttemptEvent,
    leaving: Option<&Reason>,
    at: Timestamp,
) -> ChangeResult {
    let (attempt, ranks) = (row.job.attempt, row.job.ranks);
    Ok(match event {
        AttemptEvent::Running { total_steps, steps_per_epoch, start_step, train_samples }
            if start_step <= total_steps && total_steps <= MAX_STEPS =>
        {
            let job = &mut row.job;
            if start_step != job.step {
                // The loss belongs to a step after the checkpoint from which the attempt continues.
                job.last.loss = None;
            }
            (job.total_steps, job.steps_per_epoch, job.step) = (total_steps, steps_per_epoch, start_step);
            job.epoch = epoch_of((start_step + 1).min(total_steps), steps_per_epoch);
            row.progress.restart_at(start_step, total_steps);
            row.progress.speed = Throughput::new(&job.spec, train_samples);
            if let Some(batch) = &mut job.batch {
                batch.epoch_samples = row.progress.speed.epoch_samples();
            }
            row.progress.trained = true;
            row.progress.not_begun = 0;
            let mut events = Vec::new();
            if row.job.state == JobState::Starting {
                // The reason stays if the job is being cancelled, or runs on fewer ranks.
                let is_kept = |cause: &Reason| {
                    row.cancel_reason.is_some() || matches!(cause.kind(), ReasonKind::FewerRanks { .. })
                };
                let cause = row.job.cause.clone().filter(is_kept);
                events = change_state(row, JobState::Running, cause, None, at)?;
            }
            events.push(EventBody::Plan { attempt, total_steps, steps_per_epoch, start_step });
            events
        }
        // A job that is being cancelled keeps its reason.
        AttemptEvent::PrecisionFallback { step, what }
            if row.job.state == JobState::Running && row.cancel_reason.is_none() =>
        {
            let detail = what.into();
            row.job.set_reason(Some(ReasonKind::PrecisionFallback { step, detail }.into()));
            vec![state_event(row)]
        }
        AttemptEvent::StoppedEarly { step, why }
            if row.job.state == JobState::Running && row.cancel_reason.is_none() =>
        {
            row.job.set_reason(Some(ReasonKind::StoppedEarly { step, detail: why.into() }.into()));
            vec![state_event(row)]
        }
        AttemptEvent::Metrics { rank, columns } if rank < ranks => {
            let columns = columns.into_iter().filter(is_valid_column);
            let events = columns
                .map(|column| {
                    note_column(row, rank, &column);
                    points_event(attempt, rank, column)
                })
                .collect();
            note_speed(row);
            events
        }
        AttemptEvent::Log { rank, mut lines } if rank < ranks && !lines.is_empty() => {
            for line in &mut lines {
                line.text.truncate(line.text.floor_char_boundary(MAX_LINE_BYTES));
            }
            vec![EventBody::Log { attempt, rank, lines }]
        }
        AttemptEvent::Rank { rank, mut report } if rank < ranks => {
            // NaN and infinity become 0, because JSON has neither, and readers expect numbers.
            let times = [&mut report.step_ms, &mut report.all_reduce_ms, &mut report.data_ms];
            let of_axes = report.axis_ms.iter_mut().flat_map(AxisTimes::values_mut);
            for number in times.into_iter().chain([&mut report.images_per_second]).chain(of_axes) {
                *number = if number.is_finite() { *number } else { 0.0 };
            }
            vec![EventBody::Rank { attempt, rank, report }]
        }
        AttemptEvent::Checkpoint(checkpoint) => {
            row.progress.checkpoint = row.progress.checkpoint.max(Some(checkpoint.step));
            let id = checkpoint_id(row, checkpoint.epoch, checkpoint.step);
            vec![EventBody::Checkpoint { attempt, id, checkpoint }]
        }
        AttemptEvent::CheckpointRemoved { epoch, step } => {
            // The newest checkpoint is removed only if it is damaged. The next start then determines the newest checkpoint.
            row.progress.checkpoint = row.progress.checkpoint.filter(|newest| *newest != step);
            vec![EventBody::CheckpointRemoved { attempt, id: checkpoint_id(row, epoch, step) }]
        }
        // The loss is not finite, or the accuracy is not in 0 to 1. Such a result is invalid, so no event is stored, and the job has no
        // newest result.
        AttemptEvent::Evaluation(evaluation)
            if !evaluation.loss.is_finite() || !(0.0..=1.0).contains(&evaluation.accuracy) =>
        {
            (row.job.last.val_loss, row.job.last.val_accuracy, row.job.last.val_pictures) =
                (None, None, None);
            Vec::new()
        }
        AttemptEvent::Evaluation(evaluation) => {
            let lowest = row.progress.lowest_val_loss.or(row.job.last.val_loss);
            row.progress.lowest_val_loss =
                Some(lowest.map_or(evaluation.loss, |lowest| lowest.min(evaluation.loss)));
            let job = &mut row.job;
            job.last.val_loss = Some(evaluation.loss);
            job.last.val_accuracy = Some(evaluation.accuracy);
            job.last.val_pictures = Some(evaluation.samples);
            let (value, loss) = (evaluation.accuracy, Some(evaluation.loss));
            if job.best.is_none_or(|best| is_better(value, loss, (best.value, best.loss))) {
                let (step, epoch) = (evaluation.step, evaluation.epoch);
                job.best = Some(Measured { value, loss, step, epoch });
            }
            vec![EventBody::Evaluation { attempt, evaluation }]
        }
        // The store keeps the contents of histograms and networks (store/sql/layers.rs).
        AttemptEvent::Histograms(histograms) if histograms.check().is_ok() => {
            vec![EventBody::Histograms { attempt, step: histograms.step }]
        }
        AttemptEvent::Network(network) if network.check().is_ok() => vec![EventBody::Network { attempt }],
        AttemptEvent::Ended(ending) => end_attempt(row, ending, leaving, at)?,
        // Stored for a server that is restarted before the attempt's end.
        AttemptEvent::RankFailed { unreachable, .. } => {
            row.progress.unreachable.extend(unreachable.into_iter().filter(|rank| *rank < ranks));
            Vec::new()
        }
        // Invalid records, and records that have no effect in this state.
        AttemptEvent::Running { .. }
        | AttemptEvent::PrecisionFallback { .. }
        | AttemptEvent::StoppedEarly { .. }
        | AttemptEvent::Metrics { .. }
        | AttemptEvent::Log { .. }
        | AttemptEvent::Rank { .. }
        | AttemptEvent::Histograms(_)
        | AttemptEvent::Network(_)
        | AttemptEvent::Unknown => Vec::new(),
    })
}

/// The event of a column of metrics.
pub(super) fn points_event(attempt: u32, rank: u32, column: MetricColumn) -> EventBody {
    let MetricColumn { name, steps, values } = column;
    let values = values.into_iter().map(|value| value.is_finite().then_some(value)).collect();
    EventBody::Metrics { attempt, rank, name, steps, values }
}

/// Whether a column of metrics is valid: a known name, and as many values as steps, at least one.
fn is_valid_column(column: &MetricColumn) -> bool {
    metric::NAMES.contains(&column.name.as_str())
        && column.steps.len() == column.values.len()
        && !column.steps.is_empty()
}

/// Merges consecutive points of a rank into one record, because a fast rank writes many records per report. All records except log lines
/// and rank reports end a merge, because points after such a record may depend on it.
pub fn merge_points(events: &[AttemptEvent]) -> Vec<AttemptEvent> {
    let mut records = Vec::new();
    // The rank whose points are being merged, and the index of the merged record.
    let mut current: Option<(u32, usize)> = None;
    for event in events {
        let AttemptEvent::Metrics { rank, columns } = event else {
            if !matches!(event, AttemptEvent::Log { .. } | AttemptEvent::Rank { .. }) {
                current = None;
            }
            records.push(event.clone());
            continue;
        };
        let index = match current {
            Some((current_rank, index)) if current_rank == *rank => index,
            _ => {
                records.push(AttemptEvent::Metrics { rank: *rank, columns: Vec::new() });
                records.len() - 1
            }
        };
        current = Some((*rank, index));
        let Some(AttemptEvent::Metrics { columns: merged, .. }) = records.get_mut(index) else { continue };
        for column in columns.iter().filter(|column| is_valid_column(column)) {
            match merged.iter_mut().find(|c| c.name == column.name) {
                Some(same) => {
                    same.steps.extend_from_slice(&column.steps);
                    same.values.extend_from_slice(&column.values);
                }
                None => merged.push(column.clone()),
            }
        }
    }
    records
}

/// The epoch of a step. Epochs and steps are counted from 1.
fn epoch_of(step: u64, steps_per_epoch: u64) -> u32 {
    let epoch = step.saturating_sub(1) / steps_per_epoch.max(1) + 1;
    u32::try_from(epoch).unwrap_or(u32::MAX)
}

/// Updates the job's newest values, step, sparkline and speed from a column.
pub(super) fn note_column(row: &mut JobRow, rank: u32, column: &MetricColumn) {
    let (Some(step), Some(newest)) = (column.steps.last().copied(), column.values.last()) else { return };
    let newest = Some(*newest).filter(|v| v.is_finite());
    let value = newest.map(f64::from);
    if column.name == "step_ms" && rank == 0 {
        row.progress.speed.add(&column.steps, &column.values);
    }
    let job = &mut row.job;
    match column.name.as_str() {
        "loss" => {
            row.progress.add_losses(column, job.total_steps);
            row.progress.loss.insert(rank, value);
            job.last.loss = mean(&row.progress.loss);
            job.sparkline = row.progress.sparkline();
            if step > job.step {
                job.step = step;
                // A run from elsewhere reports its epochs as a metric.
                if job.external.is_none() {
                    let last = if job.total_steps > 0 { step.min(job.total_steps) } else { step };
                    job.epoch = epoch_of(last, job.steps_per_epoch);
                }
            }
        }
        "accuracy" => {
            row.progress.accuracy.insert(rank, value);
            job.last.accuracy = mean(&row.progress.accuracy);
        }
        "lr" => job.last.lr = value,
        // The job has other fields for these values. The speed of a run from elsewhere is only known as a metric.
        "val_loss" | "val_accuracy" => {}
        "images_per_second" if job.external.is_none() => {}
        name => {
            let others = &mut job.last.others;
            if let Some(mean) = row.progress.set_newest(name, rank, newest) {
                others.insert(name.to_owned(), mean);
            } else {
                others.remove(name);
            }
        }
    }
}

/// Updates the speed and the remaining time after points of any rank. Until the first step of this attempt, the job shows the speed of the
/// previous attempt.
fn note_speed(row: &mut JobRow) {
    let (job, speed) = (&mut row.job, &row.progress.speed);
    job.images_per_second = speed.images_per_second().or(job.images_per_second);
    job.eta_secs = speed.secs_left(job.step, job.total_steps).filter(|_| job.state.is_active());
}

/// Handles the end of the live attempt's ranks. `leaving` is the reason if the agent itself is stopping.
pub(super) fn end_attempt(
    row: &mut JobRow,
    ending: Ending,
    leaving: Option<&Reason>,
    at: Timestamp,
) -> ChangeResult {
    let ending = match ending {
        // No rank or agent has reported the primary cause.
        Ending::Secondary { reason } => Ending::Failed { reason, retriable: true },
        ending => ending,
    };
    match (ending, row.cancel_reason.take()) {
        (Ending::Succeeded { step }, _) => {
            let mut events = Vec::new();
            if row.job.state == JobState::Starting {
                events = change_state(row, JobState::Running, None, None, at)?;
            }
            row.job.step = row.job.step.max(step);
            let is_early = |cause: &Reason| matches!(cause.kind(), ReasonKind::StoppedEarly { .. });
            let early = row.job.cause.clone().filter(is_early);
            events.extend(change_state(row, JobState::Succeeded, early, None, at)?);
            Ok(events)
        }
        // The cancelled job also shows a failure that a person must handle, such as ranks that could not be ended.
        (Ending::Failed { reason, retriable: false }, Some(_)) => {
            let reason = ReasonKind::CancelledByUser { detail: Some(reason.words().into()) };
            change_state(row, JobState::Cancelled, Some(reason.into()), None, at)
        }
        (_, Some(cancel_reason)) => change_state(row, JobState::Cancelled, Some(cancel_reason), None, at),
        (Ending::Stopped, None) if row.job.state == JobState::Pausing => pause_or_requeue(row, None, at),
        (Ending::Failed { reason, retriable: true }, None) if row.job.state == JobState::Pausing => {
            pause_or_requeue(row, Some(&reason), at)
        }
        (Ending::Stopped, None) if trial::is_at_rung(row) => trial::pause_at_rung(row, at),
        (Ending::Stopped, None) => {
            let agent_stopped = ReasonKind::AgentStopped { agent: None, detail: None }.into();
            requeue(row, leaving.unwrap_or(&agent_stopped), at)
        }
        // No rank has run, so this end does not count as a restart, unless it happens too often in a row.
        (Ending::Failed { reason, retriable: true }, None)
            if matches!(reason.kind(), ReasonKind::AgentRestarted { .. })
                && row.progress.not_begun < MAX_NOT_BEGUN =>
        {
            row.progress.not_begun += 1;
            requeue(row, &reason, at)
        }
        (Ending::Failed { reason, retriable: true }, None) => restart_or_fail(row, reason, at),
        (Ending::Failed { reason, retriable: false } | Ending::Secondary { reason }, None) => {
            change_state(row, JobState::Failed, Some(reason), None, at)
        }
    }
}

#[cfg(test)]
mod tests;
