//! Opens the dashboard in a browser when `serve` or `demo` starts on a terminal. Other accounts of the machine can see the arguments of a
//! process. So the browser's argument is not the sign-in link, but a file in the data directory that redirects to the link and that only
//! this account can read.

use lockstep_server::Running;
use std::{
    fs::{self, File},
    io::{self, IsTerminal, Write},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Name of the file in the data directory.
const FILE: &str = "sign-in.html";
const OPENER: &str = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };

/// The file that redirects to the link, which works once. Exists until this value is dropped.
pub(crate) struct SignInFile(PathBuf);

impl SignInFile {
    /// Removes the file that a killed server may have left. Only one server uses a data directory, so the file is not in use.
    pub(crate) fn new(data_dir: &Path) -> Self {
        let path = data_dir.join(FILE);
        let _ = fs::remove_file(&path);
        Self(path)
    }

    /// Writes the file and opens a page of a server's dashboard, on a terminal with a graphical display. Errors are only logged, because the
    /// server works without a browser.
    pub(crate) fn open_browser(&self, server: &Running, page: &str) {
        if has_display_and_terminal()
            && let Err(error) = self.try_to_open_browser(server, page)
        {
            tracing::info!(%error, "no browser was opened");
        }
    }

    fn try_to_open_browser(&self, server: &Running, page: &str) -> io::Result<()> {
        // Each link works once, so this browser gets a second link: the printed link stays valid for another browser.
        let link = server.login_link(page)?;
        write_redirect(&self.0, &link)?;
        start_browser(&self.0.canonicalize()?)
    }
}

impl Drop for SignInFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Whether this process has a terminal and a graphical display.
fn has_display_and_terminal() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let has_display = cfg!(target_os = "macos") || is_set("DISPLAY") || is_set("WAYLAND_DISPLAY");
    has_display && io::stdout().is_terminal()
}

fn write_redirect(path: &Path, link: &str) -> io::Result<()> {
    let link = link.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
    let page = format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>Lockstep</title>\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <meta http-equiv=\"refresh\" content=\"0; url={link}\">\n<p><a href=\"{link}\">The dashboard</a></p>\n"
    );
    File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(page.as_bytes())
}

/// Starts the browser in a process group of its own, so that Ctrl-C ends only the server.
fn start_browser(page: &Path) -> io::Result<()> {
    let mut command = Command::new(OPENER);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let mut browser =
        command.spawn().map_err(|error| io::Error::new(error.kind(), format!("{OPENER}: {error}")))?;
    // The process may run as long as the browser, so no thread joins this thread.
    std::thread::Builder::new().name("browser".into()).spawn(move || match browser.wait() {
        Ok(status) if !status.success() => tracing::info!(%status, "{OPENER} opened no browser"),
        _ => {}
    })?;
    Ok(())
}
