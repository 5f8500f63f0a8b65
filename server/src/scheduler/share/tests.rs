use super::*;

/// The order in which waiting jobs, given by share and ranks, get slots if each job gets all of its slots. A share in use is given by its
/// slots; its newest start is its place in the list.
fn order(in_use: &[(&str, u64)], waiting: &[(&str, u32)]) -> Vec<usize> {
    let share_use = |(start, (share, slots)): (u64, &(&str, u64))| {
        ((*share).to_owned(), ShareUse { slots: *slots, newest_start: start })
    };
    let mut queue = Queue::new((1..).zip(in_use).map(share_use).collect());
    queue.fill(waiting.iter().enumerate().map(|(n, (share, ranks))| ((*share).to_owned(), (n, *ranks))));
    let (mut order, mut assigned) = (Vec::new(), 0);
    while let Some((n, ranks)) = queue.next(assigned) {
        order.push(n);
        assigned = ranks;
    }
    order
}

#[test]
fn the_share_with_the_fewest_slots_comes_first_then_the_longest_wait() {
    let waiting = [("a", 1), ("a", 1), ("a", 1), ("b", 1), ("b", 1)];
    assert_eq!(order(&[], &waiting), [0, 3, 1, 4, 2], "the shares alternate");
    assert_eq!(order(&[("a", 2)], &waiting), [3, 4, 0, 1, 2], "b gets two slots before a gets more");
    assert_eq!(order(&[("a", 1), ("b", 9)], &waiting), [0, 1, 2, 3, 4]);
    let full = [("a", 8), ("a", 8), ("b", 8), ("b", 8)];
    // Jobs that fill the cluster alternate: while the first runs, and after its end.
    assert_eq!(order(&[("a", 8)], &full), [2, 0, 3, 1]);
    assert_eq!(order(&[("a", 0)], &full), [2, 0, 3, 1], "after its end");
    assert_eq!(order(&[("b", 0), ("a", 0)], &full), [2, 0, 3, 1]);
    // A job counts as many slots as it has ranks.
    assert_eq!(order(&[], &[("a", 4), ("a", 1), ("b", 1), ("b", 2), ("b", 2)]), [0, 2, 3, 4, 1]);
    // In one share, only age counts.
    assert_eq!(order(&[("", 7)], &[("", 1), ("", 5), ("", 1)]), [0, 1, 2]);
    assert_eq!(order(&[], &[]), Vec::<usize>::new());
}

#[test]
fn a_job_without_slots_does_not_count_and_slots_count_in_the_next_priority() {
    let mut queue = Queue::new(HashMap::new());
    let fill = |queue: &mut Queue<&'static str>, jobs: &[(&str, &'static str)]| {
        queue.fill(jobs.iter().map(|(share, job)| ((*share).to_owned(), *job)));
    };
    fill(&mut queue, &[("a", "a0"), ("a", "a1"), ("b", "b0")]);
    assert_eq!(queue.next(0), Some("a0"));
    assert_eq!(queue.next(0), Some("a1"), "a0 got nothing");
    assert_eq!(queue.next(8), Some("b0"));
    assert_eq!(queue.next(1), None);
    fill(&mut queue, &[("a", "a2"), ("b", "b1"), ("b", "b2")]);
    assert_eq!(queue.next(0), Some("b1"), "a has eight slots, b one");
    assert_eq!(queue.next(8), Some("a2"));
    assert_eq!(queue.next(0), Some("b2"));
    assert_eq!(queue.next(0), None);
}
