//! The calls of MLflow's REST interface (2.0) that MLflow's clients need to log. Experiments are projects, runs are runs from elsewhere,
//! and parameters are settings. Requests, responses and errors follow `mlflow/protos/service.proto` and
//! `mlflow/store/tracking/rest_store.py`.

pub(crate) mod artifacts;
mod models;

use super::{LAST_STEP, NAME_CHARS, NewRun, number, start_run, to_columns};
use crate::api::prelude::*;
use crate::{
    api::{jobs, list::Pages, run_to_completion},
    auth::Auth,
    http::{authorize::is_mlflow, error::Detail},
    ingest::runs::Runs,
    lifecycle::external::{RunChange, text_of},
    metrics::{self, query},
    scheduler::Scheduler,
    store::{JobFilter, JobSort, MetricFilter, RunRecords, SortBy, StoreError, purge::DeletedJobs},
};
use axum::{
    extract::{FromRequest, Query, Request},
    http::Method,
    middleware::Next,
};
use bytes::Bytes;
use jiff::Timestamp;
use lockstep_protocol::{
    job::{External, Job, JobState},
    labels::{self, DEFAULT_PROJECT},
    metric::{MetricColumn, name_mistake},
    numbers::exact,
    spec::shortened,
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, str::FromStr};

const PREFIX: &str = "/api/2.0/mlflow/";
/// MLflow's default experiment, which clients use if none is named.
const DEFAULT_ID: &str = "0";
const DEFAULT_NAME: &str = "Default";
/// Key of the tag with a run's name.
const RUN_NAME: &str = "mlflow.runName";
/// Key of the tag with the user who runs the program.
const USER: &str = "mlflow.user";
// Maximum lengths, and maximum numbers of elements in a batch, as documented by MLflow.
const KEY_CHARS: usize = 250;
const PARAM_CHARS: usize = 6000;
const TAG_CHARS: usize = 8000;
const BATCH_METRICS: usize = 1000;
const BATCH_PARAMS: usize = 100;
const BATCH_TAGS: usize = 100;
/// Maximum number of runs or experiments on a page.
const PAGE_RUNS: u32 = 1000;
/// Maximum number of points on a page of a metric's history.
const PAGE_POINTS: u32 = 25_000;
/// Maximum of `max_results`, as documented by MLflow. A page may have fewer results.
const PAGE_LIMIT: u32 = 50_000;

/// An error in the format that MLflow's clients expect.
pub(crate) struct Refusal {
    status: StatusCode,
    code: &'static str,
    message: String,
}

type Result<T, E = Refusal> = std::result::Result<T, E>;

fn refuse(code: &'static str, message: impl Into<String>) -> Refusal {
    let status = match code {
        "RESOURCE_DOES_NOT_EXIST" | "ENDPOINT_NOT_FOUND" => StatusCode::NOT_FOUND,
        "PERMISSION_DENIED" => StatusCode::FORBIDDEN,
        _ => StatusCode::BAD_REQUEST,
    };
    Refusal { status, code, message: message.into() }
}

fn invalid(message: impl Into<String>) -> Refusal {
    refuse("INVALID_PARAMETER_VALUE", message)
}

/// Error for a value of the wrong type, with MLflow's text.
fn invalid_value(key: &str, value: &Value) -> Refusal {
    invalid(format!("Invalid value {} for parameter '{key}' supplied", shortened(&value.to_string())))
}

fn unsupported_call(method: &Method, name: &str) -> Refusal {
    let detail = format!(
        "Lockstep does not support MLflow's call {method} {:?}. Lockstep supports experiments, and runs with parameters, metrics, tags, \
         artifacts and logged models, but no registered models or traces",
        shortened(name)
    );
    refuse("ENDPOINT_NOT_FOUND", detail)
}

impl Refusal {
    /// Returns the refusal for an error of Lockstep's own interface.
    fn of(status: StatusCode, message: String) -> Self {
        let code = match status {
            StatusCode::NOT_FOUND => "RESOURCE_DOES_NOT_EXIST",
            StatusCode::UNAUTHORIZED => "UNAUTHENTICATED",
            StatusCode::FORBIDDEN => "PERMISSION_DENIED",
            StatusCode::TOO_MANY_REQUESTS => "REQUEST_LIMIT_EXCEEDED",
            StatusCode::SERVICE_UNAVAILABLE => "TEMPORARILY_UNAVAILABLE",
            status if status.is_server_error() => "INTERNAL_ERROR",
            _ => return invalid(message),
        };
        Self { status, code, message }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let (status, message) = error.status_and_detail();
        Self::of(status, message)
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Error::from(error).into()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Refusal { status, code, message } = self;
        (status, Json(json!({"error_code": code, "message": message}))).into_response()
    }
}

/// Converts the errors of requests for MLflow's calls to MLflow's format, also if a request does not reach its call, for example because it
/// has no token.
pub(crate) async fn format_errors(request: Request, next: Next) -> Response {
    let is_call = is_mlflow(request.uri().path());
    let mut response = next.run(request).await;
    let detail = response.extensions_mut().remove::<Detail>().filter(|_| is_call);
    let Some(Detail(message)) = detail else { return response };
    let (parts, body) = Refusal::of(response.status(), message).into_response().into_parts();
    // These headers belong to the replaced body, which may have been compressed.
    for name in [header::CONTENT_LENGTH, header::CONTENT_ENCODING] {
        response.headers_mut().remove(name);
    }
    response.headers_mut().extend(parts.headers);
    *response.body_mut() = body;
    response
}

/// Parameters of a request: the fields of the body or of the query. The parameters of an element of a list have the element's name as
/// `prefix`, for example `metrics[0].`.
struct Parameters {
    fields: Map<String, Value>,
    prefix: String,
}

impl Parameters {
    async fn read(request: Request) -> Result<Self> {
        if request.method() == Method::GET {
            let pairs = Query::<Vec<(String, String)>>::try_from_uri(request.uri());
            let Query(pairs) = pairs.map_err(|error| invalid(error.body_text()))?;
            let fields = pairs.into_iter().map(|(key, value)| (key, Value::String(value))).collect();
            return Ok(Self { fields, prefix: String::new() });
        }
        let bytes = Bytes::from_request(request, &()).await;
        let bytes = bytes.map_err(|error| refuse("BAD_REQUEST", error.body_text()))?;
        let body = serde_json::from_slice(if bytes.is_empty() { &b"{}"[..] } else { &bytes[..] });
        let fields =
            body.map_err(|error| refuse("BAD_REQUEST", format!("the body is not a JSON object: {error}")))?;
        Ok(Self { fields, prefix: String::new() })
    }

    /// Returns a text; `None` if it is missing or empty.
    fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
            Some(other) => Err(invalid_value(key, other)),
        }
    }

    fn required(&self, key: &str) -> Result<&str> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }

    fn missing(&self, key: &str) -> Refusal {
        let advice = "See the API docs for more information about request parameters.";
        invalid(format!("Missing value for required parameter '{}{key}'. {advice}", self.prefix))
    }

    /// Returns the id of the run that a request names. Early clients send it as `run_uuid`.
    fn run_id(&self) -> Result<&str> {
        match self.text("run_id")? {
            Some(id) => Ok(id),
            None => self.text("run_uuid")?.ok_or_else(|| self.missing("run_id")),
        }
    }

    fn list(&self, key: &str) -> Result<Vec<Parameters>> {
        let Some(list) = self.fields.get(key).filter(|list| !list.is_null()) else { return Ok(Vec::new()) };
        let element = |(index, value): (usize, &Value)| {
            let fields = value.as_object()?.clone();
            Some(Parameters { fields, prefix: format!("{key}[{index}].") })
        };
        let objects = list.as_array().and_then(|list| list.iter().enumerate().map(element).collect());
        objects.ok_or_else(|| invalid_value(key, list))
    }

    fn texts(&self, key: &str) -> Vec<&str> {
        let list = self.fields.get(key).and_then(Value::as_array);
        list.map(|list| list.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
    }

    /// Returns an integer. Protobuf's JSON encodes 64-bit integers as text.
    fn integer(&self, key: &str) -> Result<Option<i64>> {
        let Some(value) = self.fields.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        let number = value.as_i64().or_else(|| value.as_str()?.parse().ok());
        number.map(Some).ok_or_else(|| invalid_value(key, value))
    }

    /// Returns a point in time from milliseconds since 1970.
    fn time(&self, key: &str) -> Result<Option<Timestamp>> {
        let ms = self.integer(key)?;
        let at = ms.map(|ms| Timestamp::from_millisecond(ms).map_err(|_| invalid_value(key, &ms.into())));
        at.transpose()
    }

    /// Returns the start of the requested page, from its `page_token`.
    fn page_start<T: FromStr + Default>(&self) -> Result<T> {
        let from = self.text("page_token")?.map(str::parse::<T>).transpose();
        let from = from.map_err(|_| invalid("page_token must be the next_page_token of the previous page"));
        Ok(from?.unwrap_or_default())
    }

    /// Returns the size of the requested page, which is at most `max`.
    fn page_size(&self, max: u32) -> Result<u32> {
        match self.integer("max_results")? {
            None => Ok(max),
            Some(requested) => match u32::try_from(requested) {
                Ok(size) if (1..=PAGE_LIMIT).contains(&size) => Ok(size.min(max)),
                _ => Err(invalid_value("max_results", &requested.into())),
            },
        }
    }
}

/// State that the calls need.
struct CallState {
    runs: Arc<Runs>,
    scheduler: Arc<Scheduler>,
    auth: Arc<Auth>,
    metrics: Arc<metrics::Metrics>,
    deleted_jobs: Arc<DeletedJobs>,
    caller: Caller,
}

/// Handles all calls below [`PREFIX`]. Refuses calls of other versions.
pub(crate) async fn call(
    State(runs): State<Arc<Runs>>,
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    State(metrics): State<Arc<metrics::Metrics>>,
    State(deleted_jobs): State<Arc<DeletedJobs>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>> {
    let state = CallState { runs, scheduler, auth, metrics, deleted_jobs, caller };
    let method = request.method().clone();
    let path = request.uri().path();
    let name = path.strip_prefix(PREFIX).unwrap_or(path).to_owned();
    let parameters = Parameters::read(request).await?;
    let answer =
        run_to_completion(async move { Ok(state.answer(&method, &name, &parameters).await) }).await?;
    Ok(Json(answer?))
}

impl CallState {
    async fn answer(&self, method: &Method, name: &str, parameters: &Parameters) -> Result<Value> {
        Ok(match (method.as_str(), name) {
            ("POST", "experiments/create") => self.create_experiment(parameters).await?,
            ("GET", "experiments/get") => {
                json!({"experiment": experiment(&project(parameters.required("experiment_id")?))})
            }
            ("GET", "experiments/get-by-name") => self.experiment_by_name(parameters).await?,
            ("POST" | "GET", "experiments/search") => self.search_experiments(parameters).await?,
            ("POST", "runs/create") => self.create_run(parameters).await?,
            ("GET", "runs/get") => json!({"run": run(&self.visible_run(parameters).await?)}),
            ("POST", "runs/update") => self.update_run(parameters).await?,
            ("POST", "runs/delete") => self.delete_run(parameters).await?,
            ("POST", "runs/search") => self.search_runs(parameters).await?,
            ("POST", "runs/log-metric") => {
                self.log(parameters, std::slice::from_ref(parameters), RunChange::default()).await?
            }
            ("POST", "runs/log-parameter") => {
                // MLflow checks the run's id before the value.
                parameters.run_id()?;
                let params = BTreeMap::from([pair(parameters, "Param", PARAM_CHARS)?]);
                self.change(parameters, RunChange { params, ..RunChange::default() }).await?
            }
            ("POST", "runs/log-batch") => self.log_batch(parameters).await?,
            ("POST", "runs/set-tag") => {
                // The order of the checks is MLflow's, as above.
                parameters.run_id()?;
                let (key, value) = pair(parameters, "Tag", TAG_CHARS)?;
                let values = BTreeMap::from([(key, Some(value))]);
                self.change(parameters, RunChange { values, ..RunChange::default() }).await?
            }
            ("POST", "runs/delete-tag") => {
                let key = parameters.required("key")?;
                let job = self.changeable_run(parameters).await?;
                if !job.external.unwrap_or_default().values.contains_key(key) {
                    let detail = format!("No tag with name: {key} in run with id {}", job.id);
                    return Err(refuse("RESOURCE_DOES_NOT_EXIST", detail));
                }
                let values = BTreeMap::from([(key.to_owned(), None)]);
                self.change(parameters, RunChange { values, ..RunChange::default() }).await?
            }
            // Nothing is stored: Lockstep has no inputs of runs, and a run's models are its folders.
            ("POST", "runs/log-inputs" | "runs/outputs") => {
                self.change(parameters, RunChange::default()).await?
            }
            ("GET", "metrics/get-history") => self.history(parameters).await?,
            ("GET", "artifacts/list") => {
                let path = parameters.text("path")?.unwrap_or_default();
                artifacts::list_of_run(&self.scheduler.config, &self.visible_run(parameters).await?, path)
                    .await?
            }
            ("POST", "logged-models") => self.create_model(parameters).await?,
            // Clients send this before they list the artifacts in a folder, and find a model in that list.
            ("POST", "logged-models/search") => json!({"models": []}),
            _ => match name.strip_prefix(models::PREFIX) {
                Some(address) => self.handle_model_call(method, address).await?,
                None => return Err(unsupported_call(method, name)),
            },
        })
    }

    /// Returns the projects with a job that the caller may see, and the default project.
    async fn projects(&self) -> Result<Vec<String>> {
        let rows = self.scheduler.store.projects(self.caller.viewer_name().as_deref()).await?;
        let mut names: Vec<String> = rows.into_iter().map(|row| row.name).collect();
        if !names.iter().any(|name| name == DEFAULT_PROJECT) {
            names.push(DEFAULT_PROJECT.into());
        }
        Ok(names)
    }

    async fn search_experiments(&self, parameters: &Parameters) -> Result<Value> {
        if parameters.text("filter")?.is_some() {
            let detail = "Lockstep's experiments/search supports no filter; leave the filter out and choose among the experiments";
            return Err(invalid(detail));
        }
        let from: usize = parameters.page_start()?;
        let max = parameters.page_size(PAGE_RUNS)? as usize;
        let are_deleted = parameters.text("view_type")? == Some("DELETED_ONLY");
        let projects = if are_deleted { Vec::new() } else { self.projects().await? };
        let page = projects.iter().skip(from).take(max).map(|name| experiment(name));
        let mut answer = json!({"experiments": page.collect::<Vec<_>>()});
        if projects.len() > from.saturating_add(max) {
            answer["next_page_token"] = (from + max).to_string().into();
        }
        Ok(answer)
    }

    async fn create_experiment(&self, parameters: &Parameters) -> Result<Value> {
        let name = parameters.required("name")?;
        // A project has neither a location nor tags, so only their types are checked.
        parameters.text("artifact_location")?;
        parameters.list("tags")?;
        let project = project(name);
        if self.projects().await?.contains(&project) {
            return Err(refuse(
                "RESOURCE_ALREADY_EXISTS",
                format!("Experiment(name={name}) already exists."),
            ));
        }
        // A project exists as soon as it has a run.
        Ok(json!({"experiment_id": experiment_id(&project)}))
    }

    async fn experiment_by_name(&self, parameters: &Parameters) -> Result<Value> {
        let name = parameters.required("experiment_name")?;
        let project = project(name);
        if !self.projects().await?.contains(&project) {
            let detail = format!("Could not find experiment with name '{name}'");
            return Err(refuse("RESOURCE_DOES_NOT_EXIST", detail));
        }
        Ok(json!({"experiment": experiment(&project)}))
    }

    async fn create_run(&self, parameters: &Parameters) -> Result<Value> {
        let mut values = BTreeMap::new();
        for tag in parameters.list("tags")? {
            values.extend([pair(&tag, "Tag", TAG_CHARS)?]);
        }
        let name = parameters.text("run_name")?.map(str::to_owned).or_else(|| values.get(RUN_NAME).cloned());
        let name: String = name.unwrap_or_else(|| "run".into()).chars().take(NAME_CHARS).collect();
        values.insert(RUN_NAME.into(), name.clone());
        let project = Some(project(parameters.text("experiment_id")?.unwrap_or(DEFAULT_ID)));
        let started_at = parameters.time("start_time")?.map(Timestamp::as_millisecond);
        let new = NewRun { name, project, started_at, values, ..NewRun::default() };
        let (_, job) = start_run(&self.runs, &self.auth, &self.caller, new).await?;
        Ok(json!({"run": run(&job)}))
    }

    /// Returns the run that a request names, if the caller may see it.
    async fn visible_run(&self, parameters: &Parameters) -> Result<Job> {
        find_run(&self.scheduler, &self.caller, parameters.run_id()?).await
    }

    /// Returns the run that a request names, if the caller may change it.
    async fn changeable_run(&self, parameters: &Parameters) -> Result<Job> {
        let job = self.visible_run(parameters).await?;
        check_may_change(&self.auth, &self.caller, &job)?;
        Ok(job)
    }

    async fn change_run(&self, parameters: &Parameters, change: RunChange) -> Result<Job> {
        let job = self.changeable_run(parameters).await?;
        Ok(self.runs.apply_change(&job.id, change).await?)
    }

    /// Changes a run. Returns the empty response.
    async fn change(&self, parameters: &Parameters, change: RunChange) -> Result<Value> {
        self.change_run(parameters, change).await?;
        Ok(json!({}))
    }

    async fn update_run(&self, parameters: &Parameters) -> Result<Value> {
        let state = match parameters.text("status")? {
            None => None,
            Some("RUNNING" | "SCHEDULED") => Some(JobState::Running),
            Some("FINISHED") => Some(JobState::Succeeded),
            Some("FAILED") => Some(JobState::Failed),
            Some("KILLED") => Some(JobState::Cancelled),
            Some(other) => return Err(invalid_value("status", &other.into())),
        };
        let name = parameters.text("run_name")?.map(|name| (RUN_NAME.to_owned(), Some(name.to_owned())));
        let ended_at = parameters.time("end_time")?;
        let change =
            RunChange { state, ended_at, values: name.into_iter().collect(), ..RunChange::default() };
        Ok(json!({"run_info": info(&self.change_run(parameters, change).await?)}))
    }

    /// Deletes a run permanently. MLflow keeps deleted runs for a while.
    async fn delete_run(&self, parameters: &Parameters) -> Result<Value> {
        let job = self.changeable_run(parameters).await?;
        if !job.state.is_final() {
            let change = RunChange { state: Some(JobState::Cancelled), ..RunChange::default() };
            self.runs.apply_change(&job.id, change).await?;
        }
        jobs::remove(&self.scheduler, &self.deleted_jobs, &job.id).await?;
        Ok(json!({}))
    }

    async fn search_runs(&self, parameters: &Parameters) -> Result<Value> {
        if parameters.text("filter")?.is_some() {
            let detail = "Lockstep's runs/search supports no filter; leave the filter out and choose among the runs, or use \
                          GET /api/v1/jobs";
            return Err(invalid(detail));
        }
        let order = parameters.texts("order_by").join(",").to_lowercase().replace(['`', '"'], "");
        let order = order.split_whitespace().collect::<Vec<_>>().join(" ");
        let order = order.trim_start_matches("attributes.").trim_start_matches("attribute.");
        let (sort, descending) = match order {
            "" | "start_time desc" => ("-created", true),
            "start_time" | "start_time asc" => ("created", false),
            _ => return Err(invalid("Lockstep's runs/search orders only by attributes.start_time")),
        };
        let projects: Vec<_> = parameters.texts("experiment_ids").into_iter().map(project).collect();
        let pages = Pages::new("mlflow runs", sort);
        let filter = JobFilter {
            seen_by: self.caller.viewer_name(),
            // If the request names several projects, jobs of other projects are filtered out below.
            project: if let [project] = &projects[..] { Some(project.clone()) } else { None },
            sort: JobSort { by: SortBy::Created, descending },
            limit: parameters.page_size(PAGE_RUNS)?,
            cursor: pages.decode(parameters.text("page_token")?)?,
            ..JobFilter::default()
        };
        if projects.is_empty() || parameters.text("run_view_type")? == Some("DELETED_ONLY") {
            return Ok(json!({"runs": []}));
        }
        let page = self.scheduler.store.jobs(&filter).await?;
        let is_requested = |job: &&Job| job.external.is_some() && projects.contains(&job.project);
        let mut answer = json!({"runs": page.jobs.iter().filter(is_requested).map(run).collect::<Vec<_>>()});
        if let Some(next) = &page.next {
            answer["next_page_token"] = pages.encode(next)?.into();
        }
        Ok(answer)
    }

    async fn log_batch(&self, parameters: &Parameters) -> Result<Value> {
        let (metrics, params, tags) =
            (parameters.list("metrics")?, parameters.list("params")?, parameters.list("tags")?);
        let limits = [
            ("metrics", metrics.len(), BATCH_METRICS),
            ("params", params.len(), BATCH_PARAMS),
            ("tags", tags.len(), BATCH_TAGS),
        ];
        for (what, length, limit) in limits {
            if length > limit {
                return Err(invalid(format!(
                    "A batch logging request can contain at most {limit} {what}. Got {length} {what}. Please split up {what} across \
                     multiple requests and try again."
                )));
            }
        }
        let mut change = RunChange::default();
        for param in &params {
            let (key, value) = pair(param, "Param", PARAM_CHARS)?;
            if change.params.get(&key).is_some_and(|before| *before != value) {
                return Err(invalid(format!("Duplicate parameter keys have been submitted: ['{key}']")));
            }
            change.params.insert(key, value);
        }
        for tag in &tags {
            let (key, value) = pair(tag, "Tag", TAG_CHARS)?;
            change.values.insert(key, Some(value));
        }
        self.log(parameters, &metrics, change).await
    }

    /// Appends points to a run, and changes the run. Returns the empty response.
    async fn log(&self, parameters: &Parameters, metrics: &[Parameters], change: RunChange) -> Result<Value> {
        let job = self.changeable_run(parameters).await?;
        let (mut points, mut newest) = (Vec::with_capacity(metrics.len()), None::<Timestamp>);
        for metric in metrics {
            let key = metric.required("key")?;
            if let Some(mistake) = name_mistake(key) {
                return Err(invalid(mistake));
            }
            let value = metric.fields.get("value").and_then(number).ok_or_else(|| {
                invalid(format!("Got invalid value for metric '{key}'. Please specify value as a valid double (64-bit floating point)"))
            })?;
            let step = metric.integer("step")?.unwrap_or(0);
            // Negative steps are rare, and charts do not support them.
            let step = u64::try_from(step).ok().filter(|step| *step <= LAST_STEP);
            let step =
                step.ok_or_else(|| invalid(format!("metric '{key}': a step must be 0 to {LAST_STEP}")))?;
            points.push((key, step, value));
            // MLflow also refuses a metric without a time.
            let at = metric.time("timestamp")?.ok_or_else(|| metric.missing("timestamp"))?;
            newest = newest.max(Some(at));
        }
        let columns: Vec<MetricColumn> = to_columns(points.into_iter());
        let now = crate::now();
        let at = newest.map_or(now, |at| at.min(now));
        let records = RunRecords { job: job.id, first: None, count: metrics.len() as u64, at };
        self.runs.append_records(records, move |_| columns.clone(), change).await?;
        Ok(json!({}))
    }

    async fn history(&self, parameters: &Parameters) -> Result<Value> {
        let job = self.visible_run(parameters).await?;
        let key = parameters.required("metric_key")?;
        let from: u64 = parameters.page_start()?;
        let max = parameters.page_size(PAGE_POINTS)? as usize;
        // Usually each step has a point, so the first range of steps fills a page. If points are sparse, the range grows.
        let mut range_steps = max as u64;
        let points = loop {
            let to = from.saturating_add(range_steps);
            let filter = MetricFilter {
                name: Some(key.to_owned()),
                from: Some(from),
                to: Some(to),
                ..MetricFilter::default()
            };
            // The limit is so large that each bucket is one point.
            let found = query::find(&self.metrics, &job, &filter, 1 << 40).await?;
            let points: Vec<_> = found.series.into_values().flatten().collect();
            if points.len() > max || to >= job.step {
                break points;
            }
            range_steps = range_steps.saturating_mul(16);
        };
        let (page, rest) = points.split_at(max.min(points.len()));
        let values = page.iter().map(|point| {
            let value = if point.finite_points > 0 { exact(point.min).into() } else { json!("NaN") };
            metric(key, &value, point.step, &job)
        });
        let mut answer = json!({"metrics": values.collect::<Vec<_>>()});
        if let Some(next) = rest.first() {
            answer["next_page_token"] = next.step.to_string().into();
        }
        Ok(answer)
    }
}

/// Returns the run with this id, if the caller may see it.
async fn find_run(scheduler: &Scheduler, caller: &Caller, id: &str) -> Result<Job> {
    match jobs::find_visible(scheduler, caller, id).await {
        Ok(job) if job.external.is_some() => Ok(job),
        Ok(_) | Err(Error::NotFound(_)) => {
            Err(refuse("RESOURCE_DOES_NOT_EXIST", format!("Run with id={} not found", shortened(id))))
        }
        Err(error) => Err(error.into()),
    }
}

fn check_may_change(auth: &Auth, caller: &Caller, job: &Job) -> Result<()> {
    if auth.may_change(caller, job.owner.as_deref()) {
        return Ok(());
    }
    let detail = "this run belongs to somebody else; only the owner and admins may change it";
    Err(refuse("PERMISSION_DENIED", detail))
}

/// Returns the parameters `key` and `value`, within MLflow's limits. `what`: the kind of the pair in errors, such as `Tag`; `limit`: maximum
/// length of the value, in characters.
fn pair(parameters: &Parameters, what: &str, limit: usize) -> Result<(String, String)> {
    let (key, value) = (parameters.required("key")?, parameters.text("value")?.unwrap_or_default());
    for (part, text, limit) in [("key", key, KEY_CHARS), ("value", value, limit)] {
        let chars = text.chars().count();
        if chars > limit {
            let shown = shortened(text);
            return Err(invalid(format!(
                "{what} {part} '{shown}' had length {chars}, which exceeded length limit of {limit}"
            )));
        }
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// Returns the project for an experiment's id or name, which are equal except for the default experiment.
fn project(experiment: &str) -> String {
    match experiment {
        DEFAULT_ID | DEFAULT_NAME => DEFAULT_PROJECT.into(),
        name => labels::to_project_name(name),
    }
}

fn experiment_id(project: &str) -> &str {
    if project == DEFAULT_PROJECT { DEFAULT_ID } else { project }
}

fn experiment(project: &str) -> Value {
    let name = if project == DEFAULT_PROJECT { DEFAULT_NAME } else { project };
    json!({"experiment_id": experiment_id(project), "name": name, "lifecycle_stage": "active", "artifact_location": "mlflow-artifacts:/"})
}

fn info(job: &Job) -> Value {
    let tag = |name: &str| job.external.as_ref().and_then(|external| external.values.get(name));
    let name = tag(RUN_NAME).unwrap_or(&job.name);
    let user = tag(USER).or(job.owner.as_ref()).map_or("unknown", String::as_str);
    let status = match job.state {
        JobState::Succeeded => "FINISHED",
        JobState::Failed => "FAILED",
        JobState::Cancelled => "KILLED",
        _ => "RUNNING",
    };
    let mut info = json!({
        "run_id": job.id, "run_name": name, "experiment_id": experiment_id(&job.project), "status": status,
        "user_id": user, "start_time": job.created_at.as_millisecond(), "artifact_uri": artifacts::uri(job), "lifecycle_stage": "active",
    });
    if let Some(at) = job.finished_at {
        info["end_time"] = at.as_millisecond().into();
    }
    info
}

/// Returns a point in MLflow's form. Times of points are not stored, so all points have the time of the run's start.
fn metric(key: &str, value: &Value, step: u64, job: &Job) -> Value {
    json!({"key": key, "value": value, "step": step, "timestamp": job.created_at.as_millisecond()})
}

fn run(job: &Job) -> Value {
    let metrics = job.last.by_name().map(|(key, value)| metric(key, &value.into(), job.step, job));
    let metrics: Vec<_> = metrics.collect();
    let empty = External::default();
    let external = job.external.as_ref().unwrap_or(&empty);
    let params: Vec<_> =
        external.config.iter().map(|(key, value)| json!({"key": key, "value": text_of(value)})).collect();
    let tags: Vec<_> =
        external.values.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
    json!({"info": info(job), "data": {"metrics": metrics, "params": params, "tags": tags}, "inputs": {}})
}
