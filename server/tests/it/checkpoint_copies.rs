//! Records of checkpoint copies in both databases.

use crate::{
    agent::{checkpoint, failed, running},
    store::{at, dataset, on_both_databases},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Source},
    job::JobId,
    spec::JobSpec,
};
use lockstep_server::{
    lifecycle,
    store::{
        AgentPlace, Claim, CopyState, CreateResult, NewJob, Place, Report, Store, StoredCheckpoint,
        sqlite::SqliteStore,
    },
};
use sqlx::Connection as _;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

async fn submit_job(store: &dyn Store) -> JobId {
    store.add_dataset(&dataset()).await.unwrap();
    let mut spec = JobSpec { name: "copied".into(), ..JobSpec::default() };
    spec.data.dataset = "p".into();
    let id = JobId::generate();
    let new = NewJob::of(id.clone(), spec, at());
    assert!(matches!(store.create_job(new).await.unwrap(), CreateResult::New(_)));
    id
}

/// Starts the job's next attempt, with a rank on each of these agents.
async fn start_attempt(store: &dyn Store, job: &JobId, after_attempt: u32, agents: &[&str]) -> AttemptRef {
    let place = |(rank, id): (u32, &&str)| Place {
        agent_id: format!("id-{id}"),
        agent: (*id).to_owned(),
        ranks: vec![(rank, 0)],
    };
    let places = (0..).zip(agents).map(place).collect();
    let claim = Claim { job: job.clone(), after_attempt, places, fewer_ranks_reason: None, at: at() };
    store.claim(claim).await.unwrap().unwrap().attempt
}

fn report(attempt: &AttemptRef, (agent, source): (&str, Source), first: u64, event: AttemptEvent) -> Report {
    Report {
        agent_id: format!("id-{agent}"),
        attempt: attempt.clone(),
        source,
        first,
        events: vec![event],
        at: at(),
        leaving: None,
    }
}

async fn test_holders(store: &dyn Store) {
    let id = submit_job(store).await;
    let attempt = start_attempt(store, &id, 0, &["a", "b", "c"]).await;
    let holders = async |step: u64| -> Vec<String> {
        let mut copies = store.copies(&id, "").await.unwrap();
        let copies = copies.remove(&format!("{id}-1-{step}")).unwrap_or_default();
        copies.holders.into_iter().map(|holder| holder.agent).collect()
    };
    let (a, b, c) = (("a", Source::Rank(0)), ("b", Source::Rank(1)), ("c", Source::Rank(2)));
    let ingest = async |attempt: &AttemptRef, from: (&str, Source), first, event| {
        store.ingest(&[report(attempt, from, first, event)]).await.unwrap();
    };

    // The assigned place of an agent, and whether the agent has its own disk.
    let place_of = async |agent: &str, attempt: &AttemptRef| store.agent_place(attempt, agent).await.unwrap();
    let place = |has_rank_0, has_own_disk| Some(AgentPlace { has_rank_0, has_own_disk });
    assert_eq!(
        (place_of("id-a", &attempt).await, place_of("id-b", &attempt).await),
        (place(true, false), place(false, false))
    );
    for agent in ["id-a", "id-b", "id-b"] {
        store.note_own_disk(&attempt, agent).await.unwrap();
    }
    assert_eq!(
        (place_of("id-a", &attempt).await, place_of("id-b", &attempt).await),
        (place(true, true), place(false, true))
    );
    assert_eq!(
        (place_of("id-c", &attempt).await, place_of("id-d", &attempt).await),
        (place(false, false), None)
    );
    let mut guessed = attempt.clone();
    guessed.fencing_token.secret += 1;
    assert_eq!(place_of("id-a", &guessed).await, None);

    // Each agent with its own disk that reports a checkpoint holds it; the agent of rank 0 is first. The agent c uses the server's disk.
    ingest(&attempt, a, 0, running(100, 0)).await;
    ingest(&attempt, a, 1, checkpoint(10)).await;
    for (from, first) in [(c, 0), (b, 0), (a, 2)] {
        ingest(&attempt, from, first, checkpoint(17)).await;
    }
    assert_eq!(
        (holders(10).await, holders(17).await),
        (vec!["a".to_owned()], vec!["a".to_owned(), "b".to_owned()])
    );
    // The same checkpoint is reported again after its validation.
    ingest(&attempt, a, 3, checkpoint(10)).await;
    assert_eq!(holders(10).await, ["a"]);

    // After a removal no agent holds the checkpoint, until an agent reports it again.
    ingest(&attempt, a, 4, AttemptEvent::CheckpointRemoved { epoch: 1, step: 10 }).await;
    ingest(&attempt, b, 1, checkpoint(10)).await;
    assert_eq!(holders(10).await, ["b"]);

    // If another attempt writes a checkpoint again, only agents of this attempt hold it. Other checkpoints keep their holders.
    for agent in [a, b, c] {
        let ended = AttemptEvent::Ended(failed("by the test", false));
        ingest(&attempt, (agent.0, Source::Agent), 0, ended).await;
    }
    store.change_job(&id, Box::new(|row| lifecycle::retry(row, at()))).await.unwrap();
    let attempt = start_attempt(store, &id, 1, &["b", "c"]).await;
    store.note_own_disk(&attempt, "id-b").await.unwrap();
    ingest(&attempt, ("b", Source::Rank(0)), 0, running(100, 10)).await;
    assert_eq!(holders(17).await, ["a", "b"]);
    ingest(&attempt, ("b", Source::Rank(0)), 1, checkpoint(17)).await;
    assert_eq!((holders(17).await, holders(10).await), (vec!["b".to_owned()], vec!["b".to_owned()]));
    store.close().await;
}

on_both_databases!(
    sqlite_records_which_agents_have_a_checkpoint,
    postgres_records_which_agents_have_a_checkpoint,
    test_holders
);

#[tokio::test]
async fn the_copies_of_a_thousand_agents_are_read_in_two_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let store = SqliteStore::open(&path).await.unwrap();
    let id = submit_job(&store).await;
    let names: Vec<String> = (0..1000).map(|n| format!("a{n}")).collect();
    let attempt = start_attempt(&store, &id, 0, &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for (first, event) in [(0, running(100, 0)), (1, checkpoint(10)), (2, checkpoint(20))] {
        store.ingest(&[report(&attempt, ("a0", Source::Rank(0)), first, event)]).await.unwrap();
    }
    // Every agent holds both checkpoints on its own disk.
    let ids: Vec<String> = names.iter().map(|name| format!("id-{name}")).collect();
    let ids = serde_json::to_string(&ids).unwrap();
    let mut db = sqlx::SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    sqlx::query("UPDATE attempts SET own_disks = $1").bind(&ids).execute(&mut db).await.unwrap();
    sqlx::query(
        "INSERT INTO checkpoint_copies (checkpoint_id, location, state) SELECT checkpoints.id, 'agent:' || value, 'complete' \
         FROM checkpoints, json_each($1) WHERE true ON CONFLICT DO NOTHING",
    )
    .bind(&ids)
    .execute(&mut db)
    .await
    .unwrap();
    let mut copies = HashMap::new();
    // Other programs may delay a read, but hardly each of three.
    let mut took = Duration::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        copies = store.copies(&id, "").await.unwrap();
        took = took.min(start.elapsed());
    }
    for step in [10, 20] {
        let holders = copies[&format!("{id}-1-{step}")].holders.iter();
        assert!(holders.map(|holder| &holder.agent).eq(&names), "holders are in the order of ranks");
    }
    assert!(took < Duration::from_secs(2), "{took:?}: is the time quadratic in the number of agents?");
    store.close().await;
}

/// Follows the state of a copy in an object store.
async fn test_object_store_copies(store: &dyn Store) {
    const URL: &str = "s3://bucket";
    let id = submit_job(store).await;
    let attempt = start_attempt(store, &id, 0, &["a"]).await;
    let from = ("a", Source::Rank(0));
    for (first, event) in [(0, running(100, 0)), (1, checkpoint(10))] {
        store.ingest(&[report(&attempt, from, first, event)]).await.unwrap();
    }
    let checkpoint_id = format!("{id}-1-10");
    let copy_state = async |url: &str| {
        let copies = store.copies(&id, url).await.unwrap().remove(&checkpoint_id).unwrap_or_default();
        (copies.object_store, copies.is_damaged_on_server)
    };
    let upload = async |manifest: Option<&str>| {
        let record = StoredCheckpoint {
            id: checkpoint_id.clone(),
            manifest: manifest.map(str::to_owned),
            unfinished_upload: None,
        };
        store.put_stored_checkpoint(URL, &record).await.unwrap()
    };
    let mark_damaged = async |location: &str| store.mark_damaged(location, &checkpoint_id).await.unwrap();
    let (copying, complete) = (Some(CopyState::Copying), Some(CopyState::Complete));
    assert_eq!(copy_state(URL).await, (None, false));
    assert!(upload(None).await);
    assert_eq!(copy_state(URL).await, (copying, false));
    // The copy on the server's disk is marked as damaged once. A record of the copy in the object store keeps the mark.
    assert!(mark_damaged("server").await && !mark_damaged("server").await);
    assert_eq!(copy_state(URL).await, (copying, true));
    assert!(upload(Some("sum")).await);
    assert_eq!((copy_state(URL).await, copy_state("s3://other").await), ((complete, true), (None, true)));
    store.forget_copy("server", &checkpoint_id).await.unwrap();
    assert_eq!(copy_state(URL).await, (complete, false));
    // A checkpoint that an attempt writes again clears the mark, too.
    assert!(mark_damaged("server").await);
    store.ingest(&[report(&attempt, from, 2, checkpoint(10))]).await.unwrap();
    assert_eq!(copy_state(URL).await, (complete, false));
    // A damaged copy in the store is checked again when a server starts, and is replaced by an upload.
    assert!(mark_damaged(URL).await && !mark_damaged(URL).await);
    assert_eq!(copy_state(URL).await.0, Some(CopyState::Damaged));
    store.clear_damage_marks(URL).await.unwrap();
    assert_eq!(copy_state(URL).await.0, complete);
    assert!(mark_damaged(URL).await && upload(None).await);
    assert_eq!(copy_state(URL).await.0, copying);
    // If the checkpoint is removed, its record stays until the objects are deleted, and does not change any more.
    let removed = AttemptEvent::CheckpointRemoved { epoch: 1, step: 10 };
    store.ingest(&[report(&attempt, from, 3, removed)]).await.unwrap();
    assert!(!mark_damaged("server").await && !upload(Some("sum")).await);
    assert_eq!(store.abandoned_checkpoints(URL, "", 10).await.unwrap(), std::slice::from_ref(&checkpoint_id));
    store.forget_copy(URL, &checkpoint_id).await.unwrap();
    assert!(store.stored_checkpoint(URL, &checkpoint_id).await.unwrap().is_none());
    store.close().await;
}

on_both_databases!(
    sqlite_records_objects_of_a_store,
    postgres_records_objects_of_a_store,
    test_object_store_copies
);

#[tokio::test]
async fn a_checkpoint_and_its_agent_are_stored_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let store = SqliteStore::open(&path).await.unwrap();
    let id = submit_job(&store).await;
    let attempt = start_attempt(&store, &id, 0, &["a"]).await;
    store.note_own_disk(&attempt, "id-a").await.unwrap();
    let from = ("a", Source::Rank(0));
    store.ingest(&[report(&attempt, from, 0, running(100, 0))]).await.unwrap();
    let mut db = sqlx::SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    sqlx::query("ALTER TABLE checkpoint_copies RENAME TO elsewhere").execute(&mut db).await.unwrap();
    store.ingest(&[report(&attempt, from, 1, checkpoint(10))]).await.unwrap_err();
    assert!(store.checkpoints(&id).await.unwrap().is_empty());
    // The agent will report the checkpoint again.
    assert_eq!(store.acknowledged_records(&attempt, "id-a").await.unwrap()[0].records, 1);
    sqlx::query("ALTER TABLE elsewhere RENAME TO checkpoint_copies").execute(&mut db).await.unwrap();
    store.ingest(&[report(&attempt, from, 1, checkpoint(10))]).await.unwrap();
    assert_eq!(store.copies(&id, "").await.unwrap()[&format!("{id}-1-10")].holders[0].agent, "a");
    store.close().await;
}
