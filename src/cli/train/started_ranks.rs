//! Decides which ranks of a run this process starts.

use super::{
    super::{rank_table::RankTable, usage_error},
    Args,
    launcher::{self, LaunchedRank, MachineRanks},
};
use std::path::Path;

/// Environment variable with the path of a rank table, in place of `--rank-table`.
const TABLE_FILE: &str = "RANK_TABLE_FILE";

/// The ranks that this process starts.
pub(super) enum StartedRanks {
    /// All ranks, each in a process of its own.
    All,
    /// The ranks of this machine, each in a process of its own.
    Machine(MachineRanks),
    /// One rank, in this process.
    Rank(LaunchedRank),
}

impl StartedRanks {
    /// Returns the name of the launcher or table that determines the number of ranks, and this number.
    pub(super) fn launcher_and_world_size(&self) -> Option<(&'static str, u32)> {
        match self {
            StartedRanks::All => None,
            StartedRanks::Machine(ranks) => Some((launcher::RANK_TABLE, ranks.world_size)),
            StartedRanks::Rank(launched) => Some((launched.launcher, launched.world_size)),
        }
    }

    /// Whether this process starts rank 0, which locks the folder, and reads and writes checkpoints.
    pub(super) fn has_rank_0(&self) -> bool {
        match self {
            StartedRanks::All => true,
            StartedRanks::Machine(ranks) => ranks.local.iter().any(|(rank, _)| *rank == 0),
            StartedRanks::Rank(launched) => launched.rank == 0,
        }
    }

    /// Determines the ranks from a rank table, or from the launcher's environment variables.
    ///
    /// # Errors
    /// Exit status 2 if an argument or a variable is missing or invalid.
    pub(super) fn find(args: &Args) -> anyhow::Result<Self> {
        let variable = |name: &str| std::env::var(name).ok();
        // MindSpore's scripts assign ranks by this variable.
        let rank = || launcher::read_number(&variable, "RANK_ID").map_err(usage_error);
        let table = match (&args.rank_table, variable(TABLE_FILE).filter(|path| !path.trim().is_empty())) {
            (Some(path), _) => RankTable::read(path)?,
            (None, given) => match (launcher::detect(variable).map_err(usage_error)?, given) {
                // A worker of MindSpore has already read the table.
                (Some(launched), Some(_)) if variable("MS_ROLE").is_none() => {
                    let launcher = launched.launcher;
                    return Err(usage_error(format!(
                        "{TABLE_FILE} is set and {launcher} has started this process: both decide which rank this process is; unset \
                         {TABLE_FILE}, or start without {launcher}"
                    )));
                }
                (Some(_), _) if args.node.is_some() => {
                    return Err(usage_error(
                        "--node: a launcher says which rank this process is; leave --node out",
                    ));
                }
                (Some(launched), _) => return Ok(StartedRanks::Rank(launched)),
                (None, Some(path)) => {
                    let table = RankTable::read(Path::new(path.trim()));
                    table.map_err(|e| usage_error(format!("{TABLE_FILE}: {e}")))?
                }
                (None, None) if args.node.is_some() => {
                    return Err(usage_error(format!("--node: needs --rank-table, or {TABLE_FILE}")));
                }
                (None, None) if rank()?.is_some() => {
                    return Err(usage_error(format!(
                        "RANK_ID is set, but the number of ranks is unknown: give --rank-table or {TABLE_FILE}, or unset RANK_ID"
                    )));
                }
                (None, None) => return Ok(StartedRanks::All),
            },
        };
        let started = match (args.node, rank()?) {
            (Some(node), _) => launcher::ranks_of_machine(&table, node, &variable).map(StartedRanks::Machine),
            (None, Some(rank)) => launcher::rank_of_table(&table, rank, &variable).map(StartedRanks::Rank),
            (None, None) if table.machines.len() == 1 => {
                launcher::ranks_of_machine(&table, 0, &variable).map(StartedRanks::Machine)
            }
            (None, None) => Err(format!(
                "the rank table has {} machines: name this machine with --node, or set RANK_ID for one rank",
                table.machines.len()
            )),
        };
        started.map_err(usage_error)
    }
}
