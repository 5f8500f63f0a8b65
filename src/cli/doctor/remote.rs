//! A machine with `lockstep doctor --peer` at the other end of an SSH connection.

use super::{
    super::{
        file,
        launch::{Host, quote, ssh},
    },
    peer::{Greeting, LINE_BYTES, PeerMessage, Start},
};
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};
use tempfile::NamedTempFile;

/// Time limit for ssh to connect, with keys and a login shell.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(40);
/// Time limit for the machine to check its GPUs.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for processes to exit before they are killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) struct Remote {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The process's standard error.
    stderr: NamedTempFile,
}

/// The reason why a machine sent no description, and the version of Lockstep on the machine if it is known.
pub(super) struct NoGreeting {
    pub(super) lockstep: Option<String>,
    pub(super) why: String,
    pub(super) advice: String,
}

impl Remote {
    /// Connects. Returns the version of Lockstep on the machine, and the machine's description.
    pub(super) fn start(
        host: &Host,
        program: &str,
        options: &[String],
        secret: &str,
    ) -> Result<(Self, String, Greeting), NoGreeting> {
        let name = &host.name;
        let no_greeting = |lockstep: Option<String>, why: String, advice: &str| NoGreeting {
            lockstep,
            why,
            advice: advice.into(),
        };
        let program = quote(program);
        // Programs of every version can print their version.
        let command = format!("{program} --version && exec {program} doctor --peer");
        let mut remote = Self::run(ssh::shell_command(options, name, &command)).map_err(|e| {
            let advice = "Install OpenSSH's client (openssh-client).";
            no_greeting(None, format!("ssh cannot be started: {e}"), advice)
        })?;
        let start = Start { secret: secret.into(), env: host.env.clone() };
        // If the program cannot read the message, its exit status and output explain why.
        let _ = remote.send(&start);
        let version = match remote.receive_line(CONNECT_TIMEOUT) {
            Ok(line) => line.trim().trim_start_matches("lockstep ").to_owned(),
            Err(why) => {
                let (why, advice) = remote.explain(name, &why);
                return Err(no_greeting(None, why, &advice));
            }
        };
        match remote.receive(GREETING_TIMEOUT) {
            Ok(PeerMessage::Hello(greeting)) => Ok((remote, version, greeting)),
            Ok(PeerMessage::Failed(why)) => {
                Err(no_greeting(Some(version), why, &format!("`lockstep doctor` on {name} may say more.")))
            }
            Ok(_) | Err(_) => {
                let why =
                    format!("its Lockstep {version} cannot examine the machine: {}", remote.last_line());
                let advice = concat!("Install Lockstep ", env!("CARGO_PKG_VERSION"), " on this machine.");
                Err(no_greeting(Some(version), why, advice))
            }
        }
    }

    /// Starts a command, and exchanges messages over the standard input and output of the command.
    pub(super) fn run(mut command: Command) -> std::io::Result<Self> {
        let stderr = NamedTempFile::new()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr.reopen()?);
        let mut child = command.spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (sender, lines) = channel();
        if let Some(stdout) = stdout {
            std::thread::Builder::new().name("remote".into()).spawn(move || {
                let mut stdout = BufReader::new(stdout);
                loop {
                    let mut bytes = Vec::new();
                    let result = (&mut stdout).take(LINE_BYTES).read_until(b'\n', &mut bytes);
                    if result.is_err() || bytes.is_empty() {
                        return;
                    }
                    if sender.send(String::from_utf8_lossy(&bytes).into_owned()).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self { child, stdin, lines, stderr })
    }

    /// Sends a message. [`Self::wait_for_response`] waits for the response to an order.
    pub(super) fn send(&mut self, message: &impl serde::Serialize) -> Result<(), String> {
        let mut line = serde_json::to_vec(message).map_err(|e| e.to_string())?;
        line.push(b'\n');
        let stdin = self.stdin.as_mut().ok_or("the connection is closed")?;
        let sent = stdin.write_all(&line).and_then(|()| stdin.flush());
        sent.map_err(|e| format!("the ssh connection is lost: {e}"))
    }

    fn receive_line(&self, timeout: Duration) -> Result<String, String> {
        self.lines.recv_timeout(timeout).map_err(|e| match e {
            RecvTimeoutError::Timeout => format!("no answer in {} s", timeout.as_secs()),
            RecvTimeoutError::Disconnected => "the ssh connection is lost".into(),
        })
    }

    fn receive(&self, timeout: Duration) -> Result<PeerMessage, String> {
        let line = self.receive_line(timeout)?;
        serde_json::from_str(&line).map_err(|e| format!("unexpected output ({e})"))
    }

    pub(super) fn wait_for_response(&mut self, timeout: Duration) -> Result<PeerMessage, String> {
        let response = self.receive(timeout);
        if response.is_err() {
            // A late response would be taken for the response to the next order.
            self.close();
        }
        response
    }

    /// Closes the standard input of the machine's process, after which no order can be sent.
    pub(super) fn close(&mut self) {
        self.stdin = None;
    }

    /// Explains a missing response from the way in which ssh ended.
    fn explain(&mut self, name: &str, why: &str) -> (String, String) {
        let status = self.wait_or_kill(EXIT_TIMEOUT);
        let last = self.last_line();
        match status.and_then(|status| ssh::explain_no_start(name, status, &last)) {
            Some(explained) => explained,
            None => {
                let last = if last.is_empty() { last } else { format!(": {last}") };
                (format!("{name}: {why}{last}"), format!("Try ssh -o BatchMode=yes {name} true."))
            }
        }
    }

    /// Returns the last line that ssh or the machine's program wrote to standard error.
    fn last_line(&mut self) -> String {
        self.wait_or_kill(EXIT_TIMEOUT);
        file::last_line(self.stderr.path())
    }

    /// Waits for the process to exit. Kills it after the time limit.
    fn wait_or_kill(&mut self, timeout: Duration) -> Option<std::process::ExitStatus> {
        self.stdin = None;
        let deadline = Instant::now() + timeout;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                _ => {
                    let _ = self.child.kill();
                    return self.child.wait().ok();
                }
            }
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.wait_or_kill(EXIT_TIMEOUT);
    }
}
