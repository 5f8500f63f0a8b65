//! Rank tables of MindSpore and HCCL: JSON files that assign ranks to devices of machines. Supports the format with `server_list`, and the
//! older format with `group_list`.

use super::{file, usage_error};
use serde_json::Value;
use std::{collections::HashMap, fmt::Display, path::Path};

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
        let table: Value = serde_json::from_slice(bytes).map_err(|e| format!("is not JSON: {e}"))?;
        if let Some(status) = table.get("status").and_then(Value::as_str)
            && status != "completed"
        {
            return Err(format!(
                "status: is {status:?} and must be \"completed\": the table is not finished"
            ));
        }
        let mut entries = Entries::default();
        match (table.get("server_list"), table.get("group_list")) {
            (Some(_), _) => entries.add_servers(&table)?,
            (None, Some(_)) => entries.add_groups(&table)?,
            (None, None) => return Err("has neither server_list nor group_list".into()),
        }
        entries.finish()
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

/// The entries that have been read, and where the table names each rank and device (`server_list[0].device[1]`).
#[derive(Default)]
struct Entries {
    machines: Vec<Machine>,
    ranks: HashMap<u32, String>,
    devices: HashMap<(usize, u32), String>,
}

impl Entries {
    fn add_servers(&mut self, table: &Value) -> Result<(), String> {
        let servers = list_of(table, "server_list", "")?;
        check_count(table, "server_count", "server_list", "", servers.len())?;
        for (s, server) in servers.iter().enumerate() {
            let location = format!("server_list[{s}]");
            let address = address_of(server, &location)?;
            if self.machines.iter().any(|machine| machine.address == address) {
                return Err(format!("{location}.server_id: {address} is in the list twice"));
            }
            for (d, device) in list_of(server, "device", &location)?.iter().enumerate() {
                let location = format!("{location}.device[{d}]");
                let rank = number_of(device, "rank_id", &location)?;
                self.add_device(&address, rank, number_of(device, "device_id", &location)?, &location)?;
            }
        }
        Ok(())
    }

    /// Reads the older format: a list of ranks, each with its machine and one device.
    fn add_groups(&mut self, table: &Value) -> Result<(), String> {
        let groups = list_of(table, "group_list", "")?;
        check_count(table, "group_count", "group_list", "", groups.len())?;
        for (g, group) in groups.iter().enumerate() {
            let location = format!("group_list[{g}]");
            let instances = list_of(group, "instance_list", &location)?;
            check_count(group, "instance_count", "instance_list", &location, instances.len())?;
            for (i, instance) in instances.iter().enumerate() {
                let location = format!("{location}.instance_list[{i}]");
                let devices = list_of(instance, "devices", &location)?;
                let [device] = &devices[..] else {
                    return Err(format!(
                        "{location}.devices: has {} devices and must have one",
                        devices.len()
                    ));
                };
                let rank = number_of(instance, "rank_id", &location)?;
                let device = number_of(device, "device_id", &format!("{location}.devices[0]"))?;
                self.add_device(&address_of(instance, &location)?, rank, device, &location)?;
            }
        }
        Ok(())
    }

    fn add_device(&mut self, address: &str, rank: u32, device: u32, location: &str) -> Result<(), String> {
        if self.ranks.len() == MAX_DEVICES {
            return Err(format!("{location}: a rank table may have at most {MAX_DEVICES} devices"));
        }
        if let Some(first) = self.ranks.insert(rank, location.to_owned()) {
            return Err(format!("{location}.rank_id: rank {rank} is at {first} already"));
        }
        let found = self.machines.iter().position(|machine| machine.address == address);
        let machine = found.unwrap_or_else(|| {
            self.machines.push(Machine { address: address.to_owned(), devices: Vec::new() });
            self.machines.len() - 1
        });
        if let Some(first) = self.devices.insert((machine, device), location.to_owned()) {
            return Err(format!("{location}.device_id: device {device} of {address} is at {first} already"));
        }
        self.machines[machine].devices.push(Device { rank, device });
        Ok(())
    }

    fn finish(mut self) -> Result<RankTable, String> {
        let ranks = self.ranks.len() as u32;
        if ranks == 0 {
            return Err("has no device".into());
        }
        if let Some(missing) = (0..ranks).find(|rank| !self.ranks.contains_key(rank)) {
            return Err(format!(
                "rank_id: rank {missing} is missing; {ranks} devices must have ranks 0 to {}",
                ranks - 1
            ));
        }
        for machine in &mut self.machines {
            machine.devices.sort_by_key(|device| device.rank);
        }
        Ok(RankTable { machines: self.machines })
    }
}

/// Returns the path of a key of the object at `location`, which is empty for the table itself.
fn key_path(location: &str, key: &str) -> String {
    if location.is_empty() { key.to_owned() } else { format!("{location}.{key}") }
}

fn list_of<'a>(object: &'a Value, key: &str, location: &str) -> Result<&'a Vec<Value>, String> {
    match object.get(key) {
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(format!("{}: must be a list", key_path(location, key))),
        None => Err(format!("{}: is missing", key_path(location, key))),
    }
}

/// Parses a number. Tables usually contain it as a text; a JSON number is accepted too.
fn number_of(object: &Value, key: &str, location: &str) -> Result<u32, String> {
    let path = key_path(location, key);
    let invalid = |given: &dyn Display| format!("{path}: is {given} and must be a whole number from 0");
    match object.get(key) {
        Some(Value::String(text)) => text.trim().parse().map_err(|_| invalid(&format!("{text:?}"))),
        Some(Value::Number(number)) => {
            number.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| invalid(number))
        }
        Some(other) => Err(invalid(other)),
        None => Err(format!("{path}: is missing")),
    }
}

/// Checks that an optional count equals the length of its list.
fn check_count(object: &Value, key: &str, list: &str, location: &str, length: usize) -> Result<(), String> {
    if object.get(key).is_none() {
        return Ok(());
    }
    match number_of(object, key, location)? {
        count if count as usize == length => Ok(()),
        count => Err(format!(
            "{}: is {count}, but {} has {length}",
            key_path(location, key),
            key_path(location, list)
        )),
    }
}

fn address_of(object: &Value, location: &str) -> Result<String, String> {
    let text = match object.get("server_id") {
        Some(Value::String(text)) => text.trim(),
        Some(_) => return Err(format!("{location}.server_id: must be text, a machine's address")),
        None => return Err(format!("{location}.server_id: is missing")),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    if text.is_empty() || text.len() > MAX_NAME_BYTES || text.starts_with('-') || !text.chars().all(is_plain)
    {
        return Err(format!(
            "{location}.server_id: must be a machine's name or address of at most {MAX_NAME_BYTES} characters"
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests;
