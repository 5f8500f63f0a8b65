//! The server's address, and the clients that connect to it.

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

/// The server's address, with the agent's credentials.
#[derive(Debug)]
pub(super) struct Address {
    /// The address as given in the options.
    pub(super) server: String,
    /// The request that opens the agents' websocket, with the agent's token.
    pub(super) request: Request,
    /// CA certificates trusted in addition to the system's.
    ca_file: Option<PathBuf>,
    /// User ids of the processes that listened at the server's address when the server first accepted this agent. Not set if the
    /// server is on another machine.
    owners: OnceLock<Vec<u32>>,
    pub(super) identity: Option<IdentityFiles>,
}

/// Reads the server's address and the agent's credentials from `options`.
///
/// # Errors
/// The options cannot be used: the address is invalid, traffic would cross the network unencrypted, a client
/// certificate is given without TLS, or a file cannot be used.
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
    let is_unencrypted = request.uri().scheme_str() != Some("wss");
    if is_unencrypted && options.identity.is_some() {
        return Err(format!(
            "--server {server}: a client certificate requires TLS; begin the address with https://, or leave out --cert-file and \
             --pkcs12-file"
        ));
    }
    if is_unencrypted && !options.insecure_http && !is_loopback(host) {
        return Err(format!(
            "--server {server}: refusing to join another machine's server without TLS: whoever can listen to the network could read \
             the token and what is trained; begin the address with https:// (`lockstep serve --tls-own-ca` makes its own \
             certificate), or use an SSH tunnel; --insecure-http joins without encryption"
        ));
    }
    if let Some(token) = &options.token {
        let value = HeaderValue::from_str(&format!("Bearer {}", token.trim()))
            .map_err(|_| "the token contains characters that are not allowed in an HTTP header".to_owned())?;
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    let address = Address {
        server: server.to_owned(),
        request,
        ca_file: options.ca_file.clone(),
        owners: OnceLock::new(),
        identity: options.identity.clone(),
    };
    // Report an invalid file now, rather than at the first connection.
    address.connector()?;
    Ok(address)
}

/// Whether `host` is a loopback address, so that data sent to it never leaves this machine.
fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

impl Address {
    /// The TLS settings of a connection. Their files are read for each connection, so a new CA certificate or a renewed
    /// client certificate needs no restart.
    pub(super) fn connector(&self) -> Result<Connector, String> {
        match self.request.uri().scheme_str() {
            Some("wss") => tls::client_config_with_identity(self.ca_file.as_deref(), self.identity.as_ref())
                .map(Connector::Rustls),
            _ => Ok(Connector::Plain),
        }
    }

    /// A client for the REST interface that sends the agent's token (and certificate), and the server's base URL.
    pub(super) fn rest_client(&self) -> Result<(reqwest::Client, String), String> {
        let uri = self.request.uri();
        let (scheme, tls) = match self.connector()? {
            Connector::Rustls(tls) => ("https", tls),
            _ => ("http", tls::client_config_without_roots()?),
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

    /// Records the user ids of the processes that listened when the server accepted this agent. Only the first call counts.
    pub(super) fn record_owners(&self, listeners: Vec<u32>) {
        if !listeners.is_empty() {
            let _ = self.owners.set(listeners);
        }
    }

    /// Returns the user ids of the processes that listen at the server's address. After [`Self::record_owners`], checks that they
    /// are the recorded ones, or root's: another account of this machine may have taken the port of a stopped server, and must
    /// not get the token. It is then also an error if nothing listens, because another program could start to listen before
    /// the connection is made.
    pub(super) fn check_listeners(&self) -> Result<Vec<u32>, String> {
        const ROOT: u32 = 0;
        let listeners = self.listeners();
        let Some(owners) = self.owners.get() else { return Ok(listeners) };
        if listeners.is_empty() {
            return Err("nothing listens at the server's address".into());
        }
        match listeners.iter().copied().find(|uid| *uid != ROOT && !owners.contains(uid)) {
            None => Ok(listeners),
            Some(uid) => Err(format!(
                "another account (user id {uid}) listens at the server's address; the token is not sent to it"
            )),
        }
    }

    /// A description of why a request got no response.
    pub(super) fn in_words(&self, error: &reqwest::Error) -> String {
        use std::error::Error;
        let tls_error = tls::in_words(error, &self.server);
        tls_error.unwrap_or_else(|| match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })
    }

    /// The host and port of the server. An IPv6 address has no brackets.
    pub(super) fn host_and_port(&self) -> (&str, u16) {
        let uri = self.request.uri();
        let default_port = if uri.scheme_str() == Some("wss") { 443 } else { 80 };
        (uri.host().unwrap_or_default().trim_matches(['[', ']']), uri.port_u16().unwrap_or(default_port))
    }

    /// User ids of the processes that listen at the server's address. Empty if nothing listens, or if the address is not a
    /// loopback address.
    fn listeners(&self) -> Vec<u32> {
        let (host, port) = self.host_and_port();
        let addresses: Vec<IpAddr> = match host {
            // The connection may use either address.
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
    use super::*;

    pub(in super::super) fn options(server: &str) -> Options {
        Options { server: server.into(), killed_after_secs: 30, ..Options::default() }
    }

    #[test]
    fn an_unencrypted_remote_server_requires_insecure_http() {
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
    fn a_client_certificate_requires_tls() {
        let identity = Some(IdentityFiles::Pem { certificate: "a.crt".into(), key: "a.key".into() });
        let refused = parse(&Options { identity, ..options("http://127.0.0.1:7070") }).unwrap_err();
        assert!(refused.contains("requires TLS"), "{refused}");
    }
}
