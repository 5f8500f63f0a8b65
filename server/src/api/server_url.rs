//! The server's URL as the client sees it, for commands to copy and for links.

use crate::{config::ServeConfig, http::peer::Peer};
use axum::{
    extract::{FromRef, FromRequestParts},
    http::request::Parts,
};
use std::{convert::Infallible, sync::Arc};

/// The public URL if one is configured, otherwise the scheme and host of the request.
#[derive(Debug, Clone)]
pub(crate) struct ServerUrl(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for ServerUrl
where
    Arc<ServeConfig>: FromRef<S>,
{
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Infallible> {
        if let Some(url) = &Arc::<ServeConfig>::from_ref(state).public_url {
            return Ok(Self(url.to_string()));
        }
        let peer = parts.extensions.get::<Peer>();
        let authority = peer.and_then(|peer| peer.authority(&parts.headers, &parts.uri));
        let scheme = if peer.is_some_and(|peer| peer.is_https) { "https" } else { "http" };
        Ok(Self(format!("{scheme}://{}", authority.unwrap_or("127.0.0.1:7070"))))
    }
}
