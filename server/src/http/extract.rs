//! Extractors whose errors are problem details, like all other errors.

mod json;

use crate::http::error::{Error, Result};
use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::{StatusCode, header, request::Parts},
};
use bytes::Bytes;
use lockstep_protocol::{
    JobId,
    limits::SEARCH_CHARS,
    spec::{self, nearest, shortened},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::error::Error as StdError;
use utoipa::{IntoParams, openapi::path::ParameterIn};

/// Query parameters of the API. Unknown parameters are refused with the most similar known name, because a mistyped filter that is ignored
/// would return everything.
#[derive(Debug)]
pub(crate) struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + IntoParams> FromRequestParts<S> for Query<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self> {
        type Pairs = axum::extract::Query<Vec<(String, String)>>;
        let known: Vec<String> =
            T::into_params(|| Some(ParameterIn::Query)).into_iter().map(|known| known.name).collect();
        let pairs = Pairs::try_from_uri(&parts.uri)?.0;
        if let Some((key, _)) = pairs.iter().find(|(key, _)| !known.contains(key)) {
            let hint = match nearest(key, known.iter().map(String::as_str)) {
                Some(near) => format!("did you mean {near:?}?"),
                None => format!("the parameters are {}", known.join(", ")),
            };
            let detail = format!("there is no query parameter {:?} here; {hint}", shortened(key));
            return Err(Error::BadRequest(detail));
        }
        Ok(Self(axum::extract::Query::try_from_uri(&parts.uri)?.0))
    }
}

/// Query parameters of a page. Unknown parameters are ignored, because the page's scripts also keep their state in the URL.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Error))]
pub(crate) struct PageQuery<T>(pub T);

/// The number of items that a request asks for, or `default`.
///
/// # Errors
/// The number is 0 or above `max`.
pub(crate) fn check_count(key: &str, asked: Option<u32>, default: u32, max: u32) -> Result<u32> {
    match asked {
        Some(asked) if !(1..=max).contains(&asked) => {
            Err(Error::BadRequest(format!("{key} must be 1 to {max}, is {asked}")))
        }
        asked => Ok(asked.unwrap_or(default)),
    }
}

#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Error))]
pub(crate) struct Path<T>(pub T);

/// The JSON body, deserialised and as bytes.
#[derive(Debug)]
pub(crate) struct Body<T>(pub T, pub Bytes);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self> {
        let bytes = json_bytes(request, state).await?;
        // serde would read the elements of a list as the fields, in order.
        if bytes.trim_ascii_start().first() != Some(&b'{') {
            return Err(Error::BadRequest("the body must be a JSON object".into()));
        }
        Ok(Self(parse_json(&bytes)?, bytes))
    }
}

fn is_of_type(request: &Request, media_type: &str) -> bool {
    let given = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    given.and_then(|given| given.split(';').next()).map(str::trim) == Some(media_type)
}

async fn json_bytes<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes> {
    // Browsers do not send this type to another origin without a preflight request.
    if !is_of_type(&request, "application/json") {
        return Err(Error::Refused(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON, with content-type: application/json".into(),
        ));
    }
    body_bytes(request, state).await
}

fn parse_json<T: DeserializeOwned>(bytes: &Bytes) -> Result<T> {
    let refuse = |e: &dyn StdError| {
        let problem = e.to_string().replace("unknown variant", "unknown value");
        Error::BadRequest(format!("the body is not the expected JSON: {problem}"))
    };
    json::check(bytes).map_err(|e| refuse(&e))?;
    // The source of the rejection begins with the path of the wrong field.
    axum::Json::from_bytes(bytes).map(|axum::Json(value)| value).map_err(|e| refuse(e.source().unwrap_or(&e)))
}

/// The body, within its limit.
async fn body_bytes<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes> {
    Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Error::Refused(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 1 MiB".into())
        }
        _ => Error::BadRequest(rejection.body_text()),
    })
}

/// A job file as JSON or TOML (`application/toml`), deserialised and as bytes.
#[derive(Debug)]
pub(crate) struct JobFile(pub Value, pub Bytes);

impl<S: Send + Sync> FromRequest<S> for JobFile {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self> {
        // Like JSON, browsers do not send this type to another origin without a preflight request.
        if !is_of_type(&request, "application/toml") {
            let bytes = json_bytes(request, state).await?;
            return Ok(Self(parse_json(&bytes)?, bytes));
        }
        let bytes = body_bytes(request, state).await?;
        let text = std::str::from_utf8(&bytes)
            .map_err(|_| Error::BadRequest("the body is not text (UTF-8)".into()))?;
        let document = spec::toml_document(text).map_err(|mistake| Error::Invalid(vec![mistake]))?;
        Ok(Self(document, bytes))
    }
}

/// Checks the length of a text to search for. A pattern that is too long for a database would be reported as an internal error.
pub(crate) fn check_search_text(key: &str, text: Option<&str>) -> Result<()> {
    match text.map(|text| text.chars().count()) {
        Some(chars) if chars > SEARCH_CHARS => Err(Error::unprocessable(format!(
            "{key} has {chars} characters; search for at most {SEARCH_CHARS}"
        ))),
        _ => Ok(()),
    }
}

/// Parses a job id. A valid id is safe as a file name.
pub(crate) fn parse_job_id(text: &str) -> Result<JobId> {
    text.parse().map_err(|_| Error::NotFound("no job has this id".into()))
}
