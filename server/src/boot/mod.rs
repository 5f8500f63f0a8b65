//! Starts the server, runs it, and stops it in an orderly way.

pub(crate) mod running;
mod wire;

use crate::{
    api::router::build_router,
    app::App,
    auth::oidc::Oidc,
    checkpoints::{
        object_storage::{ObjectStorage, Unusable},
        object_store_state::{ObjectStoreState, RequestKind},
    },
    config::{AccessLogTo, ServeConfig, TlsConfig, check_listen_address, serve_error::ServeError},
    datasets::roots::resolve_links,
    http::{
        access_log::AccessLog,
        listener::{self, Listener},
        tls::ServerCertificate,
    },
    ingest::run_files,
    store::{Location, Store, StoreError},
    util::private_files,
};
use lockstep_protocol::JobId;
use running::Running;
use std::{
    fs::{File, TryLockError},
    future::Future,
    io::{Seek, Write},
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

/// Time limit for taking the lock. An agent of this machine that cannot reach a server tests the lock, and so holds it for a moment.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Time limit for each of the two checks of the object store at the start.
const STORE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for requests in progress when the server stops, and after that for websockets and tasks.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the server until `shutdown` completes. Calls `ready` once the server accepts connections.
///
/// # Errors
/// [`ServeError`], which determines the exit status. Address and data directory are checked before the database is opened.
pub async fn serve(
    mut config: ServeConfig,
    ready: impl FnOnce(Running) + Send,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    check_listen_address(&config)?;
    // Files that the user provides are read before anything is created.
    let tls_files = config.tls.as_ref().filter(|tls| matches!(tls, TlsConfig::Files { .. }));
    let user_certificate =
        tls_files.map(|tls| ServerCertificate::open(&config, tls)).transpose().map_err(ServeError::Tls)?;
    let artifacts = open_artifacts(&config).await?;
    // If a server of the same data directory runs, the error is about the directory, and not about the server's port.
    let has_lock_file = private_files::server_lock_path(&config.data_dir).exists();
    let lock = has_lock_file.then(|| lock_data_dir(&config.data_dir)).transpose()?;
    let listener = listen(config.listen).await?;
    config.listen = listener.local_addr().map_err(ServeError::Stopped)?;
    let _lock = lock.map_or_else(|| lock_data_dir(&config.data_dir), Ok)?;
    let certificate = match (user_certificate, &config.tls) {
        (None, Some(tls)) => Some(ServerCertificate::open(&config, tls).map_err(ServeError::Tls)?),
        (user_certificate, _) => user_certificate,
    };
    let access_log =
        config.access_log.as_ref().map(|to| open_log(to, config.access_log_bytes)).transpose()?;
    let tls = certificate.as_ref().map(ServerCertificate::acceptor).transpose().map_err(ServeError::Tls)?;
    let mut listeners = vec![Listener { socket: listener, tls }];
    if let Some(local_listener) = &config.local_listener {
        let socket = local_listener.try_clone().and_then(|socket| {
            socket.set_nonblocking(true)?;
            TcpListener::from_std(socket)
        });
        listeners.push(Listener { socket: socket.map_err(ServeError::Stopped)?, tls: None });
    }

    let app = open_app(config, certificate, artifacts).await?;
    ready(Running { config: app.config.clone(), auth: app.auth.clone() });
    let max_connections = app.config.max_connections.unwrap_or_else(listener::connection_limit);
    let stopping = app.tasks.stopping.clone();
    let stop = async {
        shutdown.await;
        // Ends websockets and background tasks. Requests in progress can finish.
        stopping.cancel();
        tokio::time::sleep(STOP_TIMEOUT).await;
    };
    let router = build_router(app.clone());
    tokio::select! {
        () = listener::serve(listeners, app.http.clone(), router, max_connections, access_log) => {}
        () = stop => {} // A download in progress is cut off; the client can continue it with a range request.
    }
    stopping.cancel();
    app.tasks.tracker.close();
    let _ = tokio::time::timeout(STOP_TIMEOUT, app.tasks.tracker.wait()).await;
    app.auth.access.store_use(&*app.store).await;
    // A minute from now, the current minute is over, so it is stored, too.
    app.agents.machines.store_minutes(&*app.store, crate::now() + Duration::from_secs(60)).await;
    app.store.close().await;
    Ok(())
}

/// Opens the object store, if one is configured, and checks that it can be used. If the store is temporarily unavailable, the server starts
/// nevertheless, and the reason is returned with the store.
async fn open_artifacts(
    config: &ServeConfig,
) -> Result<Option<(ObjectStoreState, Option<String>)>, ServeError> {
    let Some(url) = &config.artifacts else { return Ok(None) };
    let failed = |detail| ServeError::Artifacts { url: url.clone(), detail };
    let storage = ObjectStorage::open(url).map_err(failed)?;
    let data_dir = std::path::absolute(&config.data_dir)
        .map_err(|source| ServeError::DataDir { path: config.data_dir.clone(), source })?;
    let data_dir = resolve_links(&data_dir);
    if let Some(directory) = storage.directory() {
        let overlap = if directory.starts_with(&data_dir) {
            "it is in the data directory"
        } else if data_dir.starts_with(directory) {
            "the data directory is in it"
        } else {
            ""
        };
        if !overlap.is_empty() {
            return Err(failed(format!(
                "{overlap} ({}), so both would be lost together; choose a directory on another disk",
                data_dir.display()
            )));
        }
    }
    let object_store = ObjectStoreState::new(storage, config.artifacts_adopt);
    let why = unavailable_reason(STORE_TIMEOUT, object_store.check()).await.map_err(failed)?;
    Ok(Some((object_store, why)))
}

/// Waits for a check of the object store, at most for `limit`. Returns the reason if the store is temporarily unavailable.
///
/// # Errors
/// The store cannot be used until the user changes something.
async fn unavailable_reason(
    limit: Duration,
    check: impl Future<Output = Result<(), Unusable>>,
) -> Result<Option<String>, String> {
    match tokio::time::timeout(limit, check).await {
        Ok(Ok(())) => Ok(None),
        Ok(Err(Unusable { why, is_temporary: true })) => Ok(Some(why)),
        Ok(Err(Unusable { why, .. })) => Err(why),
        Err(_) => Ok(Some(format!("it did not respond within {} s", limit.as_secs()))),
    }
}

/// Confirms that the object store is the store that the database knows. `unavailable` is the reason if the store is unavailable.
async fn confirm_artifacts(
    config: &ServeConfig,
    store: &dyn Store,
    object_store: ObjectStoreState,
    mut unavailable: Option<String>,
) -> Result<ObjectStoreState, ServeError> {
    if unavailable.is_none() {
        // No job starts before all checkpoints of an adopted store are known. Each request has its own limit.
        let limit = if config.artifacts_adopt { Duration::MAX } else { STORE_TIMEOUT };
        unavailable = unavailable_reason(limit, object_store.confirm(store)).await.map_err(|detail| {
            ServeError::Artifacts { url: config.artifacts.clone().unwrap_or_default(), detail }
        })?;
    }
    if let Some(why) = unavailable {
        object_store.note_failure(RequestKind::Other, &why);
    }
    // Damaged checkpoints in the object store may have been repaired.
    let cleared = store.clear_damage_marks(object_store.storage.url()).await;
    cleared.map_err(|error| database_error(config, error))?;
    Ok(object_store)
}

/// Refuses an empty database if the data directory has folders of jobs, because the database was then lost.
async fn refuse_empty_database(
    config: &ServeConfig,
    location: &Location,
    store: &dyn Store,
) -> Result<(), ServeError> {
    let is_empty = async {
        Ok::<_, StoreError>(
            store.counts().await?.jobs.is_empty()
                && store.tokens().await?.is_empty()
                && store.agents().await?.is_empty()
                && store.datasets().await?.is_empty(),
        )
    };
    if !is_empty.await.map_err(|error| database_error(config, error))? {
        return Ok(());
    }
    let entries = std::fs::read_dir(config.data_dir.join("jobs"));
    let mut names =
        entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    match names.find(|name| name.parse::<JobId>().is_ok()) {
        None => Ok(()),
        Some(job) => {
            let (path, data_dir) = (location.to_string(), config.data_dir.clone());
            Err(ServeError::DatabaseEmpty { path, data_dir, job })
        }
    }
}

fn database_error(config: &ServeConfig, error: StoreError) -> ServeError {
    ServeError::Database {
        path: Location::of(config).map_or_else(|e| e.to_string(), |location| location.to_string()),
        detail: error.to_string(),
    }
}

/// Opens the database and starts the subsystems.
async fn open_app(
    mut config: ServeConfig,
    certificate: Option<Arc<ServerCertificate>>,
    artifacts: Option<(ObjectStoreState, Option<String>)>,
) -> Result<App, ServeError> {
    let data_dir = &config.data_dir;
    config.data_dir = private_files::create_data_dir(data_dir)
        .and_then(|()| data_dir.canonicalize())
        .map_err(|source| ServeError::DataDir { path: data_dir.clone(), source })?;
    let oidc = config.oidc.clone().map(Oidc::new).transpose().map_err(ServeError::Oidc)?;
    let location = Location::of(&config)?;
    let store = location.open().await?;
    let checked = async {
        refuse_empty_database(&config, &location, &*store).await?;
        match artifacts {
            Some((object_store, unavailable)) => {
                confirm_artifacts(&config, &*store, object_store, unavailable).await.map(Some)
            }
            None => Ok(None),
        }
    };
    let object_store = match checked.await {
        Ok(object_store) => object_store,
        Err(error) => {
            store.close().await;
            return Err(error);
        }
    };
    run_files::clear_incoming(&config.data_dir.join("jobs"));
    wire::start(config, store, object_store, oidc, certificate).await
}

fn open_log(to: &AccessLogTo, max_bytes: u64) -> Result<AccessLog, ServeError> {
    AccessLog::open(to, max_bytes).map_err(|error| {
        let name = match to {
            AccessLogTo::File(path) => path.display().to_string(),
            AccessLogTo::Stdout => "the standard output".into(),
        };
        ServeError::AccessLog(format!("{name}: {error}"))
    })
}

async fn listen(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => ServeError::PortTaken(address, address.ip()),
        _ => ServeError::Listen { address, source },
    })
}

/// Creates the data directory and takes its lock. The system releases the lock when this process ends for any reason.
fn lock_data_dir(path: &Path) -> Result<File, ServeError> {
    let failed = |source| ServeError::DataDir { path: path.to_owned(), source };
    private_files::create_data_dir(path).map_err(failed)?;
    let mut file = private_files::open_lock_file(&private_files::server_lock_path(path)).map_err(failed)?;
    let since = Instant::now();
    let locked = loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if since.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => break other,
        }
    };
    match locked {
        Ok(()) => {
            let pid = std::process::id().to_string();
            file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
            file.write_all(pid.as_bytes()).map_err(failed)?;
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => {
            let pid = std::io::read_to_string(&file).ok().filter(|pid| pid.parse::<u32>().is_ok());
            Err(ServeError::DataDirInUse { path: path.to_owned(), pid })
        }
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}
