//! Reads the environment variables of MindSpore's dynamic cluster, which `msrun` sets: a scheduler process and workers. Each worker is a
//! rank.

use super::{LaunchedRank, Rendezvous, check_rank, read_number, read_port, table::rank_of_table};
use crate::cli::{access::is_loopback, rank_table::RankTable};
use std::path::Path;

const LAUNCHER: &str = "MindSpore";

/// Whether this is the scheduler process, through which MindSpore's workers find each other. In Lockstep, ranks find each other through
/// rank 0.
pub(in super::super) fn is_scheduler(variable: impl Fn(&str) -> Option<String>) -> bool {
    variable("MS_ROLE").is_some_and(|role| role.trim() == "MS_SCHED")
}

/// Returns the rank of a worker. The rank's number is `MS_NODE_ID`, or `RANK_ID` if node ids are names. The rank's GPU is `DEVICE_ID`, or
/// is taken from the rank table in `RANK_TABLE_FILE`.
///
/// # Errors
/// A variable is missing or is not a number.
pub(super) fn detect(variable: &impl Fn(&str) -> Option<String>) -> Result<LaunchedRank, String> {
    let role = variable("MS_ROLE").unwrap_or_default();
    if role.trim() != "MS_WORKER" {
        return Err(format!("MS_ROLE={role:?}: Lockstep has workers (MS_WORKER) and no parameter servers"));
    }
    let missing = |name: &str| format!("MS_ROLE is MS_WORKER, but {name} is not set");
    let world_size = read_number(variable, "MS_WORKER_NUM")?.ok_or_else(|| missing("MS_WORKER_NUM"))?;
    let node_id = variable("MS_NODE_ID").and_then(|id| id.trim().parse().ok());
    let rank: u32 = read_number(variable, "RANK_ID")?
        .or(node_id)
        .ok_or("MS_ROLE is MS_WORKER, but neither RANK_ID nor a number in MS_NODE_ID is set")?;
    check_rank(LAUNCHER, rank, world_size)?;
    let addr = variable("MASTER_ADDR").or_else(|| variable("MS_SCHED_HOST"));
    let addr = addr.map(|addr| addr.trim().to_owned()).filter(|addr| !addr.is_empty());
    let addr = addr.ok_or_else(|| missing("MS_SCHED_HOST"))?;
    // The scheduler process exits at once, so rank 0 can use the scheduler's port.
    let port = read_port(variable, "MASTER_PORT")?.or(read_port(variable, "MS_SCHED_PORT")?);
    let port = port.ok_or_else(|| missing("MS_SCHED_PORT"))?;
    // If the scheduler is at a loopback address, all workers are on one machine. Otherwise the number of workers per machine is unknown.
    let default_local_ranks = if is_loopback(&addr) { world_size } else { 1 };
    let rendezvous = Rendezvous::new(variable, &format!("{LAUNCHER}/{world_size}"), addr, port);
    if let Some(path) = variable("RANK_TABLE_FILE").filter(|path| !path.trim().is_empty()) {
        let table = RankTable::read(Path::new(path.trim())).map_err(|e| format!("RANK_TABLE_FILE: {e}"))?;
        if table.world_size() != world_size {
            let ranks = table.world_size();
            return Err(format!("MS_WORKER_NUM is {world_size}, but RANK_TABLE_FILE has {ranks} devices"));
        }
        let launched = rank_of_table(&table, rank, variable)?;
        return Ok(LaunchedRank { launcher: LAUNCHER, rendezvous, ..launched });
    }
    let device = read_number(variable, "DEVICE_ID")?;
    let local_ranks = read_number(variable, "LOCAL_WORLD_SIZE")?.unwrap_or(default_local_ranks);
    let local_ranks = local_ranks.clamp(1, world_size);
    let local_rank = read_number(variable, "LOCAL_RANK")?.or(device).unwrap_or(rank % local_ranks);
    let launcher = LAUNCHER;
    Ok(LaunchedRank { launcher, rank, world_size, local_rank, local_ranks, device, rendezvous })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: [(&str, &str); 5] = [
        ("MS_ROLE", "MS_WORKER"),
        ("MS_WORKER_NUM", "8"),
        ("MS_SCHED_HOST", "10.0.0.7"),
        ("MS_SCHED_PORT", "8118"),
        ("MS_NODE_ID", "5"),
    ];

    fn detect_with(changes: &[(&str, &str)]) -> Result<LaunchedRank, String> {
        let all = [changes, &WORKER].concat();
        // If a variable occurs twice, the first counts; an empty value unsets it.
        detect(&|name: &str| {
            let found = all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            found.filter(|value| !value.is_empty())
        })
    }

    #[test]
    fn a_worker_is_a_rank() {
        let launched = detect_with(&[("DEVICE_ID", "1"), ("LOCAL_WORLD_SIZE", "4")]).unwrap();
        assert_eq!(
            (launched.rank, launched.world_size, launched.local_rank, launched.local_ranks),
            (5, 8, 1, 4)
        );
        let Rendezvous { addr, port, .. } = launched.rendezvous;
        assert_eq!((addr.as_str(), port, launched.device), ("10.0.0.7", 8118, Some(1)));
        // Node ids may be names.
        let named = detect_with(&[("MS_NODE_ID", "host-a"), ("RANK_ID", "3")]).unwrap();
        assert_eq!((named.rank, named.local_rank, named.local_ranks), (3, 0, 1));
        let one_machine = detect_with(&[("MS_SCHED_HOST", "127.0.0.1")]).unwrap();
        assert_eq!((one_machine.local_rank, one_machine.local_ranks), (5, 8));
        assert_eq!(detect_with(&[("MASTER_PORT", "4000")]).unwrap().rendezvous.port, 4000);
    }

    #[test]
    fn missing_variables_are_named() {
        for (name, value, message) in [
            ("MS_WORKER_NUM", "", "MS_WORKER_NUM is not set"),
            ("MS_SCHED_HOST", "", "MS_SCHED_HOST is not set"),
            ("MS_SCHED_PORT", "", "MS_SCHED_PORT is not set"),
            ("MS_SCHED_PORT", "70000", "MS_SCHED_PORT=70000 is not a port"),
            ("MS_NODE_ID", "host-a", "RANK_ID"),
            ("MS_NODE_ID", "8", "rank 8 of 8"),
            ("MS_WORKER_NUM", "many", "MS_WORKER_NUM=\"many\" is not a number"),
            ("MS_ROLE", "MS_PSERVER", "no parameter servers"),
            ("RANK_TABLE_FILE", "/none.json", "RANK_TABLE_FILE"),
        ] {
            let error = detect_with(&[(name, value)]).unwrap_err();
            assert!(error.contains(message), "{name}: {error}");
        }
    }

    #[test]
    fn a_scheduler_is_detected_by_its_role() {
        let role = |role: &'static str| is_scheduler(|name| (name == "MS_ROLE").then(|| role.to_owned()));
        assert!(role("MS_SCHED") && !role("MS_WORKER"));
        assert!(!is_scheduler(|_| None));
    }
}
