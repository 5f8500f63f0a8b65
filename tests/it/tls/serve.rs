//! Helpers of the TLS tests: a server with options, and a client that trusts a CA.

use crate::server::{Finished, Folder, TIMEOUT, Terminated, free_port, lockstep};
use reqwest::header::{AUTHORIZATION, HeaderMap};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// A `lockstep serve` process.
pub(crate) struct Serve {
    process: Terminated,
    pub(crate) port: u16,
    pub(crate) folder: Folder,
}

impl Serve {
    /// Starts a server, and waits until `ready` holds for its port.
    pub(crate) async fn start(options: &[&str], ready: impl AsyncFn(u16) -> bool) -> Self {
        Self::start_in(Folder::new(), options, ready).await
    }

    /// As [`Serve::start`], in an existing folder.
    pub(crate) async fn start_in(folder: Folder, options: &[&str], ready: impl AsyncFn(u16) -> bool) -> Self {
        Self::start_at("127.0.0.1", folder, options, ready).await
    }

    /// As [`Serve::start_in`], at this address.
    pub(crate) async fn start_at(
        address: &str,
        folder: Folder,
        options: &[&str],
        ready: impl AsyncFn(u16) -> bool,
    ) -> Self {
        let port = free_port();
        let mut command = lockstep();
        command.args(["serve", "--listen", &format!("{address}:{port}"), "--data-dir", "data"]).args(options);
        let log = fs::File::create(folder.path().join("serve.log")).expect("a log");
        command.current_dir(folder.path()).stdout(log.try_clone().expect("a log")).stderr(log);
        let mut serve = Self { process: Terminated(command.spawn().expect("lockstep serve")), port, folder };
        let start = Instant::now();
        while !(serve.log().contains("dashboard: ") && ready(port).await) {
            let ended = serve.process.0.try_wait().expect("its status");
            assert!(ended.is_none() && start.elapsed() < TIMEOUT, "{ended:?}: {}", serve.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        serve
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("serve.log")).unwrap_or_default()
    }

    pub(crate) fn ca(&self) -> PathBuf {
        self.folder.path().join("data/ca/ca.crt")
    }

    /// The authorization header with the server's admin token.
    pub(crate) fn bearer(&self) -> HeaderMap {
        let token = fs::read_to_string(self.folder.path().join("data/token")).expect("the server's token");
        let value = format!("Bearer {}", token.trim()).parse().expect("a header");
        HeaderMap::from_iter([(AUTHORIZATION, value)])
    }

    /// A client that has the server's admin token and trusts `ca`.
    pub(crate) fn client(&self, ca: &Path) -> reqwest::Client {
        let client = reqwest::Client::builder().tls_backend_preconfigured((*client_config_for(ca)).clone());
        client.default_headers(self.bearer()).build().expect("a client")
    }

    /// Runs a client command that has the server's admin token and trusts `ca`.
    pub(crate) fn cli(&self, server: &str, ca: Option<&Path>, args: &[&str]) -> Finished {
        let mut command = lockstep();
        command.args(args).env("LOCKSTEP_SERVER", server).current_dir(self.folder.path());
        command.env("LOCKSTEP_TOKEN_FILE", self.folder.path().join("data/token"));
        if let Some(ca) = ca {
            command.env("LOCKSTEP_CA_FILE", ca);
        }
        Finished::of(&mut command)
    }
}

/// Runs `lockstep ca` in this folder.
pub(crate) fn ca(folder: &Path, args: &[&str]) -> Finished {
    Finished::of(lockstep().arg("ca").args(args).current_dir(folder))
}

/// TLS settings of a client that trusts the CA certificate in a file.
pub(crate) fn client_config_for(ca: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).expect("a certificate")).expect("a CA certificate");
    Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

pub(crate) async fn listens(port: u16) -> bool {
    tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok()
}
