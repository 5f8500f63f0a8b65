//! The address at which ranks of other machines reach the ranks of this machine.

use super::{AgentError, Options};
use lockstep_host::{
    interfaces::{first_address, interfaces, select_interface, speed_mbits},
    nccl_variable, network_id,
};
use lockstep_protocol::agent::{Machine, RankNetwork};
use std::net::IpAddr;

/// The address from the options, or chosen by the agent.
#[derive(Debug, Clone)]
pub(super) struct Network {
    advertised: Option<String>,
    interface: Option<String>,
    /// Where the address comes from, for messages.
    pub(super) named_by: &'static str,
    /// The last logged description of the address.
    logged: Option<String>,
}

impl Network {
    /// # Errors
    /// The interface does not exist or has no address.
    pub(super) fn of(options: &Options) -> Result<Self, AgentError> {
        let variable = nccl_variable();
        Self::choose(options.advertise.as_deref(), options.interface.as_deref(), variable.as_deref())
            .map_err(AgentError::InvalidOptions)
    }

    /// `variable` is the value of NCCL_SOCKET_IFNAME.
    fn choose(
        advertise: Option<&str>,
        interface: Option<&str>,
        variable: Option<&str>,
    ) -> Result<Self, String> {
        if let Some(address) = advertise {
            if address.contains(|c: char| !c.is_ascii_alphanumeric() && !".-:%".contains(c)) {
                return Err(format!(
                    "--advertise {address}: give an address or a name of this machine, without a port, such as 10.0.0.7"
                ));
            }
            let (advertised, interface) = (Some(address.to_owned()), interface.map(str::to_owned));
            return Ok(Self { advertised, interface, named_by: "named by --advertise", logged: None });
        }
        let all = || interfaces().map_err(|e| format!("the network interfaces cannot be listed: {e}"));
        let found = match (interface, variable) {
            (Some(name), _) => {
                let found = first_address(&all()?, |listed| listed == name);
                Some((found.map_err(|why| format!("--interface {name}: {why}"))?, "named by --interface"))
            }
            (None, Some(value)) => {
                select_interface(&all()?, value)?.map(|found| (found, "named by NCCL_SOCKET_IFNAME"))
            }
            (None, None) => None,
        };
        let (advertised, interface, named_by) = match found {
            Some(((name, ip), named_by)) => (Some(ip.to_string()), Some(name), named_by),
            None => (None, None, "from the route to the server"),
        };
        Ok(Self { advertised, interface, named_by, logged: None })
    }

    /// Adds the facts about the address to the machine's description. `local` is the local address of the connection
    /// to the server. The log has a line for each new address.
    pub(super) fn describe(&mut self, machine: &mut Machine, local: Option<IpAddr>) {
        machine.address = self.advertised.clone().or_else(|| local.map(|ip| ip.to_string()));
        machine.interface = self.interface.clone().or_else(|| {
            let address: IpAddr = machine.address.as_deref()?.parse().ok()?;
            let all = interfaces().ok()?;
            all.into_iter().find(|(_, ip)| *ip == address).map(|(name, _)| name)
        });
        machine.interface_mbits = machine.interface.as_deref().and_then(speed_mbits);
        machine.network_id = network_id();
        let Some(address) = machine.address.clone() else { return };
        let named_by = Some(self.named_by.to_owned());
        let words = RankNetwork { address, interface: machine.interface.clone(), named_by }.in_words();
        if self.logged.as_ref() != Some(&words) {
            tracing::info!("ranks listen at {words}");
            self.logged = Some(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_with_an_address_is_found_and_others_are_refused() {
        let found = Network::choose(None, Some("lo"), None).unwrap();
        assert_eq!(found.advertised.as_deref(), Some("127.0.0.1"));
        let error = Network::choose(None, Some("none-such"), None).unwrap_err();
        assert!(error.contains("--interface none-such") && error.contains("lo"), "{error}");
    }

    #[test]
    fn options_precede_nccl_socket_ifname_which_precedes_the_route() {
        let loopback = Some(IpAddr::from([127, 0, 0, 1]));
        let described = |advertise, interface, variable| {
            let mut machine = crate::agent::machine::describe(std::path::Path::new("/"));
            let mut network = Network::choose(advertise, interface, variable).unwrap();
            network.describe(&mut machine, loopback);
            assert!(machine.network_id.is_some_and(|id| id.contains("net:")));
            network.logged.unwrap()
        };
        for (advertise, interface, variable, logged) in [
            (None, None, None, "127.0.0.1 (lo), from the route to the server"),
            (None, None, Some("^lo"), "127.0.0.1 (lo), from the route to the server"),
            (None, None, Some("=lo"), "127.0.0.1 (lo), named by NCCL_SOCKET_IFNAME"),
            (None, Some("lo"), Some("=none-such"), "127.0.0.1 (lo), named by --interface"),
            (Some("node-7"), None, Some("=none-such"), "node-7, named by --advertise"),
            (Some("node-7"), Some("ib0"), None, "node-7 (ib0), named by --advertise"),
        ] {
            assert_eq!(described(advertise, interface, variable), logged);
        }
        let error = Network::choose(None, None, Some("=none-such")).unwrap_err();
        assert!(error.starts_with("NCCL_SOCKET_IFNAME==none-such: no such interface"), "{error}");
    }
}
