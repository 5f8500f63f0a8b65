//! A client for the server's REST interface and its streams.

mod named;
mod outage;
mod requests;
mod stream;

use super::{
    WrongRequest,
    access::{AccessArgs, DEFAULT_SERVER, NO_TOKEN, Token, is_loopback, with_scheme},
    output, unknown_name_message, usage_error,
};
use anyhow::{Chain, Context, anyhow};
use lockstep_protocol::{
    Job, JobState,
    backoff::Backoff,
    models::{ModelVersion, SCHEME, Selector, VersionName},
    spec::SpecError,
    sweep::Sweep,
};
use lockstep_worker::tls;
use named::{JOB, Kind, OnDuplicateName, SWEEP};
pub(crate) use outage::Outage;
use reqwest::{
    Client, Method, RequestBuilder, Response, StatusCode,
    header::{AUTHORIZATION, HeaderValue},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{
    fmt::Write,
    path::{Path, PathBuf},
    time::Duration,
};

/// Time after which a command gives up while the server is unreachable.
pub(super) const SERVER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a connection, including the TLS handshake. A server may share its cores with ranks, and then answers late.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Pauses before a request or a connection is retried.
pub(super) const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// Number of elements that one request for a list returns.
const PAGE_SIZE: usize = 200;

/// Options for the server to which a command connects, and for the output.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServerArgs {
    /// Address of the server [default: the address that a server on this machine has written into its data directory, or
    /// http://127.0.0.1:7070]
    #[arg(long, value_name = "URL", env = "LOCKSTEP_SERVER")]
    server: Option<String>,
    /// CA certificates to trust in addition to the system's (PEM), for a server whose URL begins with https
    #[arg(long, value_name = "FILE", env = "LOCKSTEP_CA_FILE")]
    pub(crate) ca_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl ServerArgs {
    /// Returns a client for this server, with the token that [`AccessArgs`] finds. Sends no request.
    ///
    /// # Errors
    /// The address is invalid, the token cannot be read, or `--data-dir` names a folder without a server.
    pub(crate) fn api(&self) -> anyhow::Result<Api> {
        self.access.check_data_dir()?;
        let server = self.address();
        let mut api = Api::new(&server, self.ca_file.as_deref(), self.access.token(&server)?)?;
        if !self.is_named() {
            api.start_command = self.access.start_command();
        }
        Ok(api)
    }

    /// Whether `--server` or `LOCKSTEP_SERVER` names the server.
    pub(crate) fn is_named(&self) -> bool {
        self.server.is_some()
    }

    pub(crate) fn address(&self) -> String {
        self.access.server(self.server.as_deref())
    }
}

/// Arguments of commands about one job.
#[derive(clap::Args)]
pub(crate) struct JobArgs {
    /// The job's id, the start of its id, or its name
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// A connection to a server.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    /// The server's address.
    pub(crate) base: String,
    client: Client,
    /// Environment variable that names the proxy for requests, if they use a proxy.
    proxy: Option<&'static str>,
    /// Command that starts the server, if its data directory is on this machine and the server was stopped.
    start_command: Option<String>,
    /// See [`Token::source`]; `None` without a token.
    token_source: Option<String>,
}

impl Api {
    /// Returns a client for `server`. The client sends `token`, and trusts `ca_file` in addition to the system's CA certificates. Sends no
    /// request.
    ///
    /// # Errors
    /// The address, the CA file or the token is invalid.
    pub(crate) fn new(server: &str, ca_file: Option<&Path>, token: Option<Token>) -> anyhow::Result<Self> {
        let base = with_scheme(server).trim_end_matches('/').to_owned();
        let url = reqwest::Url::parse(&base)
            .map_err(|e| usage_error(format!("{server}: {e}; write an address such as {DEFAULT_SERVER}")))?;
        let tls = match url.scheme() {
            "https" => tls::client_config(ca_file),
            "http" => tls::client_config_without_roots(),
            other => {
                let address = base.split_once("://").map_or(&*base, |(_, address)| address);
                return Err(usage_error(format!(
                    "{server}: the scheme {other}:// is not supported; write http://{address} or https://{address}"
                )));
            }
        };
        let tls = tls.map_err(usage_error)?;
        let header = token.as_ref().map(|token| bearer_header(&token.secret)).transpose()?;
        let client = Client::builder()
            .default_headers(header.map(|header| (AUTHORIZATION, header)).into_iter().collect())
            .connect_timeout(CONNECT_TIMEOUT)
            .tls_backend_preconfigured((*tls).clone());
        let proxy = proxy_variable(&url);
        // Without `no_proxy`, the client would also send http requests through a proxy, which would see the token.
        let client = if proxy.is_none() { client.no_proxy() } else { client };
        let token_source = token.map(|token| token.source);
        Ok(Self { base, client: client.build()?, proxy, start_command: None, token_source })
    }

    /// Returns the job with this id, name or start of an id. If several jobs have the name, returns the newest of them and prints a note to
    /// standard error.
    ///
    /// # Errors
    /// No job matches, or several ids begin with `id`. An empty `id` (an unset variable of a script) is an error.
    pub(crate) async fn find_job(&self, id: &str) -> anyhow::Result<Job> {
        self.find_named(JOB, id, |_| true, OnDuplicateName::TakeNewest).await
    }

    /// Like [`Api::find_job`], but of several jobs with the name, prefers the jobs whose state `accepts` accepts.
    pub(crate) async fn find_job_preferring(
        &self,
        id: &str,
        accepts: impl Fn(JobState) -> bool,
    ) -> anyhow::Result<Job> {
        self.find_named(JOB, id, in_state(accepts), OnDuplicateName::TakeNewest).await
    }

    /// Like [`Api::find_job_preferring`], for actions on jobs in certain states.
    ///
    /// # Errors
    /// See [`Api::find_job`]. Also if several jobs have the name, and none of them is accepted.
    pub(crate) async fn find_job_in_state(
        &self,
        id: &str,
        accepts: impl Fn(JobState) -> bool,
    ) -> anyhow::Result<Job> {
        self.find_named(JOB, id, in_state(accepts), OnDuplicateName::TakeNewestAccepted).await
    }

    /// Like [`Api::find_job`], for commands that need checkpoints: of several jobs with the name, prefers the jobs of which Lockstep has
    /// trained a step.
    pub(crate) async fn find_trained_job(&self, id: &str) -> anyhow::Result<Job> {
        let is_trained =
            |job: &Value| job["external"].is_null() && job["step"].as_u64().is_some_and(|step| step > 0);
        self.find_named(JOB, id, is_trained, OnDuplicateName::TakeNewest).await
    }

    /// Like [`Api::find_job_preferring`], for commands that cannot be undone: refuses a name that several of the accepted jobs have.
    ///
    /// # Errors
    /// See [`Api::find_job`]. Also if several of the accepted jobs have the name.
    pub(crate) async fn find_only_job(
        &self,
        id: &str,
        accepts: impl Fn(JobState) -> bool,
    ) -> anyhow::Result<Job> {
        self.find_named(JOB, id, in_state(accepts), OnDuplicateName::Refuse).await
    }

    /// Returns the object that `id` names, and prints a note if several objects have the name. Of these objects, prefers the objects that
    /// `accepts` accepts.
    async fn find_named<T: DeserializeOwned>(
        &self,
        kind: Kind,
        id: &str,
        accepts: impl Fn(&Value) -> bool,
        on_duplicate: OnDuplicateName,
    ) -> anyhow::Result<T> {
        let Kind { noun, is_id } = kind;
        let list_path = format!("/{noun}s");
        if id.is_empty() {
            return Err(usage_error(format!(
                "the name of the {noun} is empty; give an id, the start of an id, or a name"
            )));
        }
        if is_id(id) {
            return self.get(&format!("{list_path}/{id}")).await;
        }
        // Includes objects that this version cannot parse, because `id` may name one of them.
        let all = self.read_all(&list_path).await?;
        let Some(chosen) = named::choose(kind, &all, id, accepts, on_duplicate).map_err(usage_error)? else {
            let namesake = if noun == JOB.noun { self.describe_namesake(id).await } else { None };
            let unknown = || unknown_name_message(noun, names(&all), id);
            return Err(usage_error(
                namesake.map_or_else(unknown, |namesake| format!("no job is called {id}. {namesake}")),
            ));
        };
        if let Some(note) = chosen.note {
            output::warn(note);
        }
        self.get(&format!("{list_path}/{}", chosen.id)).await
    }

    /// Returns a sentence about the sweep `name`, for the error of a command about a job of this name. `None` without such a sweep.
    pub(crate) async fn describe_sweep(&self, name: &str) -> Option<String> {
        let sweeps = self.read_all("/sweeps").await.ok()?;
        let sweep = sweeps.iter().find(|sweep| [text(sweep, "name"), text(sweep, "id")].contains(&name))?;
        let best = sweep["best"]["job"].as_str().map(|job| format!("; its best trial is the job {job}"));
        Some(format!(
            "{name} is a sweep: `lockstep sweep show {name}` shows its jobs, and `lockstep sweep pause {name}`, `lockstep sweep cancel \
             {name}` and `lockstep sweep delete {name}` change the sweep{}",
            best.unwrap_or_default()
        ))
    }

    /// Returns a sentence for the error that no job or version is called `name`, if a sweep or a model has this name.
    pub(crate) async fn describe_namesake(&self, name: &str) -> Option<String> {
        if let Some(sweep) = self.describe_sweep(name).await {
            return Some(sweep);
        }
        let models = self.read_all("/models").await.unwrap_or_default();
        let model_name = name.strip_prefix(SCHEME).unwrap_or(name);
        if let Some(model) = models.iter().find(|model| text(model, "name") == model_name) {
            return Some(format!(
                "{model_name} is a model: the name of a version also has its number or an alias, as in {SCHEME}{model_name}/{}; \
                 `lockstep model show {model_name}` shows all versions and aliases",
                model["newest"]["version"]
            ));
        }
        let version = format!("{SCHEME}{name}").parse::<VersionName>().ok()?;
        let is_known = models.iter().any(|model| text(model, "name") == version.model);
        is_known.then(|| format!("{} is a model: write {version} for its version", version.model))
    }

    /// Returns the version of a model that `name` names.
    ///
    /// # Errors
    /// Exit status 2 if the version does not exist. If no model has the name, the error names the most similar model.
    pub(crate) async fn find_model_version(&self, name: &VersionName) -> anyhow::Result<ModelVersion> {
        let VersionName { model, selector } = name;
        let path = match selector {
            Selector::Number(number) => format!("/models/{model}/versions/{number}"),
            Selector::Alias(alias) => format!("/models/{model}/aliases/{alias}"),
        };
        let error = match self.get(&path).await {
            Err(error) if error.is::<WrongRequest>() => error,
            result => return result,
        };
        Err(self.unknown_model(model).await.unwrap_or_else(|| {
            usage_error(format!("{error}; `lockstep model show {model}` shows its versions and aliases"))
        }))
    }

    /// If the server's list shows that no model is called `name`, returns the error that names the most similar model.
    async fn unknown_model(&self, name: &str) -> Option<anyhow::Error> {
        let models = self.read_all("/models").await.ok()?;
        let is_unknown = !names(&models).any(|known| known == name);
        is_unknown.then(|| usage_error(unknown_name_message("model", names(&models), name)))
    }

    /// Returns `error`, the error of a request about the model `name`, or the error that no model has this name.
    pub(crate) async fn explain_unknown_model(&self, name: &str, error: anyhow::Error) -> anyhow::Error {
        let unknown = if error.is::<WrongRequest>() { self.unknown_model(name).await } else { None };
        unknown.unwrap_or(error)
    }

    /// Returns the sweep with this id, name or start of an id. If several sweeps have the name, returns the newest of them and prints a
    /// note to standard error.
    pub(crate) async fn find_sweep(&self, id: &str) -> anyhow::Result<Sweep> {
        self.find_named(SWEEP, id, |_| true, OnDuplicateName::TakeNewest).await
    }

    /// Like [`Api::find_sweep`], for commands that change the sweep: refuses a name that several unfinished sweeps have.
    pub(crate) async fn find_only_sweep(&self, id: &str) -> anyhow::Result<Sweep> {
        let has_not_ended = |sweep: &Value| text(sweep, "finished_at").is_empty();
        self.find_named(SWEEP, id, has_not_ended, OnDuplicateName::Refuse).await
    }

    /// Reads a whole list. An element that this version cannot parse is reported and left out, as in [`parse_elements`].
    pub(crate) async fn list<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<Vec<T>> {
        Ok(parse_elements(&self.read_all(path).await?, list_key(path)))
    }

    /// Reads a whole list, also elements that this version cannot parse.
    pub(crate) async fn read_all(&self, path: &str) -> anyhow::Result<Vec<Value>> {
        self.read_pages(path, &[], None).await
    }

    /// Reads a list page by page: all elements, or the first `limit`.
    pub(crate) async fn read_pages(
        &self,
        path: &str,
        query: &[(&str, String)],
        limit: Option<u32>,
    ) -> anyhow::Result<Vec<Value>> {
        let limit = limit.map(|limit| limit as usize);
        let mut values = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let page_size =
                limit.map_or(PAGE_SIZE, |limit| limit.saturating_sub(values.len()).clamp(1, PAGE_SIZE));
            let mut pairs = vec![("limit", page_size.to_string())];
            pairs.extend(query.iter().cloned());
            pairs.extend(cursor.map(|cursor| ("cursor", cursor)));
            let page: Value = self.get(&with_query(path, &pairs)?).await?;
            values.extend_from_slice(elements(&page, list_key(path))?);
            match page.get("next_cursor").and_then(Value::as_str) {
                Some(next) if limit.is_none_or(|limit| values.len() < limit) => {
                    cursor = Some(next.to_owned())
                }
                _ => return Ok(values),
            }
        }
    }

    /// Whether the server responds within [`CONNECT_TIMEOUT`].
    pub(crate) async fn is_reachable(&self) -> bool {
        let request = self.client.get(format!("{}/healthz", self.base)).timeout(CONNECT_TIMEOUT);
        request.send().await.is_ok()
    }

    /// Reads the object at a path under `/api/v1`.
    ///
    /// # Errors
    /// The server is unreachable, or responds with a problem document (RFC 9457), whose text becomes the error.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.read(self.get_response(path).await?).await
    }

    /// Like [`Api::get`], but returns the response before its body has arrived.
    pub(crate) async fn get_response(&self, path: &str) -> anyhow::Result<Response> {
        self.request(Method::GET, path, None::<&()>).await
    }

    pub(crate) async fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.request(Method::DELETE, path, None::<&()>).await.map(drop)
    }

    /// Changes the object at a path and reads the response.
    pub(crate) async fn patch<T: DeserializeOwned>(
        &self,
        path: &str,
        change: &impl Serialize,
    ) -> anyhow::Result<T> {
        self.read(self.request(Method::PATCH, path, Some(change)).await?).await
    }

    /// Sends a value and reads the response.
    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        self.read(self.request(Method::POST, path, Some(body)).await?).await
    }

    /// Sends a request and returns the response. A response with a problem document becomes an error.
    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> anyhow::Result<Response> {
        let mut request = self.client.request(method, self.url(path));
        if let Some(body) = body {
            request = request.json(body);
        }
        self.send(request).await
    }

    /// Returns the URL of a path under `/api/v1`.
    fn url(&self, path: &str) -> String {
        format!("{}/api/v1{path}", self.base)
    }

    async fn send(&self, request: RequestBuilder) -> anyhow::Result<Response> {
        let (client, request) = request.build_split();
        let request = request.map_err(|error| self.request_error(&error))?;
        let is_change = request.method() != Method::GET;
        let response = client.execute(request).await.map_err(|error| {
            let failure = self.request_error(&error);
            if !is_change || error.is_connect() {
                return failure;
            }
            anyhow!(
                "{failure}; the connection broke before the response, so it is unknown whether the server has carried out the request: \
                 look at its effect before you repeat it"
            )
        })?;
        if response.status().is_success() { Ok(response) } else { Err(self.read_problem(response).await) }
    }

    /// Converts a problem document (RFC 9457) to an error: each of its mistakes on a line, or else its detail or title.
    async fn read_problem(&self, response: Response) -> anyhow::Error {
        let status = response.status();
        let body: Value = response.json().await.unwrap_or_default();
        let text = |key: &str| body.get(key).and_then(Value::as_str).filter(|t| !t.is_empty());
        let mut message = text("detail")
            .or(text("title"))
            .map_or_else(
                || {
                    format!(
                        "the server answered {status} without an explanation: the program at {} may not be Lockstep, or is a \
                         proxy that cannot reach the Lockstep server; check --server or LOCKSTEP_SERVER",
                        self.base
                    )
                },
                str::to_owned,
            );
        if let Some(errors) = body.get("errors").and_then(Value::as_array).filter(|errors| !errors.is_empty())
        {
            // Each error is more specific than the detail, which repeats the first error.
            message = match errors.len() {
                1 => "the server found a mistake:".to_owned(),
                count => format!("the server found {count} mistakes:"),
            };
            for error in errors {
                let [pointer, detail] =
                    ["pointer", "detail"].map(|key| error[key].as_str().unwrap_or_default());
                let _ = write!(message, "\n  {}", format_mistake(pointer, detail));
            }
        }
        if status == StatusCode::UNAUTHORIZED {
            // Cuts off the server's advice for a request without a token, which is about headers and the sign-in page.
            let problem = message.split_once(": send it as ").map_or(&*message, |(problem, _)| problem);
            message = match &self.token_source {
                Some(source) => {
                    format!("{problem}\nthe token in {source} was refused: replace it, or remove it there")
                }
                None => format!("{problem}\n{NO_TOKEN}"),
            };
        }
        match status {
            s if s.is_server_error() || s == StatusCode::REQUEST_TIMEOUT => anyhow!(message),
            _ => usage_error(message),
        }
    }

    /// Returns the mistakes that the server finds in a job.
    pub(crate) async fn find_mistakes(&self, document: &Value) -> anyhow::Result<Vec<SpecError>> {
        let response = self.client.post(self.url("/jobs/validate")).json(document).send().await;
        let response = response.map_err(|error| self.request_error(&error))?;
        match response.status() {
            StatusCode::UNPROCESSABLE_ENTITY => {
                let mut body: Value = response.json().await.unwrap_or_default();
                let errors = body.get_mut("errors").map(Value::take).unwrap_or_default();
                Ok(serde_json::from_value(errors).unwrap_or_default())
            }
            status if status.is_success() => Ok(Vec::new()),
            _ => Err(self.read_problem(response).await),
        }
    }

    /// Sends bytes unchanged and reads the response.
    pub(crate) async fn send_bytes<T: DeserializeOwned>(
        &self,
        path: &str,
        bytes: Vec<u8>,
    ) -> anyhow::Result<T> {
        let request = self.client.post(self.url(path));
        let request = request.header("content-type", "application/octet-stream").body(bytes);
        self.read(self.send(request).await?).await
    }

    /// Parses the body of a response.
    ///
    /// # Errors
    /// The connection broke, or the response does not come from a Lockstep server.
    pub(crate) async fn read<T: DeserializeOwned>(&self, response: Response) -> anyhow::Result<T> {
        let bytes = response.bytes().await.map_err(|error| self.request_error(&error))?;
        // A response without a body reads as null.
        let text: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        serde_json::from_slice(text)
            .with_context(|| format!("{}: the response does not come from a Lockstep server", self.base))
    }

    /// Returns the error of a request without a response.
    fn request_error(&self, error: &reqwest::Error) -> anyhow::Error {
        if let Some(why) = tls::in_words(error, &self.base) {
            return anyhow!(why);
        }
        if error.is_connect() || error.is_timeout() {
            let proxy = self.proxy.map(|name| {
                format!(" ({name} is set: requests go through that proxy, unless NO_PROXY names the server)")
            });
            // The text of hyper-util's error; its type is private.
            if Chain::new(error).any(|cause| cause.to_string().starts_with("dns error")) {
                return anyhow!(
                    "{}: the name of the host was not found{}. Check the address in --server or LOCKSTEP_SERVER",
                    self.base,
                    proxy.unwrap_or_default()
                );
            }
            let start = self.start_command.as_ref().map_or_else(
                || "Start one with `lockstep serve`".to_owned(),
                |command| format!("The server of the data directory is stopped: start it with `{command}`"),
            );
            anyhow!(
                "no server answers at {}{}. {start}. To use another server, name its data directory on this machine (--data-dir or \
                 LOCKSTEP_DATA_DIR), or for another machine set LOCKSTEP_SERVER and LOCKSTEP_TOKEN",
                self.base,
                proxy.unwrap_or_default()
            )
        } else {
            anyhow!("{}: {error}", self.base)
        }
    }
}

/// Returns the text under `key` in an object, or an empty text if there is none.
pub(crate) fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn names(objects: &[Value]) -> impl Iterator<Item = &str> {
    objects.iter().map(|object| text(object, "name"))
}

/// Returns a predicate for jobs of the server's list: whether `accepts` accepts the job's state.
fn in_state(accepts: impl Fn(JobState) -> bool) -> impl Fn(&Value) -> bool {
    move |job: &Value| text(job, "state").parse::<JobState>().is_ok_and(&accepts)
}

/// Returns the environment variable that names the proxy for requests to a server (curl's names). Only https requests to other machines use
/// a proxy.
fn proxy_variable(server: &reqwest::Url) -> Option<&'static str> {
    let is_on_this_machine = is_loopback(server.host_str()?);
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let names = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
    names.into_iter().find(is_set).filter(|_| server.scheme() == "https" && !is_on_this_machine)
}

/// Returns the request parameters that have a value.
pub(crate) fn present_parameters<const N: usize>(
    parameters: [(&'static str, Option<String>); N],
) -> Vec<(&'static str, String)> {
    parameters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Returns the key of the list in a response: the last part of the path, or `jobs` for the queue.
fn list_key(path: &str) -> &str {
    match path.rsplit('/').next() {
        Some("queue") => "jobs",
        last => last.unwrap_or_default(),
    }
}

/// Returns the list under `key` of a response.
///
/// # Errors
/// The response has no such list.
fn elements<'a>(response: &'a Value, key: &str) -> anyhow::Result<&'a [Value]> {
    let list = response.get(key).and_then(Value::as_array);
    list.map(Vec::as_slice).with_context(|| format!("the server's response has no list {key:?}"))
}

/// Parses the list under `key` of a response, as [`parse_elements`] does.
///
/// # Errors
/// The response has no such list.
pub(crate) fn parse_list<T: DeserializeOwned>(response: &Value, key: &str) -> anyhow::Result<Vec<T>> {
    Ok(parse_elements(elements(response, key)?, key))
}

/// Parses the elements of the server's list `key`. An element that this version cannot parse (the server may be newer) is reported and left
/// out.
pub(crate) fn parse_elements<T: DeserializeOwned>(elements: &[Value], key: &str) -> Vec<T> {
    let parse = |element: &Value| {
        let name = element.get("id").or(element.get("name")).unwrap_or(&Value::Null);
        let report = |error| {
            output::warn(format_args!(
                "{name} of the server's {key} cannot be read by this version: {error}"
            ));
        };
        serde_json::from_value(element.clone()).map_err(report).ok()
    };
    elements.iter().filter_map(parse).collect()
}

/// Appends query parameters to a path.
///
/// # Errors
/// No input causes an error in practice.
pub(crate) fn with_query(path: &str, pairs: &[(&str, String)]) -> anyhow::Result<String> {
    let url = reqwest::Url::parse_with_params("http://host/", pairs)?;
    Ok(format!("{path}?{}", url.query().unwrap_or_default()))
}

fn bearer_header(token: &str) -> anyhow::Result<HeaderValue> {
    let value = HeaderValue::from_str(&format!("Bearer {token}"));
    let mut value =
        value.map_err(|_| usage_error("the token has characters that are not allowed in a token"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Formats a mistake in a specification as a line, with the JSON pointer `/train/lr` written as the key `train.lr`.
pub(crate) fn format_mistake(pointer: &str, detail: &str) -> String {
    let key = pointer.trim_start_matches('/').replace('/', ".");
    // A pointer has `~1` in place of a slash in a key, and `~0` in place of a tilde.
    let key = key.replace("~1", "/").replace("~0", "~");
    if key.is_empty() { detail.to_owned() } else { format!("{key}: {detail}") }
}
