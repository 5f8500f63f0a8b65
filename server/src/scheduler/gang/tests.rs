use super::*;
use lockstep_protocol::{
    JobId,
    agent::{Machine, Slot},
};

/// A machine: its name, address, number of slots, number of slots in use, and the model of the slots.
pub(in crate::scheduler) type TestMachine<'a> = (&'a str, Option<&'a str>, u32, u32, &'a str);

pub(in crate::scheduler) fn candidates(machines: &[TestMachine<'_>]) -> Candidates {
    candidates_with_links(machines, |_| (None, Vec::new()))
}

/// Like [`candidates`], with each machine's network speed and NVLink groups.
fn candidates_with_links(
    machines: &[TestMachine<'_>],
    links: impl Fn(&str) -> (Option<u32>, Vec<Vec<u32>>),
) -> Candidates {
    let candidate = |(name, address, slots, in_use, model): &TestMachine<'_>| {
        let device = if model.starts_with("GPU") { "cuda" } else { "cpu" };
        let slot =
            |index| Slot { index, device: device.into(), name: (*model).into(), memory_bytes: 0, uuid: None };
        let (interface_mbits, nvlink_groups) = links(name);
        let machine = Machine {
            hostname: (*name).into(),
            address: address.map(Into::into),
            interface_mbits,
            nvlink_groups,
            // Agents whose names begin with the same part before a dash are on one machine.
            network_id: address.and_then(|_| name.split('-').next()).map(Into::into),
            ..Machine::default()
        };
        let row = AgentRow {
            id: format!("id-{name}"),
            name: (*name).into(),
            machine,
            slots: (0..*slots).map(slot).collect(),
            last_seen_at: crate::now(),
        };
        Candidate::of(Arc::new(AgentState::idle(Arc::new(row))), &(0..*in_use).collect(), Device::Auto)
    };
    Candidates::new(machines.iter().map(candidate).collect())
}

/// These machines, reserved for another job.
fn reserved_agents(names: &[&str]) -> ReservedAgents {
    let reserved_for = (JobId::generate(), String::new());
    names.iter().map(|name| (format!("id-{name}"), reserved_for.clone())).collect()
}

/// The names of the chosen machines, each with the number of slots chosen on it.
fn chosen(machines: &[TestMachine<'_>], ranks: usize, reserved: &[&str]) -> Vec<(String, usize)> {
    chosen_from(&candidates(machines), ranks, reserved)
}

fn chosen_from(candidates: &Candidates, ranks: usize, reserved: &[&str]) -> Vec<(String, usize)> {
    let reserved = reserved_agents(reserved);
    let found = choose_agents(candidates, ranks, &reserved).unwrap_or_default();
    found.into_iter().map(|(c, slots)| (candidates[c].agent.row.name.clone(), slots.len())).collect()
}

fn expected(list: &[(&str, usize)]) -> Vec<(String, usize)> {
    list.iter().map(|(name, slots)| ((*name).to_owned(), *slots)).collect()
}

const CPU: &str = "a core";

#[test]
fn a_job_gets_the_fewest_machines_and_the_fullest_one_last() {
    let machines = [
        ("a", Some("10.0.0.1"), 4, 0, CPU),
        ("b", Some("10.0.0.2"), 4, 1, CPU),
        ("c", Some("10.0.0.3"), 4, 3, CPU),
        ("d", Some("10.0.0.4"), 4, 4, CPU),
    ];
    assert_eq!(chosen(&machines, 1, &[]), expected(&[("c", 1)]));
    assert_eq!(chosen(&machines, 4, &[]), expected(&[("a", 4)]));
    assert_eq!(chosen(&machines, 5, &[]), expected(&[("a", 4), ("c", 1)]));
    assert_eq!(chosen(&machines, 6, &[]), expected(&[("a", 4), ("b", 2)]));
    assert_eq!(chosen(&machines, 8, &[]), expected(&[("a", 4), ("b", 3), ("c", 1)]));
    assert_eq!(chosen(&machines, 9, &[]), [], "all slots or none");
    // Machines reserved for jobs before this one are not chosen.
    assert_eq!(chosen(&machines, 4, &["a"]), expected(&[("b", 3), ("c", 1)]));
    assert_eq!(chosen(&machines, 5, &["a"]), []);
}

#[test]
fn machines_share_a_job_only_if_they_can_reach_each_other() {
    let apart = [("a", Some("127.0.0.1"), 2, 0, CPU), ("b", Some("127.0.0.1"), 2, 0, CPU)];
    assert_eq!(chosen(&apart, 4, &[]), []);
    assert_eq!(max_capacity(&candidates(&apart)), Capacity { slots: 2, free: 2, machines: 1 });
    let mixed = [("a", Some("10.0.0.1"), 2, 0, CPU), ("b", Some("localhost"), 2, 0, CPU)];
    assert_eq!(chosen(&mixed, 4, &[]), []);
    // Two agents of one machine, one with a loopback address and one without.
    let together = [("m-1", Some("127.0.0.1"), 2, 0, CPU), ("m-2", Some("10.0.0.2"), 2, 0, CPU)];
    assert_eq!(chosen(&together, 4, &[]), expected(&[("m-1", 2), ("m-2", 2)]));
    // Agents without an address.
    let unreachable = [("a", None, 2, 0, CPU), ("b", None, 2, 0, CPU)];
    assert_eq!(chosen(&unreachable, 4, &[]), []);
    assert_eq!(chosen(&unreachable, 2, &[]), expected(&[("a", 2)]));
}

#[test]
fn slots_are_of_one_device_type_and_of_one_model_if_that_needs_no_more_machines() {
    let machines = [
        ("a", Some("10.0.0.1"), 2, 0, "GPU old"),
        ("b", Some("10.0.0.2"), 2, 0, "GPU new"),
        ("c", Some("10.0.0.3"), 2, 0, "GPU new"),
        ("d", Some("10.0.0.4"), 2, 0, CPU),
    ];
    assert_eq!(chosen(&machines, 4, &[]), expected(&[("b", 2), ("c", 2)]));
    assert_eq!(chosen(&machines, 6, &[]), expected(&[("a", 2), ("b", 2), ("c", 2)]));
    assert_eq!(chosen(&machines, 8, &[]), [], "CPU and GPU slots are not mixed");
    assert_eq!(max_capacity(&candidates(&machines)), Capacity { slots: 6, free: 6, machines: 3 });
}

#[test]
fn machines_reserved_for_a_large_job_have_enough_slots_and_the_most_free_ones() {
    let machines = [
        ("a", Some("10.0.0.1"), 2, 2, CPU),
        ("b", Some("10.0.0.2"), 2, 1, CPU),
        ("c", Some("10.0.0.3"), 2, 1, CPU),
    ];
    let candidates = candidates(&machines);
    let reserved_names = |ranks| {
        let found = choose_reserved_agents(&candidates, ranks)?;
        Some(found.into_iter().map(|c| candidates[c].agent.row.name.clone()).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(reserved_names(4).as_deref(), Some("b c"));
    assert_eq!(reserved_names(5).as_deref(), Some("b c a"));
    assert_eq!(reserved_names(7), None);
    assert!(reserved_names(2).is_some_and(|one| one == "b" || one == "c"), "one machine is enough");
}

#[test]
fn machines_of_a_launch_keep_the_order_of_its_list() {
    let names: Vec<_> = (1..=12).map(|n| format!("launch-a-{n}-host")).collect();
    // The machines have different numbers of slots.
    let slots = |n: usize| 1 + (n as u32 % 2);
    let machines: Vec<TestMachine<'_>> =
        names.iter().enumerate().map(|(n, name)| (&**name, Some("10.0.0.1"), slots(n), 0, CPU)).collect();
    let job = JobId::generate();
    let mut launched = candidates(&machines).to_vec();
    for candidate in &mut launched {
        Arc::make_mut(&mut candidate.agent).only_job = Some(job.clone());
    }
    let candidates = Candidates::new(launched);
    let found = choose_agents(&candidates, 18, &ReservedAgents::new()).unwrap();
    let found: Vec<_> =
        found.into_iter().map(|(c, slots)| (candidates[c].agent.row.name.clone(), slots.len())).collect();
    let listed: Vec<_> =
        names.iter().enumerate().map(|(n, name)| (name.clone(), slots(n) as usize)).collect();
    assert_eq!(found, listed);
}

#[test]
fn of_equally_many_machines_those_whose_slowest_link_is_fastest_are_chosen() {
    let machines = [
        ("a", Some("10.0.0.1"), 4, 0, CPU),
        ("b", Some("10.0.0.2"), 4, 0, CPU),
        ("c", Some("10.0.0.3"), 4, 1, CPU),
        ("d", Some("10.0.0.4"), 4, 1, CPU),
    ];
    let speeds = |a, b, c, d| {
        candidates_with_links(&machines, move |name| {
            let speed = match name {
                "a" => a,
                "b" => b,
                "c" => c,
                _ => d,
            };
            (speed, Vec::new())
        })
    };
    let slow_and_fast = speeds(Some(1000), Some(10_000), Some(100_000), Some(100_000));
    assert_eq!(chosen_from(&slow_and_fast, 6, &[]), expected(&[("c", 3), ("d", 3)]));
    // The slowest link counts.
    assert_eq!(chosen_from(&slow_and_fast, 7, &[]), expected(&[("b", 4), ("c", 3)]));
    // Two machines with a slow link rather than three.
    assert_eq!(chosen_from(&slow_and_fast, 8, &[]), expected(&[("a", 4), ("b", 4)]));
    assert_eq!(chosen_from(&slow_and_fast, 9, &[]), expected(&[("b", 4), ("c", 3), ("d", 2)]));
    assert_eq!(chosen_from(&slow_and_fast, 6, &["c"]), expected(&[("b", 4), ("d", 2)]), "c is reserved");
    // The speed of b is unknown: it counts as the slowest known speed.
    let unknown = speeds(Some(1000), None, Some(10_000), Some(10_000));
    assert_eq!(chosen_from(&unknown, 6, &[]), expected(&[("c", 3), ("d", 3)]));
    let equal = speeds(Some(1000), None, Some(1000), Some(1000));
    assert_eq!(chosen_from(&equal, 6, &[]), expected(&[("a", 4), ("c", 2)]), "as if no speed were known");
    // Reservations prefer fast links, too.
    let reserved_names = |candidates: &Candidates, ranks| {
        let found = choose_reserved_agents(candidates, ranks).unwrap();
        found.into_iter().map(|c| candidates[c].agent.row.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(reserved_names(&slow_and_fast, 8), ["c", "d"]);
    assert_eq!(reserved_names(&slow_and_fast, 12), ["b", "c", "d"]);
}

#[test]
fn agents_of_one_machine_need_no_network() {
    let machines = [
        ("m-1", Some("10.0.0.1"), 2, 0, CPU),
        ("m-2", Some("10.0.0.1"), 2, 0, CPU),
        ("n", Some("10.0.0.2"), 2, 0, CPU),
        ("o", Some("10.0.0.3"), 2, 0, CPU),
    ];
    let links = |name: &str| (Some(if name.starts_with('m') { 100 } else { 100_000 }), Vec::new());
    assert_eq!(
        chosen_from(&candidates_with_links(&machines, links), 4, &[]),
        expected(&[("m-1", 2), ("m-2", 2)])
    );
}

#[test]
fn gpus_connected_by_nvlink_are_chosen_together() {
    const GPU: &str = "GPU A";
    let slots = |in_use: u32, groups: &[&[u32]], ranks| {
        let groups: Vec<Vec<u32>> = groups.iter().map(|group| group.to_vec()).collect();
        let candidates =
            candidates_with_links(&[("a", Some("10.0.0.1"), 8, in_use, GPU)], |_| (None, groups.clone()));
        choose_agents(&candidates, ranks, &ReservedAgents::new()).unwrap().remove(0).1
    };
    let pairs: &[&[u32]] = &[&[0, 4], &[1, 5], &[2, 6], &[3, 7]];
    assert_eq!(slots(0, pairs, 2), [0, 4]);
    assert_eq!(slots(2, pairs, 2), [2, 6], "the remaining halves of pairs are not used");
    assert_eq!(slots(2, pairs, 1), [4], "a job of one rank gets such a half");
    assert_eq!(slots(1, pairs, 4), [1, 5, 2, 6]);
    assert_eq!(slots(2, pairs, 6), [2, 6, 3, 7, 4, 5]);
    assert_eq!(slots(0, &[&[0, 1, 2, 3], &[4, 5, 6, 7]], 4), [0, 1, 2, 3]);
    assert_eq!(slots(1, &[&[0, 1, 2, 3], &[4, 5, 6, 7]], 4), [4, 5, 6, 7]);
    assert_eq!(slots(3, &[], 3), [3, 4, 5], "without NVLink groups, slots are used in their order");
}

#[test]
fn faster_links_count_more_than_fuller_machines() {
    const GPU: &str = "GPU A";
    let machines = [
        ("a", Some("10.0.0.1"), 8, 0, GPU),
        ("b", Some("10.0.0.2"), 8, 0, GPU),
        ("c", Some("10.0.0.3"), 8, 2, GPU),
        ("d", Some("10.0.0.4"), 8, 6, GPU),
    ];
    let candidates = candidates_with_links(&machines, |name| {
        let groups = match name {
            "a" => vec![(0..8).collect()],
            // Two of its pairs are incomplete: slots 0 and 1 are in use.
            "c" => vec![vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]],
            _ => Vec::new(),
        };
        (None, groups)
    });
    let best = |ranks, reserved: &[&str]| {
        let reserved = reserved_agents(reserved);
        let (c, slots) = choose_agents(&candidates, ranks, &reserved).unwrap().remove(0);
        (candidates[c].agent.row.name.clone(), slots)
    };
    assert_eq!(best(1, &[]), ("d".into(), vec![6]), "a single rank uses no links: the fullest");
    assert_eq!(best(2, &[]), ("c".into(), vec![2, 6]), "the fuller one of two machines with NVLink");
    assert_eq!(best(2, &["c"]), ("a".into(), vec![0, 1]), "rather than a fuller machine without NVLink");
    assert_eq!(best(4, &[]), ("a".into(), vec![0, 1, 2, 3]), "four of one group rather than two pairs");
    assert_eq!(best(4, &["a"]), ("c".into(), vec![2, 6, 3, 7]), "two pairs rather than none");
    assert_eq!(best(2, &["a", "c"]), ("d".into(), vec![6, 7]), "the fullest one if links are equal");
}

#[test]
fn jobs_of_one_rank_get_slots_without_nvlink() {
    const GPU: &str = "GPU A";
    let groups: Vec<Vec<u32>> = vec![vec![0, 1], vec![2, 3, 4, 5]];
    let candidates = candidates_with_links(&[("a", Some("10.0.0.1"), 7, 0, GPU)], |_| (None, groups.clone()));
    let slots = |ranks| choose_agents(&candidates, ranks, &ReservedAgents::new()).unwrap().remove(0).1;
    assert_eq!(slots(1), [6], "the pair stays whole");
    assert_eq!(slots(2), [0, 1]);
    assert_eq!(slots(3), [2, 3, 4]);
    assert_eq!(slots(5), [2, 3, 4, 5, 6], "and the pair stays whole again");
    assert_eq!(slots(6), [2, 3, 4, 5, 0, 1]);
}
