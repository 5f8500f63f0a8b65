//! The addresses of this machine's network interfaces, as the kernel lists them (rtnetlink(7)).

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketType, netdevice::index_to_name, recv, send, socket,
};
use std::{io, net::IpAddr, path::Path};

/// NCCL's variable for the network interface that it is to use.
pub const NCCL_INTERFACE: &str = "NCCL_SOCKET_IFNAME";

const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// A request, for all of them.
const REQUEST_DUMP: u16 = 0x301;
/// Attributes: the other end's address on a point-to-point link, else this end's; and this end's.
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// `struct nlmsghdr` and `struct ifaddrmsg`.
const HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
/// The kernel sends at most so much at once.
const BUFFER: usize = 64 << 10;

/// NCCL's variable of this process's environment; none where it is empty, which names no interface.
pub fn nccl_variable() -> Option<String> {
    std::env::var(NCCL_INTERFACE).ok().filter(|value| !value.is_empty())
}

/// The interface that NCCL's variable in this process's environment names, with its address. None where the variable is not set, or only
/// excludes.
///
/// # Errors
/// No interface of such a name has an address; a sentence.
pub fn of_environment() -> Result<Option<(String, IpAddr)>, String> {
    let Some(value) = nccl_variable() else { return Ok(None) };
    let all = interfaces().map_err(|e| format!("the network interfaces cannot be listed: {e}"))?;
    of_variable(&all, &value)
}

/// The interface that a value of NCCL's variable names, as NCCL reads it: `=eth1` is that one alone, `eth` all that begin so, of several
/// names any. `^` excludes, which says nothing about which one it is: none then.
///
/// # Errors
/// No interface of such a name has an address; a sentence.
pub fn of_variable(all: &[(String, IpAddr)], value: &str) -> Result<Option<(String, IpAddr)>, String> {
    if value.starts_with('^') {
        return Ok(None);
    }
    let (exact, list) = value.strip_prefix('=').map_or((false, value), |list| (true, list));
    let is_named =
        |name: &str| list.split(',').any(|of| if exact { name == of } else { name.starts_with(of) });
    first_of(all, is_named).map(Some).map_err(|why| format!("{NCCL_INTERFACE}={value}: {why}"))
}

/// The first address of interfaces that are meant: IPv4 where they have both kinds, and none that is valid on its own link alone.
///
/// # Errors
/// None of them has one; the sentence names those that have.
pub fn first_of(
    all: &[(String, IpAddr)],
    is_meant: impl Fn(&str) -> bool,
) -> Result<(String, IpAddr), String> {
    let found = all.iter().filter(|(name, ip)| is_meant(name) && !is_link_local(ip));
    found.min_by_key(|(_, ip)| ip.is_ipv6()).cloned().ok_or_else(|| {
        let mut names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.dedup();
        format!("no such interface has an address; there are {}", names.join(", "))
    })
}

/// Valid on its own link alone.
pub fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Speed of an interface in Mbit/s, as its driver says (sysfs-class-net); none where it does not, as for virtual interfaces and for links
/// that are down.
pub fn speed_mbits(interface: &str) -> Option<u32> {
    speed_below(Path::new("/sys/class/net"), interface)
}

fn speed_below(folder: &Path, interface: &str) -> Option<u32> {
    // The kernel allows neither in a name.
    if interface.is_empty() || interface == ".." || interface.contains('/') {
        return None;
    }
    let text = std::fs::read_to_string(folder.join(interface).join("speed")).ok()?;
    // Unknown is -1.
    text.trim().parse().ok().filter(|mbits| *mbits > 0 && *mbits < u32::MAX)
}

/// Each interface's name with each of its addresses, in the kernel's order.
///
/// # Errors
/// The kernel does not say.
pub fn interfaces() -> io::Result<Vec<(String, IpAddr)>> {
    let netlink = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    let mut request = Vec::with_capacity(HEADER + ADDRESS_HEADER);
    request.extend(((HEADER + ADDRESS_HEADER) as u32).to_ne_bytes());
    request.extend(RTM_GETADDR.to_ne_bytes());
    request.extend(REQUEST_DUMP.to_ne_bytes());
    // Sequence number, port; then any family, any interface.
    request.resize(HEADER + ADDRESS_HEADER, 0);
    send(&netlink, &request, SendFlags::empty())?;
    let names = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let mut found = Vec::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        let (bytes, _) = recv(&netlink, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..bytes];
        while let Some((kind, body, after)) = message(rest) {
            match kind {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => return Err(io::Error::other("the kernel lists no addresses")),
                RTM_NEWADDR => {
                    if let Some((index, address)) = address(body)
                        && let Ok(name) = index_to_name(&names, index)
                    {
                        found.push((name, address));
                    }
                }
                _ => {}
            }
            rest = after;
        }
    }
}

/// Splits the first message off: its kind, its body, and what follows.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(HEADER..length)?;
    Some((kind, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Interface and address of an `RTM_NEWADDR`.
fn address(body: &[u8]) -> Option<(u32, IpAddr)> {
    let index = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
    let mut rest = body.get(ADDRESS_HEADER..)?;
    let mut found = None;
    while let (Some(length), Some(kind)) = (rest.get(..2), rest.get(2..4)) {
        let length = u16::from_ne_bytes(length.try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(kind.try_into().ok()?);
        let value = rest.get(4..length)?;
        let ip = match value.len() {
            4 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
            16 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            _ => None,
        };
        if kind == IFA_LOCAL || kind == IFA_ADDRESS && found.is_none() {
            found = ip.or(found);
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some((index, found?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_is_known_where_the_driver_says_one() {
        let folder = tempfile::tempdir().unwrap();
        for (name, speed) in [("fast", "100000\n"), ("down", "-1\n"), ("odd", "4294967295\n"), ("none", "")] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("speed"), speed).unwrap();
        }
        let speed = |name: &str| speed_below(folder.path(), name);
        assert_eq!(speed("fast"), Some(100_000));
        for unknown in ["down", "odd", "none", "not-there", "", "..", "fast/../fast"] {
            assert_eq!(speed(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn nccl_s_variable_names_exact_interfaces_prefixes_or_what_is_excluded() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let all = [
            ("lo".to_owned(), ip("127.0.0.1")),
            ("eth0".to_owned(), ip("10.0.0.5")),
            ("eth1".to_owned(), ip("fe80::5")),
            ("eth1".to_owned(), ip("fd00::5")),
            ("eth1".to_owned(), ip("10.1.0.5")),
            ("eth10".to_owned(), ip("10.2.0.5")),
            ("ib0".to_owned(), ip("fd01::5")),
        ];
        let named = |value: &str| of_variable(&all, value).map(|found| found.map(|(name, _)| name));
        for (value, name) in [
            ("=eth1", "eth1"),
            ("eth", "eth0"),
            ("eth10,ib", "eth10"),
            ("ib", "ib0"),
            ("=ib0,eth10", "eth10"),
        ] {
            assert_eq!(named(value), Ok(Some(name.into())), "{value}");
        }
        assert_eq!(of_variable(&all, "=eth1"), Ok(Some(("eth1".into(), ip("10.1.0.5")))));
        assert_eq!(named("^eth0"), Ok(None));
        assert_eq!(named("^=eth0"), Ok(None));
        let error = named("=eth").unwrap_err();
        assert!(
            error.contains("NCCL_SOCKET_IFNAME==eth: ") && error.contains("lo, eth0, eth1, eth10, ib0"),
            "{error}"
        );
    }

    #[test]
    fn loopback_is_there_and_bytes_that_end_early_are_no_message() {
        let all = interfaces().unwrap();
        assert!(all.contains(&("lo".to_owned(), IpAddr::from([127, 0, 0, 1]))), "{all:?}");
        assert_eq!(message(&[0; 3]), None);
        assert_eq!(message(&[255; HEADER]), None, "longer than what is there");
        assert_eq!(message(&[0; HEADER]), None, "shorter than its header");
        assert_eq!(address(&[0; ADDRESS_HEADER]), None);
        let cut = [&[0; ADDRESS_HEADER][..], &[8, 0, 2, 0, 10, 0]].concat();
        assert_eq!(address(&cut), None);
        let whole = [&[0, 0, 0, 0, 7, 0, 0, 0][..], &[8, 0, 2, 0, 10, 0, 0, 1]].concat();
        assert_eq!(address(&whole), Some((7, IpAddr::from([10, 0, 0, 1]))));
        let zero = [&[0; ADDRESS_HEADER][..], &[0, 0, 2, 0]].concat();
        assert_eq!(address(&zero), None, "no length, no progress");
    }
}
