//! Predictions of a checkpoint for uploaded pictures. An agent computes the predictions.

use crate::api::prelude::*;
use crate::{
    agents::requests,
    api::checkpoints::{self, Weights},
    checkpoints::Checkpoints,
};
use axum::extract::{FromRequest, Multipart, Request, multipart::MultipartError};
use base64::Engine as _;
use bytes::Bytes;
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    inspect::{NamedPicture, Prediction},
};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Maximum number of pictures in a request.
const MAX_PICTURES: usize = 100;
/// Maximum length of a picture's name in the response, in characters. Longer names are truncated.
const NAME_CHARS: usize = 200;
/// Maximum size of all pictures in a request, in bytes.
const MAX_BYTES: usize = 24 << 20;
/// Maximum size of a body, in bytes. A form has some bytes in addition to its pictures.
pub(crate) const BODY_BYTES: usize = MAX_BYTES + (1 << 20);
/// Limits the number of requests whose pictures are in memory at the same time. Other requests wait.
static CONCURRENT: Semaphore = Semaphore::const_new(4);
/// Time limit for an agent to compute the predictions.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for reading all pictures of a request, because other requests wait meanwhile. The largest body arrives in time at about half
/// a megabyte a second.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Predictions for uploaded pictures.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Predictions {
    /// One prediction for each picture, in the same order.
    predictions: Vec<Prediction>,
}

/// Parameters of `POST /checkpoints/{id}/predict`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct PredictQuery {
    /// The weights to use: `model` for the trained weights (default), `ema` for their moving average.
    #[serde(default)]
    #[param(inline)]
    weights: Weights,
    /// Whether to return embeddings (the inputs of the network's last layer) instead of classes.
    #[serde(default)]
    embed: bool,
}

/// Classify or embed pictures
///
/// The body is one picture (JPEG, PNG, WebP, GIF, BMP or TIFF), or several pictures as `multipart/form-data`, with at most 256 megapixels
/// in total. Pictures are prepared in the same way as for the job's validation. If a picture cannot be read, its prediction has the error.
#[utoipa::path(post, path = "/checkpoints/{id}/predict", tag = "checkpoints", params(("id" = String, Path), PredictQuery),
    request_body(content((Vec<u8> = "application/octet-stream"), (Object = "multipart/form-data"))),
    responses((status = 200, body = Predictions),
        (status = 409, body = Problem, description = "The checkpoint is still being uploaded from another machine"),
        (status = 503, body = Problem, description = "No agent is online")))]
pub(crate) async fn predict(
    State(checkpoints): State<Arc<Checkpoints>>,
    Path(id): Path<String>,
    Query(query): Query<PredictQuery>,
    request: Request,
) -> Result<Json<Predictions>> {
    let row = checkpoints::find(&*checkpoints.store, &id).await?;
    checkpoints::ensure_on_disk(&checkpoints, &row).await?;
    let model = query.weights.path(&checkpoints.folder(&row))?;
    let _permit = CONCURRENT.acquire().await.map_err(|e| Error::Internal(e.to_string()))?;
    let pictures = tokio::time::timeout(READ_TIMEOUT, read_pictures(request)).await.map_err(|_| {
        let detail =
            format!("the pictures did not arrive within {} s; send fewer at a time", READ_TIMEOUT.as_secs());
        Error::Refused(StatusCode::REQUEST_TIMEOUT, detail)
    })??;
    let agent_request =
        AgentRequest::Predict { model: model.to_string_lossy().into_owned(), pictures, embed: query.embed };
    match requests::call(&checkpoints.agents, agent_request, TIMEOUT).await {
        Ok(AgentReply::Predictions { predictions }) => Ok(Json(Predictions { predictions })),
        Ok(_) => Err(Error::Internal("an agent replied with something other than predictions".into())),
        Err(error) => Err(error.without_pointer()),
    }
}

async fn read_pictures(request: Request) -> Result<Vec<NamedPicture>> {
    let too_large = || {
        let detail = format!("the pictures have more than {} MiB; send fewer at a time", MAX_BYTES >> 20);
        Error::Refused(StatusCode::PAYLOAD_TOO_LARGE, detail)
    };
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("multipart/form-data") {
        let bytes = Bytes::from_request(request, &()).await.map_err(|_| too_large())?;
        if bytes.len() > MAX_BYTES {
            return Err(too_large());
        }
        if bytes.is_empty() {
            return Err(Error::BadRequest(
                "the body is empty; it must be a picture: JPEG, PNG, WebP, GIF, BMP or TIFF".into(),
            ));
        }
        return Ok(vec![named_picture(String::new(), &bytes)]);
    }
    let mut form =
        Multipart::from_request(request, &()).await.map_err(|e| Error::BadRequest(e.body_text()))?;
    let mut pictures = Vec::new();
    let mut total_bytes = 0;
    let unreadable = |e: MultipartError| match e.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_large(),
        _ => Error::BadRequest(e.body_text()),
    };
    while let Some(field) = form.next_field().await.map_err(unreadable)? {
        let name = field.file_name().unwrap_or_default().chars().take(NAME_CHARS).collect();
        let bytes = field.bytes().await.map_err(unreadable)?;
        total_bytes += bytes.len();
        if total_bytes > MAX_BYTES {
            return Err(too_large());
        }
        pictures.push(named_picture(name, &bytes));
        if pictures.len() > MAX_PICTURES {
            return Err(Error::BadRequest(format!("send at most {MAX_PICTURES} pictures at a time")));
        }
    }
    if pictures.is_empty() {
        return Err(Error::BadRequest("the form contains no picture".into()));
    }
    Ok(pictures)
}

fn named_picture(name: String, bytes: &Bytes) -> NamedPicture {
    NamedPicture { name, content: base64::engine::general_purpose::STANDARD.encode(bytes) }
}
