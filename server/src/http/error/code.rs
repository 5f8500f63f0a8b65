//! The codes of all problem details. `docs/api.md` has the same list; a test compares the two.

use axum::http::StatusCode;

macro_rules! codes {
    ($($name:ident = $text:literal, $status:ident, $meaning:literal;)*) => {
        /// The kind of a problem, for programs. New codes may be added; programs that do not know a code use the status.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Code {
            $(#[doc = $meaning] $name,)*
        }

        impl Code {
            pub(crate) const ALL: &[Code] = &[$(Code::$name,)*];

            /// As in JSON: snake_case.
            pub(crate) fn as_str(self) -> &'static str {
                match self { $(Code::$name => $text,)* }
            }

            /// The `type` of a problem: a name, not an address.
            pub(crate) fn type_uri(self) -> &'static str {
                match self { $(Code::$name => concat!("urn:lockstep:problem:", $text),)* }
            }

            /// The response's status.
            pub(crate) fn status(self) -> StatusCode {
                match self { $(Code::$name => StatusCode::$status,)* }
            }

            /// The meaning, as in the documentation.
            #[cfg(test)]
            pub(crate) fn meaning(self) -> &'static str {
                match self { $(Code::$name => $meaning,)* }
            }
        }
    };
}

codes! {
    BadRequest = "bad_request", BAD_REQUEST, "The request cannot be read: a parameter, a header or the body is not what the call expects";
    WrongCursor = "wrong_cursor", BAD_REQUEST, "The cursor is invalid, or belongs to another list, job, dataset or order: leave it out to begin with the first page";
    Unauthorized = "unauthorized", UNAUTHORIZED, "No token, or an invalid token";
    Forbidden = "forbidden", FORBIDDEN, "The scope or the role does not suffice, the object belongs to somebody else, or the request came from a page of another origin";
    NotFound = "not_found", NOT_FOUND, "Nothing has this name, id or URL";
    MethodNotAllowed = "method_not_allowed", METHOD_NOT_ALLOWED, "The URL does not support this method";
    BodyTimeout = "body_timeout", REQUEST_TIMEOUT, "The body stopped arriving";
    Conflict = "conflict", CONFLICT, "The request conflicts with existing data";
    WrongState = "wrong_state", CONFLICT, "The job's state, which is in `state`, forbids the request";
    NameTaken = "name_taken", CONFLICT, "The name is in use";
    DatasetInUse = "dataset_in_use", CONFLICT, "Unfinished jobs train on the dataset";
    IdempotencyKeyReused = "idempotency_key_reused", CONFLICT, "The Idempotency-Key was used with another request before";
    BodyTooLarge = "body_too_large", PAYLOAD_TOO_LARGE, "The body is larger than the call allows";
    UnsupportedMediaType = "unsupported_media_type", UNSUPPORTED_MEDIA_TYPE, "The call does not accept this type of body";
    WrongHost = "wrong_host", MISDIRECTED_REQUEST, "The header Host is not a name of this server";
    Invalid = "invalid", UNPROCESSABLE_ENTITY, "The body has mistakes; `errors` has each with its position";
    Unprocessable = "unprocessable", UNPROCESSABLE_ENTITY, "The request is valid but impossible with the existing data";
    CheckpointDamaged = "checkpoint_damaged", UNPROCESSABLE_ENTITY, "The checkpoint's files differ from the files that were written";
    UpgradeRequired = "upgrade_required", UPGRADE_REQUIRED, "The URL is a websocket";
    TooManyRequests = "too_many_requests", TOO_MANY_REQUESTS, "Too many requests from this address or with this token; `Retry-After` says when to retry";
    Internal = "internal", INTERNAL_SERVER_ERROR, "An error of the server; its log says more";
    Unavailable = "unavailable", SERVICE_UNAVAILABLE, "The database or an agent is unreachable; the same request may succeed later";
    Timeout = "timeout", GATEWAY_TIMEOUT, "The response took too long";
}

impl Code {
    /// The code of a refusal that has only a status.
    pub(crate) fn of(status: StatusCode) -> Self {
        let other = if status.is_server_error() { Code::Internal } else { Code::BadRequest };
        match status {
            // `Code::Invalid` has the same status, and lists mistakes.
            StatusCode::UNPROCESSABLE_ENTITY => Code::Unprocessable,
            _ => Code::ALL.iter().copied().find(|code| code.status() == status).unwrap_or(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_lists_every_code() {
        let page = include_str!("../../../../docs/api.md");
        let start = page.find("| code | status | meaning |").expect("the table");
        let table: Vec<&str> =
            page[start..].lines().skip(2).take_while(|line| line.starts_with('|')).collect();
        let codes = Code::ALL
            .iter()
            .map(|code| format!("| `{}` | {} | {} |", code.as_str(), code.status().as_u16(), code.meaning()));
        assert_eq!(table, codes.collect::<Vec<_>>());
    }

    #[test]
    fn a_status_has_a_code_of_that_status() {
        for code in Code::ALL {
            assert_eq!(Code::of(code.status()).status(), code.status(), "{code:?}");
            assert!(code.type_uri().ends_with(code.as_str()));
        }
    }
}
