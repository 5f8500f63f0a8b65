//! Opens files that a request names and that must be in allowed folders. Links are followed before the check and not after
//! it, so the opened file is the checked file.

use super::check_opened;
use lockstep_protocol::agent::AllowedFolders;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    fs::File,
    io,
    path::{Component, Path, PathBuf},
};

/// Whether a path without links is in an allowed folder of this machine.
pub fn is_allowed(allowed: &AllowedFolders, path: &Path) -> bool {
    allowed.contain(path, |folder| folder.canonicalize().ok())
}

/// The path with its links resolved, if it leads to an allowed folder. Without `allowed`, the path is returned
/// unchanged.
///
/// # Errors
/// A sentence that says why the path is refused.
pub fn resolve(path: &Path, allowed: Option<&AllowedFolders>) -> Result<PathBuf, String> {
    let Some(allowed) = allowed else { return Ok(path.to_owned()) };
    let real = path.canonicalize().map_err(|e| format!("{} cannot be read: {e}", path.display()))?;
    if is_allowed(allowed, &real) { Ok(real) } else { Err(allowed.refusal(&path.display().to_string())) }
}

/// Opens a regular file if its path leads to an allowed folder. Returns the path without links, the file and its
/// size.
///
/// # Errors
/// A sentence that says why the file is refused.
pub fn open(path: &Path, allowed: Option<&AllowedFolders>) -> Result<(PathBuf, (File, u64)), String> {
    let real = resolve(path, allowed)?;
    let opened = match allowed {
        Some(_) => open_without_links(&real),
        None => super::open(&real),
    };
    let opened = opened.map_err(|detail| format!("{} {detail}", real.display()))?;
    Ok((real, opened))
}

/// Opens a regular file by an absolute path that must not contain links. Opens one folder after the other, which is
/// possible on every kernel.
///
/// # Errors
/// Why the file cannot be used, as a phrase to follow its name.
fn open_without_links(path: &Path) -> Result<(File, u64), String> {
    let cannot_open = |error: Errno| super::cannot_be_read(io::Error::from(error));
    let is_plain = |part: &Component<'_>| matches!(part, Component::Normal(_));
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err("is a folder, not a file".into());
    };
    if !path.is_absolute() || !path.components().skip(1).all(|part| is_plain(&part)) {
        return Err("is not an absolute path without links".into());
    }
    // The folders on the way to the file need not be readable.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut directory = rustix::fs::open("/", flags, Mode::empty()).map_err(cannot_open)?;
    for part in folder.iter().skip(1) {
        directory = rustix::fs::openat(&directory, part, flags, Mode::empty()).map_err(cannot_open)?;
    }
    // These flags prevent blocking at a pipe, and acquiring a controlling terminal.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(&directory, name, flags, Mode::empty()).map_err(cannot_open)?);
    if file.metadata().is_ok_and(|found| found.is_dir()) {
        return Err("is a folder, not a file".into());
    }
    check_opened(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn links_are_resolved_before_the_check_and_not_followed_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
        for folder in ["root/inner", "root/data/jobs", "outside"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["root/inner/w", "root/data/jobs/w", "outside/w"] {
            fs::write(at(file), file).unwrap();
        }
        symlink(at("root"), at("way")).unwrap();
        let text = |name: &str| at(name).display().to_string();
        // The allowed folder is given by a link.
        let allowed = AllowedFolders { below: vec![text("way")], except: vec![text("way/data")] };
        let real = |name: &str| resolve(&at(name), Some(&allowed));
        symlink(at("root/inner/w"), at("root/to-inner")).unwrap();
        symlink(at("outside/w"), at("root/to-outside")).unwrap();
        symlink(at("root/data"), at("root/inner/to-data")).unwrap();
        for name in ["root/inner/w", "way/inner/w", "root/to-inner"] {
            assert_eq!(real(name), Ok(at("root/inner/w")), "{name}");
        }
        for name in ["outside/w", "root/to-outside", "root/data/jobs/w", "root/inner/to-data/jobs/w"] {
            let why = real(name).unwrap_err();
            assert!(why.contains("--dataset-root") && why.starts_with(&text(name)), "{why}");
            assert!(!why.contains(&text("data/")), "the error does not say where the link leads: {why}");
            assert!(open(&at(name), Some(&allowed)).is_err(), "{name}");
            assert_eq!(
                resolve(&at(name), None),
                Ok(at(name)),
                "without allowed folders, a link may lead anywhere"
            );
        }
        let (path, (file, size)) = open(&at("root/to-inner"), Some(&allowed)).unwrap();
        assert_eq!((path, size), (at("root/inner/w"), 12));
        assert_eq!(super::super::read_opened((file, size), 12).unwrap(), b"root/inner/w");
        assert!(open(&at("root/inner"), Some(&allowed)).unwrap_err().ends_with("is a folder, not a file"));

        // After the check, a link replaces the file, and then its folder.
        let checked = real("root/inner/w").unwrap();
        fs::remove_file(&checked).unwrap();
        symlink(at("outside/w"), &checked).unwrap();
        assert!(open_without_links(&checked).is_err());
        fs::rename(at("root/inner"), at("root/moved")).unwrap();
        symlink(at("outside"), at("root/inner")).unwrap();
        assert!(checked.is_file() && open_without_links(&checked).is_err());
    }
}
