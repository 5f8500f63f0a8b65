//! The parts of the commands with which another machine joins this server: the server's URL for that machine, a token, and the server's
//! CA certificate.

use crate::{
    config::{ServeConfig, TlsConfig, addresses::host_and_port},
    http::{peer::PeerPolicy, tls::addresses},
};
use lockstep_web::machines::Join;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Returns the parts of the commands to join. `browser_url` is the server's URL in the browser of the page's reader.
pub(crate) fn join_parts(
    config: &ServeConfig,
    peer_policy: &PeerPolicy,
    browser_url: &str,
    known_names: &[String],
    is_admin: bool,
) -> Join {
    let (ip, port) = (config.listen.ip(), config.listen.port());
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    // If the server listens on a specific address, loopback does not work.
    let own_ip = if ip.is_unspecified() || ip.is_loopback() { Ipv4Addr::LOCALHOST.into() } else { ip };
    Join {
        server_url: reachable_url(peer_policy, browser_url, ip, scheme, port),
        own_url: format!("{scheme}://{}", SocketAddr::new(own_ip, port)),
        port,
        name: free_name(known_names),
        needs_token: !config.no_auth,
        has_own_ca: matches!(config.tls, Some(TlsConfig::OwnCa)),
        data_dir: is_admin.then(|| config.data_dir.display().to_string()),
    }
}

/// `node-1`, or the first such name that no machine has.
fn free_name(known_names: &[String]) -> String {
    let mut names = (1..).map(|number: usize| format!("node-{number}"));
    names.find(|name| !known_names.contains(name)).unwrap_or_default()
}

/// Whether the host of a URL means the machine on which the URL is used: loopback, or the unspecified address (`0.0.0.0`), which browsers
/// treat as loopback.
fn is_local(url: &str) -> bool {
    let authority = url.split("://").last().unwrap_or_default();
    let Some((host, _)) = host_and_port(authority) else { return false };
    let is_name = host.eq_ignore_ascii_case("localhost") || host.to_ascii_lowercase().ends_with(".localhost");
    let ip = host.parse::<IpAddr>().map(|ip| ip.to_canonical());
    is_name || ip.is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
}

/// Returns the URL at which another machine reaches the server: the URL in the reader's browser, or, if that URL is
/// local, a URL with one of the server's addresses; `None` if the server listens only on loopback.
fn reachable_url(
    peer_policy: &PeerPolicy,
    browser_url: &str,
    listen_ip: IpAddr,
    scheme: &str,
    port: u16,
) -> Option<String> {
    // The public URL, or the URL of a tunnel or proxy.
    if !is_local(browser_url) {
        return Some(browser_url.to_owned());
    }
    if listen_ip.is_loopback() {
        return None;
    }
    let reachable_ip = if listen_ip.is_unspecified() {
        // Prefers addresses that the server's certificate names. Clients refuse an address that was added after the certificate was issued.
        let is_named = |ip: &IpAddr| peer_policy.is_certified_as(&ip.to_string());
        addresses().into_iter().min_by_key(|ip| (!is_named(ip), ip.is_ipv6()))?
    } else {
        listen_ip
    };
    Some(format!("{scheme}://{}", SocketAddr::new(reachable_ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_are_local() {
        for url in [
            "http://127.0.0.1:7070",
            "http://127.1.2.3",
            "http://localhost:7070",
            "https://LOCALHOST",
            "http://lockstep.localhost:7070",
            "http://[::1]:7070",
            "http://[::ffff:127.0.0.1]:7070",
            "http://0.0.0.0:7070",
            "http://[::]:7070",
        ] {
            assert!(is_local(url), "{url}");
        }
        for url in [
            "http://10.0.0.1:7070",
            "https://lockstep.example.org",
            "http://[2001:db8::7]:7070",
            "http://gpu:7070",
        ] {
            assert!(!is_local(url), "{url}");
        }
    }
}
