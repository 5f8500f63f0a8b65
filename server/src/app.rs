//! The application: what handlers and the server's own tasks share, and the router that tests and
//! [`crate::serve`] use.

use crate::{
    agents::Agents,
    config::{ServeConfig, ServeError},
    dispatch::{self, Dispatch},
    handlers::{evaluation::Evaluations, looks::Looks},
    hub::Hub,
    ingest::{self, Ingest},
    metrics::{
        pyramid::{self, Sealer},
        retire,
    },
    private, purge,
    store::{Changed, CheckpointRow, Location, Store},
};
use std::{
    ops::Deref,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64},
    },
};
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use crate::router::build_router;

/// Everything that handlers share; cheap to clone.
#[derive(Clone)]
pub struct App(Arc<Parts>);

/// What an [`App`] points to.
pub struct Parts {
    /// As given, the data directory made absolute.
    pub config: ServeConfig,
    /// What outlives the server.
    pub store: Arc<dyn Store>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) agents: Agents,
    pub(crate) dispatch: Dispatch,
    pub(crate) ingest: Ingest,
    pub(crate) sealer: Sealer,
    /// Rung when a job was deleted, of which there are rows yet.
    pub(crate) deleted: Notify,
    pub(crate) evaluations: Evaluations,
    pub(crate) looks: Looks,
    /// Done when the server stops: websockets close, tasks end.
    pub stopping: CancellationToken,
    /// Websockets and the server's own tasks.
    pub(crate) tasks: TaskTracker,
    pub(crate) events_stored: AtomicU64,
    pub(crate) stream_clients: AtomicI64,
}

impl Deref for App {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl App {
    /// Opens the database and starts ingest and dispatch.
    ///
    /// # Errors
    /// A data directory or a database that cannot be used.
    pub async fn open(mut config: ServeConfig) -> Result<App, ServeError> {
        let data_dir = &config.data_dir;
        config.data_dir = private::data_dir(data_dir)
            .and_then(|()| data_dir.canonicalize())
            .map_err(|source| ServeError::DataDir { path: data_dir.clone(), source })?;
        let store = Location::of(&config)?.open().await?;
        App::with_store(config, store).await
    }

    /// As [`App::open`], on a store that is open already.
    ///
    /// # Errors
    /// A store that cannot be read.
    pub async fn with_store(config: ServeConfig, store: Arc<dyn Store>) -> Result<App, ServeError> {
        let (ingest, queue) = Ingest::new();
        let app = App(Arc::new(Parts {
            dispatch: Dispatch::new(config.lease),
            config,
            store,
            hub: Arc::new(Hub::new()),
            agents: Agents::default(),
            ingest,
            sealer: Sealer::default(),
            deleted: Notify::new(),
            evaluations: Evaluations::default(),
            looks: Looks::default(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
            events_stored: AtomicU64::new(0),
            stream_clients: AtomicI64::new(0),
        }));
        let restored = async {
            app.agents.set_draining(app.store.draining().await?);
            dispatch::restore(&app).await
        };
        restored.await.map_err(|error| ServeError::Database {
            path: Location::of(&app.config).map_or_else(|e| e.to_string(), |location| location.to_string()),
            detail: error.to_string(),
        })?;
        app.spawn(ingest::run(app.clone(), queue));
        app.spawn(dispatch::run(app.clone()));
        app.spawn(pyramid::run(app.clone()));
        app.spawn(retire::run(app.clone()));
        app.spawn(purge::run(app.clone()));
        app.spawn({
            let hub = app.hub.clone();
            async move { hub.tell_list().await }
        });
        Ok(app)
    }

    /// Runs a task until the server stops.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopping = self.stopping.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stopping.cancelled() => {}
            }
        });
    }

    /// Tells everyone who watches what is now stored, and lets slots go that the job holds no more.
    pub(crate) fn announce(&self, changed: &Changed) {
        self.hub.publish(changed);
        self.sealer.note(changed);
        if !changed.job.state.is_active() {
            self.dispatch.release(&changed.job.id, changed.job.attempt);
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
