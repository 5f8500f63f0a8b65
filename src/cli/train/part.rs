//! Which ranks of a run this process starts.

use super::{
    super::{rank_table::RankTable, wrong},
    Args,
    launcher::{self, LaunchedRank, Ranks},
};

/// What this process is to start.
pub(super) enum Part {
    /// All ranks, each in a process of its own.
    All,
    /// The ranks of this machine, each in a process of its own.
    Machine(Ranks),
    /// One rank, in this process.
    Rank(LaunchedRank),
}

impl Part {
    /// Who decides how many ranks there are, and how many.
    pub(super) fn world(&self) -> Option<(&'static str, u32)> {
        match self {
            Part::All => None,
            Part::Machine(ranks) => Some((launcher::RANK_TABLE, ranks.world_size)),
            Part::Rank(place) => Some((place.by, place.world_size)),
        }
    }

    /// Whether rank 0 runs here: the one that locks the folder and reads and writes checkpoints.
    pub(super) fn has_rank_0(&self) -> bool {
        match self {
            Part::All => true,
            Part::Machine(ranks) => ranks.local.iter().any(|(rank, _)| *rank == 0),
            Part::Rank(place) => place.rank == 0,
        }
    }

    /// Finds it in the launcher's variables, or in a rank table.
    ///
    /// # Errors
    /// Exit status 2: what is missing or wrong in them.
    pub(super) fn find(args: &Args) -> anyhow::Result<Self> {
        let variable = |name: &str| std::env::var(name).ok();
        let Some(path) = &args.rank_table else {
            return Ok(launcher::detect(variable).map_err(wrong)?.map_or(Part::All, Part::Rank));
        };
        let table = RankTable::read(path)?;
        let part = match (args.node, launcher::rank_id(&variable).map_err(wrong)?) {
            (Some(node), _) => launcher::of_machine(&table, node, &variable).map(Part::Machine),
            (None, Some(rank)) => launcher::of_rank(&table, rank, &variable).map(Part::Rank),
            (None, None) if table.machines.len() == 1 => {
                launcher::of_machine(&table, 0, &variable).map(Part::Machine)
            }
            (None, None) => Err(format!(
                "--rank-table: the table has {} machines: say which one this is with --node, or set RANK_ID for one rank",
                table.machines.len()
            )),
        };
        part.map_err(wrong)
    }
}
