//! Executes the program again with another environment. The dynamic linker reads `LD_LIBRARY_PATH` only when a
//! process starts.

use super::{Libraries, Library, cache, check_loadable};
use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, symlink},
    path::{Path, PathBuf},
};

/// Environment variable set for the second execution, to prevent a third.
const REEXECUTED_VARIABLE: &str = "LOCKSTEP_LIBRARIES";

/// The folder for links to libraries: in the [cache](cache::dir), or else in the folder for temporary files.
///
/// # Errors
/// No folder can be created.
pub fn links_dir() -> io::Result<PathBuf> {
    let cache = cache::dir().filter(|dir| dir.is_absolute()).map(|dir| dir.join("libraries"));
    let create_private = |dir: &Path| -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let metadata = fs::symlink_metadata(dir)?;
        // Code is loaded from the folder, so no other user may write to it.
        let is_own = metadata.is_dir() && metadata.uid() == rustix::process::getuid().as_raw();
        if !is_own || metadata.mode() & 0o022 != 0 {
            let message = format!(
                "{}: this folder must belong to this user, and other users must not be able to write to it",
                dir.display()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        Ok(())
    };
    if let Some(dir) = cache
        && create_private(&dir).is_ok()
    {
        return Ok(dir);
    }
    let uid = rustix::process::getuid().as_raw();
    let dir = std::env::temp_dir().join(format!("lockstep-libraries-{uid}"));
    create_private(&dir).map(|()| dir)
}

/// Executes this program again, with the same arguments and the environment of a rank, if it cannot load `needed` or lacks
/// a variable of that environment. Returns if that is not necessary or does not help. If it does not help,
/// [`check_loadable`] names the missing library.
pub fn reexec_if_needed(needed: &[Library]) {
    let queues = crate::gpu::queues_variable();
    if std::env::var_os(REEXECUTED_VARIABLE).is_some() || (queues.is_none() && check_loadable(needed).is_ok())
    {
        return;
    }
    let libraries = Libraries::find();
    if !libraries.missing(needed).is_empty() {
        return;
    }
    let variables = links_dir().and_then(|dir| libraries.environment(&dir));
    let (Ok(variables), Ok(program)) = (variables, crate::own_program()) else { return };
    let mut arguments = std::env::args_os();
    let mut command = std::process::Command::new(program);
    if let Some(name) = arguments.next() {
        use std::os::unix::process::CommandExt;
        command.arg0(name).args(arguments).envs(variables).envs(queues).env(REEXECUTED_VARIABLE, "1");
        // `exec` returns only if it fails. `check_loadable` then names the missing library.
        let error = command.exec();
        tracing::warn!(%error, "the program could not be executed again with the environment of a rank");
    }
}

/// Creates a link, or replaces a link to another target, atomically.
pub(super) fn link(path: &Path, target: &Path) -> io::Result<()> {
    if fs::read_link(path).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let _ = fs::remove_file(&temporary);
    symlink(target, &temporary)?;
    fs::rename(&temporary, path)
}
