//! The fastest plan whose memory suffices: every mesh of stages x data x height x model, each with the splits that a beam search finds. Stages
//! whose operators are split as well are considered only where the job asks for one of both.
//!
//! Blocks of a stage are split alike (`layer3.*.conv1`), so even ResNet-152 has 18 choices. A beam search makes one after the other and keeps
//! the best beginnings of each choice: an operator that is split by `in` costs least behind one that is split by `out`. A test compares it
//! with every plan of small networks.

use super::{Cost, Machine, Mesh, Plan, Workload, cost};
use crate::net::{Network, Op};
use lockstep_protocol::spec::{ParallelSpec, ShardSpec, Split};
use std::cmp::Ordering;

/// A plan other than data parallel has to be faster by this part, and by another one for each of its strategies: what a model says is not
/// exact, and a short plan is understood.
const WORTH_IT: [f64; 2] = [0.02, 0.002];

/// Beginnings that are kept of each choice.
const KEPT: usize = 3;

/// A plan that was considered.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    pub plan: Plan,
    pub cost: Cost,
}

impl Candidate {
    /// Whether a rank of `machine` has the memory for it.
    pub fn fits(&self, machine: &Machine) -> bool {
        self.excess(machine) <= 0.0
    }

    /// Bytes that a rank has too few.
    fn excess(&self, machine: &Machine) -> f64 {
        (self.cost.memory_bytes - machine.memory_bytes as f64).max(0.0)
    }

    /// Whether it is to be chosen rather than `other`.
    pub fn is_better(&self, other: &Self, machine: &Machine) -> bool {
        self.compare(other, machine).is_lt()
    }

    /// The better one first.
    fn compare(&self, other: &Self, machine: &Machine) -> Ordering {
        let excess = self.excess(machine).total_cmp(&other.excess(machine));
        excess.then(self.time().total_cmp(&other.time()))
    }

    /// Milliseconds of a step, and a part of them for what has to be worth it.
    fn time(&self) -> f64 {
        let worth = WORTH_IT[0] + WORTH_IT[1] * self.plan.shards.len() as f64;
        self.cost.step_ms * if self.plan.is_data() { 1.0 } else { 1.0 + worth }
    }
}

/// The best plan of each mesh of `ranks` ranks that `runs`, best first. What `pinned` says of `model`, `height` and `shard` stays. Empty:
/// none can be run.
pub fn search(
    network: &Network,
    ranks: usize,
    (machine, work): (&Machine, &Workload),
    pinned: &ParallelSpec,
    runs: impl Fn(&Plan) -> bool,
) -> Vec<Candidate> {
    let divisors = |of: usize| (1..=of).filter(move |n| of.is_multiple_of(*n));
    let is_free = |pin: u32, ranks: usize| pin <= 1 || pin as usize == ranks;
    let mut found = Vec::new();
    let is_pinned = pinned.pipeline > 1 || pinned.model > 1;
    let runnable = |best: Candidate| {
        let best = divided(network, best, (machine, work), pinned, &runs);
        runs(&best.plan).then_some(best)
    };
    for stage in divisors(ranks).filter(|ranks| is_free(pinned.pipeline, *ranks)) {
        for height in divisors(ranks / stage).filter(|ranks| is_free(pinned.height, *ranks)) {
            for model in divisors(ranks / (stage * height)).filter(|ranks| is_free(pinned.model, *ranks)) {
                let mesh = Mesh { stage, data: ranks / (stage * height * model), height, model };
                if model == 1 {
                    let plain = pinned.shard.is_empty().then(|| Plan::on(mesh, Vec::new()));
                    let plain = plain.and_then(|plan| candidate(network, plan, machine, work));
                    found.extend(plain.and_then(runnable));
                } else if stage == 1 || is_pinned {
                    let best = best_splits(network, mesh, (machine, work), &pinned.shard);
                    // For some backends only the split without strategies is searched.
                    let plain = || candidate(network, Plan::on(mesh, pinned.shard.clone()), machine, work);
                    found.extend(best.and_then(runnable).or_else(|| plain().and_then(runnable)));
                }
            }
        }
    }
    found.sort_by(|a, b| a.compare(b, machine));
    found
}

/// The same plan with the optimizer's state divided, where the job asks for that or the memory does not suffice without.
fn divided(
    network: &Network,
    best: Candidate,
    (machine, work): (&Machine, &Workload),
    pinned: &ParallelSpec,
    runs: impl Fn(&Plan) -> bool,
) -> Candidate {
    if best.fits(machine) && !pinned.optimizer_sharding {
        return best;
    }
    let plan = Plan { optimizer_sharding: true, ..best.plan.clone() };
    let divided = candidate(network, plan, machine, work);
    let is_taken =
        |it: &Candidate| pinned.optimizer_sharding || runs(&it.plan) && it.is_better(&best, machine);
    divided.filter(is_taken).unwrap_or(best)
}

fn candidate(network: &Network, plan: Plan, machine: &Machine, work: &Workload) -> Option<Candidate> {
    let cost = cost(network, &plan, machine, work).ok()?;
    Some(Candidate { plan, cost })
}

const DENSE: &[Option<Split>] = &[None, Some(Split::Out), Some(Split::In)];
const GROUPED: &[Option<Split>] = &[None, Some(Split::Groups)];

/// Operators that are split alike.
struct Alike {
    pattern: String,
    splits: &'static [Option<Split>],
}

/// The operators in their order. Parts of a name that are numbers stand for the blocks of a stage.
fn alike(network: &Network) -> Vec<Alike> {
    let mut all: Vec<Alike> = Vec::new();
    for op in &network.ops {
        let (name, splits) = match op {
            Op::Conv { name, groups: 2.., .. } => (name, GROUPED),
            Op::Conv { name, .. } | Op::Linear { name, .. } => (name, DENSE),
            _ => continue,
        };
        let part = |part: &str| if part.parse::<u32>().is_ok() { "*".to_owned() } else { part.to_owned() };
        let pattern = name.split('.').map(part).collect::<Vec<_>>().join(".");
        if all.iter().all(|other| other.pattern != pattern) {
            all.push(Alike { pattern, splits });
        }
    }
    all
}

/// The best splits of those that the search meets.
fn best_splits(
    network: &Network,
    mesh: Mesh,
    (machine, work): (&Machine, &Workload),
    pinned: &[ShardSpec],
) -> Option<Candidate> {
    let operators = alike(network);
    let evaluate = |chosen: &[Option<Split>]| {
        let own = operators
            .iter()
            .zip(chosen)
            .filter_map(|(of, split)| split.map(|split| ShardSpec { pattern: of.pattern.clone(), split }));
        // The last one that matches counts.
        let mut shards: Vec<_> = own.chain(pinned.iter().cloned()).collect();
        if shards.is_empty() {
            // So it is without any.
            shards.push(ShardSpec { pattern: network.head().into(), split: Split::Out });
        }
        candidate(network, Plan::on(mesh, shards), machine, work)
    };
    let is_head = |of: &Alike| of.pattern == network.head() && pinned.is_empty();
    let start: Vec<_> = operators.iter().map(|of| is_head(of).then_some(Split::Out)).collect();
    let nothing = vec![None; operators.len()];
    let mut kept: Vec<_> = [start, nothing]
        .into_iter()
        .find_map(|chosen| Some((evaluate(&chosen)?, chosen)))
        .into_iter()
        .collect();
    let mut best = kept.first().map(|(candidate, _)| candidate.clone());
    for (place, of) in operators.iter().enumerate() {
        let mut found = kept.clone();
        for (_, before) in &kept {
            for split in of.splits {
                let mut chosen = before.clone();
                if chosen[place] != *split {
                    chosen[place] = *split;
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
        // What costs more here may cost less with what follows, and what is too large may fit.
        kept.clear();
        for by_time in [false, true] {
            if by_time {
                found.sort_by(|(a, _), (b, _)| a.time().total_cmp(&b.time()));
            }
            for split in of.splits {
                let alike = found.iter().filter(|(_, chosen)| chosen[place] == *split).take(KEPT);
                let new: Vec<_> = alike.filter(|of| !kept.contains(of)).cloned().collect();
                kept.extend(new);
            }
        }
    }
    best
}
