//! Rank tables of MindSpore and HCCL: JSON files that assign ranks to devices of machines. Supports the format with `server_list`, and the
//! older format with `group_list`.

use super::{file, usage_error};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;
use std::path::Path;

/// Maximum size of a file in bytes. A table of 4096 devices has about half of this size.
const TABLE_BYTES: u64 = 1 << 20;
/// Maximum number of devices in a table. MindSpore's own tools write tables of 2, 8 and 16 devices.
pub(crate) const MAX_DEVICES: usize = 4096;
/// Maximum length of a machine's name: the limit of DNS names.
pub(crate) const MAX_NAME_BYTES: usize = 253;

/// The assignment of ranks to machines and devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankTable {
    /// The machines, in the table's order.
    pub(crate) machines: Vec<Machine>,
}

/// A machine of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Machine {
    /// `server_id`: the machine's address.
    pub(crate) address: String,
    /// The machine's devices, in the order of ranks.
    pub(crate) devices: Vec<Device>,
}

/// A device of a machine and the rank that runs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) rank: u32,
    /// `device_id`: the device's index on its machine.
    pub(crate) device: u32,
}

impl RankTable {
    /// Reads a rank table from a file.
    ///
    /// # Errors
    /// Exit status 2. The message names the field with the mistake.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let too_large = "is larger than 1 MiB, the maximum size of a rank table";
        let failed = |detail: String| usage_error(format!("the rank table {}: {detail}", path.display()));
        let bytes = file::read(path, TABLE_BYTES, too_large).map_err(failed)?;
        Self::parse(&bytes).map_err(failed)
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut json = serde_json::Deserializer::from_slice(bytes);
        let table: Table = serde_path_to_error::deserialize(&mut json).map_err(|e| e.to_string())?;
        if let Some(status) = table.status.filter(|status| status != "completed") {
            return Err(format!(
                "status: is {status:?} and must be \"completed\": the table is not finished"
            ));
        }
        let instances: Vec<Instance> = match (table.server_list, table.group_list) {
            (Some(servers), _) => servers.into_iter().flat_map(Server::instances).collect(),
            (None, Some(groups)) => groups.into_iter().flat_map(|group| group.instance_list).collect(),
            (None, None) => return Err("has neither server_list nor group_list".into()),
        };
        Self::from_instances(instances)
    }

    fn from_instances(instances: Vec<Instance>) -> Result<Self, String> {
        let count = instances.len();
        if count == 0 || count > MAX_DEVICES {
            return Err(format!("has {count} devices; a rank table has 1 to {MAX_DEVICES}"));
        }
        let mut ranks: Vec<u32> = instances.iter().map(|instance| instance.rank_id).collect();
        ranks.sort_unstable();
        match (0..).zip(ranks).find(|(expected, rank)| expected != rank) {
            Some((expected, rank)) if rank < expected => {
                return Err(format!("rank_id: rank {rank} is in the table twice"));
            }
            Some((missing, _)) => {
                return Err(format!(
                    "rank_id: rank {missing} is missing; {count} devices must have ranks 0 to {}",
                    count - 1
                ));
            }
            None => {}
        }
        let mut machines = Vec::<Machine>::new();
        for Instance { rank_id: rank, server_id: address, devices: [TableDevice { device_id: device }] } in
            instances
        {
            let found = machines.iter().position(|machine| machine.address == address);
            let index = found.unwrap_or(machines.len());
            if found.is_none() {
                machines.push(Machine { address, devices: Vec::new() });
            }
            let Machine { address, devices } = &mut machines[index];
            if devices.iter().any(|other| other.device == device) {
                return Err(format!("device_id: device {device} of {address} is in the table twice"));
            }
            devices.push(Device { rank, device });
        }
        machines.iter_mut().for_each(|machine| machine.devices.sort_by_key(|device| device.rank));
        Ok(Self { machines })
    }

    /// Returns the total number of ranks.
    pub(crate) fn world_size(&self) -> u32 {
        self.machines.iter().map(|machine| machine.devices.len() as u32).sum()
    }

    /// Returns the machine of a rank, and the rank's index among the ranks of this machine.
    pub(crate) fn machine_of(&self, rank: u32) -> Option<(&Machine, u32)> {
        let local_index = |machine: &Machine| machine.devices.iter().position(|device| device.rank == rank);
        self.machines.iter().find_map(|machine| Some((machine, local_index(machine)? as u32)))
    }
}

/// The fields of a file that are used.
#[derive(Deserialize)]
struct Table {
    status: Option<String>,
    server_list: Option<Vec<Server>>,
    group_list: Option<Vec<Group>>,
}

#[derive(Deserialize)]
struct Server {
    #[serde(deserialize_with = "address")]
    server_id: String,
    device: Vec<RankedDevice>,
}

#[derive(Deserialize)]
struct RankedDevice {
    #[serde(deserialize_with = "number")]
    rank_id: u32,
    #[serde(deserialize_with = "number")]
    device_id: u32,
}

#[derive(Deserialize)]
struct TableDevice {
    #[serde(deserialize_with = "number")]
    device_id: u32,
}

/// A group of the older format.
#[derive(Deserialize)]
struct Group {
    instance_list: Vec<Instance>,
}

/// A rank of the older format, with its machine and one device.
#[derive(Deserialize)]
struct Instance {
    #[serde(deserialize_with = "number")]
    rank_id: u32,
    #[serde(deserialize_with = "address")]
    server_id: String,
    devices: [TableDevice; 1],
}

impl Server {
    fn instances(self) -> impl Iterator<Item = Instance> {
        let Self { server_id, device } = self;
        device.into_iter().map(move |RankedDevice { rank_id, device_id }| Instance {
            rank_id,
            server_id: server_id.clone(),
            devices: [TableDevice { device_id }],
        })
    }
}

/// Reads a number. Tables usually contain it as a text; a JSON number is accepted too.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let number = value.as_str().map_or_else(|| value.as_u64(), |text| text.trim().parse().ok());
    let number = number.and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| D::Error::custom(format_args!("is {value} and must be a whole number from 0")))
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    let address = text.trim();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    if (1..=MAX_NAME_BYTES).contains(&address.len())
        && !address.starts_with('-')
        && address.chars().all(is_plain)
    {
        return Ok(address.to_owned());
    }
    Err(D::Error::custom(format_args!(
        "must be a machine's name or address of at most {MAX_NAME_BYTES} characters"
    )))
}

#[cfg(test)]
mod tests;
