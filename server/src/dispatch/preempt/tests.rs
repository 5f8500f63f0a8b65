use super::super::gang::tests::{Given, candidates};
use super::*;

const CPU: &str = "a core";

/// Jobs that run: priority, whether it ends already, and slots by agent; in the order of the store.
type Running<'a> = (i32, bool, &'a [(&'a str, &'a [u32])]);

fn occupied(running: &[Running<'_>]) -> Vec<Occupied> {
    let one = |(priority, ends, places): &Running<'_>| Occupied {
        by: Occupant { job: JobId::generate(), priority: *priority, ends: *ends },
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
    let candidates = candidates(given);
    let plan = plan(&candidates, ranks, &HashSet::new(), &occupied(running), &HashSet::new())?;
    let name = |(c, slots): (usize, Vec<u32>)| (candidates[c].agent.row.name.clone(), slots.len());
    Some((plan.chosen.into_iter().map(name).collect(), plan.victims))
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
    let found = plan(&candidates, 1, &HashSet::new(), &occupied(&running), &promised).unwrap();
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
