//! Opens the dashboard in a browser when `serve` and `demo` start on somebody's terminal. Others of this machine see the arguments of a
//! process, so a browser is not given the link that signs in, but a file of the data directory that leads there and that this account
//! alone can read.

use lockstep_server::Running;
use std::{
    fs::{self, File},
    io::{self, IsTerminal, Write},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use tokio::task::JoinHandle;

/// The file in the data directory.
const FILE: &str = "sign-in.html";
/// How often to check whether the link was used.
const LOOK: Duration = Duration::from_millis(500);

/// What starts a browser.
const OPENER: &str = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };

/// The file, until its link was used or this is dropped.
pub(crate) struct Opened {
    path: PathBuf,
    watch: Option<JoinHandle<()>>,
}

impl Opened {
    /// Opens the dashboard of a server, unless it is switched off or there is no screen. Errors are only logged: the server works without
    /// it.
    pub(crate) fn of(server: &Running, data_dir: &Path, wanted: bool) -> Self {
        // A file that a killed server has left. Nobody else uses this folder.
        let path = data_dir.join(FILE);
        let _ = fs::remove_file(&path);
        let mut opened = Self { path, watch: None };
        if wanted
            && has_screen()
            && let Err(error) = opened.open(server)
        {
            tracing::info!(%error, "no browser was opened");
        }
        opened
    }

    fn open(&mut self, server: &Running) -> io::Result<()> {
        // A link of its own: the printed one is good once, in whichever browser the user opens it.
        let link = server.login_link()?;
        write(&self.path, &link)?;
        start(&self.path.canonicalize()?)?;
        let (path, running) = (self.path.clone(), server.clone());
        self.watch = Some(tokio::spawn(async move {
            while running.is_good(&link) {
                tokio::time::sleep(LOOK).await;
            }
            let _ = fs::remove_file(path);
        }));
        Ok(())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.abort();
        }
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether this was started on a terminal of a machine with a screen.
fn has_screen() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let screen = cfg!(target_os = "macos") || is_set("DISPLAY") || is_set("WAYLAND_DISPLAY");
    screen && io::stdout().is_terminal()
}

fn write(path: &Path, link: &str) -> io::Result<()> {
    let link = link.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
    let page = format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>Lockstep</title>\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <meta http-equiv=\"refresh\" content=\"0; url={link}\">\n<p><a href=\"{link}\">The dashboard</a></p>\n"
    );
    File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(page.as_bytes())
}

/// Starts the browser in a process group of its own: Ctrl-C ends the server alone.
fn start(page: &Path) -> io::Result<()> {
    let mut command = Command::new(OPENER);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let mut browser =
        command.spawn().map_err(|error| io::Error::new(error.kind(), format!("{OPENER}: {error}")))?;
    // It may run for as long as the browser does. Nothing waits for this thread.
    std::thread::Builder::new().name("browser".into()).spawn(move || match browser.wait() {
        Ok(status) if !status.success() => tracing::info!(%status, "{OPENER} opened no browser"),
        _ => {}
    })?;
    Ok(())
}
