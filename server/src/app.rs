//! The application state that handlers and background tasks share. It knows neither.

use crate::{
    access::Access,
    agent_rows::AgentRows,
    agents::Agents,
    artifact_store::ArtifactStore,
    audit::Audit,
    compaction_queue::CompactionQueue,
    config::ServeConfig,
    dataset_copies::CopyProgress,
    dataset_roots::DatasetRoots,
    evaluations::Evaluations,
    hub::Hub,
    inbox::Inbox,
    ingress::Ingress,
    inspections::Inspections,
    job_owners::JobOwners,
    leases::Leases,
    machines::Machines,
    oidc::Oidc,
    rate_limit::RateLimiter,
    refusals::Refusals,
    scheduler::{CheckpointWaits, LastPlan, WaitingJobs},
    store::{Changed, CheckpointRow, Location, Store},
    verified_files::VerifiedFiles,
};
use std::{
    ops::Deref,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64},
    },
    time::Instant,
};
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Everything that handlers share; cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Parts>);

/// The state that all clones of an [`App`] share.
pub struct Parts {
    /// As given, the data directory made absolute.
    pub config: ServeConfig,
    /// The database.
    pub store: Arc<dyn Store>,
    /// The object store for copies of checkpoints, if there is one.
    pub(crate) artifact_store: Option<ArtifactStore>,
    pub(crate) ingress: Ingress,
    /// Who may do what.
    pub(crate) access: Access,
    /// Requests by the id of their token, or of the person who is signed in.
    pub(crate) token_limit: RateLimiter<String>,
    /// The owners of recently requested jobs.
    pub(crate) job_owners: JobOwners,
    pub(crate) audit: Audit,
    /// Agents that were refused, for the log.
    pub(crate) refusals: Refusals,
    /// The provider that people sign in with, where there is one.
    pub(crate) oidc: Option<Oidc>,
    pub(crate) dataset_roots: DatasetRoots,
    /// When a client without a token last asked whether jobs can be stored, and the response.
    pub(crate) last_ready: tokio::sync::Mutex<Option<(Instant, bool)>>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) agents: Agents,
    pub(crate) agent_rows: AgentRows,
    pub(crate) leases: Leases,
    pub(crate) machines: Machines,
    pub(crate) last_plan: LastPlan,
    /// The queue.
    pub(crate) waiting: WaitingJobs,
    pub(crate) inbox: Inbox,
    pub(crate) compaction_queue: CompactionQueue,
    /// Notified when a job was deleted whose rows are still to be removed.
    pub(crate) deleted: Notify,
    pub(crate) evaluations: Evaluations,
    pub(crate) inspections: Inspections,
    /// Done when the server stops: websockets close, tasks end.
    pub stopping: CancellationToken,
    /// Websockets and the server's own tasks.
    pub(crate) tasks: TaskTracker,
    /// When this server started.
    pub(crate) started_at: jiff::Timestamp,
    /// The same moment on the monotonic clock.
    pub(crate) up_since: std::time::Instant,
    pub(crate) events_stored: AtomicU64,
    pub(crate) stream_clients: AtomicI64,
    /// Since when jobs wait for checkpoints that other machines upload.
    pub(crate) checkpoint_waits: CheckpointWaits,
    /// Files of checkpoints that were found whole.
    pub(crate) verified_files: VerifiedFiles,
    /// How far the logs of jobs say that machines have copied their datasets.
    pub(crate) dataset_copies: CopyProgress,
    /// Lines that the server has written into logs of jobs: job, attempt, what they are about.
    pub(crate) log_lines:
        std::sync::Mutex<std::collections::HashSet<(lockstep_protocol::JobId, u32, &'static str)>>,
}

impl Deref for App {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl App {
    /// Builds the state. Starts no task and reads nothing from the store.
    pub(crate) fn new(
        config: ServeConfig,
        store: Arc<dyn Store>,
        artifact_store: Option<ArtifactStore>,
        inbox: Inbox,
        ingress: Ingress,
        audit: Audit,
        oidc: Option<Oidc>,
    ) -> App {
        App(Arc::new(Parts {
            started_at: crate::now(),
            up_since: std::time::Instant::now(),
            access: Access::new(!config.no_auth),
            token_limit: RateLimiter::new(config.token_requests_per_second),
            job_owners: JobOwners::default(),
            audit,
            refusals: Refusals::default(),
            oidc,
            dataset_roots: DatasetRoots::new(&config),
            dataset_copies: CopyProgress::default(),
            last_ready: tokio::sync::Mutex::default(),
            leases: Leases::new(config.lease),
            machines: Machines::default(),
            last_plan: LastPlan::default(),
            waiting: WaitingJobs::default(),
            config,
            store,
            artifact_store,
            ingress,
            hub: Arc::new(Hub::new()),
            agents: Agents::default(),
            agent_rows: AgentRows::default(),
            inbox,
            compaction_queue: CompactionQueue::default(),
            deleted: Notify::new(),
            evaluations: Evaluations::default(),
            inspections: Inspections::default(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
            events_stored: AtomicU64::new(0),
            stream_clients: AtomicI64::new(0),
            checkpoint_waits: CheckpointWaits::default(),
            verified_files: VerifiedFiles::default(),
            log_lines: std::sync::Mutex::default(),
        }))
    }

    /// Runs a task until the server stops.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopping = self.stopping.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stopping.cancelled() => {}
            }
        });
    }

    /// Publishes a stored change to all who follow it, and releases the slots of a job that is no longer active.
    pub(crate) fn announce(&self, changed: &Changed) {
        self.waiting.note(&changed.job);
        self.hub.publish(changed);
        self.compaction_queue.note(changed);
        if let Some(artifacts) = &self.artifact_store {
            changed.events.iter().for_each(|event| match event.checkpoint() {
                Some((id, true)) => artifacts.note(&id),
                Some((_, false)) => artifacts.removed.notify_one(),
                None => {}
            });
        }
        if !changed.job.state.is_active() {
            self.leases.release(&changed.job.id, changed.job.attempt);
        }
    }

    /// A checkpoint's folder.
    pub(crate) fn checkpoint_dir(&self, row: &CheckpointRow) -> PathBuf {
        self.job_dir(&row.job).join("checkpoints").join(format!("{}-{}", row.info.epoch, row.info.step))
    }

    /// The folder of the database's file, when it is one outside the data directory.
    pub(crate) fn database_dir(&self) -> Option<PathBuf> {
        match Location::of(&self.config) {
            Ok(Location::Sqlite(path)) => {
                let folder = path.canonicalize().ok()?.parent()?.to_owned();
                (folder != self.config.data_dir).then_some(folder)
            }
            _ => None,
        }
    }

    /// A job's folder. Ids are made here and checked when they come in, so it is always below `jobs`.
    pub(crate) fn job_dir(&self, id: &lockstep_protocol::JobId) -> PathBuf {
        self.config.data_dir.join("jobs").join(id.as_str())
    }
}
