//! Runs from elsewhere: jobs that another program trains and reports to the server. Such a job takes no slots. It has one attempt of one
//! rank, to which the points belong, and no fencing token, because every program with the right to change the job may report.

use super::{
    ChangeResult, JobRow, Refusal, change_state, refusal,
    reports::{note_column, points_event},
};
use jiff::Timestamp;
use lockstep_protocol::{
    best::is_better,
    job::{Alert, Job, JobState, Measured},
    limits::{MAX_RUN_METRICS, RUN_CONFIG_BYTES},
    metric::MetricColumn,
    numbers::exact,
    reason::{Reason, ReasonKind},
    stream::EventBody,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Number of a run's only attempt.
pub const ATTEMPT: u32 = 1;
/// Number of a run's only rank.
pub const RANK: u32 = 0;
/// Maximum number of alerts in a change. Only the newest are stored. The Python package keeps the same number.
const MAX_ALERTS: usize = 50;

/// A change of a run by its program. It is applied completely or not at all.
#[derive(Debug, Clone, Default)]
pub struct RunChange {
    /// Settings that replace settings with the same names.
    pub config: Map<String, Value>,
    /// Settings that must not change the values of existing settings.
    pub params: BTreeMap<String, String>,
    /// Results that replace results with the same names. Each new entry of the result `alerts`, a list, raises an [`Alert`].
    pub summary: Map<String, Value>,
    /// Tags with values. `None` removes a tag.
    pub values: BTreeMap<String, Option<String>>,
    /// `running` or a final state.
    pub state: Option<JobState>,
    /// The reason of the state, in the program's words.
    pub reason: Option<String>,
    /// The time of the run's end, if it was before the request.
    pub ended_at: Option<Timestamp>,
    /// Points, in the order in which they were measured.
    pub columns: Vec<MetricColumn>,
}

/// Refuses a request about a run from elsewhere that is only possible for jobs that this server's ranks train. `what`: what the request
/// would do to the job, such as "paused".
pub fn refuse_external(job: &Job, what: &str) -> Result<(), Refusal> {
    if job.external.is_none() {
        return Ok(());
    }
    let detail =
        format!("the job is a run from elsewhere, which its own program trains, so it cannot be {what} here");
    Err(refusal(job.state, detail))
}

/// Begins a new run. Its state is `running` at once.
pub fn begin(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    row.job.attempt = ATTEMPT;
    make_running(row, at)
}

/// Applies a change that a run's program reports. A run that failed because its program was silent is running again.
pub fn apply_change(row: &mut JobRow, change: &RunChange, at: Timestamp) -> ChangeResult {
    let alerts = merge(row, change)?;
    let at = change.ended_at.map_or(at, |ended| ended.min(at).max(row.job.created_at));
    let is_silence = |cause: &Reason| matches!(cause.kind(), ReasonKind::RunSilent { .. });
    let was_silent = row.job.cause.as_ref().is_some_and(is_silence);
    let mut events: Vec<_> =
        alerts.into_iter().map(|alert| EventBody::Alert { attempt: ATTEMPT, alert }).collect();
    events.extend(match change.state {
        None if was_silent && row.job.state == JobState::Failed => make_running(row, at)?,
        None => Vec::new(),
        Some(state) if state == row.job.state && !was_silent => Vec::new(),
        // The program of a run that a user has cancelled may continue. Its end does not undo the cancellation.
        Some(state) if row.job.state == JobState::Cancelled && state.is_final() => Vec::new(),
        Some(JobState::Running) => make_running(row, at)?,
        Some(state) => {
            make_running(row, at)?;
            change_state(row, state, end_reason(state, change.reason.as_deref()), None, at)?
        }
    });
    events.extend(add_points(row, &change.columns)?);
    Ok(events)
}

/// Fails a running run whose program has been silent for `secs` seconds.
pub fn fail_silent(row: &mut JobRow, secs: f64, at: Timestamp) -> ChangeResult {
    if row.job.state != JobState::Running {
        return Ok(Vec::new());
    }
    change_state(row, JobState::Failed, Some(ReasonKind::RunSilent { secs }.into()), None, at)
}

/// Changes a run to `running` from any state, through `queued` and `starting`.
fn make_running(row: &mut JobRow, at: Timestamp) -> ChangeResult {
    if row.job.state == JobState::Running {
        return Ok(Vec::new());
    }
    if row.job.state.is_final() {
        change_state(row, JobState::Queued, None, None, at)?;
    }
    change_state(row, JobState::Starting, None, None, at)?;
    change_state(row, JobState::Running, None, None, at)
}

fn end_reason(state: JobState, text: Option<&str>) -> Option<Reason> {
    match (state, text) {
        (JobState::Succeeded, _) => None,
        (_, Some(text)) => Some(text.into()),
        (JobState::Cancelled, None) => Some(ReasonKind::CancelledByUser { detail: None }.into()),
        (_, None) => Some("its program reported a failure".into()),
    }
}

/// Applies settings, results and tags. Returns the new alerts.
fn merge(row: &mut JobRow, change: &RunChange) -> Result<Vec<Alert>, Refusal> {
    let (state, id) = (row.job.state, row.job.id.clone());
    let external = row.job.external.as_mut().ok_or_else(|| {
        refusal(state, "this server's ranks train the job; programs can change only runs from elsewhere")
    })?;
    let alerts = new_alerts(&external.summary, &change.summary);
    for (name, value) in &change.params {
        let logged = external.config.get(name).map(text_of);
        if let Some(logged) = logged.filter(|logged| logged != value) {
            // The text of MLflow's error.
            let detail = format!(
                "Changing param values is not allowed. Param with key='{name}' was already logged with value='{logged}' for run \
                 ID='{id}'. Attempted logging new value '{value}'."
            );
            return Err(refusal(state, detail));
        }
        external.config.entry(name.clone()).or_insert_with(|| Value::String(value.clone()));
    }
    external.config.extend(change.config.clone());
    external.summary.extend(change.summary.clone());
    for (name, value) in &change.values {
        match value {
            Some(value) => external.values.insert(name.clone(), value.clone()),
            None => external.values.remove(name),
        };
    }
    let sizes = [
        ("settings", serde_json::to_string(&external.config)),
        ("summary", serde_json::to_string(&external.summary)),
        ("tags with values", serde_json::to_string(&external.values)),
    ];
    for (what, text) in sizes {
        let bytes = text.map_or(usize::MAX, |text| text.len());
        if bytes > RUN_CONFIG_BYTES {
            let detail =
                format!("the run's {what} would have {bytes} bytes; the limit is {RUN_CONFIG_BYTES}");
            return Err(refusal(state, detail));
        }
    }
    Ok(alerts)
}

/// The alerts of the summary `reported` that the summary `known` does not contain. With each alert, a program sends its whole list of the
/// newest alerts, so that an alert is neither lost nor raised twice. Invalid entries are ignored.
fn new_alerts(known: &Map<String, Value>, reported: &Map<String, Value>) -> Vec<Alert> {
    fn list(summary: &Map<String, Value>) -> &[Value] {
        summary.get("alerts").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
    }
    let (known, reported) = (list(known), list(reported));
    let newest = &reported[reported.len().saturating_sub(MAX_ALERTS)..];
    let new = newest.iter().filter(|alert| !known.contains(alert));
    new.filter_map(|alert| Alert::deserialize(alert).ok()).collect()
}

/// The text of a setting for clients of MLflow.
pub fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the events of points, and updates the job's newest values. A value that is not finite is a gap in a chart, and the newest finite
/// value stays the job's newest value.
fn add_points(row: &mut JobRow, columns: &[MetricColumn]) -> ChangeResult {
    // A metric without a finite value is in `known`, but not in `last`.
    let (last, known) = (&row.job.last.others, &row.progress.others);
    let is_new = |name: &str| !last.contains_key(name) && !known.contains_key(name);
    let new_count = columns.iter().filter(|column| is_new(&column.name)).count();
    if last.len().max(known.len()) + new_count > MAX_RUN_METRICS {
        let detail = format!("the run would have more than {MAX_RUN_METRICS} metrics; log fewer names");
        return Err(refusal(row.job.state, detail));
    }
    let attempt = row.job.attempt;
    let mut events = Vec::with_capacity(columns.len());
    for column in columns {
        // Counts the metric even if it has no finite value yet.
        row.progress.others.entry(column.name.clone()).or_default();
        let finite = finite_points(column);
        // `val_pictures` is a field of `last` that is not a metric.
        if column.name != "val_pictures" {
            note_column(row, RANK, &finite);
        }
        let job = &mut row.job;
        let newest = finite.values.last().copied().map(exact);
        // These values are fields of the job. Ranks of this server do not report them as metrics.
        match column.name.as_str() {
            "epoch" => job.epoch = newest.map_or(job.epoch, |epoch| epoch as u32),
            "images_per_second" => job.images_per_second = newest.or(job.images_per_second),
            "val_loss" => job.last.val_loss = newest.or(job.last.val_loss),
            "val_accuracy" => {
                note_best(job, &finite, columns);
                job.last.val_accuracy = newest.or(job.last.val_accuracy);
            }
            _ => {}
        }
        job.step = job.step.max(column.steps.iter().copied().max().unwrap_or(0));
        events.push(points_event(attempt, RANK, column.clone()));
    }
    Ok(events)
}

/// Updates the best validation accuracy. Values outside 0 to 1, such as percentages, do not count. The epoch is the value of the metric
/// `epoch` at the same step of `columns`. A run without a best accuracy first takes its newest accuracy, as measured at the newest step.
fn note_best(job: &mut Job, accuracies: &MetricColumn, columns: &[MetricColumn]) {
    let is_share = |value: &f64| (0.0..=1.0).contains(value);
    if job.best.is_none()
        && let Some(value) = job.last.val_accuracy.filter(is_share)
    {
        job.best = Some(Measured { value, loss: None, step: job.step, epoch: job.epoch });
    }
    let epochs = columns.iter().find(|column| column.name == "epoch");
    for (step, value) in accuracies.steps.iter().copied().zip(accuracies.values.iter().copied().map(exact)) {
        if is_share(&value) && job.best.is_none_or(|best| is_better(value, None, (best.value, best.loss))) {
            let epoch = epochs.and_then(|c| c.steps.iter().zip(&c.values).rfind(|(at, _)| **at == step));
            let epoch = epoch.map_or(0, |(_, epoch)| *epoch as u32);
            job.best = Some(Measured { value, loss: None, step, epoch });
        }
    }
}

/// The points of a column whose values are finite.
fn finite_points(column: &MetricColumn) -> MetricColumn {
    let points = column.steps.iter().copied().zip(column.values.iter().copied());
    let (steps, values) = points.filter(|(_, value)| value.is_finite()).unzip();
    MetricColumn { name: column.name.clone(), steps, values }
}
