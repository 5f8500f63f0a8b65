//! Parallelisation plans. A pass over the network ([`lower()`]) applies a plan: it produces the part of the network that one rank computes,
//! including the operations that exchange activations with other ranks.

mod cost;
mod lower;
mod mesh;
mod search;
mod stages;
#[cfg(test)]
mod tests;

pub use cost::{Cost, LinearRate, Link, Machine, OperatorCost, Rates, Workload, cost};
pub use lower::{lower, part_of};
pub use mesh::Mesh;
pub use search::{Candidate, search};
pub use stages::{Pass, cuts, schedule};

use crate::net::{self, Network, Op};
use lockstep_protocol::{
    numbers::plural,
    spec::{JobSpec, ParallelSpec, ShardSpec, Split},
};
use std::fmt;

/// The mesh of ranks, and how the network's operators are split over the ranks of a model group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub mesh: Mesh,
    /// Strategies (entries of `parallel.shard`). Each says how the operators that match a pattern are split. If several match an
    /// operator, the last one applies.
    pub shards: Vec<ShardSpec>,
    /// Whether ranks that reduce the same gradients divide the optimizer's state (ZeRO-1).
    pub optimizer_sharding: bool,
    /// Index of the first operation of each stage except the first. If empty, [`lower()`] balances the stages.
    pub cuts: Vec<usize>,
}

/// Image size for checks that depend only on names and channels.
const ANY_SIZE: usize = 224;
/// Number of classes for these checks.
const ANY_CLASSES: usize = 1 << 16;

/// Checks that the strategies of a job fit its network.
///
/// # Errors
/// As for [`lower()`].
pub fn check(spec: &JobSpec) -> Result<(), String> {
    let parallel = &spec.parallel;
    let plan = if !parallel.is_auto() {
        Plan::of(parallel)
    } else if parallel.shard.is_empty() {
        // The search chooses the mesh, and there are no strategies to check.
        return Ok(());
    } else {
        let mesh = Mesh { stage: 1, data: 1, height: 1, model: parallel.model.max(2) as usize };
        Plan::on(mesh, parallel.shard.clone())
    };
    let side = spec.data.effective_validation_size().map_or(ANY_SIZE, |side| side as usize);
    // Other checks report an unsuitable image size.
    let Ok(network) = net::build(&spec.model, side, 3, ANY_CLASSES) else { return Ok(()) };
    lower::check(&network, &plan)
}

impl Plan {
    /// The strategies `shards` on `mesh`, without sharding of optimizer state.
    pub fn on(mesh: Mesh, shards: Vec<ShardSpec>) -> Self {
        Self { mesh, shards, optimizer_sharding: false, cuts: Vec::new() }
    }

    /// Data parallelism: every rank has the whole network and its own pictures.
    pub fn data(ranks: u32) -> Self {
        let mesh = Mesh { stage: 1, data: ranks as usize, height: 1, model: 1 };
        Self::on(mesh, Vec::new())
    }

    /// The plan that a job requests.
    pub fn of(parallel: &ParallelSpec) -> Self {
        let optimizer_sharding = parallel.optimizer_sharding;
        if !parallel.is_hybrid() {
            return Self { optimizer_sharding, ..Self::data(parallel.ranks) };
        }
        let [stage, height, model] =
            [parallel.pipeline, parallel.height, parallel.model].map(|ranks| ranks.max(1) as usize);
        let mesh = Mesh { stage, data: parallel.ranks as usize / (stage * height * model), height, model };
        Self { optimizer_sharding, ..Self::on(mesh, parallel.shard.clone()) }
    }

    /// Whether the plan is plain data parallelism.
    pub fn is_data(&self) -> bool {
        self.mesh.stage * self.mesh.height * self.mesh.model == 1
    }

    /// Whether `other` distributes `network` in the same way, even if its strategies are written differently.
    pub fn is_equivalent(&self, other: &Self, network: &Network) -> bool {
        self.mesh == other.mesh
            && self.optimizer_sharding == other.optimizer_sharding
            && self.stage_begins(network) == other.stage_begins(network)
            && lower::operators(network)
                .all(|(name, _)| self.split_of(network, name) == other.split_of(network, name))
    }

    /// The layers at which stages after the first begin.
    pub fn stage_begins(&self, network: &Network) -> Vec<String> {
        let cuts = if self.cuts.is_empty() {
            cuts(network, self.mesh.stage).unwrap_or_default()
        } else {
            self.cuts.clone()
        };
        let first = |cut: usize| match &network.ops[cut] {
            Op::Conv { name, .. } | Op::Linear { name, .. } => Some(name.clone()),
            _ => None,
        };
        cuts.into_iter().filter_map(first).collect()
    }

    /// A phrase for the log with the layers of [`Plan::stage_begins`]. Empty if there is one stage.
    pub(crate) fn later_stages_text(&self, network: &Network) -> String {
        let names = self.stage_begins(network);
        if names.is_empty() { String::new() } else { format!("; later stages begin at {}", names.join(", ")) }
    }

    /// How `network`'s operator `name` is split. `None` if it is not split.
    fn split_of(&self, network: &Network, name: &str) -> Option<Split> {
        if self.mesh.model == 1 {
            return None;
        }
        if self.shards.is_empty() {
            return (name == network.head()).then_some(Split::Out);
        }
        self.shards.iter().rev().find(|shard| shard.matches(name)).map(|shard| shard.split)
    }
}

/// `2 (data) x 1 (height) x 2 (model) ranks, fc split by its outputs`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_data() {
            write!(f, "data parallel on {}", plural(self.mesh.data as u64, "rank"))?;
        } else {
            write!(f, "{}", self.mesh)?;
        }
        if self.mesh.model > 1 && self.shards.is_empty() {
            write!(f, ", the last layer split by its outputs")?;
        }
        for ShardSpec { pattern, split } in &self.shards {
            let part = match split {
                Split::Out => "outputs",
                Split::In => "inputs",
                Split::Groups => "groups",
            };
            write!(f, ", {pattern} split by its {part}")?;
        }
        if self.optimizer_sharding {
            write!(f, ", optimizer state divided")?;
        }
        Ok(())
    }
}
