//! The list of jobs in every database: each order page by page, for each reader, with counts and projects.

use crate::agent::info;
use lockstep_protocol::{
    dataset::Dataset,
    job::{JobId, JobState},
    spec::JobSpec,
};
use lockstep_server::store::{
    Annotation, Created, JobFilter, JobSort, NewJob, SortBy, Store, postgres::PostgresStore,
    sqlite::SqliteStore,
};

const SORTS: [SortBy; 14] = [
    SortBy::Created,
    SortBy::Started,
    SortBy::Finished,
    SortBy::Name,
    SortBy::State,
    SortBy::Project,
    SortBy::Priority,
    SortBy::Step,
    SortBy::Loss,
    SortBy::ValAccuracy,
    SortBy::Best,
    SortBy::Setting { table: "train", key: "lr", is_number: true },
    SortBy::Setting { table: "train", key: "optimizer", is_number: false },
    SortBy::Setting { table: "", key: "priority", is_number: true },
];

/// Name, project, learning rate, owner, whether it is private.
const JOBS: [(&str, &str, f32, Option<&str>, bool); 4] = [
    ("b", "vision", 0.1, Some("mona"), true),
    ("a", "vision", 0.4, Some("otto"), false),
    ("d", "hidden", 0.1, Some("mona"), true),
    ("c", "default", 0.2, None, true),
];

async fn fill(store: &dyn Store) {
    let added_at = "2026-01-02T03:04:05.678Z".parse().unwrap();
    let dataset =
        Dataset { name: "p".into(), path: "/p".into(), info: info(), added_at, owner: None, private: false };
    store.add_dataset(&dataset).await.unwrap();
    for (n, (name, project, lr, owner, private)) in JOBS.into_iter().enumerate() {
        let mut spec = JobSpec { name: name.into(), project: project.into(), private, ..JobSpec::default() };
        spec.data.dataset = "p".into();
        spec.train.lr = lr;
        let new = NewJob {
            id: JobId::generate(),
            spec,
            annotation: Annotation { notes: format!("notes of {name}"), tags: vec![format!("tag {name}")] },
            // Two of the same millisecond: their ids decide.
            at: added_at + jiff::SignedDuration::from_secs((n / 2) as i64),
            idempotency: None,
            fork: None,
            owner: owner.map(str::to_owned),
        };
        assert!(matches!(store.create_job(new).await.unwrap(), Created::New(_)));
    }
}

async fn walked(store: &dyn Store, filter: &JobFilter, limit: u32) -> Vec<String> {
    let (mut names, mut filter) = (Vec::new(), JobFilter { limit, ..filter.clone() });
    loop {
        let page = store.jobs(&filter).await.unwrap();
        assert!(page.jobs.len() <= limit as usize);
        names.extend(page.jobs.into_iter().map(|job| job.name));
        filter.cursor = page.next;
        if filter.cursor.is_none() {
            return names;
        }
    }
}

async fn scenario(store: &dyn Store) {
    fill(store).await;
    // Nobody's private job is an admin's alone to see.
    for (reader, expected) in
        [(None, "abcd"), (Some("mona"), "abd"), (Some("otto"), "a"), (Some("eve"), "a"), (Some(""), "a")]
    {
        let seen_by = reader.map(str::to_owned);
        for by in SORTS {
            let mut both = Vec::new();
            for descending in [false, true] {
                let sort = JobSort { by, descending };
                let filter = JobFilter { seen_by: seen_by.clone(), sort, ..JobFilter::default() };
                let whole = walked(store, &filter, 10).await;
                let mut sorted = whole.clone();
                sorted.sort();
                assert_eq!(sorted.concat(), expected, "{reader:?}: {sort:?}");
                for limit in 1..=3 {
                    assert_eq!(walked(store, &filter, limit).await, whole, "{reader:?}: {sort:?} by {limit}");
                }
                assert_eq!(store.jobs_counted(&filter).await.unwrap(), expected.len() as u64);
                both.push(whole);
            }
            let backwards: Vec<_> = both[1].iter().rev().cloned().collect();
            assert_eq!(both[0], backwards, "{by:?}: ids follow the direction, too");
        }
        let projects = store.projects(reader).await.unwrap();
        let counts: Vec<_> = projects.into_iter().map(|project| (project.name, project.states)).collect();
        let queued = |name: &str, count| (name.to_owned(), vec![(JobState::Queued, count)]);
        let expected = match reader {
            None => vec![queued("default", 1), queued("hidden", 1), queued("vision", 2)],
            Some("mona") => vec![queued("hidden", 1), queued("vision", 2)],
            Some(_) => vec![queued("vision", 1)],
        };
        assert_eq!(counts, expected, "{reader:?}");
    }
    let by_lr = JobSort { by: SORTS[11], descending: false };
    assert_eq!(walked(store, &JobFilter { sort: by_lr, ..JobFilter::default() }, 2).await.concat(), "bdca");
    let by_name = JobSort { by: SortBy::Name, descending: true };
    for (filter, expected) in [
        (JobFilter { owner: Some("mona".into()), ..JobFilter::default() }, "db"),
        (JobFilter { project: Some("vision".into()), ..JobFilter::default() }, "ba"),
        (JobFilter { tags: vec!["tag c".into()], ..JobFilter::default() }, "c"),
        (JobFilter { tags: vec!["tag".into()], ..JobFilter::default() }, ""),
        (JobFilter { states: vec![JobState::Queued, JobState::Failed], ..JobFilter::default() }, "dcba"),
        (JobFilter { states: vec![JobState::Failed], ..JobFilter::default() }, ""),
        (
            JobFilter {
                created_after: Some("2026-01-02T03:04:06.678Z".parse().unwrap()),
                ..JobFilter::default()
            },
            "dc",
        ),
        (
            JobFilter {
                created_before: Some("2026-01-02T03:04:06.678Z".parse().unwrap()),
                ..JobFilter::default()
            },
            "ba",
        ),
    ] {
        let filter = JobFilter { sort: by_name, ..filter };
        assert_eq!(walked(store, &filter, 1).await.concat(), expected, "{filter:?}");
        assert_eq!(store.jobs_counted(&filter).await.unwrap(), expected.len() as u64, "{filter:?}");
    }
    // Notes are read where they are asked for, and tags always.
    for (with_notes, notes) in [(false, None), (true, Some("notes of a"))] {
        let filter = JobFilter { with_notes, name: Some("A".into()), ..JobFilter::default() };
        let job = store.jobs(&filter).await.unwrap().jobs.swap_remove(0);
        assert_eq!((job.notes.as_deref(), job.tags), (notes, vec!["tag a".to_owned()]));
        let job = store.job(&job.id).await.unwrap().unwrap().job;
        assert_eq!(job.notes.as_deref(), Some("notes of a"));
    }
    store.close().await;
}

#[tokio::test]
async fn sqlite_lists_jobs_for_each_reader() {
    let dir = tempfile::tempdir().unwrap();
    scenario(&SqliteStore::open(&dir.path().join("test.db")).await.unwrap()).await;
}

#[tokio::test]
async fn postgres_lists_jobs_for_each_reader() {
    scenario(&PostgresStore::open(&crate::postgres::database()).await.unwrap()).await;
}
