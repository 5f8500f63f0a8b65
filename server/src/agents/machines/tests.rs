use super::{warnings::MAX_CLOCK_DIFFERENCE_MS, *};
use lockstep_protocol::agent::{GpuSample, Machine};

fn at(secs: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + secs).unwrap()
}

fn sample(cpu_utilization: f32, gpus: u32) -> MachineSample {
    let gpu = |slot| GpuSample {
        slot,
        utilization: Some(0.5),
        memory_used_bytes: 1 << 30,
        temperature_celsius: Some(60.0),
        power_watts: None,
    };
    MachineSample {
        at: at(0),
        cpus: 2.0,
        host_cpus: 64,
        cpu_utilization: Some(cpu_utilization),
        load: Some(1.0),
        memory_used_bytes: 1 << 30,
        memory_bytes: 4 << 30,
        host_memory_bytes: 256 << 30,
        disk_used_bytes: 100_000_000_000,
        disk_bytes: 1_000_000_000_000,
        disk_read_bytes_per_second: Some(0),
        disk_written_bytes_per_second: None,
        network_received_bytes_per_second: Some(1000),
        network_sent_bytes_per_second: Some(u64::MAX),
        gpus: (0..gpus).map(gpu).collect(),
    }
}

fn slots(count: u32) -> Vec<Slot> {
    let slot = |index| Slot { index, device: "cuda".into(), name: "g".into(), memory_bytes: 1, uuid: None };
    (0..count).map(slot).collect()
}

#[test]
fn points_are_decoded_and_damaged_bytes_refused() {
    let point = Point::of(at(0), &sample(0.25, 8));
    let bytes = point.encode();
    assert!(bytes.len() < 200, "{}", bytes.len());
    let decoded = Point::decode(at(0), &bytes).unwrap();
    // Compared as text, since NaN is not equal to itself.
    assert_eq!(format!("{decoded:?}"), format!("{point:?}"));
    for end in [0, 1, 5, bytes.len() - 1] {
        assert!(Point::decode(at(0), &bytes[..end]).is_none(), "cut at {end}");
    }
    // Written by a version that stores fewer values.
    let fewer = [vec![1], 0.5f32.to_le_bytes().to_vec()].concat();
    let fewer = Point::decode(at(0), &fewer).unwrap();
    assert!(fewer.machine[0] == 0.5 && fewer.machine[1].is_nan() && fewer.gpus.is_empty());
}

#[test]
fn a_minute_is_the_mean_of_its_points() {
    let mut minute = Minute::new(at(0));
    for (secs, cpu) in [(0, 0.2), (5, 0.4), (10, f32::NAN)] {
        let point = Point::of(at(secs), &sample(cpu, u32::from(secs == 5)));
        assert_eq!(minute.add("a", &point), None);
    }
    let row = minute.add("a", &Point::of(at(60), &sample(1.0, 0))).expect("a minute is over");
    let point = point_of(&row).unwrap();
    assert!((point.machine[0] - 0.3).abs() < 1e-6, "{point:?}");
    assert_eq!((point.gpus.len(), point.at), (1, at(60)));
    assert!(minute.finish_if_over("a", at(61)).is_none(), "the minute is not over");
    assert!(minute.finish_if_over("a", at(120)).is_some());
    assert!(minute.finish_if_over("a", at(180)).is_none(), "the minute has no measurements");
}

#[test]
fn times_without_measurements_are_gaps() {
    let points: Vec<_> =
        [(0, 0.0), (10, 1.0), (95, 0.5)].map(|(secs, cpu)| Point::of(at(secs), &sample(cpu, 0))).into();
    let means = bucket_means(&points, at(0), at(100), 4);
    let cpu: Vec<_> = means.iter().map(|p| p.machine[0]).collect();
    assert!(cpu[0] == 0.5 && cpu[1].is_nan() && cpu[2].is_nan() && cpu[3] == 0.5, "{cpu:?}");
    assert_eq!(means.iter().map(|p| p.at).collect::<Vec<_>>(), [at(25), at(50), at(75), at(100)]);
    assert_eq!(bucket_means(&[], at(0), at(0), 1).len(), 1);
}

#[test]
fn impossible_values_are_left_out() {
    let mut impossible = sample(f32::NAN, MAX_MEASURED_GPUS as u32 + 1);
    impossible.load = Some(f32::INFINITY);
    impossible.gpus[0].utilization = Some(1.5);
    impossible.gpus[1].temperature_celsius = Some(-300.0);
    impossible.gpus.push(impossible.gpus[2].clone());
    let valid = sanitize(impossible.clone(), &slots(1000));
    assert_eq!((valid.cpu_utilization, valid.load), (None, None));
    assert_eq!((valid.gpus[0].utilization, valid.gpus[1].temperature_celsius), (None, None));
    assert_eq!(
        (valid.gpus.len(), valid.network_sent_bytes_per_second),
        (MAX_MEASURED_GPUS, Some(MAX_VALUE as u64))
    );
    assert_eq!(sanitize(impossible.clone(), &slots(2)).gpus.len(), 2, "only GPUs of the agent's slots");
    impossible.gpus.truncate(MAX_MEASURED_GPUS);
    assert_eq!(sanitize(impossible, &slots(1000)).gpus.len(), MAX_MEASURED_GPUS);

    let finding = MachineWarning { problem: true, text: "a\u{202e}b".into() };
    assert_eq!(limit_findings(vec![finding])[0].text, r"a\u202eb");
}

#[test]
fn machines_and_samples_are_bounded() {
    let machines = Machines::default();
    for number in 0..=MAX_MEASURED_MACHINES {
        machines.add(&format!("m{number}"), sample(0.5, 1), &slots(1), at(number as i64));
    }
    assert_eq!(lock(&machines.by_agent).len(), MAX_MEASURED_MACHINES);
    assert!(machines.newest("m0").is_none() && machines.newest("m1").is_some());
    // A second sample at the same time is ignored.
    machines.add("m1", sample(0.9, 1), &slots(1), at(2));
    assert_eq!(machines.newest("m1").unwrap().sample.cpu_utilization, Some(0.5));
    for number in 0..2 * RECENT_SAMPLES as i64 {
        if let Some(measured) = lock(&machines.by_agent).get_mut("m1") {
            measured.arrived_at -= MIN_SAMPLE_INTERVAL;
        }
        machines.add("m1", sample(0.5, 1), &slots(1), at(100 + 5 * number));
    }
    let (unstored, recent) = machines.measurements_since("m1", at(0));
    assert_eq!(recent.len(), RECENT_SAMPLES);
    assert!(unstored.len() > 15 && unstored.len() <= MAX_UNSTORED, "{}", unstored.len());
    let minutes = machines.take_minutes(at(100_000));
    assert!(machines.take_minutes(at(200_000)).is_empty());
    machines.put_back(minutes.clone());
    assert_eq!(machines.take_minutes(at(200_000)).len(), minutes.len());
}

fn state<'a>(machine: &'a Machine, newest: Option<&'a NewestSample>) -> MachineState<'a> {
    MachineState {
        machine,
        newest,
        findings: &[],
        connected_at: Some(at(0)),
        last_seen_at: at(0),
        attempt_count: 0,
        is_draining: false,
        now: at(100),
    }
}

#[test]
fn warnings_describe_the_problem() {
    let machine = Machine {
        hostname: "h".into(),
        cpu: "c".into(),
        cores: 2,
        memory_bytes: 1,
        disk_free_bytes: 1,
        version: env!("CARGO_PKG_VERSION").into(),
        ..Machine::default()
    };
    let age = Duration::from_secs(1);
    let good = NewestSample { sample: sample(0.5, 0), age, clock_behind_ms: Some(MAX_CLOCK_DIFFERENCE_MS) };
    let texts = |machine: &Machine, newest: &NewestSample| {
        warnings(&state(machine, Some(newest))).into_iter().map(|w| w.text).collect::<Vec<_>>()
    };
    assert_eq!(texts(&machine, &good), [""; 0]);
    for (ms, text) in [(MAX_CLOCK_DIFFERENCE_MS + 1, "5 s behind"), (-60_000, "60 s ahead of")] {
        let found = texts(&machine, &NewestSample { clock_behind_ms: Some(ms), ..good.clone() });
        assert!(found.len() == 1 && found[0].contains(text), "{found:?}");
    }
    let found = texts(&Machine { version: "0.0.9".into(), ..machine.clone() }, &good);
    assert!(found.len() == 1 && found[0].contains("version 0.0.9"), "{found:?}");
    let mut full = good.clone();
    full.sample.disk_used_bytes = 995_000_000_000;
    full.sample.memory_used_bytes = full.sample.memory_bytes;
    let found = warnings(&state(&machine, Some(&full)));
    assert!(found.len() == 2 && found.iter().all(|w| w.problem), "{found:?}");
    let silent = NewestSample { age: Duration::from_secs(31), ..good };
    let found = texts(&machine, &silent);
    assert!(found.len() == 1 && found[0].contains("sends no measurements"), "{found:?}");
    let finding = MachineWarning { problem: true, text: "memory: little".into() };
    let offline = MachineState {
        connected_at: None,
        attempt_count: 1,
        is_draining: true,
        findings: std::slice::from_ref(&finding),
        ..state(&machine, None)
    };
    let found = warnings(&offline);
    assert!(found[0].problem && found[0].text.contains("Offline for 100 s"), "{found:?}");
    assert!(found.contains(&finding) && found.iter().any(|w| w.text.contains("Drained")), "{found:?}");
}
