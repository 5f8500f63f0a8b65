//! Executes the program once more with another environment: a process finds libraries by the environment that it started with.

use super::{Libraries, Library, ready};
use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, symlink},
    path::{Path, PathBuf},
};

/// Set for a process that was started anew with the right environment: not a second time.
const STARTED_ANEW: &str = "LOCKSTEP_LIBRARIES";

/// Where the links of this machine's user may lie: the cache folder, else one of this process's.
///
/// # Errors
/// Neither can be made.
pub fn links_dir() -> io::Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join("lockstep").join("libraries"));
    let own = |dir: &Path| -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let about = fs::symlink_metadata(dir)?;
        // Code is loaded from there: nobody else may write in it.
        let mine = about.is_dir() && about.uid() == rustix::process::getuid().as_raw();
        if !mine || about.mode() & 0o022 != 0 {
            let text = format!("{}: others can write there", dir.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(())
    };
    if let Some(dir) = cache
        && own(&dir).is_ok()
    {
        return Ok(dir);
    }
    let uid = rustix::process::getuid().as_raw();
    let dir = std::env::temp_dir().join(format!("lockstep-libraries-{uid}"));
    own(&dir).map(|()| dir)
}

/// Starts this program anew, in its place and with the same arguments, when it cannot load
/// `needed` as it was started but could with another environment, or lacks a variable that ranks are started with. Returns
/// when there is no need or no help; [`ready`] then says which.
pub fn reexec_if_needed(needed: &[Library]) {
    let queues = crate::gpu::queues();
    if std::env::var_os(STARTED_ANEW).is_some() || (queues.is_none() && ready(needed).is_ok()) {
        return;
    }
    let libraries = Libraries::find();
    if !libraries.missing(needed).is_empty() {
        return;
    }
    let made = links_dir().and_then(|dir| libraries.environment(&dir));
    let (Ok(variables), Ok(program)) = (made, crate::own_program()) else { return };
    let mut arguments = std::env::args_os();
    let mut command = std::process::Command::new(program);
    if let Some(name) = arguments.next() {
        use std::os::unix::process::CommandExt;
        command.arg0(name).args(arguments).envs(variables).envs(queues).env(STARTED_ANEW, "1");
        // Only a failure returns; `ready` will say what is missing.
        let error = command.exec();
        tracing::warn!(%error, "could not start anew with the environment of a rank");
    }
}

/// A link that others see whole, replaced when it points elsewhere.
pub(super) fn link(path: &Path, target: &Path) -> io::Result<()> {
    if fs::read_link(path).is_ok_and(|is| is == target) {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let _ = fs::remove_file(&temporary);
    symlink(target, &temporary)?;
    fs::rename(&temporary, path)
}
