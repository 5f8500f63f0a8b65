//! Groups of jobs: in both databases, with filters, for different readers, in every order, in pages.

use crate::{
    agent::server_with_agent,
    lists::submit_jobs,
    store::{at, dataset, on_both_databases},
    test_server::{TestServer, assert_refused},
};
use lockstep_protocol::{job::JobId, spec::JobSpec};
use lockstep_server::store::{
    Annotation, GroupBy, GroupValue, JobFilter, JobSort, NewJob, RunningStatistics, SettingKind, SortBy,
    Store,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const LR: GroupBy = GroupBy::Setting { table: "train", key: "lr", kind: SettingKind::Number };
const PRIVATE: GroupBy = GroupBy::Setting { table: "", key: "private", kind: SettingKind::Bool };
const PRETRAINED: GroupBy = GroupBy::Setting { table: "model", key: "pretrained", kind: SettingKind::Text };
const PRIORITY: SortBy = SortBy::Setting { table: "", key: "priority", is_number: true };

/// Name, tags, learning rate, priority, owner, and whether the job is private.
type JobValues = (&'static str, &'static [&'static str], f32, i32, Option<&'static str>, bool);
const JOBS: [JobValues; 6] = [
    ("a", &["base", "x,y"], 0.1, 2, Some("mona"), false),
    ("b", &["base"], 0.1, 4, Some("mona"), true),
    ("c", &[], 0.1, 9, Some("otto"), false),
    ("d", &["x,y"], 0.4, -3, None, false),
    ("e", &["\"base\""], 0.4, 0, None, true),
    ("f", &["bas"], 0.2, 1, Some("null"), false),
];

async fn fill(store: &dyn Store) {
    store.add_dataset(&dataset()).await.unwrap();
    for (n, (name, tags, lr, priority, owner, private)) in JOBS.into_iter().enumerate() {
        let mut spec = JobSpec { name: name.into(), priority, private, ..JobSpec::default() };
        spec.data.dataset = "p".into();
        spec.train.lr = lr;
        let at = at() + jiff::SignedDuration::from_secs(n as i64);
        let new = NewJob {
            annotation: Annotation {
                notes: String::new(),
                tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            },
            owner: owner.map(str::to_owned),
            ..NewJob::of(JobId::generate(), spec, at)
        };
        store.create_job(new).await.unwrap();
    }
}

/// Returns the values of each group as JSON, and the names of its jobs. Checks that the list of the group's jobs agrees.
async fn read_groups(store: &dyn Store, filter: &JobFilter, by: &[GroupBy]) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for group in store.job_groups(filter, by, &[], 100).await.unwrap().unwrap() {
        let sort = JobSort { by: SortBy::Name, descending: false };
        let pairs = by.iter().copied().zip(group.values.clone()).collect();
        let jobs = store.jobs(&JobFilter { group: pairs, sort, ..filter.clone() }).await.unwrap().jobs;
        let count: u64 = group.states.values().sum();
        assert_eq!(jobs.len() as u64, count, "{group:?}");
        assert_eq!(jobs.iter().map(|job| job.created_at).max(), Some(group.newest_at));
        let names = jobs.into_iter().map(|job| job.name).collect();
        rows.push((serde_json::to_string(&group.values).unwrap(), names));
    }
    rows.sort();
    rows
}

async fn test_groups(store: &dyn Store) {
    fill(store).await;
    let all = JobFilter::default();
    let otto = JobFilter { seen_by: Some("otto".into()), ..JobFilter::default() };
    let named_d = JobFilter { name: Some("d".into()), ..JobFilter::default() };
    let by_owner = [(r#"["mona"]"#, "ab"), (r#"["null"]"#, "f"), (r#"["otto"]"#, "c"), ("[null]", "de")];
    let by_tag = [
        (r#"["\"base\""]"#, "e"),
        (r#"["bas"]"#, "f"),
        (r#"["base"]"#, "ab"),
        (r#"["x,y"]"#, "ad"),
        ("[null]", "c"),
    ];
    let visible_tags = [(r#"["bas"]"#, "f"), (r#"["base"]"#, "a"), (r#"["x,y"]"#, "ad"), ("[null]", "c")];
    let lr_and_tag = [
        (r#"[0.1,"base"]"#, "a"),
        (r#"[0.1,"x,y"]"#, "a"),
        ("[0.1,null]", "c"),
        (r#"[0.2,"bas"]"#, "f"),
        (r#"[0.4,"x,y"]"#, "d"),
    ];
    let cases: [(&JobFilter, &[GroupBy], &[(&str, &str)]); 9] = [
        (&all, &[GroupBy::Project], &[(r#"["default"]"#, "abcdef")]),
        (&all, &[GroupBy::Owner], &by_owner),
        (&all, &[GroupBy::Tag], &by_tag),
        (&all, &[LR], &[("[0.1]", "abc"), ("[0.2]", "f"), ("[0.4]", "de")]),
        (&all, &[GroupBy::State, PRIVATE], &[(r#"["queued",false]"#, "acdf"), (r#"["queued",true]"#, "be")]),
        (&all, &[PRETRAINED], &[("[null]", "abcdef")]),
        (&otto, &[GroupBy::Tag], &visible_tags),
        (&otto, &[LR, GroupBy::Tag], &lr_and_tag),
        (&named_d, &[LR, GroupBy::Name], &[(r#"[0.4,"d"]"#, "d")]),
    ];
    for (filter, by, expected) in cases {
        let expected: Vec<_> = expected.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        assert_eq!(read_groups(store, filter, by).await, expected, "{by:?}");
    }
    let metrics = [PRIORITY, SortBy::Best, SortBy::Step];
    let groups = store.job_groups(&all, &[LR], &metrics, 3).await.unwrap().unwrap();
    let first = groups.iter().find(|group| group.values == [GroupValue::Number(0.1)]).unwrap();
    assert_eq!(first.states, BTreeMap::from([("queued", 3)]));
    let statistics: Vec<_> = first.metrics.iter().map(RunningStatistics::statistics).collect();
    let [priority, best, step] = &statistics[..] else { panic!("{first:?}") };
    assert_eq!((priority.n, priority.mean, priority.min, priority.max), (3, Some(5.0), Some(2.0), Some(9.0)));
    // The variance of 2, 4 and 9 is (9 + 1 + 16) / 2 = 13.
    assert!((priority.std.unwrap() - 13.0_f64.sqrt()).abs() < 1e-12);
    assert_eq!((best.n, best.mean, best.std), (0, None, None));
    assert_eq!((step.n, step.mean, step.std), (3, Some(0.0), Some(0.0)));
    // There is one group more than the limit.
    assert!(store.job_groups(&all, &[LR], &[], 2).await.unwrap().is_none());
    store.close().await;
}

on_both_databases!(sqlite_groups_jobs, postgres_groups_jobs, test_groups);

/// Reads all pages, and returns the values of all groups.
async fn read_all(server: &TestServer, query: &str, limit: usize) -> Vec<Value> {
    let pages = server.read_pages(&format!("/jobs/groups?limit={limit}&count=true&{query}")).await;
    let mut values = Vec::new();
    for page in &pages {
        let groups = page["groups"].as_array().unwrap();
        assert!(groups.len() <= limit);
        values.extend(groups.iter().map(|group| group["values"].clone()));
    }
    assert_eq!(pages.last().unwrap()["total"], values.len());
    values
}

#[tokio::test]
async fn groups_are_listed_in_every_order_with_any_page_size() {
    let (server, _agent) = server_with_agent(2).await;
    let specs =
        [("b", 0.1, "vision"), ("a", 0.4, ""), ("c", 0.2, "vision"), ("d", 10.0, "x"), ("e", 2.0, "x")];
    let ids = submit_jobs(&server, &specs).await;
    for (id, best) in ids.iter().zip(["0.5", "0.9", "0.7", "", "0.65"]) {
        if !best.is_empty() {
            let sql = format!("UPDATE jobs SET best = '{{\"value\":{best},\"epoch\":1}}' WHERE id = '{id}'");
            assert_eq!(server.execute(&sql).await, 1);
        }
    }
    for limit in 1..=6 {
        for (query, expected) in [
            ("by=project", json!([["default"], ["vision"], ["x"]])),
            ("by=project&sort=-group", json!([["x"], ["vision"], ["default"]])),
            // The highest of 0.5 and 0.7 is above 0.65, though their mean is below.
            ("by=project&sort=-best&metrics=best", json!([["default"], ["vision"], ["x"]])),
            ("by=project&sort=best&metrics=best,loss", json!([["x"], ["vision"], ["default"]])),
            ("by=project&sort=-spec.train.lr&metrics=spec.train.lr", json!([["x"], ["default"], ["vision"]])),
            ("by=project&sort=jobs", json!([["default"], ["vision"], ["x"]])),
            ("by=project&sort=-newest", json!([["x"], ["vision"], ["default"]])),
            // No job has a loss, so the groups are ordered by their values.
            ("by=project&sort=-loss&metrics=loss", json!([["x"], ["vision"], ["default"]])),
            // Numbers are ordered numerically, also as the second key.
            ("by=train.lr", json!([[0.1], [0.2], [0.4], [2.0], [10.0]])),
            (
                "by=project,train.lr",
                json!([["default", 0.4], ["vision", 0.1], ["vision", 0.2], ["x", 2.0], ["x", 10.0]]),
            ),
            ("by=project&where=train.lr%3E1", json!([["x"]])),
            ("by=project&q=nothing", json!([])),
        ] {
            assert_eq!(json!(read_all(&server, query, limit).await), expected, "{query} by {limit}");
        }
    }
    let (_, page) = server.get("/jobs/groups?by=project&metrics=best&project=vision").await;
    let group = &page["groups"][0];
    assert_eq!(group["jobs"], 2);
    assert_eq!(group["states"], json!({"queued": 2}));
    let best = &group["metrics"]["best"];
    assert_eq!(
        (best["n"].as_u64(), best["min"].as_f64(), best["max"].as_f64()),
        (Some(2), Some(0.5), Some(0.7))
    );
    assert!((best["mean"].as_f64().unwrap() - 0.6).abs() < 1e-12, "{best}");
    assert!((best["std"].as_f64().unwrap() - 0.02_f64.sqrt()).abs() < 1e-12, "{best}");
    let (_, page) = server.get("/jobs?by=project,train.lr&group=%5B%22vision%22,0.2%5D").await;
    assert_eq!(page["jobs"][0]["name"], "c");
    assert_eq!(page["jobs"].as_array().unwrap().len(), 1);
    // An unreadable job is in the group null, and hides no other job.
    assert_eq!(server.execute("UPDATE jobs SET spec = '{', best = 'x' WHERE name = 'd'").await, 1);
    assert_eq!(
        json!(read_all(&server, "by=train.lr&metrics=best", 2).await),
        json!([[0.1], [0.2], [0.4], [2.0], [null]])
    );
    server.stop().await;
}

#[tokio::test]
async fn errors_of_groups_name_valid_values() {
    let server = TestServer::new().await;
    let names = |n: usize| vec!["loss,best,step"; n].join(",");
    for (query, message) in [
        ("".to_owned(), "1 to 3"),
        ("by=".into(), "1 to 3"),
        ("by=lrr".into(), "not a setting"),
        ("by=every_steps".into(), "checkpoint.every_steps or log.every_steps"),
        ("by=project&metrics=name".into(), "not a number"),
        ("by=project&metrics=-loss".into(), "not a number"),
        ("by=project&metrics=lose".into(), "did you mean \"loss\"?"),
        (
            "by=project&sort=loss".into(),
            "sort is \"loss\", but must be group, jobs, newest or one of metrics",
        ),
        ("by=project&limit=0".into(), "1 to 1000"),
        ("by=project&limit=1001".into(), "1 to 1000"),
        ("by=project&cursor=x".into(), "not valid for this list"),
        ("by=project&groups=x".into(), "no query parameter"),
        ("by=project&state=fast".into(), "fast"),
    ] {
        assert_refused(server.get(&format!("/jobs/groups?{query}")).await, 400, message);
    }
    // Repeated names count once. Sixteen names are allowed.
    assert_eq!(server.get(&format!("/jobs/groups?by=project&metrics={}", names(9))).await.0, 200);
    let sixteen = "loss,best,step,epoch,attempt,ranks,speed,accuracy,val_loss,val_accuracy,lr,priority,spec.train.lr,spec.train.epochs,spec.train.seed,spec.train.batch_size";
    assert_eq!(sixteen.split(',').count(), 16);
    assert_eq!(server.get(&format!("/jobs/groups?by=project&metrics={sixteen}")).await.0, 200);
    assert_refused(
        server.get(&format!("/jobs/groups?by=project&metrics={sixteen},spec.train.weight_decay")).await,
        400,
        "at most 16",
    );
    let refused = server.get("/jobs?by=project&group=%5B1%5D").await;
    assert_refused(refused, 400, "one for each key of by");
    server.stop().await;
}

#[tokio::test]
async fn ten_thousand_groups_are_listed_and_more_are_refused() {
    let server = TestServer::new().await;
    let insert_jobs = |from: u32, to: u32| {
        format!(
            "INSERT INTO jobs (id, name, state, priority, spec, ranks, created_at) WITH RECURSIVE n (i) AS \
             (SELECT {from} UNION ALL SELECT i + 1 FROM n WHERE i < {to}) \
             SELECT 'j' || i, 'name ' || i, 'succeeded', 0, '{{}}', 1, 0 FROM n"
        )
    };
    assert_eq!(server.execute(&insert_jobs(1, 10_000)).await, 10_000);
    let (status, response) = server.get("/jobs/groups?by=name&count=true&limit=1").await;
    assert_eq!((status, &response["total"]), (200, &json!(10_000)), "{response}");
    server.execute(&insert_jobs(10_001, 10_001)).await;
    assert_refused(
        server.get("/jobs/groups?by=name&count=true&limit=1").await,
        400,
        "more than 10000 groups",
    );
    server.stop().await;
}
