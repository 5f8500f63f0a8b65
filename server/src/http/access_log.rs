//! The access log (`serve --access-log`): one line for each request. A separate thread writes it, so a slow disk delays no response. Lines
//! that do not fit into the queue are counted, and the log reports their number. No crate writes the file: `tracing-appender` starts new
//! files by time and not by size, and `file-rotate` depends on `chrono`.
//!
//! `2026-11-23T04:17:37.123Z 10.0.0.7 GET /api/v1/jobs?limit 200 1834 3.2 -`: time, client, method, path with the names (not the
//! values) of its query, status, bytes of the response, milliseconds, request id.

use crate::{
    config::AccessLogTo,
    util::{failure_log::FailureLog, private_files},
};
use axum::http::{Method, StatusCode, Uri};
use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{self, BufWriter, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    time::Instant,
};

/// Maximum number of lines that wait to be written.
const MAX_WAITING: usize = 8192;
/// Maximum length of a logged path. The longest path of this server has about a hundred characters.
const PATH_CHARS: usize = 512;

/// A handle for writing lines.
#[derive(Debug, Clone)]
pub(crate) struct AccessLog {
    lines: SyncSender<String>,
    /// Number of lines that did not fit into the queue.
    lost: Arc<AtomicU64>,
}

/// A request in progress. Its line is written when this is dropped.
#[derive(Debug)]
pub(crate) struct Line {
    log: AccessLog,
    began: Instant,
    /// The beginning of the line: time, client, method and path.
    head: String,
    pub(crate) status: StatusCode,
    /// Number of bytes of the response's body that were sent.
    pub(crate) bytes: u64,
    pub(crate) request_id: Option<String>,
}

impl AccessLog {
    /// Opens the log, and starts the thread that writes it. A file that reaches `max_bytes` is renamed, and a new file begins.
    pub(crate) fn open(target: &AccessLogTo, max_bytes: u64) -> io::Result<Self> {
        let mut out = LogSink::open(target, max_bytes)?;
        let (lines, waiting) = sync_channel(MAX_WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let log = Self { lines, lost: lost.clone() };
        std::thread::Builder::new()
            .name("access log".into())
            .spawn(move || write_lines(&mut out, &waiting, &lost))?;
        Ok(log)
    }

    pub(crate) fn begin(&self, address: IpAddr, method: &Method, uri: &Uri) -> Line {
        let mut head = String::new();
        let _ = write!(head, "{} {address} {method} {}", crate::now(), logged_path(uri));
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Line { log: self.clone(), began: Instant::now(), head, status, bytes: 0, request_id: None }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut line = std::mem::take(&mut self.head);
        let ms = self.began.elapsed().as_secs_f64() * 1e3;
        let id = self.request_id.as_deref().unwrap_or("-");
        let _ = writeln!(line, " {} {} {ms:.1} {id}", self.status.as_u16(), self.bytes);
        if let Err(TrySendError::Full(_)) = self.log.lines.try_send(line) {
            self.log.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The path, and the names of the query's parameters. Values are left out, because they may be secrets.
fn logged_path(uri: &Uri) -> String {
    let plain = |text: &str| -> String {
        text.chars().take(PATH_CHARS).map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect()
    };
    let mut shown = plain(uri.path());
    for (n, part) in
        uri.query().unwrap_or_default().split('&').filter(|part| !part.is_empty()).take(32).enumerate()
    {
        shown.push(if n == 0 { '?' } else { '&' });
        // A part without `=` may be a value.
        shown.push_str(&part.split_once('=').map_or("...".into(), |(name, _)| plain(name)));
    }
    shown
}

/// Where lines are written.
enum LogSink {
    Stdout,
    File { path: PathBuf, file: BufWriter<File>, bytes: u64, max_bytes: u64 },
}

impl LogSink {
    fn open(target: &AccessLogTo, max_bytes: u64) -> io::Result<Self> {
        match target {
            AccessLogTo::Stdout => Ok(LogSink::Stdout),
            AccessLogTo::File(path) => {
                let (file, bytes) = open_private(path)?;
                Ok(LogSink::File { path: path.clone(), file: BufWriter::new(file), bytes, max_bytes })
            }
        }
    }

    fn write_line(&mut self, line: &str) -> io::Result<()> {
        match self {
            LogSink::Stdout => io::stdout().lock().write_all(line.as_bytes()),
            LogSink::File { path, file, bytes, max_bytes } => {
                if *bytes > 0 && *bytes + line.len() as u64 > *max_bytes {
                    file.flush()?;
                    fs::rename(&*path, path.with_added_extension("1"))?;
                    let (new_file, length) = open_private(path)?;
                    (*file, *bytes) = (BufWriter::new(new_file), length);
                }
                file.write_all(line.as_bytes())?;
                *bytes += line.len() as u64;
                Ok(())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            LogSink::Stdout => io::stdout().flush(),
            LogSink::File { file, .. } => file.flush(),
        }
    }
}

/// Opens a file that only this user can read. Returns the file and its length.
fn open_private(path: &Path) -> io::Result<(File, u64)> {
    if path.exists() && !path.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    private_files::create_file(path)?;
    let file = File::options().append(true).open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
}

/// Writes lines until all senders are dropped.
fn write_lines(out: &mut LogSink, lines: &Receiver<String>, lost: &AtomicU64) {
    let mut failure_log = FailureLog::default();
    while let Ok(first) = lines.recv() {
        let written = write_batch(out, &first, lines, lost);
        failure_log.log(&written, "the access log cannot be written", "the access log can be written again");
    }
}

/// Writes a line and all further waiting lines.
fn write_batch(out: &mut LogSink, first: &str, lines: &Receiver<String>, lost: &AtomicU64) -> io::Result<()> {
    out.write_line(first)?;
    while let Ok(line) = lines.try_recv() {
        out.write_line(&line)?;
    }
    let lost = lost.swap(0, Ordering::Relaxed);
    if lost > 0 {
        out.write_line(&format!("{} {lost} lines were lost, because too many waited\n", crate::now()))?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn values_of_query_parameters_are_not_logged() {
        for (uri, logged) in [
            ("/api/v1/jobs", "/api/v1/jobs"),
            ("/api/v1/jobs?limit=20&token=secret&", "/api/v1/jobs?limit&token"),
            ("/?secret", "/?..."),
            ("/a%0Ab", "/a%0Ab"),
        ] {
            assert_eq!(logged_path(&uri.parse().unwrap()), logged);
        }
        let long = format!("/{}", "a".repeat(5000));
        assert_eq!(logged_path(&long.parse().unwrap()).len(), PATH_CHARS);
    }

    #[test]
    fn a_full_file_is_renamed_and_files_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let mut out = LogSink::open(&AccessLogTo::File(path.clone()), 18).unwrap();
        for line in ["first line\n", "second\n", "third\n"] {
            out.write_line(line).unwrap();
        }
        out.flush().unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        // A file is full at the limit; the next line goes to a new file.
        let older = path.with_added_extension("1");
        assert_eq!((read(&older), read(&path)), ("first line\nsecond\n".into(), "third\n".into()));
        for path in [&path, &older] {
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
    }
}
