mod own_disk;
mod preflight;

use super::{super::Warm, watch::GRACE, *};
use crate::{
    fence::Fence,
    report::{Observer, Reporter},
    supervisor::{RankProcess, rank_file},
};
use lockstep_protocol::{
    agent::{AgentReply, CheckpointInfo, LogLine, RankReport, Slot},
    dataset::PicturesFingerprint,
    metric::MetricColumn,
    reason::ReasonKind,
    spec::JobSpec,
};
use rustix::process::Signal;
use std::{
    fs,
    time::{Duration, Instant},
};

struct Fixture {
    dir: tempfile::TempDir,
    stored: StoredAttempt,
    context: AttemptContext,
}

/// Creates a job folder, and a shell script that replaces the ranks' program. In the script, `$R` is the rank.
fn fixture(ranks: u32, script: &str) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    crate::testkit::write_script(&program, &format!("R=$8\n{script}"));
    let start = StartAttempt { master_port: 1, ..StartAttempt::local(JobSpec::default(), "/none", ranks) };
    let stored = StoredAttempt { start, job_dir: dir.path().join("job") };
    fs::create_dir_all(stored.attempt_dir()).unwrap();
    let context = AttemptContext {
        program,
        lease: Arc::new(Lease::new(Fence::open(dir.path()).unwrap())),
        fence: dir.path().join("lease"),
        // The check before the start passes.
        check: |_, _, _, _, _| Ok(()),
        wake: Arc::new(Notify::new()),
        remote: Arc::new(crate::agent::test_server::remote("http://127.0.0.1:1")),
        copies: None,
        stop_within_secs: 20,
        devices: Arc::default(),
        spares: Arc::default(),
        spare_delay: Duration::ZERO,
    };
    Fixture { dir, stored, context }
}

impl Fixture {
    fn record(&self, rank: u32, events: &[AttemptEvent]) {
        let reporter = Reporter::create(&self.stored.attempt_dir(), rank).unwrap();
        reporter.log("one line");
        events.iter().for_each(|event| reporter.event(event));
    }

    fn start(&self) -> Attempt {
        Attempt::start(self.stored.clone(), self.context.clone())
    }

    fn adopt(&self) -> Attempt {
        Attempt::adopt(self.stored.clone(), self.context.clone())
    }

    /// What a rank has printed so far.
    fn printed(&self, rank: u32) -> String {
        fs::read_to_string(rank_file(&self.stored.attempt_dir(), rank, "stderr")).unwrap_or_default()
    }

    async fn wait_for_output(&self, rank: u32) {
        while self.printed(rank).is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn wait_for_end(&self, attempt: &Attempt) -> Ending {
        let ended = async {
            while !attempt.is_over() {
                self.context.wake.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ended).await.expect("the attempt never ended");
        for (rank, _) in &self.stored.start.ranks {
            let mut process = RankProcess::adopt(&self.stored.attempt_dir(), *rank);
            assert!(process.poll().is_some(), "rank {rank} still runs");
        }
        recorded_ending(&self.stored).unwrap()
    }

    /// The log lines added by the agent.
    fn added_lines(&self) -> Vec<LogLine> {
        let mut tail = Tail::open(&agent_events_path(&self.stored), 0);
        let events = tail.poll().unwrap();
        let lines = events.into_iter().filter_map(|event| match event {
            AttemptEvent::Log { lines, .. } => Some(lines),
            _ => None,
        });
        lines.flatten().collect()
    }
}

fn step(step: u64) -> AttemptEvent {
    let column = MetricColumn { name: "step_ms".into(), steps: vec![step], values: vec![1.0] };
    AttemptEvent::Metrics { rank: 0, columns: vec![column] }
}

fn failure(ending: Ending, is_retriable: bool) -> Reason {
    match ending {
        Ending::Failed { reason, retriable } if retriable == is_retriable => reason,
        other => panic!("{other:?}"),
    }
}

/// The words of a retriable failure.
fn reason(ending: Ending) -> String {
    failure(ending, true).words().to_owned()
}

#[tokio::test]
async fn an_attempt_succeeds_if_all_ranks_exit_with_0() {
    let fixture = fixture(2, "exit 0");
    fixture.record(0, &[step(12)]);
    let attempt = fixture.start();
    assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Succeeded { step: 12 });
    assert!(!attempt.has_failed());
}

#[tokio::test]
async fn a_spare_becomes_the_rank_and_another_spare_is_started_while_it_trains() {
    let script = "[ $2 != --spare ] || { path=$(cat); [ \"$path\" ] || exit 9; exec >\"${path%json}stderr\"; echo spare; }\n\
        for i in $(seq 6000); do [ ! -e \"${path%/*}/end\" ] || exit 0; sleep 0.01; done";
    let mut fixture = fixture(1, script);
    fixture.record(0, &[step(12)]);
    let uuid = crate::toy::device("a");
    let (device, name) = ("toy".into(), "a".into());
    let slots = [Slot { index: 0, device, name, memory_bytes: 0, uuid: Some(uuid.clone()) }];
    fixture.context.devices = Arc::new(BTreeMap::from([(0, uuid)]));
    let spares = Arc::new(Spares::new(&fixture.context.program, &slots, Warm::On));
    fixture.context.spares = spares.clone();
    spares.fill();
    let attempt = fixture.start();
    fixture.wait_for_output(0).await;
    assert_eq!(fixture.printed(0), "spare\n");
    let next_spare = async {
        while spares.take(0).is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), next_spare).await.expect("no other spare was started");
    fs::write(fixture.stored.attempt_dir().join("end"), "").unwrap();
    assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Succeeded { step: 12 });
    // After `close`, which the agent calls when it ends, no spare is started.
    spares.fill();
    spares.close();
    spares.fill();
    assert!(spares.take(0).is_none());
}

#[tokio::test]
async fn a_killed_rank_ends_the_others_and_is_named_in_the_reason() {
    let fixture =
        fixture(3, "[ $R = 1 ] && { echo last words >&2; kill -9 $$; }; while :; do sleep 0.05; done");
    fixture.record(1, &[step(41)]);
    let attempt = fixture.start();
    assert_eq!(reason(fixture.wait_for_end(&attempt).await), "rank 1 was killed by signal 9 at step 41");
    let lines = fixture.added_lines();
    // Numbers continue after the rank's own line.
    assert_eq!((lines[0].number, lines[0].text.as_str()), (2, "last words"));
}

#[tokio::test]
async fn a_rank_that_ignores_term_is_killed() {
    let fixture = fixture(1, "trap '' TERM; echo up; while :; do sleep 0.05; done");
    let attempt = fixture.start();
    fixture.wait_for_output(0).await;
    let ordered = Instant::now();
    attempt.send_order(Order::Stop { patient: false });
    assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Stopped);
    assert!(ordered.elapsed() >= GRACE);
}

#[tokio::test]
async fn survivors_of_a_killed_rank_may_only_finish_a_checkpoint() {
    for is_writing in [false, true] {
        // Rank 0 ignores signals, like a rank that waits for its GPU.
        let script = "trap '' TERM; echo up; [ $R = 1 ] && while [ ! -e ${0%/*}/job/go ]; do sleep 0.02; done && kill -9 $$; while :; do sleep 0.05; done";
        let fixture = fixture(2, script);
        if is_writing {
            fs::create_dir_all(fixture.stored.job_dir.join("checkpoints/.tmp-1-40")).unwrap();
        }
        let attempt = fixture.start();
        fixture.wait_for_output(0).await;
        let began = Instant::now();
        fs::write(fixture.stored.job_dir.join("go"), "").unwrap();
        assert!(reason(fixture.wait_for_end(&attempt).await).starts_with("rank 1 was killed by signal 9"));
        assert_eq!(began.elapsed() >= GRACE, is_writing, "{:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_patient_stop_waits_for_ranks_and_an_urgent_one_does_not() {
    let script = "trap 'sleep 0.3; echo kept; exit 3' USR1; echo up; while :; do sleep 0.05; done";
    for is_urgent in [false, true] {
        let fixture = fixture(2, script);
        let attempt = fixture.start();
        fixture.wait_for_output(0).await;
        fixture.wait_for_output(1).await;
        attempt.send_order(Order::Stop { patient: true });
        if is_urgent {
            attempt.send_order(Order::Stop { patient: false });
        }
        assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Stopped);
        assert_eq!(fixture.printed(0).contains("kept") && fixture.printed(1).contains("kept"), !is_urgent);
    }
}

#[tokio::test]
async fn ranks_that_stop_themselves_may_finish_their_checkpoint() {
    // A signal stopped the ranks. Rank 1 has ended, and rank 0 is still writing its checkpoint.
    let fixture = fixture(2, "[ $R = 1 ] && exit 3; sleep 3; echo kept; exit 3");
    fixture.record(1, &[step(41)]);
    let attempt = fixture.start();
    let reason = reason(fixture.wait_for_end(&attempt).await);
    assert!(reason.contains("was stopped at step") && reason.contains("not by its agent"), "{reason}");
    assert_eq!(fixture.printed(0), "kept\n");
}

#[tokio::test]
async fn only_paused_ranks_end_the_attempt_as_stopped() {
    for (script, has_paused) in [("exit 4", true), ("exit 3", false), ("[ $R = 1 ] && exit 4; exit 3", false)]
    {
        let mut fixture = fixture(2, script);
        fixture.stored.start.pause_after = Some(1);
        let attempt = fixture.start();
        match fixture.wait_for_end(&attempt).await {
            Ending::Stopped => assert!(has_paused, "{script}"),
            ending => assert!(!has_paused && reason(ending).contains("was stopped at step"), "{script}"),
        }
    }
    // If no agent ran when ranks ended, their last records tell how they ended.
    for (status, expected) in [("finished", Ending::Succeeded { step: 9 }), ("paused", Ending::Stopped)] {
        let fixture = self::fixture(2, "exit 0");
        for rank in 0..2 {
            let report = RankReport { status: status.into(), step: 9, ..RankReport::default() };
            fixture.record(rank, &[AttemptEvent::Rank { rank, report }]);
            fs::write(rank_file(&fixture.stored.attempt_dir(), rank, "json"), "{}").unwrap();
        }
        let adopted = fixture.adopt();
        assert_eq!(fixture.wait_for_end(&adopted).await, expected);
    }
}

#[tokio::test]
async fn a_stop_without_a_checkpoint_reports_the_loss() {
    let checkpoint = CheckpointInfo { epoch: 1, step: 40, size_bytes: 1, ..CheckpointInfo::default() };
    let checkpoint = AttemptEvent::Checkpoint(checkpoint);
    let running =
        AttemptEvent::Running { total_steps: 100, steps_per_epoch: 100, start_step: 0, train_samples: 0 };
    for (last_step, is_lost) in [(57, true), (40, false)] {
        let fixture = fixture(1, "trap 'exit 3' USR1; echo up; while :; do sleep 0.05; done");
        fixture.record(0, &[running.clone(), step(last_step), checkpoint.clone()]);
        let attempt = fixture.start();
        fixture.wait_for_output(0).await;
        attempt.send_order(Order::Stop { patient: true });
        assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Stopped);
        let lines: Vec<_> = fixture.added_lines().into_iter().map(|line| line.text).collect();
        assert_eq!(
            lines.iter().any(|line| line.contains("of step 40, steps 41 to 57 are lost")),
            is_lost,
            "{lines:?}"
        );
        assert_eq!(lines.is_empty(), !is_lost, "{lines:?}");
    }
}

#[tokio::test]
async fn processes_started_by_a_rank_end_with_it() {
    let fixture = fixture(1, "sleep 1000 & echo $!; kill -9 $$");
    let attempt = fixture.start();
    fixture.wait_for_end(&attempt).await;
    let state = fs::read_to_string(format!("/proc/{}/stat", fixture.printed(0).trim())).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z"), "{state}");
}

#[tokio::test]
async fn a_suspended_rank_is_detected() {
    let mut fixture = fixture(2, "[ $R = 1 ] && kill -STOP $$; while :; do :; done");
    fixture.stored.start.spec.recovery.stall_timeout_secs = 5;
    let attempt = fixture.start();
    let reason = reason(fixture.wait_for_end(&attempt).await);
    assert!(reason.starts_with("rank 1 made no progress for 5 s at step 0"), "{reason}");
    assert!(reason.contains("suspended"), "{reason}");
}

#[tokio::test]
async fn ranks_are_fenced_if_the_server_stays_silent() {
    let fixture = fixture(2, "while :; do sleep 0.05; done");
    fixture.context.lease.set_length(Duration::from_millis(300));
    let attempt = fixture.start();
    assert!(reason(fixture.wait_for_end(&attempt).await).contains("the server was silent"));
}

#[tokio::test]
async fn the_next_agent_takes_over_running_and_ended_ranks() {
    let fixture = fixture(2, "while :; do sleep 0.05; done");
    let (_, orders) = mpsc::unbounded_channel();
    let (_, mut first) =
        Watch::begin(fixture.stored.clone(), &fixture.context, orders, StartMode::Launch).await;
    fixture.record(0, &[step(7)]);
    // The first agent has ended, so it does not notice that rank 1 dies.
    first.ranks[1].process.signal(Signal::KILL);
    while first.ranks[1].process.poll().is_none() {
        tokio::task::yield_now().await;
    }
    let adopted = fixture.adopt();
    // Reaps rank 0, whose parent is this process.
    let reaper = tokio::spawn(async move {
        while first.ranks[0].process.poll().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let ending = fixture.wait_for_end(&adopted).await;
    assert_eq!(
        reason(ending.clone()),
        "rank 1 ended at step 0; how is unknown, because the agent that started it had ended"
    );
    reaper.await.unwrap();
    // A third agent finds that the attempt has ended, and reports nothing.
    let third = fixture.adopt();
    assert!(third.is_over() && third.has_failed());
    assert_eq!(recorded_ending(&fixture.stored), Some(ending));
}

#[tokio::test]
async fn an_agent_that_ended_before_it_started_ranks_is_reported() {
    let fixture = fixture(2, "exit 0");
    let adopted = fixture.adopt();
    let reason = failure(fixture.wait_for_end(&adopted).await, true);
    assert!(matches!(reason.kind(), ReasonKind::AgentRestarted { .. }), "{reason:?}");
    // A rank that was about to be started may have run.
    let fixture = self::fixture(2, "exit 0");
    fs::write(rank_file(&fixture.stored.attempt_dir(), 1, "json"), "{}").unwrap();
    let adopted = fixture.adopt();
    assert_eq!(
        self::reason(fixture.wait_for_end(&adopted).await),
        "rank 0 ended at step 0; how is unknown, because the agent that started it had ended"
    );
}

#[tokio::test]
async fn the_reason_names_a_program_that_fails_to_start() {
    let mut fixture = fixture(2, "exit 0");
    fixture.context.program = fixture.dir.path().join("nowhere");
    let attempt = fixture.start();
    let reason = failure(fixture.wait_for_end(&attempt).await, false);
    assert!(reason.words().contains("nowhere"), "{reason}");
}

/// What the inspecting process prints about a dataset.
fn fingerprint_reply() -> String {
    let found = PicturesFingerprint::default();
    serde_json::to_string(&Ok::<_, String>(AgentReply::Fingerprint { found })).unwrap()
}

/// `toy` is the third backend.
#[tokio::test]
async fn a_third_backend_offers_devices_that_pass_the_preflight_and_get_ranks() {
    use crate::toy;
    use lockstep_engine::{Selection, registry};
    let list = format!("{},{}", toy::device("a"), toy::device("b"));
    let slots = registry::offer(Selection { list: Some(&list), ..Selection::default() }).unwrap().slots;
    assert_eq!(slots.iter().map(|slot| slot.device.as_str()).collect::<Vec<_>>(), ["toy", "toy"]);
    let inspected = fingerprint_reply();
    let script = format!("[ $1 = inspect ] && echo '{inspected}' || echo $R of ${}", toy::VISIBLE);
    let mut fixture = fixture(2, &script);
    fixture.context.devices = Arc::new(slots.into_iter().filter_map(|s| Some((s.index, s.uuid?))).collect());
    fixture.context.check = super::super::preflight::check;
    let attempt = fixture.start();
    assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Succeeded { step: 0 });
    assert_eq!(
        [fixture.printed(0), fixture.printed(1)],
        [format!("0 of {list}\n"), format!("1 of {list}\n")]
    );
}
