use super::super::gang::tests::{Given, candidates};
use super::*;
use crate::store::Occupant;
use lockstep_protocol::JobId;

const CPU: &str = "a core";

/// Jobs that run: priority, whether it ends already, and slots by agent; in the order of the store.
type Running<'a> = (i32, bool, &'a [(&'a str, &'a [u32])]);

fn yielding(running: &[Running<'_>]) -> Vec<Yielding> {
    let one = |(priority, ends, places): &Running<'_>| Yielding {
        by: Occupant {
            job: JobId::generate(),
            priority: *priority,
            preemptible: true,
            ends: *ends,
            preempted: *ends,
        },
        ends: *ends,
        slots: places
            .iter()
            .flat_map(|(agent, slots)| slots.iter().map(move |slot| (format!("id-{agent}"), *slot)))
            .collect(),
    };
    running.iter().map(one).collect()
}

/// Agents with how many slots a job of so many ranks has on each, and who ends for it.
fn planned(
    given: &[Given<'_>],
    running: &[Running<'_>],
    ranks: usize,
) -> Option<(Vec<(String, usize)>, Vec<usize>)> {
    planned_with(given, &yielding(running), ranks)
}

/// The same for a job of priority 9, with jobs that are more particular.
fn planned_with(
    given: &[Given<'_>],
    yielding: &[Yielding],
    ranks: usize,
) -> Option<(Vec<(String, usize)>, Vec<usize>)> {
    let candidates = candidates(given);
    let room = room(&candidates, (ranks, 9), &HashSet::new(), yielding, &HashSet::new())?;
    let name = |(c, slots): (usize, Vec<u32>)| (candidates[c].agent.row.name.clone(), slots.len());
    Some((room.chosen.into_iter().map(name).collect(), room.victims))
}

fn on(agents: &[(&str, usize)], victims: &[usize]) -> Option<(Vec<(String, usize)>, Vec<usize>)> {
    Some((agents.iter().map(|(name, slots)| ((*name).to_owned(), *slots)).collect(), victims.to_vec()))
}

#[test]
fn as_few_as_possible_end_and_of_so_many_the_lowest() {
    let one = [("a", None, 4, 4, CPU)];
    let running: [Running<'_>; 3] =
        [(0, false, &[("a", &[0])]), (1, false, &[("a", &[1])]), (2, false, &[("a", &[2, 3])])];
    assert_eq!(planned(&one, &running, 1), on(&[("a", 1)], &[0]));
    assert_eq!(
        planned(&one, &running, 2),
        on(&[("a", 2)], &[2]),
        "one job rather than two of lower priority"
    );
    assert_eq!(planned(&one, &running, 3), on(&[("a", 3)], &[0, 2]));
    assert_eq!(planned(&one, &running, 4), on(&[("a", 4)], &[0, 1, 2]));
    assert_eq!(planned(&one, &running, 5), None, "it would not fit");
    assert_eq!(planned(&one, &running[..1], 2), None);
    // Of two agents the one where fewer end, or lower ones.
    let two = [("a", None, 2, 2, CPU), ("b", None, 2, 2, CPU)];
    let running: [Running<'_>; 3] =
        [(0, false, &[("a", &[0])]), (0, false, &[("a", &[1])]), (3, false, &[("b", &[0, 1])])];
    assert_eq!(planned(&two, &running, 2), on(&[("b", 2)], &[2]));
    assert_eq!(planned(&two, &running, 1), on(&[("a", 1)], &[0]));
}

#[test]
fn slots_that_come_free_anyway_are_counted_on_and_nobody_else_ends() {
    let one = [("a", None, 2, 2, CPU)];
    let running: [Running<'_>; 2] = [(0, false, &[("a", &[0])]), (1, true, &[("a", &[1])])];
    assert_eq!(planned(&one, &running, 1), on(&[("a", 1)], &[]));
    assert_eq!(planned(&one, &running, 2), on(&[("a", 2)], &[0]));
    // They are promised to another job.
    let candidates = candidates(&one);
    let promised = HashSet::from([("id-a".to_owned(), 1)]);
    let found = room(&candidates, (1, 9), &HashSet::new(), &yielding(&running), &promised).unwrap();
    assert_eq!((found.chosen, found.victims), (vec![(0, vec![0])], vec![0]));
}

#[test]
fn over_several_agents_those_that_are_not_needed_go_on() {
    let given = [
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
    assert_eq!(planned(&given, &running, 4), on(&[("a", 2), ("b", 2)], &[1, 2]));
    assert_eq!(planned(&given, &running, 5), on(&[("a", 2), ("b", 2), ("c", 1)], &[0, 1, 2]));
    assert_eq!(planned(&given, &running, 7), None);
}

#[test]
fn of_agents_where_as_much_has_to_end_the_one_with_most_free_slots() {
    let given = [("a", None, 3, 3, CPU), ("b", None, 3, 2, CPU), ("c", None, 3, 3, CPU)];
    let running: [Running<'_>; 3] =
        [(0, false, &[("a", &[0, 1])]), (0, false, &[("b", &[0])]), (0, false, &[("c", &[0, 1])])];
    assert_eq!(planned(&given, &running, 2), on(&[("b", 2)], &[1]));
}

#[test]
fn whoever_ends_anyway_is_counted_on_and_only_lower_ones_that_allow_it_are_stopped() {
    let one = [("a", None, 3, 3, CPU)];
    let mut running =
        yielding(&[(0, false, &[("a", &[0])]), (9, true, &[("a", &[1])]), (12, false, &[("a", &[2])])]);
    running[1].by.preemptible = false;
    assert_eq!(planned_with(&one, &running, 1), on(&[("a", 1)], &[]), "of its own priority, not preemptible");
    assert_eq!(planned_with(&one, &running, 2), on(&[("a", 2)], &[0]));
    assert_eq!(planned_with(&one, &running, 3), None, "one of a higher priority stays");
    // Its ranks on another machine have ended: these end, too.
    running[2].ends = true;
    assert_eq!(planned_with(&one, &running, 2), on(&[("a", 2)], &[]));
    running[0].by.priority = 9;
    assert_eq!(planned_with(&one, &running, 3), None, "one of its own priority stays");
    running[0].by.priority = 8;
    assert_eq!(planned_with(&one, &running, 3), on(&[("a", 3)], &[0]));
    running[0].by.preemptible = false;
    assert_eq!(planned_with(&one, &running, 3), None);
}

#[test]
fn of_jobs_that_turn_out_not_to_be_needed_the_highest_64_are_spared() {
    // A large job gives as many slots as are missing. Each small one would end only because its machine has a free slot, too, and so
    // fewer machines would be enough.
    let ended_with = |small: usize| {
        let large = small + 1;
        let name = |n: usize| format!("{}{n:02}", if n < small { 'a' } else { 'b' });
        let names: Vec<String> = (0..small + large).map(name).collect();
        let addresses: Vec<String> = (0..names.len()).map(|n| format!("10.0.0.{n}")).collect();
        let given: Vec<Given<'_>> = names
            .iter()
            .zip(&addresses)
            .enumerate()
            .map(|(n, (name, at))| (name.as_str(), Some(at.as_str()), if n < small { 2 } else { 1 }, 1, CPU))
            .collect();
        let places: Vec<(&str, &[u32])> = names.iter().map(|name| (name.as_str(), &[0][..])).collect();
        let mut running: Vec<Running<'_>> =
            places[..small].iter().map(|place| (0, false, std::slice::from_ref(place))).collect();
        running.push((1, false, &places[small..]));
        planned(&given, &running, 2 * small + 1).expect("it fits").1
    };
    // The large one is tried, too, and has to end.
    assert_eq!(ended_with(MAX_TRIED - 1), [63]);
    assert_eq!(ended_with(MAX_TRIED), [0, 64], "one more is not tried any more, and ends");
}
