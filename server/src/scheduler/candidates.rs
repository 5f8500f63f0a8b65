//! Agents that a job may be started on, and which of them can share one.

use super::AgentState;
use lockstep_protocol::{
    agent::{Machine, Slot},
    spec::Device,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
    net::IpAddr,
    ops::Deref,
    sync::Arc,
};

/// Agents that can share a job, by their place in the list of candidates.
pub(super) type Group = Vec<usize>;

/// An agent that a job may be started on.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) agent: Arc<AgentState>,
    /// Slots of the kind that the job needs, and those of them that are free.
    pub(super) all: Vec<u32>,
    pub(super) free: Vec<u32>,
    /// Where the first of them is among the agent's slots.
    first: Option<usize>,
}

/// Agents that a job may be started on, by name.
#[derive(Clone)]
pub(super) struct Candidates {
    list: Vec<Candidate>,
    /// Those that can share a job; which slots are free does not matter for that.
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

    /// Adds slots that are going to be free behind those that are.
    pub(super) fn free(&mut self, candidate: usize, slot: u32) {
        if let Some(candidate) = self.list.get_mut(candidate)
            && candidate.all.contains(&slot)
            && !candidate.free.contains(&slot)
        {
            candidate.free.push(slot);
        }
    }

    pub(super) fn take(&mut self, agent_id: &str, slots: &[u32]) {
        for candidate in self.list.iter_mut().filter(|c| c.agent.row.id == agent_id) {
            candidate.free.retain(|slot| !slots.contains(slot));
        }
    }
}

impl Candidate {
    pub(super) fn of(agent: Arc<AgentState>, in_use: &HashSet<u32>, device: Device) -> Self {
        let all = slots_for(&agent.row.slots, device);
        let free = all.iter().copied().filter(|slot| !in_use.contains(slot)).collect();
        let first =
            all.first().and_then(|index| agent.row.slots.iter().position(|slot| slot.index == *index));
        Self { agent, all, free, first }
    }

    fn first(&self) -> Option<&Slot> {
        self.agent.row.slots.get(self.first?)
    }

    /// The name of the kind of its slots.
    pub(super) fn device(&self) -> &str {
        self.first().map_or("", |slot| slot.device.as_str())
    }

    /// So many of its free slots, of as few groups that NVLink joins as possible.
    pub(super) fn take(&self, ranks: usize) -> Vec<u32> {
        if self.has_no_links() {
            return self.free[..ranks.min(self.free.len())].to_vec();
        }
        self.linked(ranks).concat()
    }

    /// How many groups [`Candidate::take`] takes slots of: the fewer, the better they are linked.
    pub(super) fn linked_groups(&self, ranks: usize) -> usize {
        if self.has_no_links() {
            return ranks.min(self.free.len());
        }
        self.linked(ranks).len()
    }

    fn has_no_links(&self) -> bool {
        self.agent.row.machine.nvlink_groups.is_empty()
    }

    fn linked(&self, ranks: usize) -> Vec<Vec<u32>> {
        let mut groups = self.free_groups();
        let mut left = ranks.min(self.free.len());
        let mut taken = Vec::new();
        while left > 0 && !groups.is_empty() {
            // The smallest that has what is left, because large gaps stay for large jobs, else the largest.
            let enough = (0..groups.len()).filter(|n| groups[*n].len() >= left);
            let next = enough.min_by_key(|n| groups[*n].len()).unwrap_or(0);
            let mut group = groups.remove(next);
            group.truncate(left);
            left -= group.len();
            taken.push(group);
        }
        taken
    }

    /// Its free slots by the groups that NVLink joins, the largest first. A slot that is joined to no other is a group of its own.
    fn free_groups(&self) -> Vec<Vec<u32>> {
        let joined = &self.agent.row.machine.nvlink_groups;
        let of = |group: &Vec<u32>| self.free.iter().copied().filter(|slot| group.contains(slot)).collect();
        let is_alone = |slot: &u32| !joined.iter().any(|group| group.contains(slot));
        let mut groups: Vec<Vec<u32>> = joined.iter().map(of).collect();
        groups.extend(self.free.iter().copied().filter(is_alone).map(|slot| vec![slot]));
        // Stable: groups are in the order in which the agent named them.
        groups.sort_by_key(|group| Reverse(group.len()));
        groups
    }

    /// What its slots are: `NVIDIA H200`.
    pub(super) fn model(&self) -> &str {
        self.first().map_or("", |slot| slot.name.as_str())
    }
}

/// The slots of a machine that ranks of such a job may run in.
pub(super) fn slots_for(slots: &[Slot], device: Device) -> Vec<u32> {
    let of = |kind: &str| -> Vec<u32> {
        slots.iter().filter(|slot| slot.device == kind).map(|slot| slot.index).collect()
    };
    let kinds = device.slot_kinds().into_iter().map(|kind| of(kind.name));
    kinds.into_iter().find(|found| !found.is_empty()).unwrap_or_default()
}

/// Whether only the machine itself reaches this address.
fn is_loopback(address: &str) -> bool {
    address.parse().map_or(address.eq_ignore_ascii_case("localhost"), |ip: IpAddr| ip.is_loopback())
}

/// The address by which other machines reach one, if they do.
pub(crate) fn address(machine: &Machine) -> Option<&str> {
    machine.address.as_deref().filter(|address| !is_loopback(address))
}

/// How fast ranks on each of these candidates reach the others, in Mbit/s. Of one whose speed is unknown it is that of the slowest that is
/// known. Agents of one machine need no network.
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

/// Groups of agents, each with whether their models differ.
pub(super) type Groups = Arc<[(Group, bool)]>;

/// The largest groups of candidates that reach each other and have slots of one kind, with whether their models differ.
fn groups(candidates: &[Candidate]) -> Groups {
    // Older agents tell no network and do not know how to share a job.
    let mut networks: BTreeMap<&str, Group> = BTreeMap::new();
    let mut over_network = Group::new();
    for (c, candidate) in candidates.iter().enumerate().filter(|(_, candidate)| !candidate.all.is_empty()) {
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
