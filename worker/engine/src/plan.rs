//! Plans: how one network is spread over several ranks. The network is data, and a plan is a pass over it ([`lower()`]): it gives each
//! rank the network of its own part, with the operations that exchange activations.

mod cost;
mod lower;
mod mesh;
mod search;
mod stages;
#[cfg(test)]
mod tests;

pub use cost::{Cost, Link, Machine, OperatorCost, Rates, Workload, cost};
pub use lower::{lower, part_of};
pub use mesh::Mesh;
pub use search::{Candidate, search};
pub use stages::{Pass, cuts, schedule};

use crate::net::{self, Network};
use lockstep_protocol::{
    numbers::plural,
    spec::{JobSpec, ParallelSpec, ShardSpec, Split},
};
use std::fmt;

/// Which ranks share a copy of the network, and how its operators are split over them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub mesh: Mesh,
    /// The last one that matches an operator counts.
    pub shards: Vec<ShardSpec>,
    /// Ranks that add up gradients divide the optimizer's state among them (ZeRO-1).
    pub optimizer_sharding: bool,
    /// The first operation of each stage but the first. Empty: [`lower()`] balances the stages.
    pub cuts: Vec<usize>,
}

/// A side of pictures and a number of classes for networks of which neither is known, and only names and channels matter.
const ANY: (usize, usize) = (224, 1 << 16);

/// Looks whether the strategies of a job fit its network, as far as that is known without its dataset.
///
/// # Errors
/// As [`lower()`].
pub fn check(spec: &JobSpec) -> Result<(), String> {
    let parallel = &spec.parallel;
    let plan = match parallel.is_auto() {
        // Which meshes there are is searched for.
        true if parallel.shard.is_empty() => return Ok(()),
        true => {
            let mesh = Mesh { stage: 1, data: 1, height: 1, model: parallel.model.max(2) as usize };
            Plan::on(mesh, parallel.shard.clone())
        }
        false => Plan::of(parallel),
    };
    let side = spec.data.evaluation_size().map_or(ANY.0, |side| side as usize);
    // What is wrong with the side is said elsewhere.
    let Ok(network) = net::build(&spec.model, side, 3, ANY.1) else { return Ok(()) };
    lower::check(&network, &plan)
}

impl Plan {
    /// The strategies `shards` on `mesh`, with optimizer state on every rank.
    pub fn on(mesh: Mesh, shards: Vec<ShardSpec>) -> Self {
        Self { mesh, shards, optimizer_sharding: false, cuts: Vec::new() }
    }

    /// Every rank has the whole network and pictures of its own.
    pub fn data(ranks: u32) -> Self {
        let mesh = Mesh { stage: 1, data: ranks as usize, height: 1, model: 1 };
        Self::on(mesh, Vec::new())
    }

    /// The plan that a job asks for.
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

    /// Whether it is plain data parallel.
    pub fn is_data(&self) -> bool {
        self.mesh.stage * self.mesh.height * self.mesh.model == 1
    }

    /// How `network`'s operator `name` is split; `None`: not at all.
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

/// `2 (data) x 1 (height) x 2 (model) ranks, fc split by out`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mesh { stage, data, height, model } = self.mesh;
        if self.is_data() {
            return write!(f, "data parallel on {}", plural(data as u64, "rank"));
        }
        if stage > 1 {
            write!(f, "{stage} (pipeline) x ")?;
        }
        write!(f, "{data} (data) x {height} (height) x {model} (model) ranks")?;
        if model > 1 && self.shards.is_empty() {
            write!(f, ", the last layer split by out")?;
        }
        for ShardSpec { pattern, split } in &self.shards {
            write!(f, ", {pattern} split by {}", split.name())?;
        }
        Ok(())
    }
}
