//! A job's stream, as the commands that follow a job read it.

use super::Api;
use anyhow::bail;
use futures_util::StreamExt;
use lockstep_protocol::{
    Job,
    stream::{Frame, HEARTBEAT_SECS},
};
use lockstep_worker::tls;
use reqwest::header::AUTHORIZATION;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_tungstenite::{
    Connector, MaybeTlsStream, WebSocketStream,
    tungstenite::{Message, client::IntoClientRequest},
};

/// A stream that is silent for longer is dead, also when nobody has said so: two heartbeats are missing.
const SILENT: Duration = Duration::from_secs(2 * HEARTBEAT_SECS + 5);

/// A job's stream.
pub(crate) struct Stream(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Stream {
    /// The next frame that is no heartbeat; none when the server has closed the stream.
    ///
    /// # Errors
    /// The connection broke, or not even heartbeats come.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Frame>> {
        loop {
            let message = tokio::time::timeout(SILENT, self.0.next()).await;
            match message.map_err(|_| anyhow::anyhow!("nothing was heard of the server for {SILENT:?}"))? {
                None | Some(Ok(Message::Close(_))) => return Ok(None),
                Some(Err(error)) => return Err(error.into()),
                Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                    // A frame of a type that this version does not know is passed over.
                    Ok(Frame::Heartbeat { .. }) | Err(_) => {}
                    Ok(frame) => return Ok(Some(frame)),
                },
                Some(Ok(_)) => {}
            }
        }
    }
}

impl Api {
    /// Opens a job's stream after event `since`.
    ///
    /// # Errors
    /// The server is not reachable.
    pub(crate) async fn stream(&self, job: &Job, since: u64) -> anyhow::Result<Stream> {
        let base = self.base.replacen("http", "ws", 1);
        let url = format!("{base}/api/v1/jobs/{}/stream?since={since}", job.id);
        let mut request = url.into_client_request()?;
        request.headers_mut().extend(self.token.clone().map(|token| (AUTHORIZATION, token)));
        let connector = Some(Connector::Rustls(self.tls.clone()));
        let connecting = tokio_tungstenite::connect_async_tls_with_config(request, None, false, connector);
        match tokio::time::timeout(Duration::from_secs(10), connecting).await {
            Ok(Ok((socket, _))) => Ok(Stream(socket)),
            Ok(Err(error)) => match tls::in_words(&error, &self.base) {
                Some(why) => bail!(why),
                None => bail!("the stream of {}: {error}", job.id),
            },
            Err(_) => bail!("the stream of {}: the server does not answer", job.id),
        }
    }
}
