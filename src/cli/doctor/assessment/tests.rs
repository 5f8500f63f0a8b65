use super::*;
use lockstep_worker::doctor::Facts;

fn link(gigabits: f64, round_trip_ms: f64) -> LinkMeasurement {
    LinkMeasurement {
        connect_ms: 0.1,
        round_trip_ms,
        bytes_per_second: gigabits * 125e6,
        clock_ahead_ms: 0.0,
        clock_within_ms: round_trip_ms / 2.0,
    }
}

fn pair(to_b: Result<LinkMeasurement, String>, to_a: Result<LinkMeasurement, String>) -> Pair {
    Pair {
        a: "a".into(),
        b: "b".into(),
        grade: Grade::Ok,
        to_b,
        to_a,
        clock_ahead_ms: None,
        clock_within_ms: None,
        nccl: None,
        findings: Vec::new(),
    }
}

/// Kind, grade and text of each finding.
fn summarize(pair: &Pair, fastest_gigabits: f64) -> Vec<(String, Grade, String)> {
    let findings = pair_findings(pair, fastest_gigabits * 125e6);
    assert!(findings.iter().all(|f| f.advice.as_ref().is_some_and(|a| a.len() > 20)), "{findings:?}");
    findings.into_iter().map(|f| (f.what, f.grade, f.found)).collect()
}

#[test]
fn a_good_pair_has_no_findings() {
    assert_eq!(summarize(&pair(Ok(link(9.4, 0.1)), Ok(link(9.3, 0.1))), 9.4), []);
    // A gigabit less TCP's headers.
    assert_eq!(summarize(&pair(Ok(link(0.94, 0.2)), Ok(link(0.94, 0.2))), 0.94), []);
}

#[test]
fn unreachable_directions_are_reported_separately() {
    let findings =
        summarize(&pair(Err("connecting to 10.0.0.2:4: no answer in 5 s".into()), Ok(link(9.4, 0.1))), 9.4);
    assert_eq!(findings.len(), 1);
    assert_eq!((findings[0].0.as_str(), findings[0].1), ("reach", Grade::Problem));
    assert!(findings[0].2.starts_with("a does not reach b: connecting"), "{findings:?}");
    let pair = pair(
        Ok(link(9.4, 0.1)),
        Err("connected to b; short messages pass, but no data arrived for 5 s during a bulk transfer".into()),
    );
    assert!(pair_findings(&pair, 1e9)[0].advice.as_ref().unwrap().contains("MTU"));
}

#[test]
fn slow_directions_are_distinguished() {
    let speed_finding = |to_b: f64, to_a: f64, fastest: f64| {
        let findings = summarize(&pair(Ok(link(to_b, 0.1)), Ok(link(to_a, 0.1))), fastest);
        assert!(findings.len() <= 1, "{findings:?}");
        findings.into_iter().next().map(|(_, grade, found)| (grade, found))
    };
    let (grade, message) = speed_finding(0.05, 0.9, 0.9).unwrap();
    assert!(grade == Grade::Problem && message.contains("50.0 Mbit/s from b to a"), "{message}");
    let (grade, message) = speed_finding(9.0, 3.0, 9.0).unwrap();
    assert!(
        grade == Grade::Note && message.contains("3.00 Gbit/s from a to b, 9.00 Gbit/s the other way"),
        "{message}"
    );
    let (grade, message) = speed_finding(0.9, 0.94, 9.4).unwrap();
    assert!(grade == Grade::Note && message.contains("slowest link"), "{message}");
    let (grade, message) = speed_finding(0.4, 0.4, 0.4).unwrap();
    assert!(
        grade == Grade::Note && message.contains("ResNet-50's gradients") && message.contains("4.1 s"),
        "{message}"
    );
    assert_eq!(speed_finding(4.0, 9.0, 9.0), None, "less than 2.5 times");
    let far = summarize(&pair(Ok(link(9.4, 10.0)), Ok(link(9.4, 10.1))), 9.4);
    assert!(far.len() == 1 && far[0].2.starts_with("10.0 ms"), "{far:?}");
}

#[test]
fn clock_differences_lead_to_notes_and_problems() {
    let finding_with = |ahead: f64, within: f64| {
        let mut pair = pair(Ok(link(9.4, 0.1)), Ok(link(9.4, 0.1)));
        (pair.clock_ahead_ms, pair.clock_within_ms) = (Some(ahead), Some(within));
        summarize(&pair, 9.4).into_iter().next().map(|(what, grade, found)| {
            assert_eq!(what, "clocks");
            (grade, found)
        })
    };
    assert_eq!(finding_with(1_000.0, 0.0), None);
    assert_eq!(finding_with(1_400.0, 500.0), None, "within the uncertainty");
    assert!(
        finding_with(1_001.0, 0.0).unwrap().1.contains("the clock of b is 1.0 s ahead of the clock of a")
    );
    assert!(
        finding_with(-59_000.0, 0.0).unwrap()
            == (Grade::Note, "the clock of a is 59.0 s ahead of the clock of b".into())
    );
    assert_eq!(finding_with(60_001.0, 0.0).unwrap().0, Grade::Problem);
    // The other direction has a smaller uncertainty.
    let mut uneven = pair(Ok(link(1.0, 4.0)), Ok(LinkMeasurement { clock_ahead_ms: 7.0, ..link(1.0, 0.2) }));
    assert_eq!(clock_difference(&uneven), Some((-7.0, 0.1)));
    uneven.to_a = Err("no".into());
    assert_eq!(clock_difference(&uneven), Some((0.0, 2.0)));
}

fn machine(name: &str, lockstep: &str, gpu: Option<(&str, &str)>) -> ExaminedMachine {
    let facts = Facts {
        hostname: name.into(),
        network_id: name.into(),
        address: [10, 0, 0, 1].into(),
        interface: None,
        cores: 8,
        gpus: gpu.iter().map(|_| "NVIDIA H100".into()).collect(),
        gpu_ids: gpu.iter().map(|_| "GPU-1".into()).collect(),
        driver: gpu.map(|(driver, _)| driver.into()),
        nccl: gpu.map(|(_, nccl)| nccl.into()),
    };
    ExaminedMachine {
        name: name.into(),
        lockstep: Some(lockstep.into()),
        facts: Some(facts),
        findings: Vec::new(),
    }
}

#[test]
fn relevant_versions_must_be_equal() {
    let findings = |a: &ExaminedMachine, b: &ExaminedMachine| -> Vec<(String, Grade)> {
        version_findings(a, b).into_iter().map(|f| (f.what, f.grade)).collect()
    };
    let problem = |what: &str| vec![(what.to_owned(), Grade::Problem)];
    let note = |what: &str| vec![(what.to_owned(), Grade::Note)];
    let good = machine("a", "1.2.0", Some(("580.95.05", "2.28.9")));
    assert_eq!(findings(&good, &machine("b", "1.2.0", Some(("580.95.05", "2.28.9")))), []);
    assert_eq!(findings(&good, &machine("b", "1.2.1", Some(("580.95.05", "2.28.9")))), problem("Lockstep"));
    assert_eq!(findings(&good, &machine("b", "1.2.0", Some(("580.95.05", "2.27.3")))), problem("NCCL"));
    assert_eq!(findings(&good, &machine("b", "1.2.0", Some(("580.82.07", "2.28.9")))), note("GPU driver"));
    assert_eq!(findings(&good, &machine("b", "1.2.0", Some(("570.82.07", "2.28.9")))), problem("GPU driver"));
    assert_eq!(findings(&good, &machine("b", "1.2.0", None)), note("GPUs"));
    assert_eq!(findings(&good, &machine("a", "1.2.0", Some(("580.95.05", "2.28.9")))), note("machine"));
    let mut without_nccl = machine("b", "1.2.0", Some(("580.95.05", "2.28.9")));
    without_nccl.facts.as_mut().unwrap().nccl = None;
    let mut another_without_nccl = machine("c", "1.2.0", Some(("580.95.05", "2.28.9")));
    another_without_nccl.facts.as_mut().unwrap().nccl = None;
    assert_eq!(findings(&without_nccl, &another_without_nccl), problem("NCCL"));
    without_nccl.facts = None;
    assert_eq!(findings(&good, &without_nccl), [], "a machine without facts has its own finding");
}
