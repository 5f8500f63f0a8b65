//! Finds ranks in a rank table.

use super::{LaunchedRank, Rendezvous, port_for, read_port};
use crate::cli::rank_table::{Machine, RankTable};
use std::fmt::Write as _;

/// Name of the rank table in messages.
pub(in super::super) const RANK_TABLE: &str = "the rank table";

/// The ranks of one machine, which this process starts.
pub(in super::super) struct MachineRanks {
    pub(in super::super) world_size: u32,
    /// Each rank, with the index of its device.
    pub(in super::super) local: Vec<(u32, u32)>,
    pub(in super::super) rendezvous: Rendezvous,
}

/// Returns one rank of the table. Ranks connect to `MASTER_ADDR` and `MASTER_PORT`, or to rank 0's machine and a port that is derived from
/// the table.
///
/// # Errors
/// The table has no such rank, or a variable is invalid.
pub(in super::super) fn rank_of_table(
    table: &RankTable,
    rank: u32,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<LaunchedRank, String> {
    let world_size = table.world_size();
    let (machine, local_rank) = table
        .machine_of(rank)
        .ok_or_else(|| format!("{RANK_TABLE} has no rank {rank}: its ranks are 0 to {}", world_size - 1))?;
    let rendezvous = find_rendezvous(table, variable)?;
    let local_ranks = machine.devices.len() as u32;
    let device = Some(machine.devices[local_rank as usize].device);
    let launcher = RANK_TABLE;
    Ok(LaunchedRank { launcher, rank, world_size, local_rank, local_ranks, device, rendezvous })
}

/// Returns the ranks of the machine `node`, an index from 0 in the table's order.
///
/// # Errors
/// The table has no such machine, or a variable is invalid.
pub(in super::super) fn ranks_of_machine(
    table: &RankTable,
    node: usize,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<MachineRanks, String> {
    let machine: &Machine = table.machines.get(node).ok_or_else(|| {
        format!("--node {node}: {RANK_TABLE} has {} machines, which are counted from 0", table.machines.len())
    })?;
    let rendezvous = find_rendezvous(table, variable)?;
    let local = machine.devices.iter().map(|device| (device.rank, device.device)).collect();
    Ok(MachineRanks { world_size: table.world_size(), local, rendezvous })
}

fn find_rendezvous(
    table: &RankTable,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<Rendezvous, String> {
    // All machines derive the same port and secret from this text.
    let mut table_text = String::new();
    for machine in &table.machines {
        let _ = write!(table_text, "{}{:?};", machine.address, machine.devices);
    }
    let given = variable("MASTER_ADDR").map(|addr| addr.trim().to_owned()).filter(|addr| !addr.is_empty());
    let addr = match (given, table.machine_of(0)) {
        (Some(addr), _) => addr,
        (None, _) if table.machines.len() == 1 => "127.0.0.1".into(),
        (None, Some((machine, _))) => machine.address.clone(),
        (None, None) => return Err(format!("{RANK_TABLE} has no rank 0")),
    };
    let port = read_port(variable, "MASTER_PORT")?.unwrap_or_else(|| port_for(&table_text));
    Ok(Rendezvous::new(variable, &format!("{RANK_TABLE}/{table_text}"), addr, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::rank_table::Device;

    fn table() -> RankTable {
        let machine = |address: &str, devices: &[(u32, u32)]| Machine {
            address: address.into(),
            devices: devices.iter().map(|&(rank, device)| Device { rank, device }).collect(),
        };
        RankTable {
            machines: vec![machine("10.0.0.1", &[(1, 4), (3, 5)]), machine("10.0.0.2", &[(0, 7), (2, 6)])],
        }
    }

    #[test]
    fn ranks_connect_to_the_machine_of_rank_0() {
        let unset = |_: &str| None;
        let (zero, three) =
            (rank_of_table(&table(), 0, &unset).unwrap(), rank_of_table(&table(), 3, &unset).unwrap());
        assert_eq!((zero.rendezvous.addr.as_str(), &zero.rendezvous), ("10.0.0.2", &three.rendezvous));
        assert_eq!((three.local_rank, three.local_ranks, three.device), (1, 2, Some(5)));
        let first = ranks_of_machine(&table(), 0, &unset).unwrap();
        assert_eq!((first.local, first.world_size), (vec![(1, 4), (3, 5)], 4));
        assert_eq!(first.rendezvous, zero.rendezvous);
        let with_port = |name: &str| (name == "MASTER_PORT").then(|| "4000".to_owned());
        assert_eq!(rank_of_table(&table(), 0, &with_port).unwrap().rendezvous.port, 4000);
        assert!(rank_of_table(&table(), 4, &unset).unwrap_err().contains("ranks are 0 to 3"));
        assert!(ranks_of_machine(&table(), 2, &unset).err().unwrap().contains("has 2 machines"));
    }
}
