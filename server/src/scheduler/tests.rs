//! Properties of plans for random clusters and queues.

use super::{
    candidates::{address, slots_for},
    *,
};
use lockstep_protocol::{
    agent::{Machine, Slot},
    random,
    reason::ReasonKind,
    spec::Device,
};
use std::{cmp::Reverse, sync::LazyLock};

const CASES: u64 = 500;

/// A random number generator with a seed.
struct Random(random::Random);

impl Random {
    /// A number below `limit`.
    fn below(&mut self, limit: u32) -> u32 {
        self.0.below(limit.into()) as u32
    }

    /// True with this probability.
    fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent
    }

    fn one_of<T: Clone>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u32) as usize].clone()
    }
}

fn at(second: u32) -> Timestamp {
    Timestamp::from_second(second.into()).unwrap()
}

/// A job that tests copy, because parsing a job from JSON takes longer than making most plans.
static JOB: LazyLock<JobRow> = LazyLock::new(JobRow::queued);

fn job(ranks: u32) -> JobRow {
    let mut row = JOB.clone();
    (row.job.id, row.job.ranks, row.job.spec.parallel.ranks) = (JobId::generate(), ranks, ranks);
    row
}

fn agent(name: &str, devices: &[&str], change: impl FnOnce(&mut Machine)) -> AgentState {
    let mut machine = Machine {
        hostname: name.into(),
        address: Some("10.0.0.1".into()),
        network_id: Some(name.into()),
        ..Machine::default()
    };
    change(&mut machine);
    let slot = |(index, device): (u32, &&str)| Slot {
        index,
        device: (*device).into(),
        name: format!("{device} model"),
        memory_bytes: 0,
        uuid: None,
    };
    let row = AgentRow {
        id: format!("id-{name}"),
        name: name.into(),
        machine,
        slots: (0..).zip(devices).map(slot).collect(),
        last_seen_at: at(0),
    };
    AgentState::idle(Arc::new(row))
}

fn snapshot(agents: Vec<AgentState>, waiting: Vec<JobRow>) -> Snapshot {
    Snapshot {
        now: at(1000),
        started_at: at(0),
        agents: agents.into_iter().map(Arc::new).collect(),
        waiting: waiting.into_iter().map(Arc::new).collect(),
        yielding_jobs: Vec::new(),
        paused_sweeps: HashMap::new(),
        fair_share: FairShare::Project,
        slots_of_shares: HashMap::new(),
        checkpoint_waits: HashMap::new(),
    }
}

fn random_job(random: &mut Random) -> JobRow {
    let mut row = job(1 + random.below(7));
    let job = &mut row.job;
    job.spec.priority = random.below(3) as i32;
    job.spec.parallel.device = random.one_of(&[Device::Auto, Device::Auto, Device::Cpu, Device::Cuda]);
    job.project = random.one_of(&["a", "b", "c"]).into();
    job.unreadable = random.chance(5).then(|| "flaw".into());
    if random.chance(40) {
        job.attempt = 1;
        job.state = random.one_of(&[JobState::Queued, JobState::Restarting, JobState::Lost]);
        job.spec.train.batch_size = Some(12);
        job.spec.recovery.min_ranks = random.chance(50).then_some(1);
        job.spec.recovery.wait_seconds = random.one_of(&[0, 60]);
        row.restarts = random.below(4);
        row.waiting_since = Some(at(1000 - random.below(4)));
    }
    row
}

fn random_agent(random: &mut Random, name: &str, waiting: &[JobRow]) -> AgentState {
    let devices: Vec<_> = (0..random.below(6)).map(|_| random.one_of(&["cpu", "cuda", "cuda"])).collect();
    let mut agent = agent(name, &devices, |machine| {
        machine.address =
            random.one_of(&[None, Some("127.0.0.1"), Some("10.0.0.1"), Some("10.0.0.1")]).map(Into::into);
        machine.network_id = random.one_of(&[None, Some("shared"), Some(name)]).map(Into::into);
        machine.interface_mbits = random.one_of(&[None, Some(1000), Some(100_000)]);
        machine.nvlink_groups = random.one_of(&[vec![], vec![vec![0, 1], vec![2, 3]], vec![vec![0, 2, 4]]]);
    });
    agent.takes_work = random.chance(85);
    agent.is_drained = !agent.takes_work && random.chance(50);
    agent.only_job = waiting.first().filter(|_| random.chance(10)).map(|row| row.job.id.clone());
    agent
}

/// A random snapshot, and its plan after every question about checkpoints has been answered.
fn random_case(seed: u64) -> (Snapshot, Plan) {
    let mut random = Random(random::Random(seed));
    let mut waiting: Vec<_> = (0..random.below(12)).map(|_| random_job(&mut random)).collect();
    waiting.sort_by_key(|row| Reverse(row.job.spec.priority));
    let names = ["a", "b", "c", "d", "e"];
    let names = &names[..random.below(6) as usize];
    let mut agents: Vec<_> = names.iter().map(|name| random_agent(&mut random, name, &waiting)).collect();
    let mut yielding: Vec<_> = (0..random.below(7))
        .map(|_| {
            let must_end = random.chance(25);
            let is_being_preempted = must_end && random.chance(50);
            let (priority, preemptible) = (random.below(2) as i32, random.chance(80));
            let occupant =
                Occupant { job: JobId::generate(), priority, preemptible, must_end, is_being_preempted };
            YieldingJob { occupant, is_ending: must_end, slots: Vec::new() }
        })
        .collect();
    yielding.sort_by_key(|yielding| yielding.occupant.priority);
    for agent in &mut agents {
        for slot in &agent.row.slots {
            if random.chance(50) {
                agent.slots_in_use.insert(slot.index);
                // Other running jobs do not yield.
                let index = random.below(7) as usize;
                if let Some(job) = yielding.get_mut(index) {
                    job.slots.push((agent.row.id.clone(), slot.index));
                }
            }
        }
    }
    let mut snapshot = Snapshot { yielding_jobs: yielding, ..snapshot(agents, waiting) };
    snapshot.slots_of_shares =
        HashMap::from([("a".to_owned(), ShareUse { slots: random.below(9).into(), newest_start: 1 })]);
    loop {
        let plan = plan(&snapshot);
        if plan.unknown_checkpoints.is_empty() {
            return (snapshot, plan);
        }
        for (row, reader) in plan.unknown_checkpoints {
            let why = ReasonKind::WaitingForCheckpoint {
                checkpoint: row.job.id.as_str().into(),
                agent: None,
                detail: None,
            };
            let wait = random
                .chance(40)
                .then(|| Wait { why: Reason::from(why).into(), keeps_slots: random.chance(50) });
            let known = snapshot.checkpoint_waits.insert((row.job.id.clone(), reader), wait);
            assert!(known.is_none(), "seed {seed}: nothing is asked twice");
        }
    }
}

fn slots_of(start: &Start) -> impl Iterator<Item = (&AgentState, u32)> {
    start.chosen.iter().flat_map(|(agent, slots)| slots.iter().map(move |slot| (&**agent, *slot)))
}

#[test]
fn no_slot_is_used_twice_and_each_job_gets_all_its_slots() {
    for seed in 0..CASES {
        let (snapshot, plan) = random_case(seed);
        let mut used = HashSet::new();
        for start in &plan.starts {
            let job = &start.row.job;
            let fewer_ranks = match start.fewer_ranks_reason.as_ref().map(Reason::kind) {
                Some(ReasonKind::FewerRanks { ranks, .. }) => Some(*ranks),
                _ => None,
            };
            let slots: Vec<_> = slots_of(start).collect();
            assert_eq!(slots.len(), fewer_ranks.unwrap_or(job.ranks) as usize, "seed {seed}");
            let device = device_for(&job.spec);
            let mut kinds = HashSet::new();
            for (agent, slot) in slots {
                assert!(
                    agent.takes_work && agent.only_job.as_ref().is_none_or(|only| *only == job.id),
                    "seed {seed}"
                );
                assert!(
                    !agent.slots_in_use.contains(&slot)
                        && slots_for(&agent.row.slots, device).contains(&slot),
                    "seed {seed}"
                );
                assert!(used.insert((agent.row.id.clone(), slot)), "seed {seed}");
                kinds.insert(&agent.row.slots[slot as usize].device);
            }
            assert_eq!(kinds.len(), 1, "seed {seed}");
            let machines = || start.chosen.iter().map(|(agent, _)| &agent.row.machine);
            let networks: HashSet<_> = machines().map(|machine| &machine.network_id).collect();
            let is_one_machine = networks.len() == 1 && !networks.contains(&None);
            let reach_each_other = is_one_machine || machines().all(|machine| address(machine).is_some());
            assert!(start.chosen.len() == 1 || reach_each_other, "seed {seed}");
        }
        for reserved in &plan.reservations {
            let in_use = |slot: &u32| {
                snapshot
                    .agents
                    .iter()
                    .any(|agent| agent.row.id == reserved.agent_id && agent.slots_in_use.contains(slot))
            };
            assert!(reserved.ending.iter().all(in_use) && !reserved.free.iter().any(in_use), "seed {seed}");
            for slot in reserved.free.iter().chain(&reserved.ending) {
                assert!(used.insert((reserved.agent_id.clone(), *slot)), "seed {seed}: slot {slot}");
            }
        }
        let starting = plan.starts.iter().map(|start| &start.row.job.id);
        let ids: HashSet<_> =
            starting.chain(plan.waiting.iter().map(|waiting| &waiting.row.job.id)).collect();
        assert_eq!(plan.starts.len() + plan.waiting.len(), snapshot.waiting.len(), "seed {seed}");
        assert_eq!(ids.len(), snapshot.waiting.len(), "seed {seed}");
    }
}

#[test]
fn only_preemptible_jobs_of_lower_priority_are_stopped_each_for_one_job() {
    let mut preempted = 0;
    for seed in 0..CASES {
        let (snapshot, plan) = random_case(seed);
        let mut victims = HashSet::new();
        for Preemption { row, victims: of_job, .. } in &plan.preemptions {
            for victim in of_job {
                let running =
                    snapshot.yielding_jobs.iter().find(|yielding| yielding.occupant.job == *victim).unwrap();
                assert!(running.occupant.preemptible && !running.is_ending, "seed {seed}");
                assert!(running.occupant.priority < row.job.spec.priority, "seed {seed}");
                assert!(victims.insert(victim), "seed {seed}");
            }
            let reservations = plan.reservations.iter().filter(|reservation| reservation.job == row.job.id);
            let kept_slots: usize = reservations.map(|kept| kept.free.len() + kept.ending.len()).sum();
            assert_eq!(kept_slots, row.job.ranks as usize, "seed {seed}: a slot for each rank");
        }
        preempted += victims.len();
    }
    assert!(preempted > 5, "{preempted}");
}

#[test]
fn jobs_of_lower_priority_do_not_change_the_plan_of_higher_ones() {
    let part = |plan: &Plan, min_priority: i32| {
        let starts = plan.starts.iter().filter(|start| start.row.job.spec.priority >= min_priority);
        let slots =
            |start: &Start| slots_of(start).map(|(a, slot)| (a.row.id.clone(), slot)).collect::<Vec<_>>();
        let starts: Vec<_> = starts.map(|start| (start.row.job.id.clone(), slots(start))).collect();
        let waiting = plan.waiting.iter().filter(|waiting| waiting.row.job.spec.priority >= min_priority);
        let waiting: Vec<_> = waiting
            .map(|waiting| {
                (waiting.row.job.id.clone(), waiting.why.as_ref().map(|why| why.words().to_owned()))
            })
            .collect();
        (starts, waiting)
    };
    for seed in 0..CASES {
        let (mut snapshot, whole) = random_case(seed);
        for min_priority in [1, 2] {
            snapshot.waiting.retain(|row| row.job.spec.priority >= min_priority);
            assert_eq!(part(&plan(&snapshot), min_priority), part(&whole, min_priority), "seed {seed}");
        }
    }
}

/// Whether a job would start on these agents if no other job waited.
fn would_start(row: &JobRow, agents: Vec<AgentState>) -> bool {
    let mut row = row.clone();
    (row.job.state, row.job.attempt) = (JobState::Queued, 0);
    plan(&snapshot(agents, vec![row])).starts.len() == 1
}

#[test]
fn every_job_that_waits_has_a_true_reason() {
    let mut seen: HashMap<String, usize> = HashMap::new();
    for seed in 0..CASES {
        let (snapshot, plan) = random_case(seed);
        let agents = || snapshot.agents.iter().map(|agent| AgentState::clone(agent));
        for WaitingJob { row, why } in &plan.waiting {
            let job = &row.job;
            let Some(why) = why else {
                assert!(!is_due(row, snapshot.now), "seed {seed}: no reason for {job:?}");
                continue;
            };
            *seen.entry(why.code()).or_default() += 1;
            let would_fit = would_start(
                row,
                agents().map(|agent| AgentState { slots_in_use: HashSet::new(), ..agent }).collect(),
            );
            // The agents with the slots that the plan leaves to this job.
            let remaining = agents().map(|mut agent| {
                let id = agent.row.id.clone();
                let assigned = plan.starts.iter().flat_map(slots_of).filter(|(of, _)| of.row.id == id);
                agent.slots_in_use.extend(assigned.map(|(_, slot)| slot));
                for kept in plan.reservations.iter().filter(|kept| kept.agent_id == id && kept.job != job.id)
                {
                    agent.slots_in_use.extend(&kept.free);
                    agent.takes_work &= !kept.is_whole_machine;
                }
                agent
            });
            let fits = would_start(row, remaining.collect());
            let is_true = match why.kind() {
                ReasonKind::UnreadableSpec { .. } => job.unreadable.is_some(),
                ReasonKind::NoAgentOnline => snapshot.agents.is_empty(),
                ReasonKind::NoAgentAccepts { .. } => !agents().any(|agent| {
                    agent.takes_work && agent.only_job.as_ref().is_none_or(|only| *only == job.id)
                }),
                ReasonKind::TooFewSlots(_) | ReasonKind::MachinesApart { .. } => !would_fit,
                ReasonKind::WaitingForSlots(wait) => {
                    let is_explained = wait.slots_free < wait.slots_needed || !wait.kept_for.is_empty();
                    would_fit && !fits && is_explained
                }
                ReasonKind::WaitingForCheckpoint { .. } => {
                    snapshot.checkpoint_waits.iter().any(|((id, _), wait)| *id == job.id && wait.is_some())
                }
                _ => false,
            };
            assert!(is_true, "seed {seed}: {} of {} ranks: {why}", job.id, job.ranks);
        }
    }
    let codes = ["unreadable_spec", "no_agent_online", "no_agent_accepts", "too_few_slots", "machines_apart"];
    for code in codes.into_iter().chain(["waiting_for_slots", "waiting_for_checkpoint"]) {
        assert!(seen.get(code).is_some_and(|times| *times > 5), "{code}: {seen:?}");
    }
}

#[test]
fn a_trial_waits_while_its_sweep_is_paused() {
    let mut trial = job(1);
    trial.job.trial = Some(TrialOf { sweep: "sweep-1".into(), number: 2 });
    let mut snapshot = snapshot(vec![agent("a", &["cpu", "cpu"], |_| {})], vec![trial, job(1)]);
    assert_eq!(plan(&snapshot).starts.len(), 2);
    snapshot.paused_sweeps.insert("sweep-1".into(), "cv".into());
    let plan = plan(&snapshot);
    assert_eq!((plan.starts.len(), plan.waiting.len()), (1, 1));
    let why = plan.waiting[0].why.as_ref().map(ToString::to_string);
    let words = "its sweep cv is paused; `lockstep sweep resume sweep-1` lets the trial start";
    assert_eq!(why.as_deref(), Some(words));
}

#[test]
fn no_job_starves_while_smaller_ones_keep_coming() {
    for seed in 0..20 {
        let mut random = Random(random::Random(seed));
        let mut agents: Vec<_> = ["a", "b", "c"].map(|name| agent(name, &["cpu"; 4], |_| {})).into();
        let mut waiting: Vec<JobRow> = Vec::new();
        // The time when each job was submitted.
        let mut submitted = HashMap::new();
        // The slots of running jobs: end of the job, agent, slot.
        let mut running: Vec<(u32, String, u32)> = Vec::new();
        for now in 0..400 {
            running.retain(|(end, ..)| *end > now);
            for agent in &mut agents {
                let here = running.iter().filter(|(_, id, _)| *id == agent.row.id);
                agent.slots_in_use = here.map(|(.., slot)| *slot).collect();
            }
            while waiting.len() < 8 {
                let ranks = if random.chance(15) { 5 + random.below(8) } else { 1 + random.below(2) };
                let row = job(ranks);
                submitted.insert(row.job.id.clone(), now);
                waiting.push(row);
            }
            let mut snapshot = snapshot(agents.clone(), waiting.clone());
            snapshot.fair_share = FairShare::Off;
            for start in &plan(&snapshot).starts {
                let end = now + 1 + random.below(8);
                running.extend(slots_of(start).map(|(agent, slot)| (end, agent.row.id.clone(), slot)));
                waiting.retain(|row| row.job.id != start.row.job.id);
            }
            for row in &waiting {
                let waited = now - submitted[&row.job.id];
                // The job and the seven before it are each first in the queue for at most as long as the longest job runs.
                assert!(waited <= 8 * 8, "seed {seed}: {} ranks have waited for {waited}", row.job.ranks);
            }
        }
    }
}

#[test]
fn every_job_that_fits_the_cluster_starts_once_running_jobs_end() {
    for seed in 0..100 {
        let mut random = Random(random::Random(seed));
        let mut waiting: Vec<_> = (0..random.below(12)).map(|_| random_job(&mut random)).collect();
        waiting.sort_by_key(|row| Reverse(row.job.spec.priority));
        let idle = ["a", "b", "c"].map(|name| random_agent(&mut random, name, &waiting));
        let mut snapshot = snapshot(Vec::new(), waiting);
        // The slots of running jobs: end of the job, agent, slot.
        let mut running: Vec<(u32, String, u32)> = Vec::new();
        // At most 11 jobs, each running for at most two rounds, and the same number of rounds to spare.
        for now in 0..44 {
            running.retain(|(end, ..)| *end > now);
            snapshot.now = at(2000 + 60 * now);
            let busy = idle.iter().map(|agent| {
                let here = running.iter().filter(|(_, id, _)| *id == agent.row.id);
                Arc::new(AgentState { slots_in_use: here.map(|(.., slot)| *slot).collect(), ..agent.clone() })
            });
            snapshot.agents = busy.collect();
            let plan = loop {
                let plan = plan(&snapshot);
                if plan.unknown_checkpoints.is_empty() {
                    break plan;
                }
                let known = plan
                    .unknown_checkpoints
                    .into_iter()
                    .map(|(row, reader)| ((row.job.id.clone(), reader), None));
                snapshot.checkpoint_waits.extend(known);
            };
            for start in &plan.starts {
                let end = now + 1 + random.below(2);
                running.extend(slots_of(start).map(|(agent, slot)| (end, agent.row.id.clone(), slot)));
                snapshot.waiting.retain(|row| row.job.id != start.row.job.id);
            }
        }
        for row in snapshot.waiting.iter().filter(|row| is_due(row, snapshot.now)) {
            assert!(
                !would_start(row, idle.to_vec()),
                "seed {seed}: {} ranks: {:?}",
                row.job.ranks,
                row.job.id
            );
        }
    }
}

#[test]
fn restarts_wait_longer_each_time_up_to_a_minute() {
    for (restarts, millis) in [(1, 0), (2, 1000), (3, 2000), (7, 32_000), (8, 60_000), (100, 60_000)] {
        let mut row = job(1);
        (row.job.state, row.restarts, row.waiting_since) = (JobState::Restarting, restarts, Some(at(1000)));
        let is_due = |millis| is_due(&row, at(1000) + Duration::from_millis(millis));
        assert!(is_due(millis), "{restarts}");
        assert!(millis == 0 || !is_due(millis - 1), "{restarts}");
    }
}
