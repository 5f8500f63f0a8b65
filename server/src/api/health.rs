//! For supervisors and monitoring.

use crate::{
    agents::Agents,
    auth::access::Caller,
    config::ServeConfig,
    events::Events,
    http::{
        error::{Error, Problem, Result},
        ingress::Ingress,
    },
    store::{Location, Store},
};
use axum::{Extension, extract::State, http::header, response::IntoResponse};
use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

const READY: &str = "ready\n";
/// The response to clients without a token may be so old.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// What a job's first files take.
const PROBE_BYTES: usize = 64 << 10;

/// The process answers
#[utoipa::path(get, path = "/healthz", tag = "health", responses((status = 200, body = String)))]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// Jobs can be stored now
///
/// Something is written to the database and to the data directory, so a disk that is full or read-only is reported. What needs
/// attention but does not keep jobs from being stored, such as a certificate that ends soon, is on lines of its own.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, body = String), (status = 503, body = Problem)))]
pub(crate) async fn readyz(
    State(store): State<Arc<dyn Store>>,
    State(config): State<Arc<ServeConfig>>,
    State(ingress): State<Arc<Ingress>>,
    caller: Option<Extension<Caller>>,
) -> Result<String> {
    if caller.is_some() {
        return ready(&*store, &config, &ingress).await;
    }
    // Clients without a token learn no details, and cause one check a second.
    let mut last = ingress.last_ready.lock().await;
    let is_ready = match *last {
        Some((at, is_ready)) if at.elapsed() < CHECK_INTERVAL => is_ready,
        _ => ready(&*store, &config, &ingress).await.is_ok(),
    };
    if last.is_none_or(|(at, _)| at.elapsed() >= CHECK_INTERVAL) {
        *last = Some((Instant::now(), is_ready));
    }
    match is_ready {
        true => Ok(READY.into()),
        false => Err(Error::Unavailable("nothing can be stored now; ask with a token for more".into())),
    }
}

async fn ready(store: &dyn Store, config: &ServeConfig, ingress: &Ingress) -> Result<String> {
    // Whatever the database says of a row that is sound: nothing can be written.
    store.ready().await.map_err(|error| Error::Unavailable(error.to_string()))?;
    let mut folders = vec![config.data_dir.join("jobs")];
    // The database's file may lie on another disk.
    folders.extend(Location::of(config).ok().and_then(|location| location.folder_outside(&config.data_dir)));
    let folders = folders.into_iter().map(|folder| tokio::task::spawn_blocking(move || probe(&folder)));
    for probed in folders.collect::<Vec<_>>() {
        probed.await.map_err(|e| Error::Internal(e.to_string()))??;
    }
    let warnings = ingress.certificate.as_ref().map(|certificate| certificate.warnings()).unwrap_or_default();
    Ok(warnings.iter().fold(READY.to_owned(), |text, remark| format!("{text}note: {remark}\n")))
}

/// Writes a file and removes it.
fn probe(folder: &Path) -> Result<()> {
    let path: PathBuf = folder.join(format!(".ready-{}", uuid::Uuid::new_v4()));
    let written = fs::File::create_new(&path).and_then(|mut file| {
        io::Write::write_all(&mut file, &[0; PROBE_BYTES])?;
        // Some file systems report only now that the disk is full.
        file.sync_data()
    });
    let removed = fs::remove_file(&path);
    written.and(removed).map_err(|error| {
        Error::Unavailable(format!("nothing can be written in {}: {error}", folder.display()))
    })
}

/// Numbers in Prometheus' text format 0.0.4
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, body = String, content_type = "text/plain")))]
pub(crate) async fn prometheus(
    State(store): State<Arc<dyn Store>>,
    State(agents): State<Arc<Agents>>,
    State(events): State<Arc<Events>>,
) -> Result<impl IntoResponse> {
    let counts = store.counts().await?;
    let online = agents.online();
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, u64)]| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "{name}{labels} {value}");
        }
    };
    let jobs: Vec<_> = counts.jobs.iter().map(|(state, n)| (format!("{{state=\"{state}\"}}"), *n)).collect();
    family("lockstep_jobs", "gauge", "Jobs by state.", &jobs);
    let plain = |n: usize| [(String::new(), n as u64)];
    family("lockstep_agents_online", "gauge", "Agents connected now.", &plain(online.len()));
    family(
        "lockstep_slots",
        "gauge",
        "Slots of the agents connected now.",
        &plain(online.iter().map(|a| a.row.slots.len()).sum()),
    );
    family(
        "lockstep_slots_busy",
        "gauge",
        "Slots that a job holds.",
        &plain(online.iter().map(|a| agents.leases.slots_in_use(&a.row.id).len()).sum()),
    );
    let stored = events.stored.load(Ordering::Relaxed);
    family(
        "lockstep_events_stored_total",
        "counter",
        "Events of jobs stored since the start.",
        &[(String::new(), stored)],
    );
    let clients = u64::try_from(events.stream_clients.load(Ordering::Relaxed)).unwrap_or(0);
    family("lockstep_stream_clients", "gauge", "Open streams of dashboards.", &[(String::new(), clients)]);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}
