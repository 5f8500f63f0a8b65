//! Plans: how one network is spread over several ranks. The network is data, and a plan is a pass over it ([`lower()`]): it gives each
//! rank the network of its own part, with the operations that exchange activations.

mod lower;
mod mesh;
mod stages;

pub use lower::lower;
pub use mesh::Mesh;
pub use stages::{Pass, cuts, schedule};

use crate::net::Network;
use lockstep_protocol::spec::{ParallelSpec, ShardSpec, Split};

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

impl Plan {
    /// Every rank has the whole network and pictures of its own.
    pub fn data(ranks: u32) -> Self {
        let mesh = Mesh { stage: 1, data: ranks as usize, height: 1, model: 1 };
        Self { mesh, shards: Vec::new(), optimizer_sharding: false, cuts: Vec::new() }
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
        Self { mesh, shards: parallel.shard.clone(), optimizer_sharding, cuts: Vec::new() }
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
