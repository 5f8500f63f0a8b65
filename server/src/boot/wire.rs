//! Creates the subsystems, connects them, and starts their tasks.

use super::{database_error, running};
use crate::{
    agents::{Agents, inbox::Inbox},
    app::App,
    auth::{Auth, audit::Audit, oidc::Oidc},
    checkpoints::{
        Checkpoints, object_store_fetches, object_store_state::ObjectStoreState, object_store_sync,
    },
    config::{ServeConfig, serve_error::ServeError},
    datasets::Datasets,
    events::{Events, Subscriber, hub::Hub},
    http::{
        HttpState, peer::PeerPolicy, rate_limit::RateLimiter, request_times::RequestTimes,
        tls::ServerCertificate,
    },
    ingest::{self, runs::Runs},
    metrics::{Metrics, compaction, retire},
    scheduler::{JobQueue, Scheduler, dispatch, sweeps},
    store::{ChangedJob, EventRow, Store, purge::DeletedJobs},
    util::{blocking, tasks::Tasks},
    webhooks::Webhooks,
};
use std::sync::Arc;
use tokio::sync::Notify;

/// Creates all subsystems, restores their state from the store, and starts their tasks.
pub(super) async fn start(
    config: ServeConfig,
    store: Arc<dyn Store>,
    object_store: Option<ObjectStoreState>,
    oidc: Option<Oidc>,
    certificate: Option<Arc<ServerCertificate>>,
) -> Result<App, ServeError> {
    let (config, tasks) = (Arc::new(config), Tasks::default());
    let object_store = object_store.map(Arc::new);
    let (inbox, reports) = Inbox::new();
    let agents = Arc::new(Agents::new(config.lease, inbox));
    let waiting = Arc::new(JobQueue::default());
    let metrics = Arc::new(Metrics::new(store.clone(), config.keep_points));
    let hub = Arc::new(Hub::new());
    let webhooks = Arc::new(Webhooks::new(&config, store.clone()));
    let sweeps_changed = Arc::new(Notify::new());
    // Called with each stored change, in this order.
    let subscribers: Vec<Subscriber> = {
        let (waiting, hub, metrics, agents) = (waiting.clone(), hub.clone(), metrics.clone(), agents.clone());
        let (webhooks, sweeps_changed) = (webhooks.clone(), sweeps_changed.clone());
        let object_store = object_store.clone();
        vec![
            Box::new(move |changed: &ChangedJob| waiting.note_change(&changed.job)),
            Box::new(move |changed: &ChangedJob| hub.publish(changed)),
            Box::new(move |changed: &ChangedJob| metrics.note_change(changed)),
            Box::new(move |changed: &ChangedJob| {
                if changed.events.iter().any(|event| event.state().is_some() || event.is_alert()) {
                    webhooks.wake();
                    if changed.job.trial.is_some() {
                        sweeps_changed.notify_one();
                    }
                }
            }),
            Box::new(move |changed: &ChangedJob| {
                if let Some(object_store) = &object_store {
                    let ids = changed.events.iter().filter_map(EventRow::checkpoint);
                    ids.for_each(|id| object_store.queue(&id));
                }
            }),
            // When a job is no longer active, its lease is released, which frees its slots.
            Box::new(move |changed: &ChangedJob| {
                if !changed.job.state.is_active() {
                    agents.leases.release(&changed.job.id, changed.job.attempt);
                }
            }),
        ]
    };
    let events = Arc::new(Events::new(store.clone(), hub, subscribers));
    let (audit, audit_writer) = Audit::new(store.clone(), config.max_audit_entries, tasks.stopping.clone());
    let auth = Arc::new(Auth::new(&config, store.clone(), audit, oidc));
    let checkpoints = Arc::new(Checkpoints::new(
        config.clone(),
        store.clone(),
        events.clone(),
        agents.clone(),
        object_store,
        tasks.clone(),
    ));
    let datasets =
        Arc::new(Datasets::new(&config, store.clone(), events.clone(), agents.clone(), tasks.clone()));
    let scheduler =
        Scheduler::new(checkpoints.clone(), datasets.clone(), waiting, sweeps_changed, tasks.clone());
    let scheduler = Arc::new(scheduler);
    let runs = Arc::new(Runs::new(store.clone(), events.clone(), config.run_silence));
    let deleted_jobs = Arc::new(DeletedJobs::new(store.clone(), config.clone()));
    let peer_policy = Arc::new(PeerPolicy::new(config.clone(), certificate.clone()));
    let http = HttpState {
        config: config.clone(),
        auth: auth.clone(),
        agents: agents.clone(),
        peer_policy: peer_policy.clone(),
        token_limit: RateLimiter::new(config.token_requests_per_second),
        tasks: tasks.clone(),
    };
    let app = App {
        config,
        store,
        events,
        webhooks,
        auth,
        agents,
        checkpoints,
        datasets,
        metrics,
        scheduler,
        runs,
        deleted_jobs,
        peer_policy,
        http: Arc::new(http),
        request_times: Arc::new(RequestTimes::default()),
        tasks,
    };
    restore(&app).await?;
    app.tasks.tracker.spawn(audit_writer.run());
    app.tasks.spawn(ingest::run(app.scheduler.clone(), reports));
    run_tasks(&app);
    if let Some(certificate) = certificate {
        app.tasks.spawn(certificate.watch(app.config.certificate_check_interval));
    }
    Ok(app)
}

/// Restores the stored state, and removes incomplete downloads of checkpoints from before the server's last stop.
async fn restore(app: &App) -> Result<(), ServeError> {
    let restored = async {
        app.agents.set_draining(app.store.draining_agents().await?);
        app.auth.load().await?;
        dispatch::restore_leases(&app.scheduler).await
    };
    restored.await.map_err(|error| database_error(&app.config, error))?;
    running::ensure_own_token(&app.config, &app.auth).await.map_err(ServeError::Token)?;
    if app.checkpoints.object_store.is_some() {
        let jobs = app.config.data_dir.join("jobs");
        if let Err(error) = blocking(move || object_store_fetches::remove_unfinished(&jobs)).await {
            tracing::warn!(%error, "incomplete downloads of checkpoints stay on the disk until the next start");
        }
    }
    Ok(())
}

/// Starts the tasks of the subsystems.
fn run_tasks(app: &App) {
    let tasks = &app.tasks;
    let (auth, deleted_jobs, hub) = (app.auth.clone(), app.deleted_jobs.clone(), app.events.hub.clone());
    let (agents, store, runs) = (app.agents.clone(), app.store.clone(), app.runs.clone());
    tasks.spawn(async move { auth.access.run_upkeep(&*auth.store).await });
    tasks.spawn(dispatch::run(app.scheduler.clone()));
    tasks.spawn(compaction::run(app.metrics.clone()));
    tasks.spawn(retire::run(app.metrics.clone()));
    tasks.spawn(async move { deleted_jobs.run().await });
    tasks.spawn(object_store_sync::run(app.checkpoints.clone()));
    tasks.spawn(async move { agents.machines.run(&*store).await });
    tasks.spawn(async move { hub.publish_list().await });
    tasks.spawn(async move { runs.watch().await });
    tasks.spawn(app.webhooks.clone().run());
    tasks.spawn(sweeps::run(app.scheduler.clone()));
}
