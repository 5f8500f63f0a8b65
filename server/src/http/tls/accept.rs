//! The beginning of a TLS connection, within a time. Plain HTTP is answered with a sentence that says so.

use super::agents::{Refused, handshake};
use crate::http::error::Error;
use axum::response::IntoResponse;
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// Of a plain request, what is read before it is answered.
const HEAD_BYTES: usize = 16 << 10;
/// After an answer in clear, for its reader to take it.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// Makes a connection a TLS one.
///
/// # Errors
/// Its client does not speak TLS, or not in time, or shows a certificate that is refused: that is given.
pub(crate) async fn accept(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    patience: Duration,
) -> Result<TlsStream<TcpStream>, Option<Refused>> {
    let work = async {
        let mut first = [0];
        if stream.peek(&mut first).await.unwrap_or(0) == 0 {
            return Err(None);
        }
        // A TLS connection begins with the byte 22, a request with the name of a method.
        if first[0].is_ascii_uppercase() {
            answer_plain(stream).await;
            return Err(None);
        }
        match handshake(acceptor.accept(stream).into_fallible()).await {
            (Ok(stream), _) => Ok(stream),
            (Err((error, stream)), refused) => {
                tracing::debug!(%error, "a TLS handshake failed");
                if refused.is_some() {
                    let_it_read(stream).await;
                }
                Err(refused)
            }
        }
    };
    tokio::time::timeout(patience, work).await.unwrap_or(Err(None))
}

/// A client that speaks TLS 1.3 has sent its request already. Closing with that unread would take the alert, which says why it is
/// refused, from it.
async fn let_it_read(mut stream: TcpStream) {
    let answered = async {
        stream.shutdown().await?;
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    // Whoever has gone need not be answered.
    let _ = tokio::time::timeout(LAST_BYTES, answered).await;
}

/// Reads a request's head and answers 400.
async fn answer_plain(mut stream: TcpStream) {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD_BYTES {
        match stream.read_buf(&mut head).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    let detail = "this port speaks HTTPS and the request came as plain HTTP; write https:// instead of http:// in the address";
    let response = Error::BadRequest(detail.into()).into_response();
    let Ok(body) = axum::body::to_bytes(response.into_body(), HEAD_BYTES).await else { return };
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\ncache-control: \
         no-store\r\nconnection: close\r\n\r\n",
        body.len()
    );
    // In one packet: a client of websockets takes no more of an answer than comes with its head.
    let answer = [head.as_bytes(), &body].concat();
    let answered = async {
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        // Closing with something unread would take the answer from its reader.
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    // Whoever has gone need not be answered.
    let _ = tokio::time::timeout(LAST_BYTES, answered).await;
}
