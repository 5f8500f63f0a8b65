//! The HTTP client for buckets. It uses the versions of `reqwest` and `rustls` that the rest of the program uses, instead of the client of
//! `object_store`.

use crate::util::http_client::{self, system_authorities};
use async_trait::async_trait;
use http_body_util::BodyExt;
use object_store::{
    ClientConfigKey, ClientOptions, Error,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
        HttpService,
    },
};
use reqwest::{Body, Client, Request, Url};
use std::time::Duration;

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the next bytes of a response. The time begins with the request, so a part of a file must be sent within the same time.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(super) struct Connector;

#[derive(Debug)]
struct Service(Client);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let failed = |detail: String| Error::Generic { store: "S3", source: detail.into() };
        let builder =
            http_client::builder(system_authorities()).map_err(|error| failed(error.to_string()))?;
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp).as_deref() == Some("true");
        let client = builder
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .https_only(!allows_http)
            .build();
        Ok(HttpClient::new(Service(client.map_err(|error| failed(error.to_string()))?)))
    }
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let url = Url::parse(&parts.uri.to_string())
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let mut request = Request::new(parts.method, url);
        *request.headers_mut() = parts.headers;
        *request.body_mut() = Some(Body::wrap(body));
        let response: axum::http::Response<Body> = self.0.execute(request).await.map_err(http_error)?.into();
        let (parts, body) = response.into_parts();
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body.map_err(http_error))))
    }
}

/// Converts an error. The kind determines whether the request is retried. The URL is left out, because the caller adds it.
fn http_error(error: reqwest::Error) -> HttpError {
    let kind = if error.is_timeout() {
        HttpErrorKind::Timeout
    } else if error.is_connect() {
        HttpErrorKind::Connect
    } else if error.is_decode() {
        HttpErrorKind::Decode
    } else {
        HttpErrorKind::Interrupted
    };
    HttpError::new(kind, error.without_url())
}
