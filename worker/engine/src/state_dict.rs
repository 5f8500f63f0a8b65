//! The state of an engine in a checkpoint, and its division among the ranks that write it.

use super::{
    LossScaling, NamedTensors, OptimizerState,
    net::{Network, Parameter},
    optimizer::slot_name,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

/// All state that an engine needs to continue training, in host memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StateDict {
    /// Weights, biases and running statistics.
    pub parameters: NamedTensors,
    /// The optimizer's named slots. If `None`, loading this state does not change the engine's slots.
    pub optimizer: Option<OptimizerState>,
    /// The moving average of the parameters; with [`AverageOn::EveryRank`], only of the parameters that this rank writes.
    /// `None` if this rank keeps no average.
    pub average: Option<NamedTensors>,
    /// The loss scaling of float16. `None` for other formats.
    pub loss_scaling: Option<LossScaling>,
}

/// Which ranks keep the moving average of the parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AverageOn {
    #[default]
    NoRank,
    /// Rank 0 has the whole average.
    FirstRank,
    /// Each rank has the average of the parameters that it writes.
    EveryRank,
}

/// Which rank writes which tensors of a checkpoint; by default rank 0 writes all of them. Rank 0 always writes the running statistics,
/// because they may differ between ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Writers {
    /// Writing ranks, ascending; empty if only rank 0 writes.
    ranks: Vec<u32>,
    /// The writing rank of each trained parameter and each optimizer slot, by its name.
    by_tensor: BTreeMap<String, u32>,
    average: AverageOn,
}

impl Writers {
    /// Divides the parameters of a whole network and their optimizer slots `slots` among `ranks` (ascending; the first is 0). Parameters
    /// are assigned one by one, the largest first, each to the rank with the smallest load. A rank's load counts its parameters with all
    /// their slots, even if other ranks write the slots. The slots of a parameter go to the ranks after its own rank, so that no rank
    /// writes all tensors of a very large layer. Exception: if rank 0 writes the whole average, and therefore fewer parameters, slots
    /// stay with their parameter.
    pub fn divide(network: &Network, slots: &[&str], average: AverageOn, ranks: &[u32]) -> Self {
        let (mut trained, running): (Vec<_>, Vec<_>) =
            network.parameters().into_iter().partition(|parameter| parameter.role.is_trained());
        trained.sort_by_key(|parameter| Reverse(parameter.len()));
        let count = |parameters: &[Parameter]| parameters.iter().map(Parameter::len).sum::<usize>();
        let mut loads = vec![0; ranks.len()];
        if let Some(first) = loads.first_mut() {
            *first = count(&running) + if average == AverageOn::FirstRank { count(&trained) } else { 0 };
        }
        let copies = 1 + slots.len() + usize::from(average == AverageOn::EveryRank);
        let slot_offset = usize::from(average != AverageOn::FirstRank);
        let mut by_tensor = BTreeMap::new();
        for parameter in trained {
            let Some(writer) = (0..ranks.len()).min_by_key(|writer| loads[*writer]) else { break };
            loads[writer] += copies * parameter.len();
            for (index, slot) in slots.iter().enumerate() {
                let slot_writer = (writer + slot_offset * (index + 1)) % ranks.len();
                by_tensor.insert(slot_name(&parameter.name, slot), ranks[slot_writer]);
            }
            by_tensor.insert(parameter.name, ranks[writer]);
        }
        // There may be more ranks than tensors.
        let ranks = BTreeSet::from_iter(by_tensor.values().copied().chain([0]));
        Self { ranks: ranks.into_iter().collect(), by_tensor, average }
    }

    /// The rank that writes `tensor`, a parameter or an optimizer slot.
    pub fn of(&self, tensor: &str) -> u32 {
        self.by_tensor.get(tensor).copied().unwrap_or(0)
    }

    /// The rank that writes the average of a parameter.
    pub fn of_average(&self, parameter: &str) -> u32 {
        if self.divides_average() { self.of(parameter) } else { 0 }
    }

    /// Whether a rank writes anything.
    pub fn contains(&self, rank: u32) -> bool {
        if self.ranks.is_empty() { rank == 0 } else { self.ranks.contains(&rank) }
    }

    /// The rank's part, counted from 1, and the number of parts. `None` if the rank writes nothing, or if the state is not divided
    /// into parts (`ranks` is empty).
    pub fn part_of(&self, rank: u32) -> Option<(usize, usize)> {
        self.ranks.binary_search(&rank).ok().map(|index| (index + 1, self.ranks.len()))
    }

    /// Whether several ranks write the average, too.
    pub fn divides_average(&self) -> bool {
        self.average == AverageOn::EveryRank
    }

    /// Retains only the tensors that are written by ranks for which `keeps` is true.
    pub fn retain(&self, state: &mut StateDict, keeps: impl Fn(u32) -> bool) {
        state.parameters.retain(|name, _| keeps(self.of(name)));
        if let Some(optimizer) = &mut state.optimizer {
            optimizer.slots.retain(|name, _| keeps(self.of(name)));
        }
        if let Some(average) = &mut state.average {
            average.retain(|name, _| keeps(self.of_average(name)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resnet;
    use lockstep_host::tensors::HostTensor;
    use lockstep_protocol::spec::Arch;

    #[test]
    fn every_tensor_has_one_writer_and_writers_have_equal_shares() {
        let network = resnet::of(Arch::ResNet50, 64, 1000);
        let tensor =
            |name: String, len: usize| (name, HostTensor { shape: vec![len], values: vec![0.0; len] });
        let parameters: NamedTensors =
            network.parameters().into_iter().map(|p| tensor(p.name.clone(), p.len())).collect();
        let slots = network.parameters().into_iter().filter(|p| p.role.is_trained());
        let slots = slots.map(|p| tensor(format!("{}.momentum", p.name), p.len())).collect();
        for (average, ranks) in [
            (AverageOn::NoRank, &[0, 1, 2, 3][..]),
            (AverageOn::FirstRank, &[0, 1]),
            (AverageOn::EveryRank, &[0, 2, 5]),
        ] {
            let writers = Writers::divide(&network, &["momentum"], average, ranks);
            let state = StateDict {
                parameters: parameters.clone(),
                optimizer: Some(OptimizerState { slots: NamedTensors::clone(&slots), updates: 7 }),
                average: (average != AverageOn::NoRank).then(|| parameters.clone()),
                loss_scaling: None,
            };
            let (mut all, mut loads) = (StateDict::default(), Vec::new());
            for (index, rank) in ranks.iter().enumerate() {
                assert_eq!(writers.part_of(*rank), Some((index + 1, ranks.len())));
                let mut own = state.clone();
                writers.retain(&mut own, |writer| writer == *rank);
                let OptimizerState { slots, updates } = own.optimizer.unwrap();
                let average = own.average.unwrap_or_default();
                let values = [&own.parameters, &slots, &average]
                    .map(|tensors| tensors.values().map(|t| t.values.len()).sum::<usize>());
                loads.push(values.iter().sum::<usize>());
                all.parameters.extend(own.parameters);
                let optimizer =
                    all.optimizer.get_or_insert_with(|| OptimizerState { updates, ..Default::default() });
                optimizer.slots.extend(slots);
                if state.average.is_some() {
                    all.average.get_or_insert_default().extend(average);
                }
            }
            assert!(all == state, "{average:?}: each tensor has a writer");
            let whole: usize = loads.iter().sum();
            for load in &loads {
                assert!(
                    (load * ranks.len()).abs_diff(whole) * 50 < whole,
                    "{average:?}: within 2 %: {loads:?}"
                );
            }
            assert!(writers.contains(0) && !writers.contains(9));
        }
        let whole = Writers::default();
        assert_eq!((whole.of("fc.weight"), whole.contains(0), whole.contains(1)), (0, true, false));
        assert_eq!(whole.part_of(0), None);
    }
}
