//! The choice of a job's agents. If single agents have enough free slots, the job gets the agent on which its slots are in the fewest
//! NVLink groups; of several such agents, the agent with the fewest free slots. Otherwise the job gets as few agents as possible that reach
//! each other and have slots of one kind. Of equally few agents, agents with slots of one model come first, then agents whose slowest
//! network link is fastest.

use super::{
    AgentState,
    candidates::{Candidate, Candidates, ChosenSlots, Group, link_speeds},
    round::ReservedAgents,
};
use crate::store::AgentRow;
use lockstep_protocol::spec::Device;
use std::{cmp::Reverse, collections::HashSet, sync::Arc};

/// Numbers of slots and machines. `slots` includes the `free` slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Capacity {
    pub(crate) slots: usize,
    pub(crate) free: usize,
    pub(crate) machines: usize,
}

/// Chooses the fewest candidates of `group` that together have `ranks` slots, by descending number of slots. The last candidate has the
/// fewest slots that suffice, so that large gaps stay for large jobs. `slots` returns the number of available slots of a candidate.
fn choose_fewest(group: &Group, ranks: usize, slots: impl Fn(usize) -> usize) -> Option<Group> {
    if group.iter().map(|c| slots(*c)).sum::<usize>() < ranks {
        return None;
    }
    let mut group = group.clone();
    // The sort is stable, so equal candidates stay in the order of their names.
    group.sort_by_key(|c| Reverse(slots(*c)));
    let mut missing = ranks;
    let mut chosen = Group::new();
    for (n, c) in group.iter().copied().enumerate() {
        if slots(c) >= missing {
            let last = group[n..].iter().copied().filter(|c| slots(*c) >= missing).min_by_key(|c| slots(*c));
            chosen.extend(last);
            return Some(chosen);
        }
        missing -= slots(c);
        chosen.push(c);
    }
    None
}

/// Chooses the candidates with the fastest links, but no more machines than `choose` needs from the whole group. Also returns the speed of
/// the slowest chosen link.
fn choose_fastest(
    candidates: &Candidates,
    group: &Group,
    choose: impl Fn(&Group) -> Option<Group>,
) -> Option<(Group, u32)> {
    let found = choose(group)?;
    let speeds = link_speeds(candidates, group);
    let mut min_speeds: Vec<u32> = speeds.values().copied().collect();
    min_speeds.sort_unstable_by_key(|speed| Reverse(*speed));
    min_speeds.dedup();
    let fastest = min_speeds.into_iter().find_map(|min_speed| {
        let fast: Group = group.iter().copied().filter(|c| speeds[c] >= min_speed).collect();
        choose(&fast).filter(|fast| fast.len() == found.len())
    });
    let found = fastest.unwrap_or(found);
    let slowest = found.iter().map(|c| speeds[c]).min()?;
    Some((found, slowest))
}

/// Chooses from the group in which `choose` needs the fewest agents. Of equally few agents, agents with slots of one model come first, then
/// agents whose slowest link is fastest.
fn choose_group(candidates: &Candidates, choose: impl Fn(&Group) -> Option<Group>) -> Option<Group> {
    let found = candidates.groups.iter().filter_map(|(group, is_mixed)| {
        let (chosen, slowest) = choose_fastest(candidates, group, &choose)?;
        Some((chosen, *is_mixed, slowest))
    });
    let best = found.min_by_key(|(chosen, is_mixed, slowest)| (chosen.len(), *is_mixed, Reverse(*slowest)));
    best.map(|(chosen, ..)| chosen)
}

/// Chooses agents and slots to start a job of `ranks` ranks now. The first agent gets rank 0.
pub(super) fn choose_agents(
    candidates: &Candidates,
    ranks: usize,
    reserved: &ReservedAgents,
) -> Option<ChosenSlots> {
    let is_reserved = |c: usize| reserved.contains_key(&candidates[c].agent.row.id);
    // Large gaps stay for large jobs, but ranks that NVLink joins exchange gradients several times faster.
    let fits = |c: &usize| candidates[*c].free.len() >= ranks && !is_reserved(*c);
    let costs = |c: &usize| (candidates[*c].nvlink_group_count(ranks), candidates[*c].free.len());
    let one = (0..candidates.len()).filter(fits).min_by_key(costs);
    if let Some(one) = one {
        return Some(vec![(one, candidates[one].choose_slots(ranks))]);
    }
    let free = |c: usize| if is_reserved(c) { 0 } else { candidates[c].free.len() };
    let mut found = choose_group(candidates, |group| choose_fewest(group, ranks, free))?;
    // Agents of a launch serve only this job, and ranks are in the order of the launch's list of machines.
    if found.iter().all(|c| candidates[*c].agent.only_job.is_some()) {
        found.sort_unstable();
    }
    let mut missing = ranks;
    let take = |c: usize| {
        let slots = candidates[c].choose_slots(missing);
        missing -= slots.len();
        (c, slots)
    };
    Some(found.into_iter().map(take).collect())
}

/// Chooses agents to reserve for a waiting job: as few as possible, by number of all slots, with the fastest links. Of agents with equally
/// many slots, the agents with the most free slots are chosen, so that a later round never reserves fewer free slots. `None` if all agents
/// that can share a job have too few slots together.
pub(super) fn choose_reserved_agents(candidates: &Candidates, ranks: usize) -> Option<Group> {
    let size = |c: usize| (candidates[c].slots.len(), candidates[c].free.len());
    let one = (0..candidates.len()).filter(|c| candidates[*c].slots.len() >= ranks).max_by_key(|c| size(*c));
    if let Some(one) = one {
        return Some(vec![one]);
    }
    let largest = |group: &Group| {
        let mut group = group.clone();
        group.sort_by_key(|c| Reverse(size(*c)));
        let mut sum = 0;
        let last = group.iter().position(|c| {
            sum += candidates[*c].slots.len();
            sum >= ranks
        })?;
        group.truncate(last + 1);
        Some(group)
    };
    choose_group(candidates, largest)
}

/// The largest capacity for one job, on one machine or on several machines that can share a job.
pub(super) fn max_capacity(candidates: &Candidates) -> Capacity {
    let sum = |group: &[usize]| Capacity {
        slots: group.iter().map(|c| candidates[*c].slots.len()).sum(),
        free: group.iter().map(|c| candidates[*c].free.len()).sum(),
        machines: group.len(),
    };
    let single = (0..candidates.len()).map(|c| sum(&[c]));
    single.chain(candidates.groups.iter().map(|(group, _)| sum(group))).max().unwrap_or_default()
}

/// Like [`max_capacity`], with all `agents` idle and open to every job.
pub(crate) fn max_capacity_of(agents: impl IntoIterator<Item = Arc<AgentRow>>, device: Device) -> Capacity {
    let candidate = |row| Candidate::of(Arc::new(AgentState::idle(row)), &HashSet::new(), device);
    max_capacity(&Candidates::new(agents.into_iter().map(candidate).collect()))
}

#[cfg(test)]
pub(super) mod tests;
