//! Health checks for supervisors, and metrics for Prometheus.

use crate::api::prelude::*;
use crate::{
    agents::Agents,
    config::ServeConfig,
    events::Events,
    http::{error::run_blocking, peer::PeerPolicy, request_times::RequestTimes},
    store::{Location, Store},
};
use lockstep_protocol::job::JobState;
use std::{
    fmt::Write as _,
    io::Write as _,
    path::Path,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

const READY: &str = "ready\n";
/// Maximum age of the cached result of `/readyz` for clients without a token.
const MAX_RESULT_AGE: Duration = Duration::from_secs(1);
/// Size of the probe file, in bytes: about the size of a job's first files.
const PROBE_BYTES: usize = 64 << 10;

/// Check that the server responds
#[utoipa::path(get, path = "/healthz", tag = "health", responses((status = 200, body = String)))]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// Check that jobs can be stored
///
/// The check writes to the database and to the data directory, so a full or read-only disk is reported. Warnings, such as a certificate
/// that expires soon, are further lines of the response.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, body = String)))]
pub(crate) async fn readyz(
    State(store): State<Arc<dyn Store>>,
    State(config): State<Arc<ServeConfig>>,
    State(peer_policy): State<Arc<PeerPolicy>>,
    caller: Option<Extension<Caller>>,
) -> Result<String> {
    if caller.is_some() {
        return check_readiness(&*store, &config, &peer_policy).await;
    }
    // Clients without a token get no details, and cause at most one check per second.
    let mut last = peer_policy.last_ready_check.lock().await;
    if last.is_none_or(|(at, _)| at.elapsed() >= MAX_RESULT_AGE) {
        let is_ready = check_readiness(&*store, &config, &peer_policy).await.is_ok();
        *last = Some((Instant::now(), is_ready));
    }
    if last.is_some_and(|(_, is_ready)| is_ready) {
        Ok(READY.into())
    } else {
        Err(Error::Unavailable("nothing can be stored now; send a token to see the reason".into()))
    }
}

/// Checks that jobs can be stored. Returns `ready` and all warnings.
async fn check_readiness(
    store: &dyn Store,
    config: &ServeConfig,
    peer_policy: &PeerPolicy,
) -> Result<String> {
    // Any error here means that the database cannot be written now.
    store.check_writable().await.map_err(|error| Error::Unavailable(error.to_string()))?;
    let mut folders = vec![config.data_dir.join("jobs")];
    // The database's file may be on another disk.
    folders.extend(Location::of(config).ok().and_then(|location| location.other_folder(&config.data_dir)));
    for folder in folders {
        run_blocking(move || probe(&folder)).await??;
    }
    let warnings =
        peer_policy.certificate.as_ref().map(|certificate| certificate.warnings()).unwrap_or_default();
    Ok(warnings.iter().fold(READY.to_owned(), |text, warning| format!("{text}note: {warning}\n")))
}

/// Checks that files can be written in a folder, by writing and removing a file.
fn probe(folder: &Path) -> Result<()> {
    let written = tempfile::Builder::new().prefix(".ready-").tempfile_in(folder).and_then(|mut file| {
        file.write_all(&[0; PROBE_BYTES])?;
        // Some file systems report a full disk only here.
        file.as_file().sync_data()?;
        file.close()
    });
    written.map_err(|error| {
        Error::Unavailable(format!("nothing can be written in {}: {error}", folder.display()))
    })
}

/// Export metrics in Prometheus' text format 0.0.4
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, body = String, content_type = "text/plain")))]
pub(crate) async fn prometheus(
    State(store): State<Arc<dyn Store>>,
    State(agents): State<Arc<Agents>>,
    State(events): State<Arc<Events>>,
    State(request_times): State<Arc<RequestTimes>>,
) -> Result<impl IntoResponse> {
    let counts = store.counts().await?;
    let online = agents.online();
    let count_of =
        |state: JobState| counts.jobs.iter().find(|(counted, _)| *counted == state).map_or(0, |(_, n)| *n);
    let slots = online.iter().map(|agent| agent.row.slots.len()).sum::<usize>();
    let busy = online.iter().map(|agent| agents.leases.slots_in_use(&agent.row.id).len()).sum::<usize>();
    let clients = u64::try_from(events.stream_clients.load(Ordering::Relaxed)).unwrap_or(0);
    let (stored, steps) =
        (events.stored_events.load(Ordering::Relaxed), events.reported_steps.load(Ordering::Relaxed));

    let mut text = String::new();
    write_header(&mut text, "lockstep_jobs", "gauge", "Jobs by state.");
    for state in JobState::ALL {
        let _ = writeln!(text, "lockstep_jobs{{state=\"{state}\"}} {}", count_of(state));
    }
    for (name, kind, help, value) in [
        ("lockstep_agents_online", "gauge", "Agents connected now.", online.len() as u64),
        ("lockstep_slots", "gauge", "Slots of the agents connected now.", slots as u64),
        ("lockstep_slots_busy", "gauge", "Slots in use by jobs.", busy as u64),
        ("lockstep_steps_total", "counter", "Steps that jobs have trained since the start.", steps),
        ("lockstep_events_stored_total", "counter", "Events of jobs stored since the start.", stored),
        ("lockstep_stream_clients", "gauge", "Open streams of dashboards.", clients),
        ("lockstep_database_bytes", "gauge", "Size of the database.", counts.database_bytes),
    ] {
        write_header(&mut text, name, kind, help);
        let _ = writeln!(text, "{name} {value}");
    }
    let name = "lockstep_ingest_lag_seconds";
    write_header(&mut text, name, "histogram", "Time from a log line of a rank until the line is stored.");
    events.ingest_lag.write(&mut text, name, "");
    let name = "lockstep_http_request_duration_seconds";
    let help = "Time from a request to the beginning of the response, by route and class of status.";
    write_header(&mut text, name, "histogram", help);
    request_times.write(&mut text, name);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

/// Writes the header of a metric family.
fn write_header(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}
