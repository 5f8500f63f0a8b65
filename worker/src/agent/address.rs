//! The address of the server, and how a connection to it begins.

use super::Options;
use crate::tls::{self, IdentityFiles};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    sync::OnceLock,
    time::Duration,
};
use tokio_tungstenite::{
    Connector,
    tungstenite::{
        client::IntoClientRequest,
        handshake::client::Request,
        http::{HeaderValue, header::AUTHORIZATION},
    },
};

/// Where the server listens for agents.
#[derive(Debug)]
pub(super) struct Address {
    /// As it was given.
    server: String,
    request: Request,
    /// Trusted besides the system's authorities.
    ca_file: Option<PathBuf>,
    /// The accounts that listened there when the server first accepted this agent, where it is on this machine.
    owners: OnceLock<Vec<u32>>,
    /// The certificate by which this agent shows who it is.
    identity: Option<IdentityFiles>,
}

/// The address of the agents' websocket on the server of `options`.
///
/// # Errors
/// A sentence: it is no address, or one where what is sent could be read on the way, or a file cannot be used.
pub(super) fn parse(options: &Options) -> Result<Address, String> {
    let server = options.server.as_str();
    let base = server.trim_end_matches('/');
    let base = match base.split_once("://") {
        Some(("http" | "ws", rest)) => format!("ws://{rest}"),
        Some(("https" | "wss", rest)) => format!("wss://{rest}"),
        Some(_) => return Err(format!("--server {server}: an address looks like http://127.0.0.1:7070")),
        None => format!("ws://{base}"),
    };
    let mut request = format!("{base}/api/v1/agent/socket")
        .into_client_request()
        .map_err(|e| format!("--server {server}: {e}; an address looks like http://127.0.0.1:7070"))?;
    let host = request.uri().host().unwrap_or_default().trim_matches(['[', ']']);
    let in_clear = request.uri().scheme_str() != Some("wss");
    if in_clear && options.identity.is_some() {
        return Err(format!(
            "--server {server}: a certificate is shown over TLS alone; begin the address with https://, or leave out --cert-file and \
             --pkcs12-file"
        ));
    }
    if in_clear && !options.insecure_http && !is_loopback(host) {
        return Err(format!(
            "--server {server}: refusing to join another machine's server without TLS: whoever can listen to the network could read \
             the token and what is trained; begin the address with https:// (`lockstep serve --tls-own-ca` makes its own \
             certificate), or take an ssh tunnel; --insecure-http joins in clear nevertheless"
        ));
    }
    if let Some(token) = &options.token {
        let value = HeaderValue::from_str(&format!("Bearer {}", token.trim()))
            .map_err(|_| "the token has characters that no token has".to_owned())?;
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    let address = Address {
        server: server.to_owned(),
        request,
        ca_file: options.ca_file.clone(),
        owners: OnceLock::new(),
        identity: options.identity.clone(),
    };
    // What is wrong with the file is better reported now than when there is no connection.
    address.connector()?;
    Ok(address)
}

/// Whether what is sent to a host never leaves this machine.
fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Whether those who listen where the server was are its account, or root: another account of this machine may have taken the port of a
/// server that is away, and gets no token. Where nobody listens, somebody may begin to before the connection is there.
pub(super) fn same_account(listeners: &[u32], owners: &[u32]) -> Result<(), String> {
    const ROOT: u32 = 0;
    if listeners.is_empty() && !owners.is_empty() {
        return Err("nothing listens there".into());
    }
    match listeners.iter().find(|uid| **uid != ROOT && !owners.is_empty() && !owners.contains(uid)) {
        None => Ok(()),
        Some(uid) => {
            Err(format!("another account (user id {uid}) listens there now, which is not sent the token"))
        }
    }
}

impl Address {
    /// Read for each connection: a new authority, or a renewed certificate, is known without a new start.
    pub(super) fn connector(&self) -> Result<Connector, String> {
        match self.request.uri().scheme_str() {
            Some("wss") => {
                let config = tls::client_config_as(self.ca_file.as_deref(), self.identity.as_ref())?;
                Ok(Connector::Rustls(config))
            }
            _ => Ok(Connector::Plain),
        }
    }

    /// A client that shows the agent's token, and the server's address, for its REST interface.
    pub(super) fn rest(&self) -> Result<(reqwest::Client, String), String> {
        let uri = self.request.uri();
        let (scheme, tls) = match self.connector()? {
            Connector::Rustls(tls) => ("https", tls),
            _ => ("http", tls::without_roots()?),
        };
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        let path = uri.path().strip_suffix("/api/v1/agent/socket").unwrap_or_default();
        let token = self.request.headers().get(AUTHORIZATION).cloned();
        let client = reqwest::Client::builder()
            .default_headers(token.map(|token| (AUTHORIZATION, token)).into_iter().collect())
            .connect_timeout(Duration::from_secs(10))
            .no_proxy()
            .tls_backend_preconfigured((*tls).clone())
            .build()
            .map_err(|e| e.to_string())?;
        Ok((client, format!("{scheme}://{authority}{path}")))
    }

    /// The server has accepted this agent while these accounts listened there.
    pub(super) fn note_owners(&self, listeners: &[u32]) {
        if !listeners.is_empty() {
            let _ = self.owners.set(listeners.to_vec());
        }
    }

    /// Whether nobody else has taken the server's port on this machine.
    pub(super) fn check_listeners(&self) -> Result<(), String> {
        same_account(&self.listeners(), self.owners.get().map_or(&[], Vec::as_slice))
    }

    /// What keeps a request from being answered.
    pub(super) fn in_words(&self, error: &reqwest::Error) -> String {
        use std::error::Error;
        let known = tls::in_words(error, &self.server);
        known.unwrap_or_else(|| match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })
    }

    /// The server as it was given.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    /// Where the server is; an IPv6 address without brackets.
    pub(super) fn host_and_port(&self) -> (&str, u16) {
        let uri = self.request.uri();
        let usual = if uri.scheme_str() == Some("wss") { 443 } else { 80 };
        (uri.host().unwrap_or_default().trim_matches(['[', ']']), uri.port_u16().unwrap_or(usual))
    }

    /// Whether the agent shows a certificate.
    pub(super) fn has_certificate(&self) -> bool {
        self.identity.is_some()
    }

    /// The accounts that listen where the server is to be, when that is this machine's loopback; none where nobody does, or
    /// the server is elsewhere.
    pub(super) fn listeners(&self) -> Vec<u32> {
        let (host, port) = self.host_and_port();
        let addresses: Vec<IpAddr> = match host {
            // Either may be connected to.
            host if host.eq_ignore_ascii_case("localhost") => {
                vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
            }
            host => host.parse().ok().filter(IpAddr::is_loopback).into_iter().collect(),
        };
        addresses.into_iter().flat_map(|address| lockstep_host::listener_owners(address, port)).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::Datasets, *};

    pub(in super::super) fn options(server: &str) -> Options {
        Options {
            server: server.into(),
            ca_file: None,
            token: None,
            identity: None,
            insecure_http: false,
            name: None,
            dir: PathBuf::new(),
            cpu_slots: None,
            gpus: None,
            only_job: None,
            until_final: false,
            program: None,
            spool_bytes: 0,
            follow_parent: false,
            advertise: None,
            interface: None,
            datasets: Datasets::default(),
            dataset_cache: None,
            dataset_cache_bytes: 0,
            killed_after_secs: 30,
        }
    }

    #[test]
    fn another_machines_server_is_joined_in_clear_when_that_is_asked_for() {
        for server in [
            "http://127.0.0.1:7070",
            "http://127.8.8.8:7070",
            "http://localhost:7070",
            "http://[::1]:7070",
            "localhost:7070",
        ] {
            assert!(parse(&options(server)).is_ok(), "{server}");
        }
        for server in [
            "http://10.0.0.5:7070",
            "http://gpu:7070",
            "ws://[2001:db8::7]:7070",
            "gpu:7070",
            "http://localhost.example:7070",
        ] {
            let refused = parse(&options(server)).unwrap_err();
            assert!(refused.contains("--insecure-http") && refused.contains("https://"), "{refused}");
            assert!(parse(&Options { insecure_http: true, ..options(server) }).is_ok(), "{server}");
        }
    }

    #[test]
    fn a_certificate_is_shown_over_tls_alone() {
        let identity = Some(IdentityFiles::Pem { certificate: "a.crt".into(), key: "a.key".into() });
        let refused = parse(&Options { identity, ..options("http://127.0.0.1:7070") }).unwrap_err();
        assert!(refused.contains("over TLS alone"), "{refused}");
    }
}
