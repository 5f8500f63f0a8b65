//! The server's REST interface for agents with their own disk.

use super::address::Address;
use lockstep_protocol::{
    agent::{AttemptRef, DatasetParts, UploadState, WhatIsNeeded},
    backoff::Backoff,
};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, header};
use serde_json::Value;
use std::{sync::Arc, time::Duration};

/// Pauses between two tries to fetch a file.
pub(super) const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(20));
/// Time limit for a response to begin. The server may first verify the checksums of a whole checkpoint.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(150);
/// Time limit for the next bytes of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RequestError {
    /// The request may succeed later: the server is unreachable or busy, or its disk is full.
    Later(String),
    /// The request will never succeed.
    Never(StatusCode, String),
}

impl RequestError {
    pub(super) fn detail(&self) -> &str {
        match self {
            Self::Later(words) | Self::Never(_, words) => words,
        }
    }
}

type Result<T> = std::result::Result<T, RequestError>;

#[derive(Debug)]
pub(super) struct Remote {
    pub(super) address: Arc<Address>,
    pub(super) agent_id: String,
    pub(super) name: String,
}

/// A connection for several requests about one attempt.
pub(super) struct AttemptClient<'a> {
    remote: &'a Remote,
    client: Client,
    base: String,
    fencing_token: String,
}

impl Remote {
    /// Opens a connection for one piece of work. Certificates are read again for each connection.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn client(&self, attempt: &AttemptRef) -> Result<AttemptClient<'_>> {
        let (client, server) = self.address.rest_client().map_err(RequestError::Later)?;
        let base = format!("{server}/api/v1/agent/attempts/{}/{}", attempt.job, attempt.attempt);
        Ok(AttemptClient { remote: self, client, base, fencing_token: attempt.fencing_token.into() })
    }
}

impl AttemptClient<'_> {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client
            .request(method, format!("{}{path}", self.base))
            .header("x-lockstep-agent", &self.remote.agent_id)
            .header("x-lockstep-fencing-token", &self.fencing_token)
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response> {
        // Checked before each request, because another account of this machine may have taken the port, and must not get the
        // token.
        self.remote.address.check_listeners().map_err(RequestError::Later)?;
        let response = match tokio::time::timeout(RESPONSE_TIMEOUT, request.send()).await {
            Err(_) => return Err(RequestError::Later("the server does not respond".into())),
            Ok(Err(error)) => return Err(RequestError::Later(self.remote.address.in_words(&error))),
            Ok(Ok(response)) => response,
        };
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = response.text().await.unwrap_or_default();
        let problem: Value = serde_json::from_str(&text).unwrap_or_default();
        let detail = problem.get("detail").and_then(Value::as_str).unwrap_or(&text);
        let words = format!("the server answered {status}: {detail}");
        // A response without a Lockstep error code comes from a proxy.
        let is_from_lockstep = problem.get("code").is_some_and(Value::is_string);
        let is_temporary = !is_from_lockstep
            || status.is_server_error()
            || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS, StatusCode::UNAUTHORIZED]
                .contains(&status);
        Err(if is_temporary { RequestError::Later(words) } else { RequestError::Never(status, words) })
    }

    async fn json<T: serde::de::DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let text = self.send(request).await?.text().await.map_err(|e| RequestError::Later(e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| RequestError::Later(format!("the server's response: {e}")))
    }

    /// Notifies the server that this agent has its own disk and is about to start ranks.
    pub(super) async fn begin(&self) -> Result<()> {
        self.send(self.request(Method::POST, "")).await.map(drop)
    }

    pub(super) async fn what_is_needed(&self) -> Result<WhatIsNeeded> {
        self.json(self.request(Method::GET, "")).await
    }

    /// Sends the fingerprint of the dataset at the job's first start.
    pub(super) async fn send_fingerprint(&self, note: Vec<u8>) -> Result<()> {
        let request = self.request(Method::POST, "/dataset").header(header::CONTENT_TYPE, "application/json");
        self.send(request.body(note)).await.map(drop)
    }

    pub(super) async fn dataset_list(&self) -> Result<Download> {
        self.send(self.request(Method::GET, "/dataset/files")).await.map(Download)
    }

    /// Parts of the dataset's files, one after the other.
    pub(super) async fn dataset_parts(&self, parts: &DatasetParts) -> Result<Download> {
        self.send(self.request(Method::POST, "/dataset/files").json(parts)).await.map(Download)
    }

    /// A file of a checkpoint, starting at byte `from`.
    pub(super) async fn file(&self, id: &str, file: &str, from: u64) -> Result<Download> {
        let mut request = self.request(Method::GET, &format!("/checkpoints/{id}/{file}"));
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        let response = self.send(request).await?;
        if from > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
            return Err(RequestError::Later("the server sent the whole file, not the rest".into()));
        }
        Ok(Download(response))
    }

    pub(super) async fn upload_state(&self, name: &str) -> Result<UploadState> {
        self.json(self.request(Method::GET, &format!("/uploads/{name}"))).await
    }

    pub(super) async fn upload_piece(
        &self,
        name: &str,
        file: &str,
        offset: u64,
        piece: Vec<u8>,
    ) -> Result<()> {
        let request = self.request(Method::PUT, &format!("/uploads/{name}/{file}?offset={offset}"));
        let request = request.header(header::CONTENT_TYPE, "application/octet-stream");
        self.send(request.body(piece)).await.map(drop)
    }

    pub(super) async fn finish_upload(&self, name: &str) -> Result<()> {
        self.send(self.request(Method::POST, &format!("/uploads/{name}"))).await.map(drop)
    }
}

/// The body of a response that is being received.
pub(super) struct Download(Response);

impl Download {
    /// The next bytes. `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<bytes::Bytes>> {
        match tokio::time::timeout(READ_TIMEOUT, self.0.chunk()).await {
            Err(_) => Err(RequestError::Later("the server stopped sending data".into())),
            Ok(chunk) => chunk.map_err(|e| RequestError::Later(e.to_string())),
        }
    }
}
