//! Requests to the server's REST interface.

use super::{JOB_TIMEOUT, MAX_POLL_PAUSE, Response, Server, number, poll_pause, state_of};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// A point of a metric.
#[derive(Debug)]
pub(crate) struct Point {
    pub(crate) attempt: u64,
    pub(crate) rank: u64,
    pub(crate) step: u64,
    pub(crate) value: f64,
}

impl Server {
    /// The URL of a path under `/api/v1`.
    pub(crate) fn api(&self, path: &str) -> String {
        format!("{}/api/v1{path}", self.url)
    }

    pub(crate) async fn request(&self, method: Method, path: &str, body: Option<&Value>) -> Response {
        let mut request = self.http.request(method, self.api(path));
        if let Some(body) = body {
            request = request.json(body);
        }
        Response::read(request.send().await.expect("a response")).await
    }

    /// An evaluation of a job. `parameters` is empty or begins with a question mark. The server responds with 202 until the evaluation is done.
    pub(crate) async fn evaluation(&self, id: &str, parameters: &str) -> Value {
        let path = format!("/jobs/{id}/evaluation{parameters}");
        self.until_within(JOB_TIMEOUT, "the evaluation is done", async |server: &Server| {
            let response = server.request(Method::GET, &path, None).await;
            assert!(response.status.is_success(), "GET {path}: {}", response.text);
            response.status == StatusCode::OK
        })
        .await;
        self.get(&path).await
    }

    /// The JSON of a GET request, which must succeed.
    pub(crate) async fn get(&self, path: &str) -> Value {
        let response = self.request(Method::GET, path, None).await;
        assert_eq!(response.status, StatusCode::OK, "GET {path}: {}", response.text);
        response.json()
    }

    /// The bytes of a file.
    pub(crate) async fn bytes(&self, path: &str) -> Vec<u8> {
        let response = self.http.get(self.api(path)).send().await.expect("a response");
        assert_eq!(response.status(), StatusCode::OK, "GET {path}");
        response.bytes().await.expect("a body").to_vec()
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.request(Method::POST, path, Some(body)).await
    }

    /// Registers a dataset under a name.
    pub(crate) async fn register(&self, name: &str, path: &Path) {
        let response = self.post("/datasets", &json!({"name": name, "path": path})).await;
        assert_eq!(response.status, StatusCode::CREATED, "registering {name}: {}", response.text);
    }

    /// Creates a job by a POST request, and returns its id.
    pub(crate) async fn create(&self, path: &str, body: &Value) -> String {
        let response = self.post(path, body).await;
        assert_eq!(response.status, StatusCode::CREATED, "{}", response.text);
        response.json()["id"].as_str().expect("an id").to_owned()
    }

    /// Submits a job, which must be accepted, and returns its id.
    pub(crate) async fn submit(&self, spec: &Value) -> String {
        self.create("/jobs", spec).await
    }

    /// Submits a job, waits for its success, and returns its id.
    pub(crate) async fn train(&self, spec: &Value) -> String {
        let id = self.submit(spec).await;
        self.wait_for_success(&id).await;
        id
    }

    pub(crate) async fn job(&self, id: &str) -> Value {
        self.get(&format!("/jobs/{id}")).await
    }

    /// Sends an order for a job (`cancel`, `pause` or `resume`), which the server must accept.
    pub(crate) async fn order(&self, id: &str, order: &str) {
        let response = self.request(Method::POST, &format!("/jobs/{id}/{order}"), None).await;
        assert_eq!(response.status, StatusCode::ACCEPTED, "{}", response.text);
    }

    pub(crate) async fn attempts(&self, id: &str) -> Vec<Value> {
        let response = self.get(&format!("/jobs/{id}/attempts")).await;
        response["attempts"].as_array().expect("attempts").clone()
    }

    /// Waits until `condition` holds and returns the job. Panics if the job ends before, or after [`JOB_TIMEOUT`].
    pub(crate) async fn wait_for_job(
        &self,
        id: &str,
        what: &str,
        condition: impl Fn(&Value) -> bool,
    ) -> Value {
        self.poll_job(id, what, MAX_POLL_PAUSE, condition).await
    }

    async fn poll_job(
        &self,
        id: &str,
        what: &str,
        longest_pause: Duration,
        condition: impl Fn(&Value) -> bool,
    ) -> Value {
        let began = Instant::now();
        loop {
            let job = self.job(id).await;
            if condition(&job) {
                return job;
            }
            assert!(!state_of(&job).is_final(), "{id} ended before: {what}; the job is {job:#}");
            assert!(began.elapsed() < JOB_TIMEOUT, "not within {JOB_TIMEOUT:?}: {what}; the job is {job:#}");
            tokio::time::sleep(poll_pause(began, longest_pause)).await;
        }
    }

    /// Waits for the job to end and returns it.
    pub(crate) async fn wait_for_end(&self, id: &str) -> Value {
        let longest_pause = Duration::from_millis(100);
        self.poll_job(id, "the job has ended", longest_pause, |job| state_of(job).is_final()).await
    }

    /// Waits for the job to succeed and returns it.
    pub(crate) async fn wait_for_success(&self, id: &str) -> Value {
        let job = self.wait_for_end(id).await;
        assert_eq!(job["state"], "succeeded", "{job:#}");
        job
    }

    /// Waits for the job to fail and returns the reason.
    pub(crate) async fn wait_for_failure(&self, id: &str) -> String {
        let job = self.wait_for_end(id).await;
        assert_eq!(job["state"], "failed", "{job:#}");
        job["reason"].as_str().expect("a reason").to_owned()
    }

    /// The listed checkpoints of a job.
    pub(crate) async fn checkpoints(&self, id: &str) -> Vec<Value> {
        let response = self.get(&format!("/jobs/{id}/checkpoints")).await;
        response["checkpoints"].as_array().expect("checkpoints").clone()
    }

    /// `model.safetensors` of the checkpoint of the last step.
    pub(crate) async fn last_model(&self, id: &str) -> Vec<u8> {
        let checkpoints = self.checkpoints(id).await;
        let last = checkpoints.iter().max_by_key(|c| c["step"].as_u64()).expect("a checkpoint");
        let checkpoint = last["id"].as_str().expect("an id");
        self.bytes(&format!("/checkpoints/{checkpoint}/model.safetensors")).await
    }

    /// The steps of which rank 0 has reported the loss, over all attempts.
    pub(crate) async fn steps(&self, id: &str) -> Vec<u64> {
        self.points(id, "loss").await.iter().filter(|p| p.rank == 0).map(|p| p.step).collect()
    }

    /// Every point of one metric, by attempt, rank and step.
    pub(crate) async fn points(&self, id: &str, name: &str) -> Vec<Point> {
        let response = self.get(&format!("/jobs/{id}/metrics?name={name}&points=10000")).await;
        assert_eq!(response["exact"], true, "{name} of {id} fits in 10000 points");
        let mut points = Vec::new();
        for series in response["series"].as_array().expect("series") {
            assert_eq!(series["name"], name);
            let list =
                |key: &str| series[key].as_array().unwrap_or_else(|| panic!("{key} of {series}")).clone();
            let (attempt, rank) = (number(&series["attempt"]), number(&series["rank"]));
            assert_eq!(list("min"), list("mean"));
            assert_eq!(list("max"), list("mean"));
            assert_eq!(list("steps").len(), list("mean").len());
            for (step, value) in list("steps").iter().zip(list("mean")) {
                let (step, value) = (number(step), value.as_f64().expect("a finite value"));
                points.push(Point { attempt, rank, step, value });
            }
        }
        points.sort_by_key(|p| (p.attempt, p.rank, p.step));
        points
    }
}
