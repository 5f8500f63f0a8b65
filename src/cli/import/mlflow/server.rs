//! Runs of a server with MLflow's REST interface (2.0), read with the requests of MLflow's own client.

use super::{Failure, Parts, Run, add_points, add_settings, new_run, text};
use crate::cli::{block_on, usage_error};
use anyhow::Context;
use jiff::Timestamp;
use lockstep_worker::tls;
use reqwest::{Client, Method};
use serde_json::{Value, json};
use std::{env, time::Duration};

/// Time limit for one response: a page of runs or points.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

struct Server {
    /// URL to which a call's name is appended.
    base: String,
    client: Client,
}

/// Returns the runs of all experiments.
pub(super) fn parts(url: &str) -> anyhow::Result<Parts> {
    let tls = tls::client_config(None).map_err(usage_error)?;
    let client =
        Client::builder().timeout(RESPONSE_TIMEOUT).tls_backend_preconfigured((*tls).clone()).build()?;
    let server = Server { base: format!("{}/api/2.0/mlflow", url.trim_end_matches('/')), client };
    let runs = block_on(server.list_runs())?;
    if runs.is_empty() {
        return Err(usage_error(format!("{url} has no runs")));
    }
    Ok(Box::new(runs.into_iter().map(move |(experiment, run)| {
        let label = format!("run {}", text(&run["info"], "run_id"));
        (label, block_on(server.read_run(&experiment, &run)).map(|run| vec![run]))
    })))
}

impl Server {
    /// Returns every run with the name of its experiment.
    async fn list_runs(&self) -> anyhow::Result<Vec<(String, Value)>> {
        let mut found = Vec::new();
        let fields = json!({"max_results": 1000});
        for experiment in self.read_list(Method::POST, "experiments/search", "experiments", fields).await? {
            let (id, name) = (text(&experiment, "experiment_id"), text(&experiment, "name"));
            let fields = json!({"max_results": 1000, "experiment_ids": [id], "run_view_type": "ACTIVE_ONLY"});
            let runs = self.read_list(Method::POST, "runs/search", "runs", fields).await?;
            found.extend(runs.into_iter().map(|run| (name.clone(), run)));
        }
        Ok(found)
    }

    async fn read_run(&self, experiment: &str, entry: &Value) -> anyhow::Result<Run> {
        let began = Timestamp::now().as_millisecond();
        let id = text(&entry["info"], "run_id");
        let mut run = new_run(&id, experiment, &entry["info"]);
        let list = |key: &str| entry["data"][key].as_array().cloned().unwrap_or_default();
        let pairs = |key: &str| -> Vec<(String, String)> {
            list(key).iter().map(|pair| (text(pair, "key"), text(pair, "value"))).collect()
        };
        add_settings(&mut run, pairs("params"), pairs("tags"));
        let mut points = Vec::new();
        for metric in list("metrics") {
            let name = text(&metric, "key");
            let fields = json!({"run_id": id, "metric_key": name, "max_results": "25000"});
            for point in self.read_list(Method::GET, "metrics/get-history", "metrics", fields).await? {
                // Protobuf's JSON has int64, NaN and infinity as strings.
                let integer = |key: &str| text(&point, key).parse::<i64>().unwrap_or(0);
                match text(&point, "value").parse() {
                    Ok(value) => points.push((integer("timestamp"), name.clone(), integer("step"), value)),
                    Err(_) => run.leave_out("values that are not numbers", 1),
                }
            }
        }
        if run.failure == Some(Failure::Unfinished) {
            // Metrics are read one by one. Points that are logged meanwhile would be in only some metrics, so they are dropped.
            points.retain(|(at, ..)| *at < began);
        }
        add_points(&mut run, points);
        Ok(run)
    }

    /// Reads all pages of a list.
    async fn read_list(
        &self,
        method: Method,
        name: &str,
        key: &str,
        mut fields: Value,
    ) -> anyhow::Result<Vec<Value>> {
        let mut all = Vec::new();
        loop {
            let page = self.call(&method, name, &fields).await?;
            all.extend(page.get(key).and_then(Value::as_array).into_iter().flatten().cloned());
            match page.get("next_page_token").and_then(Value::as_str).filter(|token| !token.is_empty()) {
                Some(token) => fields["page_token"] = token.into(),
                None => return Ok(all),
            }
        }
    }

    /// Makes a call, with the credentials in the environment variables of MLflow's clients.
    async fn call(&self, method: &Method, name: &str, fields: &Value) -> anyhow::Result<Value> {
        let url = format!("{}/{name}", self.base);
        let request = self.client.request(method.clone(), &url);
        let request = match *method {
            Method::GET => request.query(fields),
            _ => request.json(fields),
        };
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let request = match (variable("MLFLOW_TRACKING_TOKEN"), variable("MLFLOW_TRACKING_USERNAME")) {
            (Some(token), _) => request.bearer_auth(token),
            (None, Some(user)) => request.basic_auth(user, variable("MLFLOW_TRACKING_PASSWORD")),
            (None, None) => request,
        };
        let response = request.send().await.with_context(|| format!("{url} does not answer"))?;
        let status = response.status();
        let body: Value = response.json().await.unwrap_or_default();
        if !status.is_success() {
            let why = ["message", "detail"].iter().find_map(|key| body.get(key)?.as_str());
            return Err(usage_error(format!(
                "{url}: {status}: {}",
                why.unwrap_or("the server gives no reason")
            )));
        }
        anyhow::ensure!(body.is_object(), "{url} does not answer as an MLflow server does");
        Ok(body)
    }
}
