//! The names and addresses of this machine, for the server's own certificate.

use rustls::pki_types::DnsName;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

/// Maximum number of addresses; further addresses are left out. A host of many containers has more, and most of them are addresses of
/// container bridges, which other machines cannot reach.
const MAX_ADDRESSES: usize = 32;

/// Names and addresses by which clients may reach this machine, including loopback.
pub(super) fn of_this_machine() -> Vec<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let mut names = Vec::new();
    let short = host.split('.').next().unwrap_or_default();
    for name in [host.as_str(), short, "localhost"] {
        if is_dns_name_or_address(name) && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
        }
    }
    names.extend(["127.0.0.1", "::1"].map(str::to_owned));
    names.extend(addresses().iter().map(ToString::to_string));
    names
}

/// The addresses at which other machines may reach this machine. The address of the default route comes first, and IPv4 addresses come
/// before IPv6 addresses. Link-local addresses are left out.
pub fn addresses() -> Vec<IpAddr> {
    let is_link_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut found: Vec<IpAddr> = Vec::new();
    for ip in interfaces.iter().map(if_addrs::Interface::ip) {
        if !ip.is_loopback() && !is_link_local(&ip) && !found.contains(&ip) {
            found.push(ip);
        }
    }
    // The system may list addresses of container bridges first, which other machines cannot reach.
    let default = default_route_address();
    found.sort_by_key(|ip| (Some(*ip) != default, ip.is_ipv6()));
    found.truncate(MAX_ADDRESSES);
    found
}

/// The address from which this machine connects to other machines. No packet is sent, because connecting a UDP socket only looks up the
/// route, here to an address that is reserved for documentation (RFC 5737).
fn default_route_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(203, 0, 113, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Whether a certificate can be issued for `name`: it is an address, or a DNS name, whose first label may be `*`.
pub(super) fn is_dns_name_or_address(name: &str) -> bool {
    let dns_name = name.strip_prefix("*.").unwrap_or(name);
    // Certificates have names without the final dot of the root domain.
    name.parse::<IpAddr>().is_ok() || (!name.ends_with('.') && DnsName::try_from(dns_name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_names_or_addresses() {
        for name in ["a", "lockstep.example.org", "*.lab.example", "10.0.0.1", "::1", "node_1"] {
            assert!(is_dns_name_or_address(name), "{name}");
        }
        for name in
            ["", "42", "a..b", "-a", "a-", "a b", "*", "a.*.b", "\u{e9}.org", "https://a", &"a".repeat(64)]
        {
            assert!(!is_dns_name_or_address(name), "{name}");
        }
    }
}
