//! The addresses of this machine's network interfaces.

use std::{io, net::IpAddr, path::Path};

/// NCCL's environment variable for the network interface to use.
pub const NCCL_INTERFACE_VARIABLE: &str = "NCCL_SOCKET_IFNAME";

/// The value of [`NCCL_INTERFACE_VARIABLE`] in this process's environment. `None` if it is empty or not set.
pub fn nccl_variable() -> Option<String> {
    std::env::var(NCCL_INTERFACE_VARIABLE).ok().filter(|value| !value.is_empty())
}

/// The first interface that a value of [`NCCL_INTERFACE_VARIABLE`] names, as NCCL reads it: `=eth1` names one interface, `eth` every interface
/// whose name begins with `eth`, and commas separate names. `None` for `^eth`, which excludes interfaces and chooses none.
///
/// # Errors
/// No interface with such a name has an address. The error is a sentence.
pub fn select_interface(all: &[(String, IpAddr)], value: &str) -> Result<Option<(String, IpAddr)>, String> {
    if value.starts_with('^') {
        return Ok(None);
    }
    let (exact, list) = value.strip_prefix('=').map_or((false, value), |list| (true, list));
    let is_named =
        |name: &str| list.split(',').any(|part| if exact { name == part } else { name.starts_with(part) });
    first_address(all, is_named).map(Some).map_err(|why| format!("{NCCL_INTERFACE_VARIABLE}={value}: {why}"))
}

/// The first address of the interfaces for which `is_meant` is true: IPv4 if there is one. Addresses that are valid only on their own
/// link are left out.
///
/// # Errors
/// No such interface has an address. The sentence names the interfaces that have one.
pub fn first_address(
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

/// Whether an address is valid only on its own link.
pub fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Speed of an interface in Mbit/s, as its driver reports it (sysfs-class-net). `None` for virtual interfaces and for links that are
/// down.
pub fn speed_mbits(interface: &str) -> Option<u32> {
    speed_below(Path::new("/sys/class/net"), interface)
}

fn speed_below(folder: &Path, interface: &str) -> Option<u32> {
    // The kernel does not allow such names.
    if interface.is_empty() || interface == ".." || interface.contains('/') {
        return None;
    }
    let text = std::fs::read_to_string(folder.join(interface).join("speed")).ok()?;
    // An unknown speed is -1.
    text.trim().parse().ok().filter(|mbits| *mbits > 0 && *mbits < u32::MAX)
}

/// Each interface's name with each of its addresses, as getifaddrs(3) lists them.
///
/// # Errors
/// The system does not list the interfaces.
pub fn interfaces() -> io::Result<Vec<(String, IpAddr)>> {
    let all = if_addrs::get_if_addrs()?;
    Ok(all.into_iter().map(|interface| (interface.name.clone(), interface.ip())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_is_the_driver_s_or_unknown() {
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
    fn nccl_s_variable_selects_exact_names_or_prefixes_or_excludes() {
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
        let named = |value: &str| select_interface(&all, value).map(|found| found.map(|(name, _)| name));
        for (value, name) in [
            ("=eth1", "eth1"),
            ("eth", "eth0"),
            ("eth10,ib", "eth10"),
            ("ib", "ib0"),
            ("=ib0,eth10", "eth10"),
        ] {
            assert_eq!(named(value), Ok(Some(name.into())), "{value}");
        }
        assert_eq!(select_interface(&all, "=eth1"), Ok(Some(("eth1".into(), ip("10.1.0.5")))));
        assert_eq!(named("^eth0"), Ok(None));
        assert_eq!(named("^=eth0"), Ok(None));
        let error = named("=eth").unwrap_err();
        assert!(
            error.contains("NCCL_SOCKET_IFNAME==eth: ") && error.contains("lo, eth0, eth1, eth10, ib0"),
            "{error}"
        );
    }
}
