//! The names and addresses of this machine, for which the server makes its own certificate.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
};

/// A machine with more, such as one of many containers, is not reached by each of them.
const MOST_ADDRESSES: usize = 32;

/// What others may call this machine, loopback included.
pub(super) fn of_this_machine() -> Vec<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let mut names = Vec::new();
    let short = host.split('.').next().unwrap_or_default();
    for name in [host.as_str(), short, "localhost"] {
        if is_name(name) && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
        }
    }
    names.extend(["127.0.0.1", "::1"].map(str::to_owned));
    names.extend(addresses().iter().map(ToString::to_string));
    names
}

/// The addresses at which other machines may reach this one, that of the default route first; those of one link alone are left out.
pub fn addresses() -> Vec<IpAddr> {
    let v4 = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let v6 = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let mut found: Vec<IpAddr> = Vec::new();
    for address in local_v4(&v4).into_iter().map(IpAddr::V4).chain(local_v6(&v6).into_iter().map(IpAddr::V6))
    {
        if !address.is_loopback() && !found.contains(&address) {
            found.push(address);
        }
    }
    if let Some(outward) = outward().and_then(|address| found.iter().position(|f| *f == address)) {
        // Those of bridges for containers come before it in the tables, and no other machine reaches them.
        found[..=outward].rotate_right(1);
    }
    found.truncate(MOST_ADDRESSES);
    found
}

/// The address from which this machine speaks to others. Nothing is sent: the system only looks at its routes to an address
/// that is for documentation (RFC 5737).
fn outward() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(203, 0, 113, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// In the routing table of IPv4, `/32 host LOCAL` below an address says that it is this machine's.
fn local_v4(trie: &str) -> Vec<Ipv4Addr> {
    let mut last: Option<Ipv4Addr> = None;
    let mut found = Vec::new();
    for line in trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last.take());
        }
    }
    found
}

/// 32 hexadecimal digits, then numbers and the interface.
fn local_v6(table: &str) -> Vec<Ipv6Addr> {
    let read =
        |line: &str| u128::from_str_radix(line.split_whitespace().next()?, 16).ok().map(Ipv6Addr::from);
    table.lines().filter_map(read).filter(|address| !address.is_unicast_link_local()).collect()
}

/// Whether a certificate can be for it: a DNS name (perhaps with `*` as its first label) or an address.
pub(super) fn is_name(name: &str) -> bool {
    if name.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = name.strip_prefix("*.").unwrap_or(name);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_in_the_systems_tables() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.2.0\n        /24 link UNICAST\n     |-- 10.0.2.15\n        \
                    /32 host LOCAL\n     |-- 10.0.2.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n";
        assert_eq!(local_v4(trie), [Ipv4Addr::new(10, 0, 2, 15), Ipv4Addr::LOCALHOST]);
        let table = "00000000000000000000000000000001 01 80 10 80       lo\n\
                     fe800000000000000000000000000001 02 40 20 80     eth0\n\
                     20010db8000000000000000000000007 02 40 00 80     eth0\nnonsense\n";
        assert_eq!(local_v6(table), [Ipv6Addr::LOCALHOST, "2001:db8::7".parse::<Ipv6Addr>().unwrap()]);
    }

    #[test]
    fn names_are_dns_names_or_addresses() {
        for name in ["a", "lockstep.example.org", "*.lab.example", "10.0.0.1", "::1", "node_1"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "a..b", "-a", "a-", "a b", "*", "a.*.b", "\u{e9}.org", "https://a", &"a".repeat(64)]
        {
            assert!(!is_name(name), "{name}");
        }
    }
}
