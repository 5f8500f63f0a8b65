//! From the socket to the handler: connections (`listener`), TLS, who sent a request (`peer`), which requests are accepted at all
//! (`request_checks`), who may make a request (`authorize`), and the format of responses and errors.

pub(crate) mod access_log;
pub(crate) mod attachment;
pub(crate) mod authorize;
pub(crate) mod conditional;
pub(crate) mod document;
pub(crate) mod error;
pub(crate) mod extract;
pub(crate) mod listener;
pub(crate) mod peer;
pub(crate) mod rate_limit;
pub(crate) mod request_checks;
pub(crate) mod request_id;
pub(crate) mod request_times;
pub(crate) mod slow_body;
pub mod tls;

use crate::{agents::Agents, auth::Auth, config::ServeConfig, util::tasks::Tasks};
use peer::PeerPolicy;
use rate_limit::RateLimiter;
use std::sync::Arc;

/// State of the listener and of the middleware.
pub(crate) struct HttpState {
    pub(crate) config: Arc<ServeConfig>,
    pub(crate) auth: Arc<Auth>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) peer_policy: Arc<PeerPolicy>,
    /// The rate limit for each token and each signed-in person, by id.
    pub(crate) token_limit: RateLimiter<String>,
    pub(crate) tasks: Tasks,
}
