//! Facts on which the machines of a job must agree, and the address at which other machines reach this machine.

use lockstep_host::{
    NCCL_INTERFACE_VARIABLE, boot_id, cores,
    gpu::{
        devices::{self, Usable},
        libraries::{Libraries, Library},
    },
    hostname,
    interfaces::{interfaces, is_link_local, select_interface},
    network_id,
};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    net::{IpAddr, UdpSocket},
};

/// The environment variable in which sshd passes a session's client address and port, then this machine's address
/// and port.
const SSH_CONNECTION: &str = "SSH_CONNECTION";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub hostname: String,
    /// Equal in two [`Facts`] of the same machine.
    pub network_id: String,
    /// The address to which other machines connect.
    pub address: IpAddr,
    /// The interface with this address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    pub cores: u32,
    /// The names of the GPUs that ranks can use.
    pub gpus: Vec<String>,
    /// The UUIDs of these GPUs.
    pub gpu_ids: Vec<String>,
    /// The version of NVIDIA's kernel driver, if there is one.
    pub driver: Option<String>,
    /// The version of NCCL, if it was found.
    pub nccl: Option<String>,
}

impl Facts {
    /// Determines the facts, using this process's environment variables.
    ///
    /// # Errors
    /// The machine has no address, or its interfaces cannot be listed.
    pub fn find() -> Result<Self, String> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let all = interfaces().map_err(|e| format!("the network interfaces cannot be listed: {e}"))?;
        let address = find_address(
            &all,
            variable(NCCL_INTERFACE_VARIABLE).as_deref(),
            variable(SSH_CONNECTION).as_deref(),
            address_of_route,
        )?;
        let libraries = Libraries::find();
        let driver =
            fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| version_in(&text));
        let gpus = devices::usable(None).map_or_else(|_| Vec::new(), |Usable { gpus, .. }| gpus);
        Ok(Self {
            hostname: hostname(),
            network_id: network_id().unwrap_or_else(boot_id),
            address,
            interface: all.into_iter().find(|(_, ip)| *ip == address).map(|(name, _)| name),
            cores: cores(),
            gpu_ids: gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            gpus: gpus.into_iter().map(|gpu| gpu.name).collect(),
            driver,
            nccl: libraries.get(Library::Nccl).and_then(|library| library.version().ok()),
        })
    }
}

/// The address of the interface that `nccl_interface` names. If it names none, the first usable address: the address to which SSH
/// connected, the default route's address, or any other address. If no address is usable, SSH's address.
fn find_address(
    all: &[(String, IpAddr)],
    nccl_interface: Option<&str>,
    ssh_connection: Option<&str>,
    address_of_route: impl Fn() -> io::Result<IpAddr>,
) -> Result<IpAddr, String> {
    if let Some((_, ip)) = nccl_interface.map_or(Ok(None), |value| select_interface(all, value))? {
        return Ok(ip);
    }
    let by_ssh = ssh_connection.and_then(|text| text.split_whitespace().nth(2)?.parse::<IpAddr>().ok());
    let is_usable = |ip: &IpAddr| !ip.is_loopback() && !is_link_local(ip);
    if let Some(ip) = by_ssh.filter(|ip| is_usable(ip) && all.iter().any(|(_, own)| own == ip)) {
        return Ok(ip);
    }
    if let Some(ip) = address_of_route().ok().filter(is_usable) {
        return Ok(ip);
    }
    let first = all.iter().map(|(_, ip)| *ip).filter(is_usable).min_by_key(IpAddr::is_ipv6);
    first.or(by_ssh).ok_or_else(|| {
        format!(
            "this machine has no address that other machines can reach; name an interface with {NCCL_INTERFACE_VARIABLE}"
        )
    })
}

/// The source address of packets that leave the machine. No packet is sent.
fn address_of_route() -> io::Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // An address reserved for documentation.
    socket.connect("192.0.2.1:9")?;
    Ok(socket.local_addr()?.ip())
}

/// The version, such as `580.95.05`, in the driver's description of itself.
fn version_in(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_in_both_formats_of_the_driver_s_description() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.2.0";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)";
        assert_eq!(version_in(closed).as_deref(), Some("535.183.01"));
        assert_eq!(version_in(open).as_deref(), Some("580.95.05"));
        assert_eq!(version_in(""), None);
        assert_eq!(version_in("NVRM version: none"), None);
    }

    #[test]
    fn the_interface_precedes_the_ssh_address_which_precedes_the_route() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let all = [
            ("lo".to_owned(), ip("127.0.0.1")),
            ("eth0".to_owned(), ip("10.0.0.5")),
            ("eth1".to_owned(), ip("fe80::5")),
            ("eth1".to_owned(), ip("fd00::5")),
            ("eth1".to_owned(), ip("10.1.0.5")),
            ("eth10".to_owned(), ip("10.2.0.5")),
        ];
        let route = || Ok(ip("10.0.0.5"));
        let none = || Err(io::Error::other("no route"));
        let ssh = Some("10.2.0.1 50000 10.2.0.5 22");
        assert_eq!(find_address(&all, Some("=eth1"), ssh, route), Ok(ip("10.1.0.5")));
        assert_eq!(find_address(&all, Some("eth10,ib"), ssh, route), Ok(ip("10.2.0.5")));
        assert!(find_address(&all, Some("=eth"), ssh, route).unwrap_err().contains("lo, eth0, eth1, eth10"));
        assert_eq!(find_address(&all, Some("^eth0"), ssh, route), Ok(ip("10.2.0.5")));
        assert_eq!(find_address(&all, None, ssh, route), Ok(ip("10.2.0.5")));
        // Behind network address translation, sshd names an address that this machine does not have. A loopback
        // address is not reachable from other machines.
        assert_eq!(find_address(&all, None, Some("1.2.3.4 5 203.0.113.9 22"), route), Ok(ip("10.0.0.5")));
        assert_eq!(find_address(&all, None, Some("127.0.0.1 5 127.0.0.1 22"), route), Ok(ip("10.0.0.5")));
        assert_eq!(find_address(&all, None, None, none), Ok(ip("10.0.0.5")));
        assert_eq!(
            find_address(&all[..1], None, Some("127.0.0.1 5 127.0.0.1 22"), none),
            Ok(ip("127.0.0.1"))
        );
        assert!(find_address(&all[..1], None, None, none).is_err());
    }
}
