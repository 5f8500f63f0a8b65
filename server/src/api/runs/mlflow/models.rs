//! Logged models of MLflow 3 (`LoggedModel` in `mlflow/protos/service.proto`). A logged model is a folder among the files of its run,
//! as in MLflow 2. The model's id is `m-<run id>-<folder name>`. The model's parameters and tags are not stored.

use super::{
    CallState, Parameters, Result, artifacts, check_may_change, experiment_id, find_run, invalid, refuse,
    unsupported_call,
};
use crate::{api::runs::files, http::error::Error};
use axum::http::Method;
use lockstep_protocol::job::Job;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

/// The path of the calls for one model, before the model's id.
pub(super) const PREFIX: &str = "logged-models/";
const DEFAULT_NAME: &str = "model";

fn model_json(job: &Job, name: &str) -> Value {
    let (id, at) = (format!("m-{}-{name}", job.id), job.created_at.as_millisecond());
    json!({"model": {"info": {
        "model_id": id, "experiment_id": experiment_id(&job.project), "name": name, "source_run_id": job.id, "status": "LOGGED_MODEL_READY",
        "artifact_uri": format!("{}/{name}", artifacts::uri(job)), "creation_timestamp_ms": at, "last_updated_timestamp_ms": at,
    }}})
}

impl CallState {
    pub(super) async fn create_model(&self, parameters: &Parameters) -> Result<Value> {
        let name = parameters.text("name")?.unwrap_or(DEFAULT_NAME);
        let run = parameters.text("source_run_id")?;
        let run = run.ok_or_else(|| {
            invalid(
                "a model needs a run, which has the model's files: call mlflow.start_run before log_model",
            )
        })?;
        let job = find_run(&self.scheduler, &self.caller, run).await?;
        check_may_change(&self.auth, &self.caller, &job)?;
        if name.contains('/') || files::run_files(&self.scheduler.config, &job.id).disk_path(name).is_err() {
            return Err(invalid(format!(
                "a model cannot have the name {name:?}: the name must be valid for the folder of the model's files"
            )));
        }
        Ok(model_json(&job, name))
    }

    /// Handles a call for a model. `address` begins with the model's id.
    pub(super) async fn handle_model_call(&self, method: &Method, address: &str) -> Result<Value> {
        let decoded = percent_decode_str(address).decode_utf8_lossy().into_owned();
        let (id, part) = decoded.split_once('/').unwrap_or((decoded.as_str(), ""));
        let Some((run, name)) = id.strip_prefix("m-").and_then(|rest| rest.split_once('-')) else {
            return Err(refuse("RESOURCE_DOES_NOT_EXIST", format!("Logged model with ID '{id}' not found.")));
        };
        let job = find_run(&self.scheduler, &self.caller, run).await?;
        if method != Method::GET {
            check_may_change(&self.auth, &self.caller, &job)?;
        }
        let part = part.split('/').next().unwrap_or_default();
        match (method.as_str(), part) {
            // PATCH says that all files are uploaded.
            ("GET" | "PATCH", "") => Ok(model_json(&job, name)),
            ("DELETE", "") => {
                let files = files::run_files(&self.scheduler.config, &job.id);
                match files::remove_path(files, name.to_owned()).await {
                    // A model without files has no folder.
                    Ok(()) | Err(Error::NotFound(_)) => Ok(json!({})),
                    Err(error) => Err(error.into()),
                }
            }
            ("POST", "params") | ("PATCH" | "DELETE", "tags") => Ok(json!({})),
            _ => Err(unsupported_call(method, PREFIX)),
        }
    }
}
