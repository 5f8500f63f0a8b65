//! TLS handshakes with a time limit. Requests in plain HTTP get an error that says to use HTTPS.

use super::agents::{RefusedCertificate, handshake};
use crate::http::error::Error;
use axum::response::IntoResponse;
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// Maximum number of bytes that are read of the head of a plain HTTP request.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Time limit for a client to read the server's last bytes. After it, the connection is closed.
const CLIENT_READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the TLS handshake of a connection.
///
/// # Errors
/// The client does not use TLS or is too slow, or its certificate is refused. In the last case, the error has the refused certificate.
pub(crate) async fn accept(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    timeout: Duration,
) -> Result<TlsStream<TcpStream>, Option<RefusedCertificate>> {
    let work = async {
        let mut first = [0];
        if stream.peek(&mut first).await.unwrap_or(0) == 0 {
            return Err(None);
        }
        // A TLS connection begins with the byte 22, a plain request with the name of a method.
        if first[0].is_ascii_uppercase() {
            answer_plain(stream).await;
            return Err(None);
        }
        match handshake(acceptor.accept(stream).into_fallible()).await {
            (Ok(stream), _) => Ok(stream),
            (Err((error, stream)), refused) => {
                tracing::debug!(%error, "a TLS handshake failed");
                if refused.is_some() {
                    drain(stream).await;
                }
                Err(refused)
            }
        }
    };
    tokio::time::timeout(timeout, work).await.unwrap_or(Err(None))
}

/// Closes a connection so that the client can read the last bytes that were sent: the alert with the reason of a refusal, or a response. If
/// the server closed the connection while bytes of the client are unread, the kernel would send a reset, and the client could lose the last
/// bytes. A TLS 1.3 client has already sent its request.
async fn drain(mut stream: TcpStream) {
    let work = async {
        stream.shutdown().await?;
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    // A client that has disconnected needs no response.
    let _ = tokio::time::timeout(CLIENT_READ_TIMEOUT, work).await;
}

/// Reads a request's head and answers 400.
async fn answer_plain(mut stream: TcpStream) {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < MAX_HEAD_BYTES {
        match stream.read_buf(&mut head).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    let detail =
        "this port uses HTTPS and the request is plain HTTP; write https:// instead of http:// in the URL";
    let response = Error::BadRequest(detail.into()).into_response();
    let Ok(body) = axum::body::to_bytes(response.into_body(), usize::MAX).await else { return };
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\ncache-control: \
         no-store\r\nconnection: close\r\n\r\n",
        body.len()
    );
    // Sent as one packet, because websocket clients read only the part of a response that arrives with its head.
    let answer = [head.as_bytes(), &body].concat();
    if let Ok(Ok(())) = tokio::time::timeout(CLIENT_READ_TIMEOUT, stream.write_all(&answer)).await {
        drain(stream).await;
    }
}
