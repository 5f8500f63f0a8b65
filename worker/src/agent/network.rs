//! The address by which ranks of other machines reach the ranks here.

use super::{AgentError, Options};
use crate::host::{
    interfaces::{interfaces, speed_mbits},
    network_id,
};
use lockstep_protocol::agent::Machine;
use std::net::IpAddr;

/// What the agent was given or chooses.
#[derive(Debug, Clone)]
pub(super) struct Network {
    advertised: Option<String>,
    interface: Option<String>,
}

impl Network {
    /// # Errors
    /// The interface is not there or has no address.
    pub(super) fn of(options: &Options) -> Result<Self, AgentError> {
        let Options { advertise, interface, .. } = options;
        if let Some(address) = advertise
            && address.contains(|c: char| !c.is_ascii_alphanumeric() && !".-:%".contains(c))
        {
            return Err(AgentError::Wrong(format!(
                "--advertise {address}: give an address or a name of this machine, without a port, such as 10.0.0.7"
            )));
        }
        let advertised = match (advertise, interface) {
            (Some(address), _) => Some(address.clone()),
            (None, Some(name)) => Some(address_of(name).map_err(AgentError::Wrong)?.to_string()),
            (None, None) => None,
        };
        Ok(Self { advertised, interface: interface.clone() })
    }

    /// Adds what others need to know to the machine's description; `local` is this end of the connection to the server.
    pub(super) fn describe(&self, machine: &mut Machine, local: Option<IpAddr>) {
        machine.address = self.advertised.clone().or_else(|| local.map(|ip| ip.to_string()));
        machine.interface = self.interface.clone().or_else(|| {
            let address: IpAddr = machine.address.as_deref()?.parse().ok()?;
            let all = interfaces().ok()?;
            all.into_iter().find(|(_, of)| *of == address).map(|(name, _)| name)
        });
        machine.interface_mbits = machine.interface.as_deref().and_then(speed_mbits);
        machine.network_id = network_id();
    }
}

/// The address of an interface: IPv4 where it has both kinds, and none that is valid on its own link alone.
fn address_of(name: &str) -> Result<IpAddr, String> {
    let all =
        interfaces().map_err(|e| format!("--interface {name}: the interfaces cannot be listed: {e}"))?;
    let is_link_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let of_it = all.iter().filter(|(of, ip)| of == name && !is_link_local(ip)).map(|(_, ip)| *ip);
    of_it.min_by_key(IpAddr::is_ipv6).ok_or_else(|| {
        let mut names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.dedup();
        format!("--interface {name}: no such interface has an address; there are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_found_with_its_address_and_another_is_not() {
        assert_eq!(address_of("lo").unwrap(), IpAddr::from([127, 0, 0, 1]));
        let error = address_of("none-such").unwrap_err();
        assert!(error.contains("--interface none-such") && error.contains("lo"), "{error}");
    }

    #[test]
    fn what_is_given_comes_before_the_connection_to_the_server() {
        let mut machine = crate::agent::machine::describe(std::path::Path::new("/"));
        let loopback = Some(IpAddr::from([127, 0, 0, 1]));
        Network { advertised: None, interface: None }.describe(&mut machine, loopback);
        assert_eq!(
            (machine.address.as_deref(), machine.interface.as_deref()),
            (Some("127.0.0.1"), Some("lo"))
        );
        assert!(machine.network_id.is_some_and(|id| id.contains("net:")));
        let mut machine = crate::agent::machine::describe(std::path::Path::new("/"));
        let given = Network { advertised: Some("node-7".into()), interface: Some("ib0".into()) };
        given.describe(&mut machine, loopback);
        assert_eq!((machine.address.as_deref(), machine.interface.as_deref()), (Some("node-7"), Some("ib0")));
    }
}
