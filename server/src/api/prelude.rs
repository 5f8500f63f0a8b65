//! What most handlers use: the caller, extractors, responses and errors.

pub(super) use crate::{
    auth::access::Caller,
    http::{
        error::{Error, Problem, Result, check_field, check_mistakes},
        extract::{Path, Query},
    },
};
pub(super) use axum::{
    Extension, Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
pub(super) use serde::{Deserialize, Serialize};
pub(super) use std::sync::Arc;
pub(super) use utoipa::{IntoParams, ToSchema};
