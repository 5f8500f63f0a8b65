use super::*;
use lockstep_protocol::random::Random;
use std::collections::{BTreeMap, BTreeSet};

fn rules(trials: u32, rungs: &[u32], max_concurrent: u32) -> Rules {
    Rules {
        state: SweepState::Running,
        metric: SweepMetric { name: "val_accuracy", maximize: true },
        reduction: 3,
        rungs: rungs.into(),
        trial_count: trials,
        max_concurrent,
    }
}

fn trial(number: u32, stage: Stage, values: &[f64]) -> TrialState {
    let values = values.iter().map(|value| Some(*value).filter(|value| value.is_finite())).collect();
    TrialState { number, stage, values }
}

#[test]
fn trials_continue_or_end_as_soon_as_the_outcome_is_certain() {
    use Action::{Cancel, End, Finish, Promote, Start};
    use Stage::{Active, AtRung, Ended};
    let six = rules(6, &[1, 3], 10);
    let started = |stages: &[(Stage, &[f64])]| -> Vec<TrialState> {
        (1..).zip(stages).map(|(number, (stage, values))| trial(number, *stage, values)).collect()
    };
    let in_state = |state| Rules { state, ..six.clone() };
    let two_of_three = rules(3, &[2], 2);
    for (name, rules, trials, expected) in [
        (
            "a sweep starts max_concurrent trials; with one rung, trials do not pause",
            two_of_three.clone(),
            vec![],
            vec![Start { number: 1, pause_after: None }, Start { number: 2, pause_after: None }],
        ),
        (
            "the next trial starts when a trial has ended",
            two_of_three,
            started(&[(Ended, &[0.5]), (Active, &[])]),
            vec![Start { number: 3, pause_after: None }],
        ),
        (
            "two of six continue: with two unknown, only the ends are certain",
            six.clone(),
            started(&[
                (AtRung, &[0.4]),
                (AtRung, &[0.3]),
                (AtRung, &[0.2]),
                (AtRung, &[0.1]),
                (Active, &[]),
                (Active, &[]),
            ]),
            vec![End { number: 3 }, End { number: 4 }],
        ),
        (
            "with one unknown the best is certain",
            six.clone(),
            started(&[
                (AtRung, &[0.4]),
                (AtRung, &[0.3]),
                (Ended, &[0.2]),
                (Ended, &[0.1]),
                (AtRung, &[0.35]),
                (Active, &[]),
            ]),
            vec![End { number: 2 }, Promote { number: 1, pause_after: None }],
        ),
        (
            "a failed trial is the worst, and of equal trials the first continues",
            six.clone(),
            started(&[
                (AtRung, &[0.3]),
                (AtRung, &[0.3]),
                (AtRung, &[0.3]),
                (Ended, &[]),
                (Ended, &[]),
                (AtRung, &[f64::NAN]),
            ]),
            vec![
                End { number: 3 },
                End { number: 6 },
                Promote { number: 1, pause_after: None },
                Promote { number: 2, pause_after: None },
            ],
        ),
        (
            "a retried trial displaces a promoted trial",
            rules(3, &[1, 3, 9], 10),
            started(&[(Active, &[0.5]), (AtRung, &[0.4, 0.6]), (Ended, &[0.1])]),
            vec![End { number: 2 }],
        ),
        (
            "a paused sweep only ends trials",
            in_state(SweepState::Paused),
            started(&[(AtRung, &[0.4]), (AtRung, &[0.3]), (AtRung, &[0.2])]),
            vec![End { number: 3 }],
        ),
        (
            "a cancelled sweep first cancels its trials",
            in_state(SweepState::Cancelled),
            started(&[(AtRung, &[0.4]), (Ended, &[])]),
            vec![Cancel { number: 1 }],
        ),
        ("a cancelled sweep without trials finishes", in_state(SweepState::Cancelled), vec![], vec![Finish]),
        (
            "a sweep finishes with its last trial",
            rules(1, &[1, 3], 1),
            started(&[(Ended, &[0.1, 0.2])]),
            vec![Finish],
        ),
    ] {
        assert_eq!(decide(&rules, &trials), expected, "{name}");
    }
}

/// Runs a sweep whose trials have these metrics (`None` fails), in an order given by `seed`. Returns the number of epochs of each trial.
/// If `has_retries`, failed trials are retried once, at any time until the sweep ends, and then do not fail.
fn run(rules: &Rules, metrics: &[Vec<Option<f64>>], seed: u64, has_retries: bool) -> BTreeMap<u32, u32> {
    let (mut random, mut trials, mut epochs) = (Random(seed), Vec::<TrialState>::new(), BTreeMap::new());
    let (mut failed, mut retried) = (BTreeSet::new(), BTreeSet::new());
    let mut targets = BTreeMap::<u32, Option<u32>>::new();
    for _ in 0..10_000 {
        // A server that is killed carries out only some of the actions.
        let actions = decide(rules, &trials);
        let done_count =
            if actions.len() > 1 { 1 + random.below(actions.len() as u64) as usize } else { actions.len() };
        for action in &actions[..done_count] {
            match *action {
                Action::Finish => return epochs,
                Action::Start { number, pause_after } => {
                    assert!(targets.insert(number, pause_after).is_none(), "a trial is started once");
                    trials.push(trial(number, Stage::Active, &[]));
                }
                Action::Promote { number, pause_after } => {
                    let found = trials.iter_mut().find(|trial| trial.number == number).unwrap();
                    assert_eq!(found.stage, Stage::AtRung);
                    found.stage = Stage::Active;
                    targets.insert(number, pause_after);
                }
                Action::End { number } => {
                    let found = trials.iter_mut().find(|trial| trial.number == number).unwrap();
                    assert_eq!(found.stage, Stage::AtRung);
                    found.stage = Stage::Ended;
                }
                Action::Cancel { .. } => panic!("the sweep was not cancelled"),
            }
        }
        if has_retries
            && random.below(4) == 0
            && let Some(number) = failed.pop_last()
        {
            trials.iter_mut().find(|trial| trial.number == number).unwrap().stage = Stage::Active;
            retried.insert(number);
        }
        let mut active: Vec<_> = trials.iter_mut().filter(|trial| trial.stage == Stage::Active).collect();
        assert!(active.len() <= rules.max_concurrent as usize);
        if active.is_empty() {
            continue;
        }
        let index = random.below(active.len() as u64) as usize;
        let arrived = &mut active[index];
        let rung = arrived.values.len();
        let retried_metric = retried.contains(&arrived.number).then(|| f64::from(arrived.number % 50));
        let metric = metrics[arrived.number as usize - 1][rung].or(retried_metric);
        epochs.insert(arrived.number, rules.rungs[rung]);
        assert_eq!(targets[&arrived.number].unwrap_or(*rules.rungs.last().unwrap()), rules.rungs[rung]);
        if metric.is_some() {
            arrived.values.push(metric);
        } else {
            failed.insert(arrived.number);
        }
        let is_over = metric.is_none() || rung + 1 == rules.rungs.len();
        arrived.stage = if is_over { Stage::Ended } else { Stage::AtRung };
    }
    panic!("the sweep does not end");
}

#[test]
fn a_sweep_ends_with_the_same_trials_in_any_order_of_arrival() {
    let mut numbers = Random(1);
    for (trials, rungs) in
        [(1, vec![1, 3]), (5, vec![4]), (6, vec![1, 3]), (27, vec![1, 3, 9]), (20, vec![1, 2, 4, 8])]
    {
        for case in 0..20 {
            let mut metric = |_| (numbers.below(8) > 0).then(|| numbers.below(50) as f64);
            let metrics: Vec<Vec<_>> = (0..trials).map(|_| rungs.iter().map(&mut metric).collect()).collect();
            let expected = run(&rules(trials, &rungs, u32::MAX), &metrics, 0, false);
            for seed in 1..6 {
                let limited = rules(trials, &rungs, 1 + seed as u32);
                assert_eq!(
                    run(&limited, &metrics, seed, false),
                    expected,
                    "{trials} trials, case {case}, order {seed}"
                );
            }
            for seed in 1..6 {
                run(&rules(trials, &rungs, u32::MAX), &metrics, seed, true);
            }
            // The number of trials that reach each rung is limited.
            let mut limit = trials;
            for epoch in &rungs {
                assert!(expected.values().filter(|epochs| *epochs >= epoch).count() <= limit as usize);
                limit = (limit / 3).max(1);
            }
        }
    }
}
