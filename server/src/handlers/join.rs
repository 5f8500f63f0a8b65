//! What another machine needs to join this server: an address that it reaches, a token, and the server's authority.

use crate::{app::App, config::TlsConfig, tls::addresses};
use lockstep_web::machines::Join;
use std::net::IpAddr;

/// `seen` is the address by which the reader of the page sees the server.
pub(super) fn commands(app: &App, seen: &str, is_admin: bool) -> Join {
    let config = &app.config;
    let (ip, port) = (config.listen.ip(), config.listen.port());
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    // Where a specific address is listened on, loopback is not.
    let own_host = if ip.is_unspecified() || ip.is_loopback() { "127.0.0.1".into() } else { host(ip) };
    Join {
        server_url: reachable(app, seen, ip, scheme, port),
        own_url: format!("{scheme}://{own_host}:{port}"),
        port,
        with_token: !config.no_auth,
        with_ca: matches!(config.tls, Some(TlsConfig::OwnCa)),
        data_dir: is_admin.then(|| config.data_dir.display().to_string()),
    }
}

fn host(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}

/// The address at which another machine reaches the server: the public one, the one that the reader uses, or, where the reader is on
/// the server's machine, one of the machine's own. None where the server listens on loopback alone.
fn reachable(app: &App, seen: &str, ip: IpAddr, scheme: &str, port: u16) -> Option<String> {
    if app.ingress.public_url.is_some() {
        return Some(seen.to_owned());
    }
    let seen_host = seen.split("://").last().unwrap_or_default();
    let seen_ip = seen_host.rsplit_once(':').map_or(seen_host, |(host, _)| host).trim_matches(['[', ']']);
    let is_local = seen_ip.eq_ignore_ascii_case("localhost")
        || seen_ip.parse::<IpAddr>().is_ok_and(|seen_ip| seen_ip.is_loopback());
    // A tunnel or a proxy leads there from elsewhere by a name of its own.
    if !is_local {
        return Some(seen.to_owned());
    }
    if ip.is_loopback() {
        return None;
    }
    let own = if ip.is_unspecified() {
        // An address that came after the server's certificate was made is refused by those who check it.
        let is_named = |ip: &IpAddr| app.ingress.is_named(&ip.to_string());
        addresses().into_iter().min_by_key(|ip| (!is_named(ip), ip.is_ipv6()))?
    } else {
        ip
    };
    Some(format!("{scheme}://{}:{port}", host(own)))
}
