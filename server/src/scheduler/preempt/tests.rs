use super::super::gang::tests::{TestMachine, candidates};
use super::*;
use crate::store::Occupant;
use lockstep_protocol::JobId;

const CPU: &str = "a core";

/// A running job: its priority, whether it is already ending, and its slots by agent. Jobs are in the order of the store.
type Running<'a> = (i32, bool, &'a [(&'a str, &'a [u32])]);

fn yielding(running: &[Running<'_>]) -> Vec<YieldingJob> {
    let job = |(priority, is_ending, places): &Running<'_>| YieldingJob {
        occupant: Occupant {
            job: JobId::generate(),
            priority: *priority,
            preemptible: true,
            must_end: *is_ending,
            is_being_preempted: *is_ending,
        },
        is_ending: *is_ending,
        slots: places
            .iter()
            .flat_map(|(agent, slots)| slots.iter().map(move |slot| (format!("id-{agent}"), *slot)))
            .collect(),
    };
    running.iter().map(job).collect()
}

/// The agents of a job with `ranks` ranks and priority 9, each with its number of slots, and the jobs that are
/// stopped for it.
fn plan(
    machines: &[TestMachine<'_>],
    running: &[Running<'_>],
    ranks: usize,
) -> Option<(Vec<(String, usize)>, Vec<usize>)> {
    plan_with(machines, &yielding(running), ranks)
}

/// Like [`plan`], with the running jobs given in full.
fn plan_with(
    machines: &[TestMachine<'_>],
    yielding: &[YieldingJob],
    ranks: usize,
) -> Option<(Vec<(String, usize)>, Vec<usize>)> {
    let candidates = candidates(machines);
    let choice = choose_victims(&candidates, ranks, 9, &ReservedAgents::new(), yielding, &HashSet::new())?;
    let name = |(c, slots): (usize, Vec<u32>)| (candidates[c].agent.row.name.clone(), slots.len());
    Some((choice.chosen.into_iter().map(name).collect(), choice.victims))
}

fn expected(agents: &[(&str, usize)], victims: &[usize]) -> Option<(Vec<(String, usize)>, Vec<usize>)> {
    Some((agents.iter().map(|(name, slots)| ((*name).to_owned(), *slots)).collect(), victims.to_vec()))
}

#[test]
fn as_few_jobs_as_possible_are_stopped_and_those_of_lowest_priority() {
    let one_machine = [("a", None, 4, 4, CPU)];
    let running: [Running<'_>; 3] =
        [(0, false, &[("a", &[0])]), (1, false, &[("a", &[1])]), (2, false, &[("a", &[2, 3])])];
    assert_eq!(plan(&one_machine, &running, 1), expected(&[("a", 1)], &[0]));
    // One job rather than two of lower priority.
    assert_eq!(plan(&one_machine, &running, 2), expected(&[("a", 2)], &[2]));
    assert_eq!(plan(&one_machine, &running, 3), expected(&[("a", 3)], &[0, 2]));
    assert_eq!(plan(&one_machine, &running, 4), expected(&[("a", 4)], &[0, 1, 2]));
    assert_eq!(plan(&one_machine, &running, 5), None, "the agent has only four slots");
    assert_eq!(plan(&one_machine, &running[..1], 2), None);
    // The agent where fewer jobs, or jobs of lower priority, are stopped.
    let two_machines = [("a", None, 2, 2, CPU), ("b", None, 2, 2, CPU)];
    let running: [Running<'_>; 3] =
        [(0, false, &[("a", &[0])]), (0, false, &[("a", &[1])]), (3, false, &[("b", &[0, 1])])];
    assert_eq!(plan(&two_machines, &running, 2), expected(&[("b", 2)], &[2]));
    assert_eq!(plan(&two_machines, &running, 1), expected(&[("a", 1)], &[0]));
}

#[test]
fn slots_of_jobs_that_are_already_ending_are_used_first() {
    let one_machine = [("a", None, 2, 2, CPU)];
    let running: [Running<'_>; 2] = [(0, false, &[("a", &[0])]), (1, true, &[("a", &[1])])];
    assert_eq!(plan(&one_machine, &running, 1), expected(&[("a", 1)], &[]));
    assert_eq!(plan(&one_machine, &running, 2), expected(&[("a", 2)], &[0]));
    // The slot that becomes free is promised to another job.
    let candidates = candidates(&one_machine);
    let promised = HashSet::from([("id-a".to_owned(), 1)]);
    let found =
        choose_victims(&candidates, 1, 9, &ReservedAgents::new(), &yielding(&running), &promised).unwrap();
    assert_eq!((found.chosen, found.victims), (vec![(0, vec![0])], vec![0]));
}

#[test]
fn jobs_on_agents_that_are_not_needed_are_not_stopped() {
    let machines = [
        ("a", Some("10.0.0.1"), 2, 2, CPU),
        ("b", Some("10.0.0.2"), 2, 2, CPU),
        ("c", Some("10.0.0.3"), 2, 2, CPU),
    ];
    let running: [Running<'_>; 4] = [
        (0, false, &[("c", &[0])]),
        (0, false, &[("a", &[0, 1])]),
        (0, false, &[("b", &[0, 1])]),
        (5, false, &[("c", &[1])]),
    ];
    assert_eq!(plan(&machines, &running, 4), expected(&[("a", 2), ("b", 2)], &[1, 2]));
    assert_eq!(plan(&machines, &running, 5), expected(&[("a", 2), ("b", 2), ("c", 1)], &[0, 1, 2]));
    assert_eq!(plan(&machines, &running, 7), None);
}

#[test]
fn of_equal_agents_the_one_with_most_free_slots_is_chosen() {
    let machines = [("a", None, 3, 3, CPU), ("b", None, 3, 2, CPU), ("c", None, 3, 3, CPU)];
    let running: [Running<'_>; 3] =
        [(0, false, &[("a", &[0, 1])]), (0, false, &[("b", &[0])]), (0, false, &[("c", &[0, 1])])];
    assert_eq!(plan(&machines, &running, 2), expected(&[("b", 2)], &[1]));
}

#[test]
fn only_preemptible_jobs_of_lower_priority_are_stopped() {
    let one_machine = [("a", None, 3, 3, CPU)];
    let mut running =
        yielding(&[(0, false, &[("a", &[0])]), (9, true, &[("a", &[1])]), (12, false, &[("a", &[2])])]);
    running[1].occupant.preemptible = false;
    // Slot 1: its job is ending, of the same priority and not preemptible.
    assert_eq!(plan_with(&one_machine, &running, 1), expected(&[("a", 1)], &[]));
    assert_eq!(plan_with(&one_machine, &running, 2), expected(&[("a", 2)], &[0]));
    assert_eq!(plan_with(&one_machine, &running, 3), None, "a job of higher priority is not stopped");
    // Its ranks on another machine have ended, so these ranks are ending, too.
    running[2].is_ending = true;
    assert_eq!(plan_with(&one_machine, &running, 2), expected(&[("a", 2)], &[]));
    running[0].occupant.priority = 9;
    assert_eq!(plan_with(&one_machine, &running, 3), None, "a job of the same priority is not stopped");
    running[0].occupant.priority = 8;
    assert_eq!(plan_with(&one_machine, &running, 3), expected(&[("a", 3)], &[0]));
    running[0].occupant.preemptible = false;
    assert_eq!(plan_with(&one_machine, &running, 3), None);
}

#[test]
fn at_most_64_victims_are_checked_for_being_unneeded() {
    // The slots of the large job are enough. The small jobs are chosen at first only because their machines also have
    // a free slot, so that fewer machines are needed.
    let stopped_with = |small: usize| {
        let large = small + 1;
        let name = |n: usize| format!("{}{n:02}", if n < small { 'a' } else { 'b' });
        let names: Vec<String> = (0..small + large).map(name).collect();
        let addresses: Vec<String> = (0..names.len()).map(|n| format!("10.0.0.{n}")).collect();
        let machines: Vec<TestMachine<'_>> = names
            .iter()
            .zip(&addresses)
            .enumerate()
            .map(|(n, (name, at))| (name.as_str(), Some(at.as_str()), if n < small { 2 } else { 1 }, 1, CPU))
            .collect();
        let places: Vec<(&str, &[u32])> = names.iter().map(|name| (name.as_str(), &[0][..])).collect();
        let mut running: Vec<Running<'_>> =
            places[..small].iter().map(|place| (0, false, std::slice::from_ref(place))).collect();
        running.push((1, false, &places[small..]));
        plan(&machines, &running, 2 * small + 1).expect("the job fits").1
    };
    // The large job is tried, too, and has to be stopped.
    assert_eq!(stopped_with(MAX_TRIED - 1), [63]);
    assert_eq!(stopped_with(MAX_TRIED), [0, 64], "one more job is not tried and is stopped");
}
