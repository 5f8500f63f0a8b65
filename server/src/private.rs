//! The server's files are private: a data directory shows everything that is trained, and weights are work. Folders are made
//! 0700 and files 0600, and locks are never taken through a symbolic link.

use rustix::fs::{Mode, OFlags};
use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

const FOLDER: u32 = 0o700;
pub(crate) const FILE: u32 = 0o600;

/// Makes files and folders that this process and its children create readable by nobody else, whatever the umask was.
pub fn keep_files_private() {
    rustix::process::umask(Mode::from_raw_mode(0o077));
}

/// What a server, its agent and its database put into a data directory.
const OURS: [&str; 11] = [
    "jobs",
    "agent",
    "ca",
    "datasets",
    "token",
    "token.new",
    "server.lock",
    "lockstep.db",
    "lockstep.db-wal",
    "lockstep.db-shm",
    "lockstep.db.lock",
];

/// The file of a data directory that its server keeps locked.
pub(crate) fn server_lock(data_dir: &Path) -> PathBuf {
    data_dir.join("server.lock")
}

/// Makes a data directory with its `jobs`. One that others can read is closed to them, if nothing but a server's
/// files is in it: a folder with other things keeps its permissions.
///
/// # Errors
/// It cannot be made.
pub(crate) fn data_dir(path: &Path) -> io::Result<()> {
    let folder = |path: &Path| DirBuilder::new().recursive(true).mode(FOLDER).create(path);
    folder(path)?;
    let mut is_ours = true;
    for entry in fs::read_dir(path)? {
        is_ours &= entry?.file_name().to_str().is_some_and(|name| OURS.contains(&name));
    }
    if is_ours {
        close(path, FOLDER)?;
    }
    folder(&path.join("jobs"))?;
    close(&path.join("jobs"), FOLDER)
}

/// Opens a file that is locked as long as a server runs.
///
/// # Errors
/// It is a symbolic link, or cannot be opened.
pub(crate) fn lock_file(path: &Path) -> io::Result<File> {
    let opened = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(path);
    opened.map_err(|error| {
        if path.is_symlink() {
            let detail = format!("its lock {} is a symbolic link; remove the link", path.display());
            return io::Error::new(error.kind(), detail);
        }
        error
    })
}

/// Makes a file when it is missing, and takes it from the eyes of others when it is there.
///
/// # Errors
/// It cannot be made.
pub(crate) fn file(path: &Path) -> io::Result<()> {
    File::options().write(true).create(true).truncate(false).mode(FILE).open(path)?;
    close(path, FILE)
}

/// Takes all permissions away but those of `mode`. What belongs to somebody else stays as it is: they have chosen.
fn close(path: &Path, mode: u32) -> io::Result<()> {
    let now = fs::metadata(path)?.permissions().mode() & 0o777;
    if now & !mode == 0 {
        return Ok(());
    }
    match fs::set_permissions(path, Permissions::from_mode(now & mode)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        other => other,
    }
}
