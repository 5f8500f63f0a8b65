//! Searches for the fastest plan that fits in memory: every mesh of stages x data x height x model, each with the splits
//! that a beam search finds. Meshes with both several stages and split operators are considered only if the job
//! requests one of the two.
//!
//! Blocks of one group of layers are split alike (`layer3.*.conv1`), so even ResNet-152 has only 18 choices. The beam search
//! decides one operator after another, and keeps the best partial plans for each split of the operator, because an operator that is split
//! by `in` costs least after an operator that is split by `out`. A test compares the result with all plans of small networks.

use super::{Cost, Machine, Mesh, Plan, Workload, cost};
use crate::net::{Network, Op};
use lockstep_protocol::spec::{ParallelSpec, ShardSpec, Split};
use std::cmp::Ordering;

/// By what fraction a plan must be faster than data parallelism to be chosen, because the cost model is not exact, and
/// simple plans are easier to understand.
const MIN_GAIN: f64 = 0.02;
/// What each strategy (entry of [`Plan::shards`]) adds to [`MIN_GAIN`].
const MIN_GAIN_PER_STRATEGY: f64 = 0.002;

/// Number of partial plans that are kept for each split of an operator, in each of two orders: by excess memory and time, and by
/// time alone.
const BEAM_WIDTH: usize = 3;

/// A plan that was considered.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    pub plan: Plan,
    pub cost: Cost,
}

impl Candidate {
    /// Whether a rank of `machine` has enough memory.
    pub fn fits(&self, machine: &Machine) -> bool {
        self.excess(machine) <= 0.0
    }

    /// Number of bytes by which a rank's memory is exceeded.
    fn excess(&self, machine: &Machine) -> f64 {
        (self.cost.memory_bytes - machine.memory_bytes as f64).max(0.0)
    }

    /// Whether this candidate is preferred to `other`.
    pub fn is_better(&self, other: &Self, machine: &Machine) -> bool {
        self.compare(other, machine).is_lt()
    }

    /// Orders candidates, the better one first.
    fn compare(&self, other: &Self, machine: &Machine) -> Ordering {
        let excess = self.excess(machine).total_cmp(&other.excess(machine));
        excess.then(self.weighted_ms().total_cmp(&other.weighted_ms()))
    }

    /// Milliseconds per step, increased by [`MIN_GAIN`] and [`MIN_GAIN_PER_STRATEGY`] unless the plan is data parallelism.
    fn weighted_ms(&self) -> f64 {
        let min_gain = MIN_GAIN + MIN_GAIN_PER_STRATEGY * self.plan.shards.len() as f64;
        self.cost.step_ms * if self.plan.is_data() { 1.0 } else { 1.0 + min_gain }
    }
}

/// For each mesh of `ranks` ranks, the best plan for which `can_run` returns true. The plans are in order, the best one first.
/// Settings in `pinned` are kept. Empty if no plan can run.
pub fn search(
    network: &Network,
    ranks: usize,
    (machine, work): (&Machine, &Workload),
    pinned: &ParallelSpec,
    can_run: impl Fn(&Plan) -> bool,
) -> Vec<Candidate> {
    let divisors = |number: usize| (1..=number).filter(move |divisor| number.is_multiple_of(*divisor));
    let is_allowed = |pin: u32, size: usize| pin <= 1 || pin as usize == size;
    let mut candidates = Vec::new();
    let may_combine_stages_and_splits = pinned.pipeline > 1 || pinned.model > 1;
    let runnable = |best: Candidate| {
        let best = with_divided_state(network, best, (machine, work), pinned, &can_run);
        can_run(&best.plan).then_some(best)
    };
    for stage in divisors(ranks).filter(|size| is_allowed(pinned.pipeline, *size)) {
        for height in divisors(ranks / stage).filter(|size| is_allowed(pinned.height, *size)) {
            for model in divisors(ranks / (stage * height)).filter(|size| is_allowed(pinned.model, *size)) {
                let mesh = Mesh { stage, data: ranks / (stage * height * model), height, model };
                if model == 1 {
                    let plain = pinned.shard.is_empty().then(|| Plan::on(mesh, Vec::new()));
                    let plain = plain.and_then(|plan| candidate(network, plan, machine, work));
                    candidates.extend(plain.and_then(runnable));
                } else if stage == 1 || may_combine_stages_and_splits {
                    let best = best_splits(network, mesh, (machine, work), &pinned.shard);
                    // Some backends can run only the job's own splits, or the default split of the last layer.
                    let plain = || candidate(network, Plan::on(mesh, pinned.shard.clone()), machine, work);
                    candidates.extend(best.and_then(runnable).or_else(|| plain().and_then(runnable)));
                }
            }
        }
    }
    candidates.sort_by(|a, b| a.compare(b, machine));
    candidates
}

/// The same plan with divided optimizer state, if the job requests it, or if the plan does not fit in memory
/// otherwise.
fn with_divided_state(
    network: &Network,
    best: Candidate,
    (machine, work): (&Machine, &Workload),
    pinned: &ParallelSpec,
    can_run: impl Fn(&Plan) -> bool,
) -> Candidate {
    if best.fits(machine) && !pinned.optimizer_sharding {
        return best;
    }
    let plan = Plan { optimizer_sharding: true, ..best.plan.clone() };
    let divided = candidate(network, plan, machine, work);
    let is_chosen = |divided: &Candidate| {
        pinned.optimizer_sharding || can_run(&divided.plan) && divided.is_better(&best, machine)
    };
    divided.filter(is_chosen).unwrap_or(best)
}

fn candidate(network: &Network, plan: Plan, machine: &Machine, work: &Workload) -> Option<Candidate> {
    let cost = cost(network, &plan, machine, work).ok()?;
    Some(Candidate { plan, cost })
}

/// The splits of an operator without groups.
const DENSE: &[Option<Split>] = &[None, Some(Split::Out), Some(Split::In)];
/// The splits of a convolution with groups.
const GROUPED: &[Option<Split>] = &[None, Some(Split::Groups)];

/// How operators that are split alike can be split.
struct SplitChoice {
    /// Matches the names of the operators.
    pattern: String,
    splits: &'static [Option<Split>],
}

/// The choices in forward order. Operators that differ only in the index of their block have one pattern, with `*` for the
/// index.
fn split_choices(network: &Network) -> Vec<SplitChoice> {
    let mut choices: Vec<SplitChoice> = Vec::new();
    for op in &network.ops {
        let (name, splits) = match op {
            Op::Conv { name, groups: 2.., .. } => (name, GROUPED),
            Op::Conv { name, .. } | Op::Linear { name, .. } => (name, DENSE),
            _ => continue,
        };
        let part = |part: &str| if part.parse::<u32>().is_ok() { "*".to_owned() } else { part.to_owned() };
        let pattern = name.split('.').map(part).collect::<Vec<_>>().join(".");
        if choices.iter().all(|other| other.pattern != pattern) {
            choices.push(SplitChoice { pattern, splits });
        }
    }
    choices
}

/// The best splits that the beam search finds.
fn best_splits(
    network: &Network,
    mesh: Mesh,
    (machine, work): (&Machine, &Workload),
    pinned: &[ShardSpec],
) -> Option<Candidate> {
    let choices = split_choices(network);
    let evaluate = |chosen: &[Option<Split>]| {
        let own = choices.iter().zip(chosen).filter_map(|(choice, split)| {
            split.map(|split| ShardSpec { pattern: choice.pattern.clone(), split })
        });
        // The last strategy that matches an operator applies.
        let mut shards: Vec<_> = own.chain(pinned.iter().cloned()).collect();
        if shards.is_empty() {
            // The default split if there are no strategies.
            shards.push(ShardSpec { pattern: network.head().into(), split: Split::Out });
        }
        candidate(network, Plan::on(mesh, shards), machine, work)
    };
    let is_head = |choice: &SplitChoice| choice.pattern == network.head() && pinned.is_empty();
    let split_head: Vec<_> = choices.iter().map(|choice| is_head(choice).then_some(Split::Out)).collect();
    let unsplit = vec![None; choices.len()];
    // The beam begins with a split head or, if that is not possible, without splits.
    let mut beam: Vec<_> = [split_head, unsplit]
        .into_iter()
        .find_map(|chosen| Some((evaluate(&chosen)?, chosen)))
        .into_iter()
        .collect();
    let mut best = beam.first().map(|(candidate, _)| candidate.clone());
    for (index, choice) in choices.iter().enumerate() {
        let mut found = beam.clone();
        for (_, before) in &beam {
            for split in choice.splits {
                let mut chosen = before.clone();
                if chosen[index] != *split {
                    chosen[index] = *split;
                    found.extend(evaluate(&chosen).map(|candidate| (candidate, chosen)));
                }
            }
        }
        found.sort_by(|(a, _), (b, _)| a.compare(b, machine));
        if let Some((first, _)) = found.first()
            && best.as_ref().is_none_or(|best| first.is_better(best, machine))
        {
            best = Some(first.clone());
        }
        // Keeps, for each split, the best plans in both orders: with later choices, a partial plan that costs more now may cost less, and a
        // partial plan that does not fit now may fit.
        beam.clear();
        for by_time in [false, true] {
            if by_time {
                found.sort_by(|(a, _), (b, _)| a.weighted_ms().total_cmp(&b.weighted_ms()));
            }
            for split in choice.splits {
                let first = found.iter().filter(|(_, chosen)| chosen[index] == *split).take(BEAM_WIDTH);
                let new: Vec<_> = first.filter(|plan| !beam.contains(plan)).cloned().collect();
                beam.extend(new);
            }
        }
    }
    best
}
