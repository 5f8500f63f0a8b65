//! The server: REST and websockets, dispatch of jobs to agents, ingest of what ranks report, and the store.

mod access;
mod access_log;
mod access_upkeep;
mod addresses;
mod agent_requests;
mod agent_rows;
mod agents;
pub mod app;
mod artifact_checks;
mod artifact_deletions;
mod artifact_fetches;
mod artifact_store;
mod artifact_uploads;
mod artifacts;
mod audit;
mod audit_log;
mod compaction_queue;
pub mod config;
mod dataset_copies;
mod dataset_files;
mod dataset_notes;
mod dataset_roots;
mod dispatch;
mod document;
mod error;
mod evaluations;
mod failing;
mod gate;
mod guard;
mod handlers;
mod handshakes;
mod holders;
mod hub;
mod inbox;
mod ingest;
mod ingress;
mod inspections;
mod job_log;
mod job_owners;
mod leases;
pub mod lifecycle;
mod listener;
mod machine_minutes;
mod machines;
mod manifest;
mod metrics;
mod numbers;
mod object_storage;
mod oidc;
mod oidc_config;
mod private;
mod purge;
mod rate_limit;
mod refusals;
mod regular;
mod request_id;
mod router;
mod running;
mod scheduler;
mod serve;
pub mod serve_error;
mod slow_body;
pub mod store;
pub mod tls;
mod tls_suites;
mod token_file;
mod uploads;
mod verified_files;

pub use access_log::AccessLogTo;
pub use addresses::{Network, PublicUrl};
pub use config::{AgentAuth, Bundled, FairShare, ServeConfig, TlsConfig};
pub use oidc_config::{ClientSecret, Groups, Issuer, NameClaim, OidcConfig};
pub use private::keep_files_private;
pub use router::{openapi, page_paths};
pub use running::Running;
pub use serve::serve;
pub use serve_error::ServeError;

/// The time, to the millisecond: what is stored and what is streamed are then the same.
pub(crate) fn now() -> jiff::Timestamp {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}
