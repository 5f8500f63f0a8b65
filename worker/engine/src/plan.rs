//! Plans: how one network is spread over several ranks. The network is data, and a plan is a pass over it ([`lower()`]): it gives each
//! rank the network of its own part, with the operations that exchange activations.

mod lower;
mod mesh;

pub use lower::lower;
pub use mesh::Mesh;

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
}

impl Plan {
    /// Every rank has the whole network and pictures of its own.
    pub fn data(ranks: u32) -> Self {
        let mesh = Mesh { data: ranks as usize, height: 1, model: 1 };
        Self { mesh, shards: Vec::new(), optimizer_sharding: false }
    }

    /// The plan that a job asks for.
    pub fn of(parallel: &ParallelSpec) -> Self {
        let optimizer_sharding = parallel.optimizer_sharding;
        if !parallel.is_hybrid() {
            return Self { optimizer_sharding, ..Self::data(parallel.ranks) };
        }
        let [height, model] = [parallel.height, parallel.model].map(|ranks| ranks.max(1) as usize);
        let mesh = Mesh { data: parallel.ranks as usize / (height * model), height, model };
        Self { mesh, shards: parallel.shard.clone(), optimizer_sharding }
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
