//! Requests for commands that cannot undo their next action. [`Api::find`] distinguishes "does not exist" from "could not be read", and
//! [`Api::post_once`] may send a request several times, but the server carries it out once.

use super::{Api, Outage, RETRY};
use crate::cli::output;
use reqwest::StatusCode;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::time::Duration;

/// Time limit for the response to a request that can be repeated.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

impl Api {
    /// Returns the object at a path, or `None` if the server responds that it does not exist. A 404 that a proxy sends in place of the
    /// server is an error.
    ///
    /// # Errors
    /// See [`Api::get`].
    pub(crate) async fn find<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<Option<T>> {
        let request = self.client.get(self.url(path)).timeout(RESPONSE_TIMEOUT);
        let response = request.send().await.map_err(|error| self.request_error(&error))?;
        match response.status() {
            StatusCode::NOT_FOUND => {
                let body: Value = response.json().await.unwrap_or_default();
                anyhow::ensure!(
                    body["code"] == "not_found",
                    "{}: the response does not come from a Lockstep server",
                    self.base
                );
                Ok(None)
            }
            status if status.is_success() => self.read(response).await.map(Some),
            _ => Err(self.read_problem(response).await),
        }
    }

    /// Sends a value until the server responds, for at most a minute. The server recognises repeated requests by their `Idempotency-Key`.
    ///
    /// # Errors
    /// The server refuses the request, or does not respond for a minute. The server may still have carried out the request.
    pub(crate) async fn post_once<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let key = uuid::Uuid::new_v4().simple().to_string();
        let (mut outage, mut backoff) = (Outage::default(), RETRY);
        loop {
            let request = self.client.post(self.url(path)).timeout(RESPONSE_TIMEOUT);
            let response = match self.send(request.header("idempotency-key", &key).json(body)).await {
                Ok(response) => self.read(response).await,
                Err(error) => Err(error),
            };
            match response {
                Ok(value) => return Ok(value),
                Err(error) => outage.tolerate(error, |text| output::warn(text))?,
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    }
}
