//! The server: REST and websockets, dispatch of jobs to agents, ingest of ranks' reports, and the store.
//!
//! A folder is a subsystem, which gets its dependencies when it is created. ARCHITECTURE.md lists the folders in their order: each uses
//! only folders before it. `app.rs` has all subsystems, for `boot` and for the router.

mod agents;
mod api;
mod app;
mod auth;
mod boot;
mod checkpoints;
mod config;
mod datasets;
mod events;
mod http;
mod ingest;
pub mod lifecycle;
mod metrics;
mod scheduler;
pub mod store;
mod util;
mod webhooks;

pub use api::router::{openapi, page_paths};
pub use boot::{running::Running, serve};
pub use config::{
    AccessLogTo, AgentAuth, Bundled, FairShare, ServeConfig, TlsConfig,
    addresses::{ProxyNetwork, PublicUrl},
    oidc::{ClientSecret, Groups, Issuer, NameClaim, OidcConfig},
    serve_error::ServeError,
    smtp::SmtpConfig,
};
pub use http::tls;
pub use util::{private_files::keep_files_private, with_causes};

/// The current time in whole milliseconds, so that stored and streamed times are equal.
pub(crate) fn now() -> jiff::Timestamp {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}
