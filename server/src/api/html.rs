//! Responses with HTML pages.

use crate::api::prelude::*;
use crate::http::error::PageError;
use axum::response::Html;
use lockstep_web::Template;

/// The response of a page's handler.
pub(crate) type Page = Result<Response, PageError>;

/// Returns the response with a page.
pub(crate) fn html(page: impl Template) -> Page {
    let html = page.render().map_err(|e| Error::Internal(format!("a page could not be rendered: {e}")))?;
    Ok(Html(html).into_response())
}

/// Returns the status of the response and the message to show with the form, for an error that the user can correct in the form.
///
/// # Errors
/// Returns the error itself if the user cannot correct it in the form.
pub(crate) fn form_error(error: Error) -> Result<(StatusCode, String)> {
    match error {
        Error::Invalid(mistakes) => {
            let each = mistakes.iter().map(|m| format!("{} {}", m.pointer.trim_start_matches('/'), m.detail));
            Ok((StatusCode::UNPROCESSABLE_ENTITY, each.collect::<Vec<_>>().join("; ")))
        }
        Error::Conflict(detail) => Ok((StatusCode::CONFLICT, detail)),
        Error::NotFound(detail) => Ok((StatusCode::NOT_FOUND, detail)),
        other => Err(other),
    }
}
