//! A client for Kubernetes' API: objects as plain JSON, with retries while the API server is unreachable.

use super::super::{
    super::{api::SERVER_TIMEOUT, output, usage_error, with_causes},
    Args,
};
use kube::{
    Client, Config, Error,
    api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
    config::KubeConfigOptions,
    core::{ApiResource, GroupVersionKind},
};
use lockstep_protocol::backoff::Backoff;
use serde_json::Value;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Pauses before a request is retried.
const INITIAL_BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));
/// HTTP status of a response if another object of this name exists already (Conflict).
const STATUS_CONFLICT: u16 = 409;
/// Time limit for the deletion of an object, whose pods end first.
const DELETION_TIMEOUT: Duration = Duration::from_secs(180);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Job,
    Service,
    Secret,
    Pod,
}

impl Kind {
    fn resource(self) -> ApiResource {
        let (group, kind) = match self {
            Kind::Job => ("batch", "Job"),
            Kind::Service => ("", "Service"),
            Kind::Secret => ("", "Secret"),
            Kind::Pod => ("", "Pod"),
        };
        ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind))
    }
}

/// Time limits of requests to a cluster.
#[derive(Debug, Clone, Copy)]
struct Timeouts {
    /// Time limit for a response. If the API server's machine loses power, its connections stay open without a response.
    response: Duration,
    /// Time for which requests are retried while the API server is unreachable.
    outage: Duration,
}

const TIMEOUTS: Timeouts = Timeouts { response: Duration::from_secs(30), outage: SERVER_TIMEOUT };

/// A namespace of a cluster.
pub(super) struct Cluster {
    client: Client,
    timeouts: Timeouts,
    pub(super) namespace: String,
    /// Whether the message about the unreachable API server has been printed.
    is_unreachable: AtomicBool,
}

/// Result of the creation of an object.
pub(super) enum Created {
    New(Value),
    /// An object with this name exists already.
    Exists(Value),
}

impl Cluster {
    /// Connects with a kubeconfig file (`KUBECONFIG`, `~/.kube/config`), or with the service account of the pod in which this process runs.
    ///
    /// # Errors
    /// Neither of the two exists, or the connection fails.
    pub(super) async fn connect(args: &Args) -> anyhow::Result<Self> {
        let unusable = |e: &dyn std::error::Error| usage_error(format!("Kubernetes: {}", with_causes(e)));
        let config = match &args.context {
            None => Config::infer().await.map_err(|e| unusable(&e))?,
            Some(context) => {
                let options = KubeConfigOptions { context: Some(context.clone()), ..Default::default() };
                Config::from_kubeconfig(&options)
                    .await
                    .map_err(|e| usage_error(format!("--context {context}: {}", with_causes(&e))))?
            }
        };
        let namespace = args.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if namespace.is_empty() || namespace.len() > 63 || !namespace.chars().all(is_plain) {
            return Err(usage_error(format!(
                "--namespace {namespace:?}: must have 1 to 63 lower-case letters, digits and hyphens"
            )));
        }
        let client = Client::try_from(config).map_err(|e| unusable(&e))?;
        Ok(Self { client, timeouts: TIMEOUTS, namespace, is_unreachable: AtomicBool::new(false) })
    }

    pub(super) fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind.resource())
    }

    /// Prints that the API server does not respond, unless this has been printed since the last response.
    pub(super) fn report_lost(&self, error: &Error) {
        if !self.is_unreachable.swap(true, Ordering::Relaxed) {
            output::warn(format_args!(
                "Kubernetes' API server does not answer ({}); trying again",
                with_causes(error)
            ));
        }
    }

    pub(super) fn report_restored(&self) {
        if self.is_unreachable.swap(false, Ordering::Relaxed) {
            output::warn("Kubernetes' API server answers again");
        }
    }

    /// Waits for a response. After the time limit, the server counts as unreachable.
    pub(super) async fn with_time_limit<T>(
        &self,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let limit = self.timeouts.response;
        let late = |_| Err(Error::Service(format!("no answer within {limit:?}").into()));
        tokio::time::timeout(limit, request).await.unwrap_or_else(late)
    }

    /// Sends a request, and retries for a minute while the API server is unreachable.
    async fn with_retries<T>(&self, send: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
        let began = Instant::now();
        let mut backoff = INITIAL_BACKOFF;
        loop {
            match self.with_time_limit(send()).await {
                Err(error) if is_retryable(&error) && began.elapsed() < self.timeouts.outage => {
                    self.report_lost(&error)
                }
                result => {
                    self.report_restored();
                    return result;
                }
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    }

    /// Formats an error with advice.
    pub(super) fn explain(&self, action: &str, error: &Error) -> anyhow::Error {
        let namespace = &self.namespace;
        match error {
            Error::Api(status) if status.code == 401 => usage_error(format!(
                "{action}: Kubernetes does not know your account ({}); sign in as for kubectl",
                status.message
            )),
            Error::Api(status) if status.code == 403 => usage_error(format!(
                "{action}: Kubernetes does not let you do this ({}); deploy/kubernetes/launch-role.yaml has the role that a launch needs \
                 in namespace {namespace}",
                status.message
            )),
            Error::Api(status) => anyhow::anyhow!("{action}: Kubernetes refuses: {}", status.message),
            error => anyhow::anyhow!("{action}: {}", with_causes(error)),
        }
    }

    /// Returns an object, or `None` if it does not exist.
    ///
    /// # Errors
    /// The object cannot be read.
    pub(super) async fn get(&self, kind: Kind, name: &str) -> anyhow::Result<Option<Value>> {
        let api = self.api(kind);
        let found = self.with_retries(async || api.get_opt(name).await).await;
        found
            .map(|found| found.map(to_json))
            .map_err(|e| self.explain(&format!("reading {kind:?} {name}"), &e))
    }

    /// Creates an object.
    ///
    /// # Errors
    /// Kubernetes refuses the object.
    pub(super) async fn create(&self, kind: Kind, object: &Value) -> anyhow::Result<Created> {
        let api = self.api(kind);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let action = format!("creating {kind:?} {name}");
        let typed: DynamicObject = serde_json::from_value(object.clone())?;
        loop {
            match self.with_retries(async || api.create(&PostParams::default(), &typed).await).await {
                Ok(created) => return Ok(Created::New(to_json(created))),
                Err(Error::Api(status)) if status.code == STATUS_CONFLICT => {
                    match self.get(kind, name).await? {
                        Some(found) => return Ok(Created::Exists(found)),
                        // The object was deleted between the two requests.
                        None => tokio::time::sleep(INITIAL_BACKOFF.first).await,
                    }
                }
                Err(error) => return Err(self.explain(&action, &error)),
            }
        }
    }

    /// Changes fields of a Job, by a JSON merge patch (RFC 7396).
    ///
    /// # Errors
    /// Kubernetes refuses the change, or the Job does not exist.
    pub(super) async fn patch_job(&self, name: &str, change: &Value) -> anyhow::Result<()> {
        let (api, patch) = (self.api(Kind::Job), Patch::Merge(change));
        let patched =
            self.with_retries(async || api.patch(name, &PatchParams::default(), &patch).await).await;
        patched.map(drop).map_err(|e| self.explain(&format!("changing Job {name}"), &e))
    }

    /// Deletes an object after its dependents (foreground deletion). Keeps an object with the same name and another UID.
    ///
    /// # Errors
    /// Kubernetes refuses the deletion.
    pub(super) async fn delete(&self, kind: Kind, object: &Value) -> anyhow::Result<()> {
        let api = self.api(kind);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let uid = object["metadata"]["uid"].as_str().map(ToOwned::to_owned);
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid, resource_version: None }),
            ..DeleteParams::foreground()
        };
        match self.with_retries(async || api.delete(name, &params).await).await {
            Ok(_) => Ok(()),
            // After a conflict, another object has this name.
            Err(Error::Api(status)) if [404, STATUS_CONFLICT].contains(&status.code) => Ok(()),
            Err(error) => Err(self.explain(&format!("deleting {kind:?} {name}"), &error)),
        }
    }

    /// Deletes an object, and waits until the object does not exist.
    ///
    /// # Errors
    /// See [`Cluster::delete`]. Also if the object still exists after three minutes.
    pub(super) async fn remove(&self, kind: Kind, object: &Value) -> anyhow::Result<()> {
        self.delete(kind, object).await?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let deadline = Instant::now() + DELETION_TIMEOUT;
        while let Some(found) = self.get(kind, name).await? {
            if found["metadata"]["uid"] != object["metadata"]["uid"] {
                break;
            }
            if Instant::now() > deadline {
                anyhow::bail!(
                    "{kind:?} {name} is being deleted, but still exists; `kubectl describe` shows why"
                );
            }
            tokio::time::sleep(INITIAL_BACKOFF.first).await;
        }
        Ok(())
    }
}

/// Whether a retry of the request may succeed.
pub(super) fn is_retryable(error: &Error) -> bool {
    match error {
        // A server that is starting, stopping or overloaded.
        Error::Api(status) => status.code == 429 || status.code >= 500,
        Error::HyperError(_) | Error::Service(_) => true,
        _ => false,
    }
}

pub(super) fn to_json(object: DynamicObject) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;
