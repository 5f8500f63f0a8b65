//! What another machine needs to join this server: an address that it reaches, a token, and the server's authority.

use crate::{
    config::{ServeConfig, TlsConfig, addresses::host_and_port},
    http::{ingress::Ingress, tls::addresses},
};
use lockstep_web::machines::Join;
use std::net::IpAddr;

/// `seen` is the address by which the reader of the page sees the server.
pub(crate) fn commands(
    config: &ServeConfig,
    ingress: &Ingress,
    seen: &str,
    known: &[String],
    is_admin: bool,
) -> Join {
    let (ip, port) = (config.listen.ip(), config.listen.port());
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    // Where a specific address is listened on, loopback is not.
    let own_host = if ip.is_unspecified() || ip.is_loopback() { "127.0.0.1".into() } else { host(ip) };
    Join {
        server_url: reachable(ingress, seen, ip, scheme, port),
        own_url: format!("{scheme}://{own_host}:{port}"),
        port,
        name: free_name(known),
        with_token: !config.no_auth,
        with_ca: matches!(config.tls, Some(TlsConfig::OwnCa)),
        data_dir: is_admin.then(|| config.data_dir.display().to_string()),
    }
}

/// `node-1`, or the next of them that no machine is called.
fn free_name(known: &[String]) -> String {
    let mut names = (1..).map(|number: usize| format!("node-{number}"));
    names.find(|name| !known.contains(name)).unwrap_or_default()
}

/// Whether the host of a URL is whatever machine it is used on: loopback, or no address at all (`0.0.0.0`), which browsers take for that.
fn is_local(url: &str) -> bool {
    let authority = url.split("://").last().unwrap_or_default();
    let Some((host, _)) = host_and_port(authority) else { return false };
    let is_name = host.eq_ignore_ascii_case("localhost") || host.to_ascii_lowercase().ends_with(".localhost");
    let ip = host.parse::<IpAddr>().map(|ip| ip.to_canonical());
    is_name || ip.is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
}

fn host(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}

/// The address at which another machine reaches the server: the public one, the one that the reader uses, or, where the reader is on
/// the server's machine, one of the machine's own. None where the server listens on loopback alone.
fn reachable(ingress: &Ingress, seen: &str, ip: IpAddr, scheme: &str, port: u16) -> Option<String> {
    // A public URL, or a tunnel or a proxy that leads there from elsewhere by a name of its own.
    if !is_local(seen) {
        return Some(seen.to_owned());
    }
    if ip.is_loopback() {
        return None;
    }
    let own = if ip.is_unspecified() {
        // An address that came after the server's certificate was made is refused by those who check it.
        let is_named = |ip: &IpAddr| ingress.is_named(&ip.to_string());
        addresses().into_iter().min_by_key(|ip| (!is_named(ip), ip.is_ipv6()))?
    } else {
        ip
    };
    Some(format!("{scheme}://{}:{port}", host(own)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_means_another_machine_on_each_is_none_to_join_by() {
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
