//! Errors that keep `lockstep serve` from starting, or end it.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

/// Says why a data directory cannot be used, and what to do.
fn describe_unusable(path: &Path, source: &std::io::Error) -> String {
    if path.is_file() {
        return "it is a file; give a folder with --data-dir".into();
    }
    format!("{source}; make it writable or choose another with --data-dir")
}

/// Why the server did not start, or stopped. Each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    #[error(
        "refusing to listen on {0} with --no-auth: it can be reached from other machines, and anybody there could run jobs \
         here; leave out --no-auth, so that requests need a token, or listen on 127.0.0.1 or [::1]"
    )]
    NotLoopback(IpAddr),
    #[error(
        "refusing --no-auth with --trusted-proxy or --public-url: whoever reaches the proxy could run jobs here; leave out --no-auth, so that \
         requests need a token"
    )]
    OpenToOthers,
    #[error(
        "refusing to listen on {0} without TLS: whoever can listen to the network could read tokens and weights; give the server \
         a certificate with --tls-cert and --tls-key, or let it make its own with --tls-own-ca, or, if a proxy terminates TLS, give the \
         proxy's address with --trusted-proxy; --insecure-http allows unencrypted connections"
    )]
    Plaintext(IpAddr),
    /// The options of the OpenID provider are wrong.
    #[error("--oidc-issuer: {0}")]
    Oidc(String),
    #[error("TLS: {0}")]
    Tls(String),
    #[error("the access log cannot be written: {0}; choose another file with --access-log")]
    AccessLog(String),
    #[error("{0} is taken by another program; stop it, or choose another port with --listen {1}:0")]
    PortTaken(SocketAddr, IpAddr),
    /// Listening at the address fails for another reason.
    #[error("cannot listen on {address}: {source}; choose another address with --listen")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("the data directory {} cannot be used: {}", path.display(), describe_unusable(path, source))]
    DataDir { path: PathBuf, source: std::io::Error },
    #[error(
        "the data directory {} is in use by another lockstep server{}; stop that server or choose another directory with --data-dir",
        path.display(),
        .pid.as_ref().map(|p| format!(" (process {p})")).unwrap_or_default()
    )]
    DataDirInUse {
        path: PathBuf,
        /// The process id of the other server, if known.
        pid: Option<String>,
    },
    /// The object store cannot be used.
    #[error("--artifacts {url}: {detail}")]
    Artifacts {
        url: String,
        /// What is wrong, and what to change.
        detail: String,
    },
    /// A database URL that this build cannot open.
    #[error("the database {0:?} cannot be used: {1}")]
    DatabaseUrl(String, String),
    #[error(
        "the database {path} was written by a newer version of lockstep (it has migration {found}, this version \
         knows up to {known}); install that version, or choose another --data-dir"
    )]
    DatabaseTooNew {
        path: String,
        /// The newest migration of the database.
        found: i64,
        /// The newest migration that this version has.
        known: i64,
    },
    #[error(
        "migration {version} of the database {path} was started and never finished, so its tables may be partly changed; \
         replace it with a copy from before the upgrade, or restore a backup into a new database (`lockstep restore FILE \
         --database URL`)"
    )]
    DatabaseHalfMigrated { path: String, version: i64 },
    #[error(
        "the database {path} was made by another build of lockstep: its migration {version} differs from this build's; use the \
         build that made the database, or back up with that build and restore into a new database with this build"
    )]
    DatabaseOfAnotherBuild { path: String, version: i64 },
    /// Another server, or another command of this program, uses the database.
    #[error(
        "the database {path} is in use by another lockstep server{}; stop that server, or name another database with --database",
        .by.as_ref().map(|by| format!(" ({by})")).unwrap_or_default()
    )]
    DatabaseInUse {
        path: String,
        /// Who uses the database, if known.
        by: Option<String>,
    },
    #[error(
        "the database {path} was not closed cleanly, and its write-ahead log {} is missing or empty, so its latest writes are missing. Put \
         that file back; or move the database away and restore a backup (`lockstep restore`). If you accept the loss of these writes, or if \
         another program (such as sqlite3) has already written the log into the database, remove {}, which says that the log is needed",
        log.display(), lock.display()
    )]
    LogMissing {
        path: String,
        /// The path of the write-ahead log.
        log: PathBuf,
        /// The file that shows that the log is needed.
        lock: PathBuf,
    },
    #[error(
        "the database {path} is damaged ({detail}): put back a copy of the file with its -wal, or restore a backup into a new database \
         (`lockstep restore FILE --database URL`), and check the disk (smartctl, dmesg)"
    )]
    DatabaseDamaged { path: String, detail: String },
    #[error(
        "the database {path} is empty, but the data directory {} has folders of jobs (such as {job}): the database was lost, or this \
         is the wrong database; name the right one with --database, restore a backup into this one (`lockstep restore FILE`), or \
         choose another --data-dir. To begin with an empty database, move {}/jobs away", data_dir.display(), data_dir.display()
    )]
    DatabaseEmpty {
        path: String,
        data_dir: PathBuf,
        /// A job that has a folder in the data directory.
        job: String,
    },
    #[error("the database {path} cannot be opened: {detail}")]
    Database { path: String, detail: String },
    #[error(
        "the token of this machine cannot be stored: {0}; make the file `token` of the data directory writable, or remove it"
    )]
    Token(#[source] std::io::Error),
    /// The server was running and could not continue.
    #[error("the server stopped: {0}")]
    Stopped(#[source] std::io::Error),
}

impl ServeError {
    /// 2 if the server did not start, 1 if it failed while running.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, ServeError::Stopped(_)) { 1 } else { 2 }
    }
}
