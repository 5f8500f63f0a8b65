//! Files with a token for programs of the same account: the server's token (`<data-dir>/token`) and the token of the agent on its machine.
//! They have mode 0600, and are never read through a link.

use crate::auth::access::is_token;
use rustix::fs::OFlags;
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

/// Maximum number of bytes that are read from a file: more than any token has.
const MAX_BYTES: u64 = 200;

/// Reads a token from a file. `None` if the file does not exist, other accounts can read it, or it does not contain a token of Lockstep.
/// The caller then writes a new token.
///
/// # Errors
/// The path is a link or not a file, or cannot be read.
pub(crate) fn read(path: &Path) -> io::Result<Option<String>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = File::options().read(true).custom_flags(flags.bits() as i32).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if path.is_symlink() => {
            let detail = format!("{} is a symbolic link; remove the link", path.display());
            return Err(io::Error::new(error.kind(), detail));
        }
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other(format!("{} is not a file; remove it", path.display())));
    }
    if metadata.mode() & 0o077 != 0 || metadata.uid() != rustix::process::geteuid().as_raw() {
        tracing::warn!(path = %path.display(), "other accounts could read this token; a new token replaces it");
        return Ok(None);
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    let text = text.trim();
    Ok(is_token(text).then(|| text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{auth::access::Secret, util::private_files::replace};
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    #[test]
    fn tokens_are_only_read_from_private_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert_eq!(read(&path).unwrap(), None);
        let token = Secret::new_token().unwrap().text;
        replace(&path, format!("{token}\n").as_bytes()).unwrap();
        assert_eq!(read(&path).unwrap().as_deref(), Some(token.as_str()));

        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(read(&path).unwrap(), None, "a group could read it");
        replace(&path, b"hunter2").unwrap();
        assert_eq!(read(&path).unwrap(), None, "it does not have the format of a token");

        let elsewhere = dir.path().join("elsewhere");
        replace(&elsewhere, token.as_bytes()).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&elsewhere, &path).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("symbolic link"), "{error}");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is not a file"));
    }
}
