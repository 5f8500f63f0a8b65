//! MLflow's proxy for artifacts (`mlflow/protos/mlflow_artifacts.proto`): a run's artifacts are its files. The URI of an artifact has the
//! run's id and the file's path: `mlflow-artifacts:/RUN/PATH`.

use super::{Parameters, Result, check_may_change, find_run, invalid, unsupported_call};
use crate::api::prelude::*;
use crate::{
    api::runs::files,
    auth::Auth,
    config::ServeConfig,
    ingest::{run_files::RunFiles, runs::Runs},
    scheduler::Scheduler,
};
use axum::{
    extract::{Path, Request},
    http::Method,
};
use lockstep_protocol::job::{Job, RunFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const NAME: &str = "mlflow-artifacts/artifacts";

/// URI of a run's artifacts, for clients.
pub(super) fn uri(job: &Job) -> String {
    format!("mlflow-artifacts:/{}", job.id)
}

/// Splits an address into a run's id and the path of a file or folder. The path is empty for all files of the run.
fn split_address(address: &str) -> (&str, &str) {
    let (run, path) = address.trim_matches('/').split_once('/').unwrap_or((address.trim_matches('/'), ""));
    // Clients write `.` for the folder of all files of the run.
    (run, if path == "." { "" } else { path.trim_start_matches("./") })
}

/// Lists the files and folders directly in a folder, with paths that begin with `prefix`. The list is empty for a file.
fn list_folder(files: &[RunFile], folder: &str, prefix: &str) -> Value {
    let mut entries = BTreeMap::new();
    for file in files {
        let rest = match folder {
            "" => Some(file.path.as_str()),
            _ => file.path.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')),
        };
        let Some(rest) = rest else { continue };
        let (name, entry) = match rest.split_once('/') {
            Some((name, _)) => (name, json!({"path": format!("{prefix}{name}"), "is_dir": true})),
            None => (
                rest,
                json!({"path": format!("{prefix}{rest}"), "is_dir": false, "file_size": file.size_bytes}),
            ),
        };
        entries.entry(name).or_insert(entry);
    }
    entries.into_values().collect()
}

/// Lists the artifacts in a folder of a run, with their paths in the run, for `artifacts/list`.
pub(super) async fn list_of_run(config: &ServeConfig, job: &Job, path: &str) -> Result<Value> {
    let files = files::run_files(config, &job.id);
    check_path(&files, path)?;
    let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
    let all = files::list_files(files).await?;
    Ok(json!({"root_uri": uri(job), "files": list_folder(&all, path, &prefix)}))
}

/// Refuses a path outside the run's folder, with MLflow's text.
fn check_path(files: &RunFiles, path: &str) -> Result<()> {
    if path.is_empty() || files.disk_path(path).is_ok() { Ok(()) } else { Err(invalid("Invalid path")) }
}

/// `GET /api/2.0/mlflow-artifacts/artifacts?path=RUN/FOLDER`: lists the files and folders directly in a folder, by name.
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>> {
    if request.method() != Method::GET {
        return Err(unsupported_call(request.method(), NAME));
    }
    let parameters = Parameters::read(request).await?;
    let (run, path) = split_address(parameters.required("path")?);
    let files = files::run_files(&scheduler.config, &find_run(&scheduler, &caller, run).await?.id);
    check_path(&files, path)?;
    Ok(Json(json!({"files": list_folder(&files::list_files(files).await?, path, "")})))
}

/// `GET`, `PUT` and `DELETE /api/2.0/mlflow-artifacts/artifacts/RUN/PATH`.
pub(crate) async fn file(
    State(runs): State<Arc<Runs>>,
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(address): Path<String>,
    request: Request,
) -> Result<Response> {
    let (run, path) = split_address(&address);
    let job = find_run(&scheduler, &caller, run).await?;
    let files = files::run_files(&scheduler.config, &job.id);
    check_path(&files, path)?;
    let method = request.method().clone();
    if matches!(method, Method::GET | Method::HEAD) {
        return Ok(files::send_file(&files, path, request).await?);
    }
    check_may_change(&auth, &caller, &job)?;
    match method {
        Method::PUT => {
            let body = runs.observe_body(&job.id, request.into_body());
            files::store_file(files, path.to_owned(), None, body).await?;
        }
        // An empty path means all files of the run.
        Method::DELETE if path.is_empty() => {
            for file in files::list_files(files.clone()).await? {
                files::remove_path(files.clone(), file.path).await?;
            }
        }
        Method::DELETE => files::remove_path(files, path.to_owned()).await?,
        other => return Err(unsupported_call(&other, NAME)),
    }
    Ok(Json(json!({})).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_lists_its_files_and_folders_once() {
        let file = |path: &str| RunFile { path: path.into(), size_bytes: 3, modified_ms: 0 };
        let all = ["a.txt", "dir/b.txt", "dir/sub/c.txt", "dir/sub/d.txt", "dirt"].map(file);
        let names = |folder: &str, prefix: &str| -> Vec<(String, bool)> {
            let found = list_folder(&all, folder, prefix);
            let found = found.as_array().unwrap().iter();
            found.map(|f| (f["path"].as_str().unwrap().into(), f["is_dir"].as_bool().unwrap())).collect()
        };
        let entry = |path: &str, is_dir| (path.to_owned(), is_dir);
        assert_eq!(names("", ""), [entry("a.txt", false), entry("dir", true), entry("dirt", false)]);
        assert_eq!(names("dir", "dir/"), [entry("dir/b.txt", false), entry("dir/sub", true)]);
        assert!(names("a.txt", "").is_empty() && names("nothing", "").is_empty());
        for (address, expected) in
            [("r", ("r", "")), ("/r/", ("r", "")), ("r/.", ("r", "")), ("r/./a/b", ("r", "a/b"))]
        {
            assert_eq!(split_address(address), expected);
        }
    }
}
