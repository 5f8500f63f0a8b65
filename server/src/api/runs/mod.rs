//! Runs from elsewhere: jobs that other programs train. The programs create, update and log runs with these calls. All other calls work
//! as for other jobs.

pub(crate) mod files;
pub(crate) mod mlflow;

use crate::api::prelude::*;
use crate::{
    api::run_to_completion,
    auth::Auth,
    http::extract::Body,
    ingest::runs::Runs,
    lifecycle::external::RunChange,
    store::{Annotation, AppendResult, NewJob, RunRecords},
};
use jiff::Timestamp;
use lockstep_protocol::{
    invisible::first_invisible,
    job::{Alert, External, Job, JobId, JobState},
    labels,
    limits::{MAX_MISTAKES, MAX_RUN_VALUES, RUN_CONFIG_BYTES, RUN_ID_CHARS},
    metric::{MetricColumn, name_mistake},
    spec::{JobSpec, SpecError},
};
use serde::{Deserializer, de::Error as _};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Maximum length of a run's name, in characters; the same as for a job.
const NAME_CHARS: usize = 200;
/// Maximum step: 2^53 - 1, the largest integer that all JSON parsers represent exactly.
const LAST_STEP: u64 = (1 << 53) - 1;

/// A run that another program trains.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewRun {
    /// An id that the program chooses: 1 to 64 characters, each a letter, a digit, `-` or `_`. An existing run with this id continues. With
    /// authentication, each owner has separate ids.
    id: Option<String>,
    /// The run's name, 1 to 200 characters.
    name: String,
    /// Name of a project (default `default`).
    project: Option<String>,
    /// Settings, at most 64 kB of JSON.
    #[schema(value_type = Option<Object>)]
    config: Option<Map<String, Value>>,
    /// The run's tags: at most 20, each of at most 40 characters.
    tags: Option<Vec<String>>,
    /// The run's notes, at most 20 000 bytes.
    notes: Option<String>,
    /// Whether only the owner and admins see the run.
    private: Option<bool>,
    /// Time of the run's start, in milliseconds since 1970 (default: now).
    started_at: Option<i64>,
    /// Whether the run is copied from elsewhere after its end, so that webhooks get no messages about it.
    #[serde(default)]
    imported: bool,
    /// Tags with values, which only MLflow's clients send.
    #[serde(skip)]
    values: BTreeMap<String, String>,
}

impl NewRun {
    fn mistakes(&self) -> Vec<SpecError> {
        let mut mistakes = Vec::new();
        let mut mistake =
            |pointer: &str, detail: String| mistakes.push(SpecError { pointer: pointer.into(), detail });
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if let Some(id) = &self.id
            && !((1..=RUN_ID_CHARS).contains(&id.len()) && id.chars().all(is_plain))
        {
            let detail = format!(
                "must have 1 to {RUN_ID_CHARS} characters, each a letter (a to z, A to Z), a digit, '-' or '_'"
            );
            mistake("/id", detail);
        }
        if !(1..=NAME_CHARS).contains(&self.name.chars().count()) || first_invisible(&self.name).is_some() {
            mistake("/name", format!("must have 1 to {NAME_CHARS} characters, none of them invisible"));
        }
        if self.started_at.is_some_and(|ms| Timestamp::from_millisecond(ms).is_err()) {
            mistake("/started_at", "must be milliseconds since 1970".into());
        }
        if let Some(detail) = self.project.as_deref().and_then(labels::project_mistake) {
            mistake("/project", detail);
        }
        if let Some(detail) = self.tags.as_deref().and_then(labels::tags_mistake) {
            mistake("/tags", detail);
        }
        if let Some(detail) = self.notes.as_deref().and_then(labels::notes_mistake) {
            mistake("/notes", detail);
        }
        let bytes = |part: serde_json::Result<String>| part.map_or(usize::MAX, |text| text.len());
        for (pointer, bytes) in [
            ("/config", bytes(serde_json::to_string(&self.config))),
            ("/tags", bytes(serde_json::to_string(&self.values))),
        ] {
            if bytes > RUN_CONFIG_BYTES {
                mistake(
                    pointer,
                    format!("has {bytes} bytes as JSON, but must have at most {RUN_CONFIG_BYTES}"),
                );
            }
        }
        mistakes
    }
}

/// Start a run that another program trains
///
/// The run is a job that uses no slots and is shown like other jobs. If a run with this id exists, that run continues.
#[utoipa::path(post, path = "/runs", tag = "runs", request_body = NewRun,
    responses((status = 201, body = Job, headers(("Location" = String))), (status = 200, body = Job, description = "The run existed and continues"),
        (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(crate) async fn create(
    State(runs): State<Arc<Runs>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Body(new, _): Body<NewRun>,
) -> Result<Response> {
    let (status, job) = run_to_completion(async move { start_run(&runs, &auth, &caller, new).await }).await?;
    Ok((status, [(header::LOCATION, format!("/api/v1/jobs/{}", job.id))], Json(job)).into_response())
}

/// Starts a run, or continues the existing run with the requested id.
async fn start_run(runs: &Runs, auth: &Auth, caller: &Caller, new: NewRun) -> Result<(StatusCode, Job)> {
    check_mistakes(new.mistakes())?;
    let config = new.config.unwrap_or_default();
    let id = new.id.as_deref().map_or_else(JobId::generate, |id| auth.run_id(caller, id));
    // `Auth::run_id` returns a job's id unchanged, and the hash of any other id.
    let is_job_id = new.id.as_deref() == Some(id.as_str());
    if new.id.is_some()
        && let Some(job) = continue_run(runs, auth, caller, &id, is_job_id, &config).await?
    {
        return Ok((StatusCode::OK, job));
    }
    if is_job_id {
        return Err(Error::NotFound(
            "no job has this id, and only the server chooses ids of this form; choose another id, or leave the id out"
                .into(),
        ));
    }
    let spec = JobSpec {
        name: new.name,
        project: new.project.unwrap_or_else(|| labels::DEFAULT_PROJECT.into()),
        private: new.private.unwrap_or(false),
        ..JobSpec::default()
    };
    let tags = labels::normalise_tags(&new.tags.unwrap_or_default());
    let now = crate::now();
    let started_at = new.started_at.and_then(|ms| Timestamp::from_millisecond(ms).ok());
    let external = External {
        id: new.id,
        config: config.clone(),
        summary: Map::new(),
        values: new.values,
        imported: new.imported,
    };
    let created_at = started_at.map_or(now, |at| at.min(now));
    let job = NewJob {
        annotation: Annotation { notes: new.notes.unwrap_or_default(), tags },
        owner: caller.owner().map(str::to_owned),
        external: Some(external),
        ..NewJob::of(id.clone(), spec, created_at)
    };
    if let Some(job) = runs.create(job).await? {
        return Ok((StatusCode::CREATED, job));
    }
    // Another request has created the run with this id meanwhile.
    match continue_run(runs, auth, caller, &id, is_job_id, &config).await? {
        Some(job) => Ok((StatusCode::OK, job)),
        None => {
            Err(Error::Unavailable("the run that had this id is being deleted; try again in a moment".into()))
        }
    }
}

/// Continues the run with this id, if it exists. `is_job_id` says whether the request has the job's id, and not an id that the program
/// chose.
async fn continue_run(
    runs: &Runs,
    auth: &Auth,
    caller: &Caller,
    id: &JobId,
    is_job_id: bool,
    config: &Map<String, Value>,
) -> Result<Option<Job>> {
    let Some(ownership) = auth.store.job_ownership(id).await? else { return Ok(None) };
    if !caller.sees_owned(&ownership) {
        let detail = "a private run of somebody else has this id; choose another id";
        return if is_job_id { Ok(None) } else { Err(Error::Conflict(detail.into())) };
    }
    if !auth.may_change(caller, ownership.owner.as_deref()) {
        return Err(Error::Forbidden(
            "this run belongs to somebody else; only the owner and admins may change it".into(),
        ));
    }
    let change = RunChange { config: config.clone(), state: Some(JobState::Running), ..RunChange::default() };
    Ok(Some(runs.apply_change(id, change).await?))
}

/// A number, which may be a value that JSON cannot represent (NaN or an infinity).
#[derive(Debug, Clone, Copy)]
struct Number(f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        number(&Value::deserialize(from)?).map(Self).ok_or_else(|| {
            D::Error::custom("a value must be a number, \"NaN\", \"Infinity\" or \"-Infinity\"")
        })
    }
}

/// Reads a number from JSON. Numbers that are not finite are texts.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => match text.as_str() {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}

/// The values of metrics at a step.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// Number of the step, from 0. Steps may repeat and decrease.
    step: u64,
    /// Time of the measurement, in milliseconds since 1970 (default: now).
    at: Option<i64>,
    /// Values by the names of metrics. The texts `"NaN"`, `"Infinity"` and `"-Infinity"` stand for values that are not finite.
    #[schema(value_type = Object)]
    values: BTreeMap<String, Number>,
}

/// Records of a run, numbered without gaps.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewRecords {
    /// Number of the first of these records. The run's first record has number 1.
    #[schema(minimum = 1)]
    first: u64,
    /// Records with at most 10000 values in total.
    records: Vec<Record>,
}

/// The number of stored records of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RecordsStored {
    /// Number of the last stored record; 0 if no record is stored.
    acknowledged: u64,
}

impl NewRecords {
    fn mistakes(&self) -> Vec<SpecError> {
        let mut mistakes = Vec::new();
        let mut mistake = |pointer: String, detail: String| mistakes.push(SpecError { pointer, detail });
        if !(1..=LAST_STEP).contains(&self.first) {
            mistake(
                "/first".into(),
                "must be 1 for the run's first record, and larger for later records".into(),
            );
        }
        let values: usize = self.records.iter().map(|record| record.values.len()).sum();
        if values > MAX_RUN_VALUES {
            let detail = format!("have {values} values; send at most {MAX_RUN_VALUES} in one request");
            mistake("/records".into(), detail);
        }
        for (index, record) in self.records.iter().enumerate() {
            if record.step > LAST_STEP {
                mistake(format!("/records/{index}/step"), format!("must be at most {LAST_STEP}"));
            }
            if let Some(detail) = record.values.keys().find_map(|name| name_mistake(name)) {
                mistake(format!("/records/{index}/values"), detail);
                break;
            }
        }
        mistakes
    }

    /// Returns the time of the newest record, or the current time if that time is in the future or no record has a time.
    fn newest_at(&self) -> Timestamp {
        let now = crate::now();
        let at = self.records.iter().filter_map(|record| record.at).max();
        at.and_then(|at| Timestamp::from_millisecond(at).ok()).map_or(now, |at| at.min(now))
    }
}

/// Converts points of records to columns, each in the order of the records.
fn to_columns<'a>(points: impl Iterator<Item = (&'a str, u64, f64)>) -> Vec<MetricColumn> {
    let mut columns: BTreeMap<&str, (Vec<u64>, Vec<f32>)> = BTreeMap::new();
    for (name, step, value) in points {
        let (steps, values) = columns.entry(name).or_default();
        steps.push(step);
        values.push(value as f32);
    }
    let column = |(name, (steps, values)): (&str, _)| MetricColumn { name: name.to_owned(), steps, values };
    columns.into_iter().map(column).collect()
}

/// Log the metrics of a run
///
/// Records that are already stored are skipped, so a request may be repeated. If a metric has several values for the same step, charts show
/// the last value.
#[utoipa::path(post, path = "/runs/{id}/records", tag = "runs", params(("id" = String, Path, description = "Id of the job, or the id that the program chose")),
    request_body = NewRecords, responses((status = 200, body = RecordsStored),
        (status = 409, body = Problem, description = "Earlier records are missing; `expected` has the number of the next record. Or no other program trains the job")))]
pub(crate) async fn log(
    State(runs): State<Arc<Runs>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Body(new, _): Body<NewRecords>,
) -> Result<Json<RecordsStored>> {
    check_mistakes(new.mistakes())?;
    let (first, count, at) = (new.first, new.records.len() as u64, new.newest_at());
    let records = RunRecords { job: auth.run_id(&caller, &id), first: Some(first), count, at };
    let columns_after = move |stored_count: u64| {
        let unstored = new.records.iter().skip(usize::try_from(stored_count).unwrap_or(usize::MAX));
        to_columns(unstored.flat_map(|record| {
            record.values.iter().map(move |(name, value)| (name.as_str(), record.step, value.0))
        }))
    };
    let change = RunChange::default();
    let logged =
        run_to_completion(async move { Ok(runs.append_records(records, columns_after, change).await?) });
    match logged.await? {
        AppendResult::Stored { records, .. } => Ok(Json(RecordsStored { acknowledged: records })),
        AppendResult::Gap { expected } => Err(Error::Gap(
            format!(
                "record {first} does not follow the stored records; send the records from number {expected} on"
            ),
            expected,
        )),
    }
}

/// State of a run, as set by the program that trains it.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RunState {
    Running,
    Succeeded,
    Failed,
    Cancelled,
}

impl From<RunState> for JobState {
    fn from(state: RunState) -> Self {
        match state {
            RunState::Running => JobState::Running,
            RunState::Succeeded => JobState::Succeeded,
            RunState::Failed => JobState::Failed,
            RunState::Cancelled => JobState::Cancelled,
        }
    }
}

/// Changes to a run. Absent fields stay unchanged.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunNews {
    /// Settings, which replace settings with the same names. At most 64 kB of JSON in total.
    #[schema(value_type = Option<Object>)]
    config: Option<Map<String, Value>>,
    /// Results, which replace results with the same names. At most 64 kB of JSON in total. The result `alerts` is a list of objects with
    /// `title`, `text` and `level` (`INFO`, `WARN` or `ERROR`). Each new object in this list raises an alert, which is an event of the run
    /// and is sent to webhooks. `title` is required.
    #[schema(value_type = Option<Object>)]
    summary: Option<Map<String, Value>>,
    state: Option<RunState>,
    /// Text that explains why the run failed or was cancelled.
    reason: Option<String>,
    /// Time of the run's end, in milliseconds since 1970 (default: now).
    ended_at: Option<i64>,
}

/// Returns a mistake for each object in the summary's list `alerts` that is not an alert.
fn alert_mistakes(summary: &Map<String, Value>) -> Vec<SpecError> {
    let alerts = summary.get("alerts").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let mistake = |(index, alert): (usize, &Value)| {
        let error = Alert::deserialize(alert).err().filter(|_| alert.is_object())?;
        Some(SpecError {
            pointer: format!("/summary/alerts/{index}"),
            detail: format!("is not an alert: {error}"),
        })
    };
    alerts.iter().enumerate().filter_map(mistake).take(MAX_MISTAKES).collect()
}

/// Update a run
///
/// A program should also send updates without changes: a run without requests for ten minutes (`lockstep serve --run-silence`) counts as
/// failed until the next request.
#[utoipa::path(patch, path = "/runs/{id}", tag = "runs", params(("id" = String, Path, description = "Id of the job, or the id that the program chose")),
    request_body = RunNews, responses((status = 200, body = Job),
        (status = 409, body = Problem, description = "No other program trains the job, or the settings or results are too long"),
        (status = 422, body = Problem, description = "An entry of `alerts` is not an alert")))]
pub(crate) async fn change(
    State(runs): State<Arc<Runs>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Body(news, _): Body<RunNews>,
) -> Result<Json<Job>> {
    check_mistakes(news.summary.as_ref().map(alert_mistakes).unwrap_or_default())?;
    let ended_at = news.ended_at.map(|ms| {
        Timestamp::from_millisecond(ms)
            .map_err(|_| Error::BadRequest("ended_at must be milliseconds since 1970".into()))
    });
    let change = RunChange {
        ended_at: ended_at.transpose()?,
        config: news.config.unwrap_or_default(),
        summary: news.summary.unwrap_or_default(),
        state: news.state.map(JobState::from),
        reason: news.reason,
        ..RunChange::default()
    };
    let id = auth.run_id(&caller, &id);
    Ok(Json(run_to_completion(async move { Ok(runs.apply_change(&id, change).await?) }).await?))
}
