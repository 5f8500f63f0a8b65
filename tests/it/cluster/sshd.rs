//! OpenSSH servers with their own keys.

use super::{program, run_ok};
use crate::server::{TIMEOUT, free_port, signal};
use rustix::process::Signal;
use std::{
    fs::{self, File},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

pub(crate) struct Sshd {
    pub(crate) port: u16,
    folder: PathBuf,
    server: Child,
}

impl Sshd {
    /// Starts a server on loopback. This user can sign in with a key in `folder`.
    pub(crate) fn start(folder: &Path) -> Self {
        Self::start_command(
            folder,
            "sshd_config",
            Command::new(program("sshd", "openssh-server")),
            "127.0.0.1",
            free_port(),
        )
    }

    /// Starts a server in a network namespace, on port 22. All servers with the same `folder` share its keys.
    pub(crate) fn start_in(folder: &Path, namespace: &str, address: &str) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(program("sshd", "openssh-server"));
        Self::start_command(folder, namespace, command, address, 22)
    }

    /// As [`Sshd::start_in`]; sessions have these environment variables (`NAME=VALUE`).
    pub(crate) fn start_with(folder: &Path, namespace: &str, address: &str, variables: &[&str]) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(program("sshd", "openssh-server"));
        command.args(["-o", &format!("SetEnv={}", variables.join(" "))]);
        Self::start_command(folder, namespace, command, address, 22)
    }

    /// As [`Sshd::start_in`]; an empty file system hides the server's data directory, as on another machine.
    pub(crate) fn start_without(folder: &Path, namespace: &str, address: &str, data: &Path) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, "sh", "-c", "mount -t tmpfs none \"$0\" && exec \"$@\""]);
        command.arg(data).arg(program("sshd", "openssh-server"));
        Self::start_command(folder, namespace, command, address, 22)
    }

    /// The process id of the listener.
    pub(crate) fn pid(&self) -> i32 {
        self.server.id() as i32
    }

    fn start_command(
        folder: &Path,
        config_name: &str,
        mut command: Command,
        address: &str,
        port: u16,
    ) -> Self {
        let folder = folder.join("ssh");
        fs::create_dir_all(&folder).expect("a folder");
        let key = |name: &str| {
            let path = folder.join(name);
            if path.exists() {
                return path;
            }
            run_ok(
                Command::new(program("ssh-keygen", "openssh-client"))
                    .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                    .arg(&path),
            );
            path
        };
        let (host_key, user_key) = (key("host_key"), key("user_key"));
        let keys = folder.join("authorized_keys");
        fs::copy(user_key.with_extension("pub"), &keys).expect("a copy");
        let config = format!(
            "ListenAddress {address}:{port}\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPidFile none\n\
             PasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n",
            host_key.display(),
            keys.display()
        );
        fs::write(folder.join(config_name), config).expect("a configuration");
        // sshd confines unprivileged processes to this folder, which Debian's service creates.
        let _ = fs::create_dir("/run/sshd");
        let log = File::create(folder.join("sshd.log")).expect("a log");
        command.args(["-D", "-e", "-f"]).arg(folder.join(config_name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut server = command.spawn().expect("sshd");
        let deadline = Instant::now() + TIMEOUT;
        while TcpStream::connect((address, port)).is_err() {
            assert!(server.try_wait().ok().flatten().is_none(), "sshd ended");
            assert!(Instant::now() < deadline, "sshd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { port, folder, server }
    }

    /// Options with which `ssh` connects to the server.
    pub(crate) fn options(&self, port: u16) -> Vec<String> {
        let known = format!("UserKnownHostsFile={}", self.folder.join("known_hosts").display());
        let key = self.folder.join("user_key").display().to_string();
        let options = ["-F", "none", "-p", &port.to_string(), "-i", &key, "-o", &known];
        let fixed = ["-o", "StrictHostKeyChecking=accept-new"];
        options.iter().chain(&fixed).map(ToString::to_string).collect()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        signal(self.server.id() as i32, Signal::TERM);
        let _ = self.server.wait();
    }
}
