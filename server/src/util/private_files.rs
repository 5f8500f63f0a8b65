//! Keeps the server's files private, because a data directory contains all trained weights. Folders have mode 0700 and files 0600, and lock
//! files are never opened through a symbolic link.

use super::if_exists;
use rustix::fs::{Mode, OFlags};
use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Sets the umask to 077, so that other accounts cannot read the files and folders that this process and its children create.
pub fn keep_files_private() {
    rustix::process::umask(Mode::from_raw_mode(0o077));
}

/// Names of the files and folders that a server, its agent and its database create in a data directory.
const SERVER_FILES: [&str; 12] = [
    "address",
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

/// The path of the file of a data directory that a running server keeps locked.
pub(crate) fn server_lock_path(data_dir: &Path) -> PathBuf {
    data_dir.join("server.lock")
}

/// Creates a data directory with its folder `jobs`. If an existing directory has only files of a server, permissions of other accounts are
/// removed. A directory with other files keeps its permissions.
pub(crate) fn create_data_dir(path: &Path) -> io::Result<()> {
    let create_folder = |path: &Path| DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(path);
    create_folder(path)?;
    let mut has_only_server_files = true;
    for entry in fs::read_dir(path)? {
        has_only_server_files &= entry?.file_name().to_str().is_some_and(|name| SERVER_FILES.contains(&name));
    }
    if has_only_server_files {
        restrict(path, FOLDER_MODE)?;
    }
    warn_if_writable(path);
    create_folder(&path.join("jobs"))?;
    restrict(&path.join("jobs"), FOLDER_MODE)
}

/// Opens a file that a server locks while it runs. Creates the file if it does not exist.
///
/// # Errors
/// The file is a symbolic link, or cannot be opened.
pub(crate) fn open_lock_file(path: &Path) -> io::Result<File> {
    let opened = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE)
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

/// Creates a file if it does not exist, and removes the permissions of other accounts.
pub(crate) fn create_file(path: &Path) -> io::Result<()> {
    File::options().write(true).create(true).truncate(false).mode(FILE_MODE).open(path)?;
    restrict(path, FILE_MODE)?;
    warn_if_writable(path);
    Ok(())
}

/// Writes a new file that other accounts cannot read, and syncs it.
///
/// # Errors
/// The file exists, or cannot be written.
pub(crate) fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(FILE_MODE).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Writes a file that other accounts cannot read. An existing file, or a link, is replaced atomically.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_added_extension("new");
    // A killed server may have left this file.
    if_exists(fs::remove_file(&new))?;
    let replaced = write_new(&new, content).and_then(|()| fs::rename(&new, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&new);
    }
    replaced?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Warns if other accounts of this machine could have changed a file, such as by adding a token to the database.
fn warn_if_writable(path: &Path) {
    if let Ok(metadata) = fs::metadata(path) {
        let server_uid = rustix::process::geteuid().as_raw();
        for warning in permission_warnings(metadata.mode(), metadata.uid(), server_uid) {
            tracing::warn!(path = %path.display(), "{warning}");
        }
    }
}

/// The warnings about a file or folder with this mode and owner (a uid), for a server that runs as `server_uid`.
fn permission_warnings(mode: u32, owner: u32, server_uid: u32) -> Vec<String> {
    let mut warnings = Vec::new();
    if mode & 0o002 != 0 {
        let warning = "every account of this machine can write here and become admin of this server: remove that permission with \
                       chmod o-w";
        warnings.push(warning.into());
    }
    // Files of root need no warning, because root can change all files.
    if owner != server_uid && owner != 0 {
        warnings.push(format!(
            "it belongs to another account (uid {owner}), which can read and change all data of this server: change the owner to the \
             server's account with chown"
        ));
    }
    warnings
}

/// Removes all permissions that are not in `mode`. A file of another owner stays unchanged.
fn restrict(path: &Path, mode: u32) -> io::Result<()> {
    let current = fs::metadata(path)?.permissions().mode() & 0o777;
    if current & !mode == 0 {
        return Ok(());
    }
    match fs::set_permissions(path, Permissions::from_mode(current & mode)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_files_are_private_and_no_other_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(path.with_added_extension("new"), "left by a killed server").unwrap();
        for content in ["first", "second"] {
            replace(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(path.metadata().unwrap().mode() & 0o777, FILE_MODE);
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        assert!(replace(&folder, b"third").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn files_that_other_accounts_can_change_are_reported() {
        for (mode, owner, expected) in [
            (0o700, 1000, &[][..]),
            (0o755, 0, &[]),
            (0o777, 1000, &["chmod o-w"]),
            (0o600, 65534, &["uid 65534"]),
            (0o722, 7, &["chmod o-w", "uid 7"]),
        ] {
            let warnings = permission_warnings(mode, owner, 1000);
            let is_named = warnings.iter().zip(expected).all(|(warning, text)| warning.contains(text));
            assert!(warnings.len() == expected.len() && is_named, "{mode:o} {owner}: {warnings:?}");
        }
    }
}
