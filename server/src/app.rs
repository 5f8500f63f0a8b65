//! All subsystems of a server. `boot` creates them, and the router passes them to handlers. A handler extracts the subsystems that it
//! needs, such as `State<Arc<Agents>>`.

use crate::{
    agents::Agents,
    auth::Auth,
    checkpoints::Checkpoints,
    config::ServeConfig,
    datasets::Datasets,
    events::Events,
    http::{HttpState, peer::PeerPolicy, request_times::RequestTimes},
    ingest::runs::Runs,
    metrics::Metrics,
    scheduler::Scheduler,
    store::{Store, purge::DeletedJobs},
    util::tasks::Tasks,
    webhooks::Webhooks,
};
use axum::extract::FromRef;
use std::sync::Arc;

/// A clone is cheap, because it shares the subsystems.
#[derive(Clone, FromRef)]
pub(crate) struct App {
    /// The configuration as given, with an absolute data directory.
    pub(crate) config: Arc<ServeConfig>,
    /// The database.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) events: Arc<Events>,
    pub(crate) webhooks: Arc<Webhooks>,
    pub(crate) auth: Arc<Auth>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) checkpoints: Arc<Checkpoints>,
    pub(crate) datasets: Arc<Datasets>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) scheduler: Arc<Scheduler>,
    pub(crate) runs: Arc<Runs>,
    pub(crate) deleted_jobs: Arc<DeletedJobs>,
    pub(crate) peer_policy: Arc<PeerPolicy>,
    pub(crate) http: Arc<HttpState>,
    pub(crate) request_times: Arc<RequestTimes>,
    pub(crate) tasks: Tasks,
}
