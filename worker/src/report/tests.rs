use super::*;

fn drain(tail: &mut Tail) -> Vec<AttemptEvent> {
    let mut all = Vec::new();
    loop {
        let events = tail.poll().unwrap();
        if events.is_empty() {
            return all;
        }
        all.extend(events);
    }
}

fn removed(step: u64) -> AttemptEvent {
    AttemptEvent::CheckpointRemoved { epoch: 1, step }
}

#[test]
fn a_reader_waits_for_a_record_that_a_full_disk_has_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let path = events_path(dir.path(), 0);
    let mut records = Records::append_to(&path).unwrap();
    records.append(&removed(1)).unwrap();
    let length_before = records.length;
    // The payload, then the header in front of it.
    let mut record = rmp_serde::to_vec_named(&removed(2)).unwrap();
    let (length, crc) = (u32::try_from(record.len()).unwrap(), crc32fast::hash(&record));
    record.splice(0..0, [length.to_le_bytes(), crc.to_le_bytes()].concat());
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    // A writer on a full disk: writes an incomplete record and truncates it, again and again.
    let writer = std::thread::spawn({
        let (path, stop) = (path.clone(), stop.clone());
        move || {
            let mut file = OpenOptions::new().append(true).open(path).unwrap();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all(&record[..record.len() - 1]).unwrap();
                file.set_len(length_before).unwrap();
            }
            file.write_all(&record).unwrap();
        }
    });
    let mut tail = Tail::open(&path, 0);
    assert_eq!(tail.poll().unwrap().len(), 1);
    for _ in 0..20_000 {
        assert!(tail.poll().expect("the file is valid").is_empty());
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    writer.join().unwrap();
    assert_eq!(drain(&mut tail).len(), 1);
}

#[test]
fn reports_are_read_in_order_including_nan() {
    let dir = tempfile::tempdir().unwrap();
    let reporter = Reporter::create(dir.path(), 3).unwrap();
    reporter.metric("loss", 1, 2.5);
    reporter.metric("loss", 2, f32::NAN);
    reporter.metric("lr", 2, 0.1);
    reporter.log("epoch: 1 step: 1, loss is 2.5\nsecond");
    reporter.event(&removed(7));
    reporter.log(&"ä".repeat(3000));
    drop(reporter);

    let events = drain(&mut Tail::open(&events_path(dir.path(), 3), 0));
    let AttemptEvent::Metrics { rank: 3, columns } = &events[0] else { panic!("{events:?}") };
    assert_eq!(columns[0].name, "loss");
    assert_eq!(columns[0].steps, [1, 2]);
    assert_eq!(columns[0].values[0], 2.5);
    assert!(columns[0].values[1].is_nan());
    assert_eq!((columns[1].name.as_str(), columns[1].values[0]), ("lr", 0.1));
    let AttemptEvent::Log { lines, .. } = &events[1] else { panic!("{events:?}") };
    assert_eq!(lines.iter().map(|l| l.number).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(events[2], removed(7));
    let AttemptEvent::Log { lines, .. } = &events[3] else { panic!("{events:?}") };
    assert_eq!((lines[0].number, lines[0].text.len()), (3, 4096));
    let text = std::fs::read_to_string(dir.path().join("rank.3.log")).unwrap();
    assert!(text.starts_with("epoch: 1 step: 1, loss is 2.5\nsecond\n"));
    // Only records after the acknowledged number are read again.
    let mut tail = Tail::open(&events_path(dir.path(), 3), 2);
    assert_eq!((tail.next_record(), drain(&mut tail).len(), tail.next_record()), (2, 2, 4));
}

#[test]
fn a_point_is_readable_soon_without_a_flush() {
    let dir = tempfile::tempdir().unwrap();
    let reporter = Reporter::create(dir.path(), 0).unwrap();
    let mut tail = Tail::open(&events_path(dir.path(), 0), 0);
    reporter.metric("loss", 1, 1.0);
    crate::testkit::wait_until("the point was never readable", || !tail.poll().unwrap().is_empty());
}

#[test]
fn a_rank_of_an_attempt_runs_once() {
    let dir = tempfile::tempdir().unwrap();
    drop(Reporter::create(dir.path(), 0).unwrap());
    let error = Reporter::create(dir.path(), 0).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
}

#[test]
fn an_incomplete_record_is_truncated_by_the_next_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.events");
    let mut records = Records::append_to(&path).unwrap();
    records.append(&removed(1)).unwrap();
    records.append(&removed(2)).unwrap();
    drop(records);
    let whole = std::fs::read(&path).unwrap();
    let one_record = whole.len() / 2;
    for cut in one_record..whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let mut tail = Tail::open(&path, 0);
        assert_eq!(drain(&mut tail), [removed(1)], "cut at {cut}");
        let mut records = Records::append_to(&path).unwrap();
        records.append(&removed(3)).unwrap();
        assert_eq!(drain(&mut tail), [removed(3)], "cut at {cut}");
    }
    // Zeros after the last record, as after a power failure.
    let mut padded = whole.clone();
    padded.extend_from_slice(&[0; 100]);
    std::fs::write(&path, &padded).unwrap();
    assert_eq!(drain(&mut Tail::open(&path, 0)), [removed(1), removed(2)]);
}

#[test]
fn damage_in_the_middle_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank.0.events");
    let mut records = Records::append_to(&path).unwrap();
    for step in 0..3 {
        records.append(&removed(step)).unwrap();
    }
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let mut tail = Tail::open(&path, 0);
    assert_eq!(tail.poll().unwrap(), [removed(0)]);
    let error = tail.poll().unwrap_err().to_string();
    assert!(error.contains("record 1 ") && error.contains("checksum"), "{error}");
    assert_eq!(tail.poll().unwrap_err().to_string(), error);
    assert_eq!(Records::append_to(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn records_are_limited_to_64_mib() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank.0.events");
    // Polls a file with only the beginning of a record of `bytes` bytes.
    let poll_beginning = |bytes: u32| {
        std::fs::write(&path, [bytes.to_le_bytes(), [0; 4]].concat()).unwrap();
        Tail::open(&path, 0).poll()
    };
    assert_eq!(poll_beginning(64 << 20).unwrap(), []);
    let error = poll_beginning((64 << 20) + 1).unwrap_err().to_string();
    assert!(
        error.contains("record 0 at byte 0 is damaged: its length is 67108865 bytes, more than 67108864"),
        "{error}"
    );
    // Such a record cannot be written either.
    let path = dir.path().join("rank.1.events");
    let mut records = Records::append_to(&path).unwrap();
    let text = "x".repeat(64 << 20);
    let line = LogLine { number: 1, at: Timestamp::UNIX_EPOCH, text };
    let error = records.append(&AttemptEvent::Log { rank: 1, lines: vec![line] }).unwrap_err();
    assert_eq!(error.to_string(), "a record of more than 64 MiB");
    records.append(&removed(1)).unwrap();
    assert_eq!(drain(&mut Tail::open(&path, 0)), [removed(1)]);
}

#[test]
fn loss_lines_are_printed_at_the_chosen_steps() {
    let mut every_third = LossLines::new(3);
    let lines: Vec<_> = (1..=7).filter_map(|s| every_third.line_if_due(1, s, 7, 2.302_585_4)).collect();
    assert_eq!(lines, ["epoch: 1 step: 3, loss is 2.3025854", "epoch: 1 step: 6, loss is 2.3025854"]);
    let mut seldom = LossLines::new(0);
    let lines: Vec<_> = (1001..=2000).filter_map(|s| seldom.line_if_due(2, s, 1000, f32::NAN)).collect();
    assert!(lines.len() < 200, "{}", lines.len());
    assert_eq!(lines[0], "epoch: 2 step: 1001, loss is NaN");
    assert_eq!(lines[lines.len() - 1], "epoch: 2 step: 2000, loss is NaN");
}
