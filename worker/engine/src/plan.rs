//! Plans: how one network is spread over several ranks. The network is data, and a plan is a pass over it ([`lower()`]): it gives each
//! rank the network of its own part, with the operations that exchange activations.

mod cost;
mod lower;
mod mesh;
mod search;
#[cfg(test)]
mod tests;

pub use cost::{Cost, Link, Machine, OperatorCost, Rates, Workload, cost};
pub use lower::lower;
pub use mesh::Mesh;
pub use search::{Candidate, search};

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
            let mesh = Mesh { data: 1, height: 1, model: parallel.model.max(2) as usize };
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
    fn on(mesh: Mesh, shards: Vec<ShardSpec>) -> Self {
        Self { mesh, shards }
    }

    /// Every rank has the whole network and pictures of its own.
    pub fn data(ranks: u32) -> Self {
        Self { mesh: Mesh { data: ranks as usize, height: 1, model: 1 }, shards: Vec::new() }
    }

    /// The plan that a job asks for.
    pub fn of(parallel: &ParallelSpec) -> Self {
        if !parallel.is_hybrid() {
            return Self::data(parallel.ranks);
        }
        let [height, model] = [parallel.height, parallel.model].map(|ranks| ranks.max(1) as usize);
        let mesh = Mesh { data: parallel.ranks as usize / (height * model), height, model };
        Self { mesh, shards: parallel.shard.clone() }
    }

    /// Whether it is plain data parallel.
    pub fn is_data(&self) -> bool {
        self.mesh.model * self.mesh.height == 1
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
        let Mesh { data, height, model, .. } = self.mesh;
        if self.is_data() {
            return write!(f, "data parallel on {}", plural(data as u64, "rank"));
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
