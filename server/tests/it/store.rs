//! The same tests of the store for SQLite and Postgres.

use crate::agent::{dataset_info, failed, hello, losses, running};
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{AttemptEvent, CheckpointInfo, Ending, FromAgent, Machine, Source},
    dataset::Dataset,
    job::{JobId, JobState, TrialOf},
    spec::JobSpec,
    sweep::SweepState,
};
use lockstep_server::{
    lifecycle,
    store::{
        AgentRow, Change, Claim, CreateResult, IngestResult, JobFilter, JobRow, MetricFilter, MinuteRow,
        NewJob, NewTrial, Ownership, Place, Report, Store, StoreError, SweepRow,
    },
};

/// Two tests that call a function with a new store: one of SQLite, and one of Postgres.
macro_rules! on_both_databases {
    ($sqlite:ident, $postgres:ident, $test:ident) => {
        #[tokio::test]
        async fn $sqlite() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("test.db");
            $test(&lockstep_server::store::sqlite::SqliteStore::open(&path).await.unwrap()).await;
        }

        #[tokio::test]
        async fn $postgres() {
            let url = crate::postgres::database();
            $test(&lockstep_server::store::postgres::PostgresStore::open(&url).await.unwrap()).await;
        }
    };
}
pub(crate) use on_both_databases;

fn spec(name: &str) -> JobSpec {
    let mut spec = JobSpec { name: name.into(), ..JobSpec::default() };
    spec.data.dataset = "p".into();
    spec
}

/// The time of all changes in tests of a store.
pub(crate) fn at() -> Timestamp {
    "2026-01-02T03:04:05.678Z".parse().unwrap()
}

/// The dataset of jobs in a store.
pub(crate) fn dataset() -> Dataset {
    Dataset {
        name: "p".into(),
        path: "/p".into(),
        info: dataset_info(),
        added_at: at(),
        owner: None,
        private: false,
    }
}

async fn test_records(store: &dyn Store) {
    let at = at();
    let id = JobId::generate();
    let new = |key: &str, request: &str| NewJob {
        idempotency: Some((key.into(), request.into())),
        ..NewJob::of(id.clone(), spec("stored"), at)
    };
    // A job needs its dataset, and a dataset in use cannot be removed.
    assert!(
        matches!(store.create_job(new("key", "one")).await, Err(StoreError::DatasetRemoved(name)) if name == "p")
    );
    store.add_dataset(&dataset()).await.unwrap();
    let CreateResult::New(created) = store.create_job(new("key", "one")).await.unwrap() else {
        panic!("the job exists already")
    };
    assert_eq!((created.job.last_seq, created.events[0].seq, created.job.created_at), (1, 1, at));
    assert!(
        matches!(store.create_job(new("key", "one")).await, Ok(CreateResult::Existing(job)) if job.id == id)
    );
    assert!(matches!(store.create_job(new("key", "two")).await, Err(StoreError::KeyReused)));

    assert!(matches!(store.remove_dataset("p").await, Err(StoreError::DatasetInUse(name)) if name == "p"));

    let minute = |minute, data: &[u8]| MinuteRow { agent_id: "a".into(), minute, data: data.into() };
    let of_other_agent = MinuteRow { agent_id: "b".into(), ..minute(7, b"other") };
    store
        .add_machine_minutes(&[minute(6, b"x"), minute(7, b"y"), minute(8, b"z"), of_other_agent])
        .await
        .unwrap();
    store.add_machine_minutes(&[minute(8, b"new")]).await.unwrap();
    assert_eq!(store.machine_minutes("a", 7).await.unwrap(), [minute(7, b"y"), minute(8, b"new")]);
    store.purge_machine_minutes(8).await.unwrap();
    assert_eq!(store.machine_minutes("a", 0).await.unwrap(), [minute(8, b"new")]);
    assert_eq!(store.machine_minutes("b", 0).await.unwrap(), []);

    // Only one of two claims creates an attempt.
    let claim = || Claim {
        job: id.clone(),
        after_attempt: 0,
        places: vec![Place { agent_id: "a".into(), agent: "name".into(), ranks: vec![(0, 3)] }],
        fewer_ranks_reason: None,
        at,
    };
    let (one, two) = tokio::join!(store.claim(claim()), store.claim(claim()));
    let claimed: Vec<_> = [one.unwrap(), two.unwrap()].into_iter().flatten().collect();
    assert_eq!(claimed.len(), 1);
    let attempt = claimed[0].attempt.clone();
    assert_eq!(claimed[0].changed.job.state, JobState::Starting);
    assert_eq!(store.live_attempts().await.unwrap()[0].places[0].ranks, [(0, 3)]);

    // Reports of one transaction: new, repeated, after a gap, and with an invalid token.
    let report = |source, first, events: Vec<AttemptEvent>| Report {
        agent_id: "a".into(),
        attempt: attempt.clone(),
        source,
        first,
        events,
        at,
        leaving: None,
    };
    let checkpoint = |step| {
        AttemptEvent::Checkpoint(CheckpointInfo {
            epoch: 1,
            step,
            best: true,
            size_bytes: 9,
            ..CheckpointInfo::default()
        })
    };
    let mut invalid = report(Source::Rank(0), 0, vec![running(10, 0)]);
    invalid.attempt.fencing_token.number += 1;
    let responses = store
        .ingest(&[
            report(Source::Rank(0), 0, vec![running(10, 0), losses(0, 1..=2), checkpoint(2), checkpoint(4)]),
            report(Source::Rank(0), 1, vec![losses(0, 1..=2)]),
            report(Source::Rank(0), 9, vec![losses(0, 1..=2)]),
            invalid,
        ])
        .await
        .unwrap();
    assert!(
        matches!(&responses[0], IngestResult::Stored { acknowledged, changed: Some(c) } if acknowledged.records == 4 && c.events.len() == 5)
    );
    assert!(
        matches!(&responses[1], IngestResult::Stored { acknowledged, changed: None } if acknowledged.records == 4)
    );
    assert!(matches!(responses[2], IngestResult::Gap { stored: 4 }));
    assert!(matches!(responses[3], IngestResult::Stale));
    let acknowledged = store.acknowledged_records(&attempt, "a").await.unwrap();
    assert_eq!((acknowledged.len(), acknowledged[0].records), (1, 4));

    let events = store.events(&id, 0, 100).await.unwrap();
    assert_eq!(events.iter().map(|e| e.seq).collect::<Vec<_>>(), (1..=7).collect::<Vec<_>>());
    assert_eq!(store.events(&id, 5, 1).await.unwrap(), events[5..6]);
    let page = store.metrics(&id, &MetricFilter::default()).await.unwrap();
    assert_eq!((page.as_of, page.columns.len(), page.columns[0].column.values.len()), (7, 1, 2));
    let checkpoints = store.checkpoints(&id).await.unwrap();
    assert_eq!(
        checkpoints.iter().map(|c| (c.info.step, c.info.best)).collect::<Vec<_>>(),
        [(4, true), (2, false)]
    );
    assert_eq!(store.checkpoint(&checkpoints[0].id).await.unwrap().unwrap(), checkpoints[0]);

    // A refused change changes nothing.
    let refused = store.change_job(&id, Box::new(move |row| lifecycle::retry(row, at))).await;
    assert!(matches!(refused, Err(StoreError::Refused(_))));
    assert!(matches!(store.delete_job(&id).await, Err(StoreError::Refused(_))));
    assert_eq!(store.job(&id).await.unwrap().unwrap().job.last_seq, 7);

    let ended = vec![AttemptEvent::Ended(failed("no", false))];
    store.ingest(&[report(Source::Agent, 0, ended)]).await.unwrap();
    let row = store.job(&id).await.unwrap().unwrap();
    assert_eq!(
        (row.job.state, row.fencing_token, row.job.reason.as_deref()),
        (JobState::Failed, None, Some("no"))
    );
    assert!(store.live_attempts().await.unwrap().is_empty());
    let late = store.ingest(&[report(Source::Rank(0), 4, vec![losses(0, 3..=3)])]).await.unwrap();
    assert!(matches!(late[0], IngestResult::Stale));

    // A finished job does not need its dataset, but a retry does.
    store.remove_dataset("p").await.unwrap();
    assert!(matches!(store.remove_dataset("p").await, Err(StoreError::NotFound("dataset"))));
    let retried = store.change_job(&id, Box::new(move |row| lifecycle::retry(row, at))).await;
    assert!(matches!(retried, Err(StoreError::DatasetRemoved(_))));
    assert_eq!(store.job(&id).await.unwrap().unwrap(), row);
    store.add_dataset(&dataset()).await.unwrap();

    // The next attempt continues from the newest checkpoint, with a higher token.
    store.change_job(&id, Box::new(move |row| lifecycle::retry(row, at))).await.unwrap();
    let second = store.claim(Claim { after_attempt: 1, ..claim() }).await.unwrap().unwrap();
    assert_eq!((second.resume_checkpoint.as_deref(), second.attempt.attempt), (Some("1-4"), 2));
    assert!(second.attempt.fencing_token > attempt.fencing_token);
    // A job has one best checkpoint over all attempts.
    let report_of_second =
        Report { attempt: second.attempt, ..report(Source::Rank(0), 0, vec![running(10, 4), checkpoint(6)]) };
    store.ingest(&[report_of_second]).await.unwrap();
    let checkpoints = store.checkpoints(&id).await.unwrap();
    assert_eq!(
        checkpoints.iter().map(|c| (c.info.step, c.info.best)).collect::<Vec<_>>(),
        [(6, true), (4, false), (2, false)]
    );
    store.change_job(&id, Box::new(move |row| lifecycle::cancel(row, false, at))).await.unwrap();

    let page =
        store.jobs(&JobFilter { states: vec![JobState::Cancelled], ..JobFilter::default() }).await.unwrap();
    assert_eq!((page.jobs.len(), page.next), (1, None));
    assert_eq!(store.counts().await.unwrap().jobs, [(JobState::Cancelled, 1)]);
    store.delete_job(&id).await.unwrap();
    assert!(store.job(&id).await.unwrap().is_none());
    assert!(
        store.checkpoints(&id).await.unwrap().is_empty() && store.attempts(&id).await.unwrap().is_empty()
    );
    assert!(store.counts().await.unwrap().jobs.is_empty());
    assert!(store.jobs(&JobFilter::default()).await.unwrap().jobs.is_empty());
    // The other rows are deleted in steps.
    while let Some(id) = store.oldest_deleted_job().await.unwrap() {
        store.purge_some_rows(&id).await.unwrap();
    }
    assert!(store.events(&id, 0, 10).await.unwrap().is_empty());
    assert!(matches!(store.delete_job(&id).await, Err(StoreError::NotFound(_))));
    store.check_writable().await.unwrap();
    store.close().await;
}

/// A sweep and its trials, whose numbers are unique.
async fn test_sweeps(store: &dyn Store) {
    let at = at();
    store.add_dataset(&dataset()).await.unwrap();
    let row = SweepRow {
        id: "sweep-1".into(),
        name: "lr".into(),
        project: "default".into(),
        state: SweepState::Running,
        reason: None,
        spec: serde_json::json!({"sweep": {"method": "grid"}}),
        settings: vec![[("train.lr".to_owned(), serde_json::json!(0.1))].into()],
        rungs: vec![1, 3],
        ownership: Ownership { owner: Some("mona".into()), private: true },
        created_at: at,
        finished_at: None,
    };
    assert!(store.add_sweep(&row, &[spec("lr lr=0.1")]).await.unwrap());
    let same_id = SweepRow { name: "other".into(), ..row.clone() };
    assert!(!store.add_sweep(&same_id, &[]).await.unwrap(), "the sweep exists already");
    assert_eq!(store.sweep("sweep-1").await.unwrap(), Some(row.clone()));
    assert_eq!(store.sweep("sweep-2").await.unwrap(), None);
    assert_eq!(store.sweep_specs("sweep-1").await.unwrap(), [spec("lr lr=0.1")]);
    assert_eq!(store.unfinished_sweeps().await.unwrap(), store.sweeps().await.unwrap());
    let trial = |number| NewJob {
        trial: Some(NewTrial { id: TrialOf { sweep: "sweep-1".into(), number }, pause_after: Some(1) }),
        ..NewJob::of(JobId::generate(), spec("lr lr=0.1"), at)
    };
    for number in [2, 1] {
        store.create_job(trial(number)).await.unwrap();
    }
    assert!(matches!(store.create_job(trial(2)).await, Err(StoreError::Rejected(_))));
    let trials = store.trials("sweep-1").await.unwrap();
    let number_and_pause = |row: &JobRow| (row.job.trial.as_ref().unwrap().number, row.progress.pause_after);
    assert_eq!(trials.iter().map(number_and_pause).collect::<Vec<_>>(), [(1, Some(1)), (2, Some(1))]);
    let id = trials[0].job.id.clone();
    store.change_job(&id, Box::new(move |row| lifecycle::cancel(row, false, at))).await.unwrap();
    assert!(matches!(store.delete_job(&id).await, Err(StoreError::Refused(_))));
    assert!(store.set_sweep_state("sweep-1", SweepState::Paused, Some("full"), None).await.unwrap());
    let paused = store.sweep("sweep-1").await.unwrap().unwrap();
    assert_eq!((paused.state, paused.reason.as_deref()), (SweepState::Paused, Some("full")));
    assert!(store.set_sweep_state("sweep-1", SweepState::Cancelled, None, None).await.unwrap());
    // A cancelled sweep cannot run.
    assert!(!store.set_sweep_state("sweep-1", SweepState::Running, None, None).await.unwrap());
    assert!(!store.delete_sweep("sweep-1").await.unwrap(), "the sweep has not ended");
    assert!(store.set_sweep_state("sweep-1", SweepState::Cancelled, None, Some(at)).await.unwrap());
    // The sweep has ended.
    assert!(!store.set_sweep_state("sweep-1", SweepState::Cancelled, None, Some(at)).await.unwrap());
    assert!(store.unfinished_sweeps().await.unwrap().is_empty());
    store.delete_job(&id).await.unwrap();
    assert!(store.delete_sweep("sweep-1").await.unwrap());
    assert_eq!(store.sweep("sweep-1").await.unwrap(), None);
    let other = store.job(&trials[1].job.id).await.unwrap().unwrap();
    assert_eq!(other.job.trial, None);
}

/// Concurrent changes: claims of one transaction, rows of agents, and versions of waiting jobs.
async fn test_concurrent_changes(store: &dyn Store) {
    let at = at();
    store.add_dataset(&dataset()).await.unwrap();
    let mut jobs = Vec::new();
    for name in ["first", "second", "third"] {
        let id = JobId::generate();
        let mut spec = spec(name);
        spec.preemptible = name == "third";
        let new = NewJob::of(id.clone(), spec, at);
        store.create_job(new).await.unwrap();
        jobs.push(id);
    }
    let before = store.waiting_fingerprints().await.unwrap();
    assert_eq!(before.len(), 3);
    store.set_priority(&jobs[0], 7).await.unwrap();
    store.set_project(&jobs[1], "another").await.unwrap();
    let after = store.waiting_fingerprints().await.unwrap();
    assert_eq!((before[&jobs[0]].priority, after[&jobs[0]].priority), (0, 7));
    assert_eq!(after[&jobs[1]].project, "another");
    assert_eq!(before[&jobs[2]], after[&jobs[2]]);

    // Claims of jobs that do not wait are ignored. Tokens ascend in the order of the claims.
    let claim = |job: &JobId, after_attempt| Claim {
        job: job.clone(),
        after_attempt,
        places: vec![Place { agent_id: "a".into(), agent: "name".into(), ranks: vec![(0, 3)] }],
        fewer_ranks_reason: None,
        at,
    };
    let claims = [claim(&jobs[0], 0), claim(&jobs[1], 1), claim(&jobs[0], 0), claim(&jobs[2], 0)];
    let claimed = store.claim_jobs(&claims).await.unwrap();
    let tokens: Vec<_> = claimed.iter().map(|c| c.as_ref().map(|c| c.attempt.fencing_token)).collect();
    assert!(
        tokens[0] < tokens[3] && tokens[0].is_some() && tokens[1].is_none() && tokens[2].is_none(),
        "{tokens:?}"
    );
    assert_eq!(
        store.waiting_fingerprints().await.unwrap().into_keys().collect::<Vec<_>>(),
        [jobs[1].clone()]
    );
    store.change_job(&jobs[1], Box::new(move |row| lifecycle::cancel(row, false, at))).await.unwrap();
    assert!(store.waiting_fingerprints().await.unwrap().is_empty());

    // Jobs that may be preempted, and jobs that end.
    let yielding =
        async || store.yielding_jobs().await.unwrap().into_iter().map(|row| row.job).collect::<Vec<_>>();
    assert_eq!(yielding().await, [jobs[2].clone()]);
    store.change_job(&jobs[0], Box::new(move |row| lifecycle::pause(row, at))).await.unwrap();
    assert_eq!(yielding().await, [jobs[2].clone(), jobs[0].clone()], "the lowest priority first");
    assert_eq!(store.live_attempts().await.unwrap().len(), 2);

    let agent = |id: &str, name: &str| AgentRow {
        id: id.into(),
        name: name.into(),
        machine: machine(),
        slots: Vec::new(),
        last_seen_at: at,
    };
    let agents = [agent("1", "a"), agent("2", "b"), agent("3", "a"), agent("1", "renamed")];
    store.put_agents(&agents).await.unwrap();
    let ids = |rows: Vec<AgentRow>| rows.into_iter().map(|row| row.id).collect::<Vec<_>>();
    assert_eq!(ids(store.agents_by_name_or_id("a", "2").await.unwrap()), ["3", "2"]);
    assert_eq!(ids(store.agents_by_name_or_id("nobody", "1").await.unwrap()), ["1"]);
    assert_eq!(store.agents().await.unwrap().len(), 3);
    store.close().await;
}

fn machine() -> Machine {
    let FromAgent::Hello { machine, .. } = hello("a", 1, Vec::new()) else { unreachable!() };
    machine
}

/// Claims, reports and edits of more jobs than one statement can contain.
async fn test_many_rows(store: &dyn Store) {
    const JOBS: usize = 64 + 32 + 5;
    let at = at();
    store.add_dataset(&dataset()).await.unwrap();
    let mut jobs = Vec::new();
    for n in 0..JOBS {
        let id = JobId::generate();
        let spec = spec(&format!("job {n}"));
        store.create_job(NewJob::of(id.clone(), spec, at)).await.unwrap();
        jobs.push(id);
    }
    // Two edits of the same job: the second edit sees the result of the first.
    let set_reason = |job: &JobId, reason: &str| -> (JobId, Change) {
        let reason = reason.into();
        (job.clone(), Box::new(move |row| lifecycle::set_wait_reason(row, &reason)))
    };
    let mut changes: Vec<_> = jobs.iter().map(|job| set_reason(job, "no slots")).collect();
    changes.push(set_reason(&jobs[3], "no slots at all"));
    changes.push(set_reason(&JobId::generate(), "nobody"));
    let changed = store.change_jobs(&changes).await.unwrap();
    assert!(changed[..=JOBS].iter().all(Option::is_some) && changed[JOBS + 1].is_none());
    let seqs =
        |n: usize| changed[n].as_ref().unwrap().events.iter().map(|event| event.seq).collect::<Vec<_>>();
    assert_eq!((seqs(3), seqs(JOBS), seqs(JOBS - 1)), (vec![2], vec![3], vec![2]));
    assert_eq!(store.job(&jobs[3]).await.unwrap().unwrap().job.reason.as_deref(), Some("no slots at all"));
    assert_eq!(store.job(&jobs[4]).await.unwrap().unwrap().job.reason.as_deref(), Some("no slots"));

    let claim = |(n, job): (usize, &JobId)| Claim {
        job: job.clone(),
        after_attempt: 0,
        places: vec![Place { agent_id: format!("id {n}"), agent: format!("agent {n}"), ranks: vec![(0, 3)] }],
        fewer_ranks_reason: None,
        at,
    };
    let claims: Vec<_> = jobs.iter().enumerate().map(claim).collect();
    let claimed = store.claim_jobs(&claims).await.unwrap();
    let attempts: Vec<_> = claimed.into_iter().map(|claimed| claimed.unwrap().attempt).collect();
    assert!(attempts.is_sorted_by(|previous, next| previous.fencing_token < next.fencing_token));
    assert!(attempts.iter().map(|attempt| &attempt.job).eq(&jobs));

    // All jobs but one run, and half of them end. The report of job 7 comes from another agent than the job's.
    let report = |n: usize, source, events| Report {
        agent_id: format!("id {}", if n == 7 { 8 } else { n }),
        attempt: attempts[n].clone(),
        source,
        first: 0,
        events,
        at,
        leaving: None,
    };
    let mut reports: Vec<_> =
        (1..JOBS).map(|n| report(n, Source::Rank(0), vec![running(10, 0), losses(0, 1..=2)])).collect();
    let end = AttemptEvent::Ended(Ending::Succeeded { step: 2 });
    let ends = (1..JOBS).filter(|n| n % 2 == 0).map(|n| report(n, Source::Agent, vec![end.clone()]));
    reports.extend(ends);
    let responses = store.ingest(&reports).await.unwrap();
    let stale: Vec<_> = responses
        .iter()
        .enumerate()
        .filter(|(_, response)| matches!(response, IngestResult::Stale))
        .collect();
    assert_eq!((stale.len(), stale[0].0), (1, 6), "the report of job 7: {stale:?}");
    for (n, attempt) in attempts.iter().enumerate() {
        let job = store.job(&attempt.job).await.unwrap().unwrap().job;
        let state = match n {
            0 | 7 => JobState::Starting,
            n if n % 2 == 0 => JobState::Succeeded,
            _ => JobState::Running,
        };
        let acknowledged = store.acknowledged_records(attempt, &format!("id {n}")).await.unwrap();
        let sources = match state {
            JobState::Starting => 0,
            JobState::Running => 1,
            _ => 2,
        };
        assert_eq!((job.state, acknowledged.len()), (state, sources), "job {n}");
        let attempts = store.attempts(&attempt.job).await.unwrap();
        assert_eq!(attempts[0].ended_at.is_some(), state == JobState::Succeeded, "job {n}");
        let events = store.events(&attempt.job, 0, 100).await.unwrap();
        assert_eq!(events.last().unwrap().seq, job.last_seq, "job {n}");
    }
    store.close().await;
}

on_both_databases!(
    sqlite_stores_more_than_fits_in_a_statement,
    postgres_stores_more_than_fits_in_a_statement,
    test_many_rows
);
on_both_databases!(
    sqlite_stores_concurrent_changes,
    postgres_stores_concurrent_changes,
    test_concurrent_changes
);
on_both_databases!(sqlite_stores_sweeps, postgres_stores_sweeps, test_sweeps);
on_both_databases!(
    sqlite_stores_and_returns_all_records,
    postgres_stores_and_returns_all_records,
    test_records
);
