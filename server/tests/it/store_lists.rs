//! The list of jobs in both databases: every order, every page size, different readers, counts and projects.

use crate::store::{at, dataset, on_both_databases};
use lockstep_protocol::{
    job::{JobId, JobState},
    spec::JobSpec,
};
use lockstep_server::store::{
    Annotation, Comparison, Condition, CreateResult, JobFilter, JobSort, NewJob, SettingValue, SortBy, Store,
};
use std::collections::BTreeMap;

const SORTS: [SortBy; 24] = [
    SortBy::Created,
    SortBy::Started,
    SortBy::Finished,
    SortBy::Name,
    SortBy::State,
    SortBy::Project,
    SortBy::Owner,
    SortBy::Priority,
    SortBy::Step,
    SortBy::Epoch,
    SortBy::Attempt,
    SortBy::Ranks,
    SortBy::Speed,
    SortBy::Metric("accuracy"),
    SortBy::Metric("val_loss"),
    SortBy::Metric("lr"),
    SortBy::Metric("loss"),
    SortBy::Metric("val_accuracy"),
    SortBy::Best,
    SortBy::Setting { table: "train", key: "lr", is_number: true },
    SortBy::Setting { table: "train", key: "optimizer", is_number: false },
    SortBy::Setting { table: "", key: "priority", is_number: true },
    SortBy::Metric("grad_norm"),
    // A tag that no job has.
    SortBy::Tag(String::new()),
];

/// Name, project, learning rate, owner, and whether the job is private.
const JOBS: [(&str, &str, f32, Option<&str>, bool); 4] = [
    ("b", "vision", 0.1, Some("mona"), true),
    ("a", "vision", 0.4, Some("otto"), false),
    ("d", "hidden", 0.1, Some("mona"), true),
    ("c", "default", 0.2, None, true),
];

async fn fill(store: &dyn Store) {
    store.add_dataset(&dataset()).await.unwrap();
    for (n, (name, project, lr, owner, private)) in JOBS.into_iter().enumerate() {
        let mut spec = JobSpec { name: name.into(), project: project.into(), private, ..JobSpec::default() };
        spec.data.dataset = "p".into();
        spec.train.lr = lr;
        // Two jobs have the same creation time, so their ids decide the order.
        let at = at() + jiff::SignedDuration::from_secs((n / 2) as i64);
        let new = NewJob {
            annotation: Annotation { notes: format!("notes of {name}"), tags: vec![format!("tag {name}")] },
            owner: owner.map(str::to_owned),
            ..NewJob::of(JobId::generate(), spec, at)
        };
        assert!(matches!(store.create_job(new).await.unwrap(), CreateResult::New(_)));
    }
}

/// Reads all pages, and returns the names of the jobs.
async fn read_names(store: &dyn Store, filter: &JobFilter, limit: u32) -> Vec<String> {
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

async fn test_lists(store: &dyn Store) {
    fill(store).await;
    // Only admins (no reader) see a private job without an owner.
    for (reader, expected) in
        [(None, "abcd"), (Some("mona"), "abd"), (Some("otto"), "a"), (Some("eve"), "a"), (Some(""), "a")]
    {
        let seen_by = reader.map(str::to_owned);
        for by in SORTS {
            let mut orders = Vec::new();
            for descending in [false, true] {
                let sort = JobSort { by: by.clone(), descending };
                let filter =
                    JobFilter { seen_by: seen_by.clone(), sort: sort.clone(), ..JobFilter::default() };
                let complete = read_names(store, &filter, 10).await;
                let mut sorted = complete.clone();
                sorted.sort();
                assert_eq!(sorted.concat(), expected, "{reader:?}: {sort:?}");
                for limit in 1..=3 {
                    assert_eq!(
                        read_names(store, &filter, limit).await,
                        complete,
                        "{reader:?}: {sort:?} by {limit}"
                    );
                }
                assert_eq!(store.count_jobs(&filter).await.unwrap(), expected.len() as u64);
                orders.push(complete);
            }
            if by == SortBy::Owner && reader.is_none() {
                // The job without an owner comes last in both directions.
                assert_eq!([orders[0].concat(), orders[1].concat()], ["bdac", "adbc"]);
                continue;
            }
            let backwards: Vec<_> = orders[1].iter().rev().cloned().collect();
            assert_eq!(orders[0], backwards, "{by:?}: ids follow the direction, too");
        }
        let projects = store.projects(reader).await.unwrap();
        let counts: Vec<_> = projects.into_iter().map(|project| (project.name, project.states)).collect();
        let queued = |name: &str, count| (name.to_owned(), BTreeMap::from([("queued", count)]));
        let expected = match reader {
            None => vec![queued("default", 1), queued("hidden", 1), queued("vision", 2)],
            Some("mona") => vec![queued("hidden", 1), queued("vision", 2)],
            Some(_) => vec![queued("vision", 1)],
        };
        assert_eq!(counts, expected, "{reader:?}");
    }
    for (by, expected) in [
        (SortBy::Setting { table: "train", key: "lr", is_number: true }, "bdca"),
        (SortBy::Tag("tag c".into()), "badc"),
    ] {
        let sort = JobSort { by, descending: false };
        for limit in [1, 2] {
            let filter = JobFilter { sort: sort.clone(), ..JobFilter::default() };
            assert_eq!(read_names(store, &filter, limit).await.concat(), expected, "{sort:?}");
        }
    }
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
        let filter = JobFilter { sort: by_name.clone(), ..filter };
        assert_eq!(read_names(store, &filter, 1).await.concat(), expected, "{filter:?}");
        assert_eq!(store.count_jobs(&filter).await.unwrap(), expected.len() as u64, "{filter:?}");
    }
    test_conditions(store).await;
    test_texts(store).await;
    // Lists have notes only on request, and always have tags.
    for (with_notes, notes) in [(false, None), (true, Some("notes of a"))] {
        let filter = JobFilter { with_notes, name: Some("A".into()), ..JobFilter::default() };
        let job = store.jobs(&filter).await.unwrap().jobs.swap_remove(0);
        assert_eq!((job.notes.as_deref(), job.tags), (notes, vec!["tag a".to_owned()]));
        let job = store.job(&job.id).await.unwrap().unwrap().job;
        assert_eq!(job.notes.as_deref(), Some("notes of a"));
    }
    store.close().await;
}

/// Returns the sorted names of matching jobs, and checks their count.
async fn matching_names(store: &dyn Store, filter: JobFilter) -> String {
    let filter = JobFilter { sort: JobSort { by: SortBy::Name, descending: false }, ..filter };
    let names = read_names(store, &filter, 2).await.concat();
    assert_eq!(store.count_jobs(&filter).await.unwrap(), names.len() as u64, "{filter:?}");
    names
}

async fn test_conditions(store: &dyn Store) {
    use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual};
    let number = SettingValue::Number;
    let text = |text: &str| SettingValue::Text(text.into());
    for (table, key, comparison, value, expected) in [
        ("train", "lr", Equal, number(0.1), "bd"),
        ("train", "lr", NotEqual, number(0.1), "ac"),
        ("train", "lr", Less, number(0.2), "bd"),
        ("train", "lr", LessOrEqual, number(0.2), "bcd"),
        ("train", "lr", Greater, number(0.2), "a"),
        ("train", "lr", GreaterOrEqual, number(0.2), "ac"),
        ("", "name", Equal, text("a"), "a"),
        ("", "name", Equal, text("' OR 1 = 1 --\0"), ""),
        ("", "project", NotEqual, text("vision"), "cd"),
        ("", "project", Equal, text("default"), "c"),
        ("", "private", Equal, SettingValue::Bool(true), "bcd"),
        ("", "private", NotEqual, SettingValue::Bool(true), "a"),
        ("", "private", Equal, SettingValue::Bool(false), "a"),
        // No job has this setting.
        ("model", "pretrained", Equal, text("x"), ""),
        ("model", "pretrained", NotEqual, text("x"), "abcd"),
    ] {
        let is_number = matches!(value, SettingValue::Number(_));
        let key = SortBy::Setting { table, key, is_number };
        let conditions = vec![Condition { key, comparison, value }];
        let filter = JobFilter { conditions, ..JobFilter::default() };
        assert_eq!(matching_names(store, filter.clone()).await, expected, "{filter:?}");
        let seen_by = Some("otto".to_owned());
        let expected: String = expected.chars().filter(|name| *name == 'a').collect();
        assert_eq!(matching_names(store, JobFilter { seen_by, ..filter }).await, expected);
    }
    let lr = |comparison, value| {
        let key = SortBy::Setting { table: "train", key: "lr", is_number: true };
        Condition { key, comparison, value: number(value) }
    };
    let conditions = vec![lr(Greater, 0.1), lr(Less, 0.4)];
    assert_eq!(matching_names(store, JobFilter { conditions, ..JobFilter::default() }).await, "c");
}

async fn test_texts(store: &dyn Store) {
    for (text, expected) in [
        ("b", "b"),
        ("NOTES OF", "abcd"),
        ("notes of c", "c"),
        ("Tag D", "d"),
        ("%", ""),
        ("_", ""),
        ("!", ""),
        ("\"", ""),
        ("\\", ""),
        ("[", ""),
        ("]", ""),
        (",", ""),
        ("tag a\"]", ""),
        ("\0", "abcd"),
    ] {
        let filter = JobFilter { text: Some(text.into()), ..JobFilter::default() };
        assert_eq!(matching_names(store, filter.clone()).await, expected, "{text:?}");
        let expected: String = expected.chars().filter(|name| *name == 'a').collect();
        assert_eq!(
            matching_names(store, JobFilter { seen_by: Some("eve".into()), ..filter }).await,
            expected
        );
    }
}

on_both_databases!(sqlite_lists_jobs_for_each_reader, postgres_lists_jobs_for_each_reader, test_lists);
