//! The server to which a command connects, and the access token that the command sends.

use super::{file::missing_path_message, usage_error};
use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Default address of `lockstep serve`.
pub(crate) const DEFAULT_SERVER: &str = "http://127.0.0.1:7070";

/// Hint for the error message after status 401 if the command has no token.
pub(crate) const NO_TOKEN: &str = "a command looks for its token in --token-file, in LOCKSTEP_TOKEN and, on the server's own machine, in \
    the server's data directory (lockstep-data in the working directory, or the folder in --data-dir or LOCKSTEP_DATA_DIR); on that \
    machine, `lockstep token create` makes a token for another machine or person";

/// Data directory in the working directory, the default of `lockstep serve`.
const DEFAULT_DATA_DIR: &str = "lockstep-data";

/// Data directories in the working directory that `lockstep demo` tries, in this order.
pub(crate) fn demo_data_dirs() -> impl Iterator<Item = PathBuf> {
    iter::once("lockstep-demo".into()).chain((2..10).map(|n| format!("lockstep-demo-{n}").into()))
}

/// User id of root.
const ROOT: u32 = 0;
/// Maximum size of a token file. A token has about 50 bytes.
const TOKEN_FILE_BYTES: u64 = 4 << 10;

/// An access token.
pub(crate) struct Token {
    pub(crate) secret: String,
    /// Where the command found the token, such as `the environment variable LOCKSTEP_TOKEN`.
    pub(crate) source: String,
}

impl Token {
    /// Reads a token from a file. `note` is appended to [`Token::source`]; it says which option named the file.
    ///
    /// # Errors
    /// See [`read_token_file`].
    pub(crate) fn read(path: &Path, note: &str) -> anyhow::Result<Self> {
        let source = format!("the file {}{note}", path.display());
        Ok(Self { secret: read_token_file(path)?, source })
    }
}

/// Options that say where a command finds its access token.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct AccessArgs {
    /// File with the access token [default: LOCKSTEP_TOKEN, or `token` in the data directory of a server on this machine]
    #[arg(long, value_name = "FILE", env = "LOCKSTEP_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Data directory of a server on this machine, which contains its token and its address [default: lockstep-data, or lockstep-demo
    /// while `lockstep demo` runs there]
    #[arg(long = "data-dir", value_name = "DIR", env = "LOCKSTEP_DATA_DIR", id = "server_data_dir")]
    data_dir: Option<PathBuf>,
}

/// File in the data directory with the server's address for programs of this machine. Exists while the server runs.
const ADDRESS: &str = "address";
/// The SQLite database in a server's data directory.
const DATABASE: &str = "lockstep.db";
/// File in the data directory with the server's token, unless the server runs without authentication.
const TOKEN: &str = "token";

/// Records the address for programs of this machine in a server's data directory.
///
/// # Errors
/// The file cannot be written; the error names it.
pub(crate) fn record_address(data_dir: &Path, url: &str) -> io::Result<()> {
    lockstep_host::write_private(&data_dir.join(ADDRESS), url.as_bytes())
}

/// Removes the recorded address when the server ends.
pub(crate) fn forget_address(data_dir: &Path) {
    // If this fails, the next start of the server replaces the file.
    let _ = fs::remove_file(data_dir.join(ADDRESS));
}

/// Returns the address that the server of a data directory has recorded. Ignores addresses of other machines, and files that neither this
/// account nor root owns: otherwise another account could receive the tokens of users who run commands in one of its folders.
fn recorded_address(data_dir: &Path) -> Option<String> {
    let path = data_dir.join(ADDRESS);
    let owner = fs::symlink_metadata(&path).ok().filter(|metadata| metadata.is_file())?.uid();
    let is_own = [rustix::process::geteuid().as_raw(), ROOT].contains(&owner);
    // The file is one short line, like a token file.
    let address = read_token_file(&path).ok().filter(|_| is_own)?;
    is_this_machine(&address).then_some(address)
}

impl AccessArgs {
    /// Returns the named data directory, or the first default directory whose server runs.
    fn data_dir(&self) -> PathBuf {
        let default = || PathBuf::from(DEFAULT_DATA_DIR);
        let first_running = || {
            let mut candidates = iter::once(default()).chain(demo_data_dirs());
            candidates.find(|dir| recorded_address(dir).is_some())
        };
        self.data_dir.clone().or_else(first_running).unwrap_or_else(default)
    }

    /// If the options name a data directory and no token file, checks that it is the data directory of a server.
    ///
    /// # Errors
    /// The folder does not exist, or has neither a token nor a database nor the address of a running server.
    pub(crate) fn check_data_dir(&self) -> anyhow::Result<()> {
        let Some(dir) = &self.data_dir else { return Ok(()) };
        if self.token_file.is_some() {
            return Ok(());
        }
        // A file to which this account has no access counts as present.
        let is_missing =
            |error: io::Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        let lacks = |path: &Path| fs::symlink_metadata(path).is_err_and(is_missing);
        let problem = if lacks(dir) {
            "does not exist"
        } else if [TOKEN, ADDRESS, DATABASE].iter().all(|name| lacks(&dir.join(name))) {
            "is not the data directory of a server: it has neither a token nor a database nor the address of a running server"
        } else {
            return Ok(());
        };
        Err(usage_error(format!(
            "--data-dir (or LOCKSTEP_DATA_DIR): {} {problem}. Give the folder that `lockstep serve` uses on this machine, or leave it out \
             and name the server with --server",
            dir.display()
        )))
    }

    /// Returns the server's address: `given`, or the recorded address of the server of the data directory, or the default of `lockstep
    /// serve`.
    pub(crate) fn server(&self, given: Option<&str>) -> String {
        let recorded = || recorded_address(&self.data_dir());
        given.map(str::to_owned).or_else(recorded).unwrap_or(DEFAULT_SERVER.into())
    }

    /// Returns the command that starts the server of the data directory, if the directory has a server that is stopped.
    pub(crate) fn start_command(&self) -> Option<String> {
        let dir = self.data_dir();
        let has = |name: &&str| fs::symlink_metadata(dir.join(name)).is_ok();
        // A running server has an address, which this account may not be able to use.
        let is_stopped = !has(&ADDRESS) && [TOKEN, DATABASE].iter().any(has);
        let folder = self.data_dir.as_ref().map(|dir| format!(" --data-dir {}", dir.display()));
        is_stopped.then(|| format!("lockstep serve{}", folder.unwrap_or_default()))
    }

    /// Returns the token for `server`: from the named file, from `LOCKSTEP_TOKEN`, or from the data directory of a server on this
    /// machine.
    ///
    /// # Errors
    /// The named file, or the server's own token file, cannot be read.
    pub(crate) fn token(&self, server: &str) -> anyhow::Result<Option<Token>> {
        if let Some(path) = &self.token_file {
            return Token::read(path, " (--token-file or LOCKSTEP_TOKEN_FILE)").map(Some);
        }
        if let Some(token) = std::env::var("LOCKSTEP_TOKEN").ok().filter(|token| !token.trim().is_empty()) {
            let source = "the environment variable LOCKSTEP_TOKEN".to_owned();
            return Ok(Some(Token { secret: token.trim().to_owned(), source }));
        }
        if !is_this_machine(server) {
            return Ok(None);
        }
        let path = self.data_dir().join(TOKEN);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Ok(metadata) => {
                let token = Token::read(&path, "")?;
                check_listener(server, metadata.uid(), &path).map(|()| Some(token))
            }
            // Reading fails, too, with an error that says what to do.
            Err(_) => Token::read(&path, "").map(Some),
        }
    }
}

/// Checks that the process that listens at `server` on this machine belongs to the token's owner or to root. Otherwise
/// another account may have taken the port of a stopped server, and must not get the token.
///
/// # Errors
/// Another account listens at `server`.
fn check_listener(server: &str, owner: u32, token_file: &Path) -> anyhow::Result<()> {
    let Some((addresses, port)) = loopback_addresses(server) else { return Ok(()) };
    let owners: Vec<u32> =
        addresses.into_iter().flat_map(|address| lockstep_host::listener_owners(address, port)).collect();
    match owners.iter().find(|uid| ![owner, ROOT].contains(uid)) {
        None => Ok(()),
        Some(uid) => Err(usage_error(format!(
            "{server}: another account of this machine (user id {uid}) listens at this address, not the owner of {} (user id {owner}), \
             so the token is not sent. Start the server again, or name its address with --server. To use the server of that account, name \
             a token file with --token-file",
            token_file.display()
        ))),
    }
}

/// Returns a warning if other users can read the file of a token or another secret. Only a file that root owns may be readable for its
/// group, because systemd and pods mount secrets in this way for a process of another user. After a warning the file is still used, because
/// Kubernetes mounts secrets with mode 0644 by default.
pub(crate) fn secret_file_warning(path: &Path) -> Option<String> {
    let metadata = fs::metadata(path).ok()?;
    let open_bits = metadata.mode() & if metadata.uid() == ROOT { 0o004 } else { 0o044 };
    let shown = path.display();
    (metadata.is_file() && open_bits != 0).then(|| {
        format!(
            "other users of this machine can read the secret in {shown} (mode {:04o}); close the file with `chmod 600 {shown}`, or with \
             defaultMode: 0440 if the file is mounted from a Secret of Kubernetes",
            metadata.mode() & 0o7777
        )
    })
}

/// Reads the token in a file.
///
/// # Errors
/// The file cannot be read, or is empty.
pub(crate) fn read_token_file(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let result = File::open(path).and_then(|file| file.take(TOKEN_FILE_BYTES + 1).read_to_string(&mut text));
    result.map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::NotFound => {
                return usage_error(format!("the token file {}", missing_path_message(path)));
            }
            ErrorKind::PermissionDenied => {
                "; run this as the account that runs the server, or ask for a token"
            }
            _ => "",
        };
        usage_error(format!("the token file {}: {error}{hint}", path.display()))
    })?;
    if text.len() as u64 > TOKEN_FILE_BYTES {
        let max_kib = TOKEN_FILE_BYTES >> 10;
        return Err(usage_error(format!(
            "the token file {} has more than {max_kib} KiB; a token is one short line",
            path.display()
        )));
    }
    match text.trim() {
        "" => Err(usage_error(format!(
            "the token file {} is empty: write a token into it, or name another file",
            path.display()
        ))),
        token => Ok(token.to_owned()),
    }
}

/// Whether the address of a server (a URL, or a host and a port) is this machine's loopback. A token from a data directory is sent only to
/// such an address.
pub(crate) fn is_this_machine(server: &str) -> bool {
    loopback_addresses(server).is_some()
}

/// Whether the host of a URL is this machine's loopback.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Returns a server's address with a scheme, `http` if none is given.
pub(crate) fn with_scheme(server: &str) -> String {
    if server.contains("://") { server.to_owned() } else { format!("http://{server}") }
}

/// Returns the IP addresses and the port of a server whose host is this machine's loopback.
fn loopback_addresses(server: &str) -> Option<(Vec<IpAddr>, u16)> {
    let url = reqwest::Url::parse(&with_scheme(server)).ok()?;
    let host = url.host_str().filter(|host| is_loopback(host))?;
    // The client may connect to either address of `localhost`.
    let localhost = || vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let addresses = host.trim_matches(['[', ']']).parse().map_or_else(|_| localhost(), |ip: IpAddr| vec![ip]);
    Some((addresses, url.port_or_known_default()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_file_larger_than_4_kib_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |bytes: usize| {
            fs::write(&path, format!("{:bytes$}", "lockstep_abc")).unwrap();
            read_token_file(&path)
        };
        assert_eq!(read(4096).unwrap(), "lockstep_abc");
        let message = read(4097).unwrap_err().to_string();
        assert!(message.contains("has more than 4 KiB; a token is one short line"), "{message}");
        let message = read_token_file(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(message.contains("/dev/zero has more than 4 KiB"), "{message}");
    }

    #[test]
    fn a_server_s_address_is_found_in_its_data_directory() {
        let dir = tempfile::tempdir().unwrap();
        let access = AccessArgs { token_file: None, data_dir: Some(dir.path().into()) };
        let server = |given: Option<&str>| access.server(given);
        // The recorded address, and the address that a command uses.
        for (recorded, expected) in [
            (None, DEFAULT_SERVER),
            (Some("http://127.0.0.1:43211"), "http://127.0.0.1:43211"),
            (Some("http://[::1]:43211"), "http://[::1]:43211"),
            (Some("http://10.0.0.1:7070"), DEFAULT_SERVER),
            (Some("http://127.0.0.1@example.com"), DEFAULT_SERVER),
            (Some(""), DEFAULT_SERVER),
        ] {
            forget_address(dir.path());
            recorded.map_or(Ok(()), |url| record_address(dir.path(), url)).unwrap();
            assert_eq!(server(None), expected);
            assert_eq!(server(Some("http://other:1")), "http://other:1");
        }
        forget_address(dir.path());
        fs::write(dir.path().join(DATABASE), "").unwrap();
        let command = format!("lockstep serve --data-dir {}", dir.path().display());
        assert_eq!(access.start_command(), Some(command));
        // A link may lead to another account's file.
        fs::write(dir.path().join("elsewhere"), "http://127.0.0.1:1").unwrap();
        std::os::unix::fs::symlink("elsewhere", dir.path().join(ADDRESS)).unwrap();
        assert_eq!(server(None), DEFAULT_SERVER);
    }

    #[test]
    fn a_data_directory_s_token_stays_on_this_machine() {
        for local in
            ["http://127.0.0.1:7070", "localhost:7070", "http://[::1]:7070/", "127.1.2.3", "http://LOCALHOST"]
        {
            assert!(is_this_machine(local), "{local}");
        }
        for remote in [
            "http://10.0.0.1:7070",
            "example.com",
            "http://localhost.example.com",
            "http://127.0.0.1.example.com",
            "http://127.0.0.1@example.com",
            "",
        ] {
            assert!(!is_this_machine(remote), "{remote}");
        }
    }
}
