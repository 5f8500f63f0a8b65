//! nginx with the configuration of docs/team.md.

use super::serve::listens;
use crate::server::TIMEOUT;
use std::{
    fs,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

/// A running nginx with its own folder.
pub(super) struct Nginx(Child);

impl Nginx {
    /// Starts nginx at `port` as a proxy of the server's port, with the folder's `NAME.crt` and `NAME.key`. `changes`: texts of the page's
    /// configuration and their replacements.
    pub(super) async fn start(
        folder: &Path,
        name: &str,
        port: u16,
        server_port: u16,
        changes: &[(&str, &str)],
    ) -> Self {
        let path = folder.join("nginx.conf");
        fs::write(&path, config(folder, name, port, server_port, changes)).expect("a file");
        let log = fs::File::create(folder.join("nginx.log")).expect("a log");
        let mut command = Command::new("nginx");
        command.arg("-p").arg(folder).arg("-c").arg(&path).arg("-e").arg("stderr").stderr(log);
        let nginx = Self(command.spawn().expect("nginx, which tests/run installs"));
        let start = Instant::now();
        while !listens(port).await {
            let log = fs::read_to_string(folder.join("nginx.log")).unwrap_or_default();
            assert!(start.elapsed() < TIMEOUT, "{log}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        nginx
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The page's configuration with this machine's values, and the settings that nginx needs without root. Each replaced text must occur
/// exactly once.
fn config(folder: &Path, name: &str, port: u16, server_port: u16, changes: &[(&str, &str)]) -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/team.md"));
    let page = page.expect("the page");
    let (_, block) = page.split_once("```nginx\n").expect("a block for nginx");
    let mut block = block.split("```").next().expect("the end of the block").to_owned();
    let dir = folder.display();
    let values = [
        ("listen 443 ssl;", format!("listen 127.0.0.1:{port} ssl;")),
        ("server_name lockstep.example.org;", format!("server_name {name};")),
        ("/etc/letsencrypt/live/lockstep.example.org/fullchain.pem", format!("{dir}/{name}.crt")),
        ("/etc/letsencrypt/live/lockstep.example.org/privkey.pem", format!("{dir}/{name}.key")),
        ("http://127.0.0.1:7070", format!("http://127.0.0.1:{server_port}")),
    ];
    for (text, value) in values.iter().map(|(a, b)| (*a, b.as_str())).chain(changes.iter().copied()) {
        assert_eq!(block.matches(text).count(), 1, "docs/team.md must have exactly once: {text}");
        block = block.replace(text, value);
    }
    format!(
        "daemon off; master_process off; error_log stderr; pid {dir}/nginx.pid;
         events {{ worker_connections 256; }}
         http {{
           access_log off;
           client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir}; uwsgi_temp_path {dir};
           scgi_temp_path {dir};
           {block}
         }}"
    )
}
