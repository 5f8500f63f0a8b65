//! Agents on which a job may be started, and groups of agents that can share a job.

use super::AgentState;
use crate::config::addresses::is_loopback;
use lockstep_protocol::{
    agent::{Machine, Slot},
    spec::Device,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
    ops::Deref,
    sync::Arc,
};

/// Agents that can share a job, by their indices in the list of candidates.
pub(super) type Group = Vec<usize>;

/// Slots for a job, by the index of their agent in the list of candidates.
pub(super) type ChosenSlots = Vec<(usize, Vec<u32>)>;

/// An agent on which a job may be started.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) agent: Arc<AgentState>,
    /// Slots of the kind that the job needs.
    pub(super) slots: Vec<u32>,
    /// The free slots among `slots`.
    pub(super) free: Vec<u32>,
}

/// Agents on which a job may be started, by name.
#[derive(Clone)]
pub(super) struct Candidates {
    list: Vec<Candidate>,
    /// Groups of candidates that can share a job, regardless of which slots are free.
    pub(super) groups: Groups,
}

impl Deref for Candidates {
    type Target = [Candidate];

    fn deref(&self) -> &[Candidate] {
        &self.list
    }
}

impl Candidates {
    pub(super) fn new(list: Vec<Candidate>) -> Self {
        Self { groups: groups(&list), list }
    }

    /// Adds a slot that will become free, after the slots that are free now.
    pub(super) fn add_free_slot(&mut self, candidate: usize, slot: u32) {
        if let Some(candidate) = self.list.get_mut(candidate)
            && candidate.slots.contains(&slot)
            && !candidate.free.contains(&slot)
        {
            candidate.free.push(slot);
        }
    }

    /// Removes slots from the free slots of an agent.
    pub(super) fn remove_free_slots(&mut self, agent_id: &str, slots: &[u32]) {
        for candidate in self.list.iter_mut().filter(|c| c.agent.row.id == agent_id) {
            candidate.free.retain(|slot| !slots.contains(slot));
        }
    }
}

impl Candidate {
    pub(super) fn of(agent: Arc<AgentState>, in_use: &HashSet<u32>, device: Device) -> Self {
        let slots = slots_for(&agent.row.slots, device);
        let free = slots.iter().copied().filter(|slot| !in_use.contains(slot)).collect();
        Self { agent, slots, free }
    }

    fn first_slot(&self) -> Option<&Slot> {
        let first = self.slots.first()?;
        self.agent.row.slots.iter().find(|slot| slot.index == *first)
    }

    /// The kind of the candidate's slots, such as `cuda`.
    pub(super) fn device(&self) -> &str {
        self.first_slot().map_or("", |slot| slot.device.as_str())
    }

    /// Free slots for `ranks` ranks, from as few NVLink groups as possible.
    pub(super) fn choose_slots(&self, ranks: usize) -> Vec<u32> {
        if self.has_no_links() {
            return self.free[..ranks.min(self.free.len())].to_vec();
        }
        self.choose_by_nvlink_group(ranks).concat()
    }

    /// Number of NVLink groups from which [`Candidate::choose_slots`] takes slots. Slots in fewer groups have faster links.
    pub(super) fn nvlink_group_count(&self, ranks: usize) -> usize {
        if self.has_no_links() {
            return ranks.min(self.free.len());
        }
        self.choose_by_nvlink_group(ranks).len()
    }

    fn has_no_links(&self) -> bool {
        self.agent.row.machine.nvlink_groups.is_empty()
    }

    /// Free slots for `ranks` ranks, by NVLink group.
    fn choose_by_nvlink_group(&self, ranks: usize) -> Vec<Vec<u32>> {
        let mut groups = self.free_groups();
        let mut missing = ranks.min(self.free.len());
        let mut chosen = Vec::new();
        while missing > 0 && !groups.is_empty() {
            // The smallest group with enough slots, so that large gaps stay for large jobs; otherwise the largest group.
            let enough = (0..groups.len()).filter(|n| groups[*n].len() >= missing);
            let index = enough.min_by_key(|n| groups[*n].len()).unwrap_or(0);
            let mut group = groups.remove(index);
            group.truncate(missing);
            missing -= group.len();
            chosen.push(group);
        }
        chosen
    }

    /// The free slots by NVLink group, the largest group first. A slot without NVLink is a group of its own.
    fn free_groups(&self) -> Vec<Vec<u32>> {
        let linked = &self.agent.row.machine.nvlink_groups;
        let free_in =
            |group: &Vec<u32>| self.free.iter().copied().filter(|slot| group.contains(slot)).collect();
        let is_unlinked = |slot: &u32| !linked.iter().any(|group| group.contains(slot));
        let mut groups: Vec<Vec<u32>> = linked.iter().map(free_in).collect();
        groups.extend(self.free.iter().copied().filter(is_unlinked).map(|slot| vec![slot]));
        // The sort is stable, so equal groups stay in the agent's order.
        groups.sort_by_key(|group| Reverse(group.len()));
        groups
    }

    /// The model of the candidate's slots, such as `NVIDIA H200`.
    pub(super) fn model(&self) -> &str {
        self.first_slot().map_or("", |slot| slot.name.as_str())
    }
}

/// The slots in which ranks of a job for `device` may run.
pub(super) fn slots_for(slots: &[Slot], device: Device) -> Vec<u32> {
    let of_kind = |kind: &str| -> Vec<u32> {
        slots.iter().filter(|slot| slot.device == kind).map(|slot| slot.index).collect()
    };
    let by_kind = device.slot_kinds().into_iter().map(|kind| of_kind(kind.name));
    by_kind.into_iter().find(|found| !found.is_empty()).unwrap_or_default()
}

/// The address at which other machines reach a machine; `None` if they cannot.
pub(crate) fn address(machine: &Machine) -> Option<&str> {
    machine.address.as_deref().filter(|address| !is_loopback(address))
}

/// Network speed of each candidate of a group, in Mbit/s. An unknown speed counts as the slowest known speed. Agents on one machine need
/// no network.
pub(super) fn link_speeds(candidates: &[Candidate], group: &Group) -> BTreeMap<usize, u32> {
    let machine = |c: &usize| &candidates[*c].agent.row.machine;
    let mut networks = group.iter().map(|c| machine(c).network_id.as_deref());
    let first = networks.next().flatten();
    if first.is_some() && networks.all(|network| network == first) {
        return group.iter().map(|c| (*c, u32::MAX)).collect();
    }
    let slowest = group.iter().filter_map(|c| machine(c).interface_mbits).min().unwrap_or(0);
    group.iter().map(|c| (*c, machine(c).interface_mbits.unwrap_or(slowest))).collect()
}

/// Groups of agents, each with a flag whether its slots are of different models.
pub(super) type Groups = Arc<[(Group, bool)]>;

/// The largest groups of candidates that reach each other and have slots of one kind, and the largest such groups with slots of one model.
fn groups(candidates: &[Candidate]) -> Groups {
    // Agents that report neither a network nor an address cannot share a job.
    let mut networks: BTreeMap<&str, Group> = BTreeMap::new();
    let mut over_network = Group::new();
    for (c, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| !candidate.slots.is_empty()) {
        let machine = &candidate.agent.row.machine;
        if let Some(network) = machine.network_id.as_deref() {
            networks.entry(network).or_default().push(c);
        }
        if address(machine).is_some() {
            over_network.push(c);
        }
    }
    let mut found: Vec<(Group, bool)> = Vec::new();
    for reachable in networks.into_values().chain([over_network]).filter(|group| group.len() > 1) {
        let mut devices: BTreeMap<&str, BTreeMap<&str, Group>> = BTreeMap::new();
        for c in reachable {
            let models = devices.entry(candidates[c].device()).or_default();
            models.entry(candidates[c].model()).or_default().push(c);
        }
        for models in devices.into_values() {
            let is_mixed = models.len() > 1;
            let mut of_device: Group = models.values().flatten().copied().collect();
            of_device.sort_unstable();
            if is_mixed {
                found.extend(models.into_values().map(|of_model| (of_model, false)));
            }
            found.push((of_device, is_mixed));
        }
    }
    found.retain(|(group, _)| group.len() > 1);
    found.dedup();
    found.into()
}
