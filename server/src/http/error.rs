//! One error type for all handlers, and its response: RFC 9457 problem details under `/api`, a page elsewhere.

mod code;

pub(crate) use code::Code;

use crate::{agents::RequestError, store::StoreError};
use axum::{
    extract::{
        rejection::{BytesRejection, PathRejection, QueryRejection},
        ws::rejection::WebSocketUpgradeRejection,
    },
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{Html, IntoResponse, Response},
};
use lockstep_protocol::{JobState, spec::SpecError};
use lockstep_web::{
    Template as _,
    layout::{CurrentUser, ErrorPage},
};
use serde::Serialize;
use std::io;
use utoipa::ToSchema;

/// Why a request failed. The response says what a client can correct. Faults of the server are logged, once, here.
#[derive(Debug)]
pub(crate) enum Error {
    /// No object has this name or id.
    NotFound(String),
    /// The request cannot be read.
    BadRequest(String),
    /// Mistakes in a job file or form, each with its location.
    Invalid(Vec<SpecError>),
    /// The request conflicts with existing data.
    Conflict(String),
    /// The job's state does not allow the request.
    WrongState(String, JobState),
    /// Records are missing. The second field is the number of the next expected record.
    Gap(String, u64),
    /// The caller is not authenticated.
    Unauthorized(String),
    /// The request comes from a page of another origin, or the caller may not make it.
    Forbidden(String),
    /// The rate limit is exceeded. The second field is the number of seconds until the next request is allowed.
    TooMany(String, u64),
    /// A refusal with one of the codes that have no variant here.
    WithCode(Code, String),
    /// A refusal with this status, such as 413 for a body that is too large. Its code follows from the status.
    Refused(StatusCode, String),
    /// Something that the server needs is temporarily unavailable.
    Unavailable(String),
    /// A fault of the server.
    Internal(String),
}

/// The result of a handler, or of a function with another error.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Refuses a request with mistakes.
pub(crate) fn check_mistakes(mistakes: Vec<SpecError>) -> Result<()> {
    if mistakes.is_empty() { Ok(()) } else { Err(Error::Invalid(mistakes)) }
}

/// Refuses a request with a mistake in the field at `pointer`.
pub(crate) fn check_field(pointer: &str, mistake: Option<String>) -> Result<()> {
    mistake.map_or(Ok(()), |detail| Err(Error::invalid(pointer, detail)))
}

/// `application/problem+json` (RFC 9457).
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Problem {
    /// `urn:lockstep:problem:` and the code.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The kind of problem, for programs: `not_found`, `invalid`, `wrong_state`, ...
    code: &'static str,
    title: String,
    status: u16,
    /// What is wrong, and what to do.
    detail: String,
    /// All mistakes in a job file or form.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<SpecError>,
    /// The job's state, which does not allow the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<JobState>,
    /// The number of the next expected record, if records are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<u64>,
}

impl Error {
    /// A mistake in a job file or form, at the location `pointer`.
    pub(crate) fn invalid(pointer: &str, detail: impl Into<String>) -> Self {
        Error::Invalid(vec![SpecError { pointer: pointer.into(), detail: detail.into() }])
    }

    /// A well-formed request (422) that names something which cannot be used.
    pub(crate) fn unprocessable(detail: String) -> Self {
        Error::Refused(StatusCode::UNPROCESSABLE_ENTITY, detail)
    }

    /// What is wrong, and what to do, without the locations of mistakes.
    pub(crate) fn detail(self) -> String {
        match self {
            Error::Invalid(mistakes) => {
                mistakes.into_iter().map(|mistake| mistake.detail).collect::<Vec<_>>().join("; ")
            }
            other => other.problem().1.detail,
        }
    }

    fn problem(self) -> (StatusCode, Problem) {
        let (mut given_status, mut errors, mut state, mut expected) = (None, Vec::new(), None, None);
        let (code, detail) = match self {
            Error::NotFound(detail) => (Code::NotFound, detail),
            Error::BadRequest(detail) => (Code::BadRequest, detail),
            Error::Unauthorized(detail) => (Code::Unauthorized, detail),
            Error::Forbidden(detail) => (Code::Forbidden, detail),
            Error::TooMany(detail, _) => (Code::TooManyRequests, detail),
            Error::Conflict(detail) => (Code::Conflict, detail),
            Error::WithCode(code, detail) => (code, detail),
            Error::WrongState(detail, job_state) => {
                state = Some(job_state);
                (Code::WrongState, detail)
            }
            Error::Gap(detail, next) => {
                expected = Some(next);
                (Code::Conflict, detail)
            }
            Error::Refused(status, detail) => {
                given_status = Some(status);
                (Code::of(status), detail)
            }
            Error::Invalid(mistakes) => {
                let detail = match &mistakes[..] {
                    [one] => format!("{} {}", one.pointer, one.detail).trim().to_owned(),
                    many => format!("{} mistakes; see errors", many.len()),
                };
                errors = mistakes;
                (Code::Invalid, detail)
            }
            Error::Unavailable(detail) => {
                tracing::warn!(detail, "a request could not be served for now");
                (Code::Unavailable, detail)
            }
            Error::Internal(detail) => {
                tracing::error!(detail, "a request failed");
                (Code::Internal, "the request failed; the server's log has the reason".to_owned())
            }
        };
        let status = given_status.unwrap_or_else(|| code.status());
        let problem = Problem {
            kind: code.type_uri(),
            code: code.as_str(),
            title: status.canonical_reason().unwrap_or("Error").to_owned(),
            status: status.as_u16(),
            detail,
            errors,
            state,
            expected,
        };
        (status, problem)
    }

    /// The status and the detail, for calls whose errors have another form (MLflow's).
    pub(crate) fn status_and_detail(self) -> (StatusCode, String) {
        let (status, problem) = self.problem();
        (status, problem.detail)
    }

    /// The response's additional header.
    fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        match self {
            Error::Unauthorized(_) => Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            Error::TooMany(_, secs) => Some((header::RETRY_AFTER, (*secs).into())),
            Error::Unavailable(_) | Error::Refused(StatusCode::SERVICE_UNAVAILABLE, _) => {
                Some((header::RETRY_AFTER, HeaderValue::from_static("2")))
            }
            _ => None,
        }
    }
}

/// Response extension of an error: what is wrong, for calls whose errors have another form (MLflow's).
#[derive(Debug, Clone)]
pub(crate) struct Detail(pub(crate) String);

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let header = self.header();
        let (status, problem) = self.problem();
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response =
            (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response();
        response.headers_mut().extend(header);
        response.extensions_mut().insert(Detail(problem.detail));
        response
    }
}

/// An error on a page for people.
#[derive(Debug)]
pub(crate) struct PageError(pub(crate) Error);

impl<E: Into<Error>> From<E> for PageError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let header = self.0.header();
        let (status, problem) = self.0.problem();
        let page = ErrorPage {
            status: problem.status,
            title: problem.title,
            detail: problem.detail,
            user: CurrentUser::NOBODY,
        };
        match page.render() {
            Ok(html) => {
                let mut response = (status, HeaderMap::from_iter(header), Html(html)).into_response();
                response.extensions_mut().insert(page);
                response
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}

/// Renders an error's page again, with the navigation bar of `user`. Other responses stay as they are.
pub(crate) fn render_for(user: CurrentUser, mut response: Response) -> Response {
    let page = response.extensions_mut().remove::<ErrorPage>();
    if let Some(html) = page.and_then(|page| ErrorPage { user, ..page }.render().ok()) {
        // These headers belong to the replaced page, which may have been compressed.
        for name in [header::CONTENT_LENGTH, header::CONTENT_ENCODING] {
            response.headers_mut().remove(name);
        }
        *response.body_mut() = html.into();
    }
    response
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound(what) => Error::NotFound(format!("there is no such {what}")),
            StoreError::Refused(refused) => Error::WrongState(refused.detail, refused.state),
            StoreError::NameTaken(name) => {
                Error::WithCode(Code::NameTaken, format!("the name {name:?} is taken; choose another"))
            }
            StoreError::DatasetRemoved(_) => {
                Error::invalid("/data/dataset", format!("{error}; add it again under this name"))
            }
            StoreError::DatasetInUse(_) => Error::WithCode(Code::DatasetInUse, error.to_string()),
            StoreError::KeyReused => Error::WithCode(Code::IdempotencyKeyReused, error.to_string()),
            StoreError::Cursor => Error::WithCode(Code::WrongCursor, error.to_string()),
            StoreError::Unavailable(_) => Error::Unavailable(error.to_string()),
            StoreError::Rejected(_) | StoreError::Corrupt(_) => Error::Internal(error.to_string()),
        }
    }
}

impl RequestError {
    /// Like [`Error::from`], for a request without the field `path`, at which `from` locates mistakes.
    pub(crate) fn without_pointer(self) -> Error {
        match self {
            RequestError::Refused(_) | RequestError::NobodyHasFiles { .. } => {
                Error::unprocessable(self.in_words())
            }
            other => Error::Unavailable(other.in_words()),
        }
    }
}

impl From<RequestError> for Error {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Refused(_) | RequestError::NobodyHasFiles { .. } => {
                Error::invalid("/path", error.in_words())
            }
            other => Error::Unavailable(other.in_words()),
        }
    }
}

impl From<QueryRejection> for Error {
    fn from(rejection: QueryRejection) -> Self {
        Error::BadRequest(rejection.body_text())
    }
}

impl From<PathRejection> for Error {
    fn from(rejection: PathRejection) -> Self {
        Error::BadRequest(rejection.body_text())
    }
}

impl From<BytesRejection> for Error {
    fn from(rejection: BytesRejection) -> Self {
        Error::Refused(rejection.status(), rejection.body_text())
    }
}

impl From<WebSocketUpgradeRejection> for Error {
    fn from(rejection: WebSocketUpgradeRejection) -> Self {
        let detail = format!("this URL is a websocket: {}", rejection.body_text());
        Error::Refused(StatusCode::UPGRADE_REQUIRED, detail)
    }
}

/// A value of the server could not be serialized. Mistakes in JSON from clients are reported as [`Error::BadRequest`].
impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Error::Internal(format!("a value cannot be serialized: {error}"))
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Error::Internal(error.to_string())
    }
}

/// The error for a file that cannot be stored: 507 if the disk is full, otherwise 503.
pub(crate) fn disk_error(error: &io::Error) -> Error {
    let detail = format!("the server cannot write to its disk: {error}");
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::Refused(StatusCode::INSUFFICIENT_STORAGE, detail)
        }
        _ => Error::Unavailable(detail),
    }
}

/// Runs blocking work on files on a separate thread. The work is completed even if the client disconnects.
///
/// # Errors
/// The work panicked.
pub(crate) async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| Error::Internal(format!("work on files failed: {e}")))
}
