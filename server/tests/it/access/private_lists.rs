//! Lists, counts, projects, metrics, events and cursors do not show private objects of others.

use super::{People, add_people, server_with_people};
use crate::{
    agent::{Agent, dataset_info, server_with_drained_agent},
    document::create_failed_job,
    test_server::{Stream, TestServer, spec},
};
use reqwest::Client;
use serde_json::{Value, json};

/// All sort keys, and two settings.
const SORTS: [&str; 13] = [
    "created",
    "started",
    "finished",
    "name",
    "state",
    "project",
    "priority",
    "step",
    "loss",
    "val_accuracy",
    "best",
    "spec.train.lr",
    "spec.name",
];

/// Ids of jobs.
struct Jobs {
    /// Otto's public job. Its project also has Mona's second private job.
    open: String,
    /// Mona's first private job, the only job of its project.
    secret: String,
}

async fn create_jobs(server: &mut TestServer, agent: &mut Agent, mona: &Client, otto: &Client) -> Jobs {
    let admin = std::mem::replace(&mut server.http, otto.clone());
    let (open, _) = create_failed_job(server, agent, |spec| {
        spec["name"] = json!("open");
        spec["project"] = json!("shared");
    })
    .await;
    server.http = mona.clone();
    let (secret, _) = create_failed_job(server, agent, |spec| {
        spec["name"] = json!("secret run");
        spec["private"] = json!(true);
        spec["project"] = json!("secret-project");
        spec["tags"] = json!(["secret-tag"]);
        spec["notes"] = json!("secret notes");
        spec["train"]["lr"] = json!(0.05);
    })
    .await;
    create_failed_job(server, agent, |spec| {
        spec["name"] = json!("secret too");
        spec["private"] = json!(true);
        spec["project"] = json!("shared");
    })
    .await;
    server.http = admin;
    Jobs { open, secret }
}

/// Reads a list in pages of one element. Returns all elements and the total.
async fn read_all(server: &TestServer, who: &Client, path: &str, key: &str) -> (Vec<Value>, Value) {
    let (mut elements, mut cursor) = (Vec::new(), String::new());
    loop {
        let sign = if path.contains('?') { '&' } else { '?' };
        let (status, page) =
            server.send_as(who, "GET", &format!("{path}{sign}limit=1&count=true{cursor}"), None).await;
        assert_eq!(status, 200, "{path}: {page}");
        elements.extend(page[key].as_array().unwrap().iter().cloned());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return (elements, page["total"].clone()),
        }
    }
}

#[tokio::test]
async fn lists_hide_private_jobs_of_others() {
    let (mut server, mut agent, people) = server_with_people().await;
    let People { vera, mona, otto, ada, .. } = people;
    let Jobs { open, secret } = create_jobs(&mut server, &mut agent, &mona, &otto).await;
    let new = json!({"name": "secret-pictures", "path": "/secret", "private": true});
    let registered = server.send_as(&mona, "POST", "/datasets", Some(new));
    let ((status, dataset), ()) = tokio::join!(registered, agent.answer_inspection(Ok(dataset_info())));
    assert_eq!(status, 201, "{dataset}");

    for (who, client, may_see) in
        [("vera", &vera, false), ("otto", &otto, false), ("mona", &mona, true), ("ada", &ada, true)]
    {
        // In every order.
        for sort in SORTS {
            for sort in [sort.to_owned(), format!("-{sort}")] {
                let (jobs, total) = read_all(&server, client, &format!("/jobs?sort={sort}"), "jobs").await;
                let names: Vec<_> = jobs.iter().map(|job| job["name"].as_str().unwrap()).collect();
                let expected = if may_see { 3 } else { 1 };
                assert_eq!((names.len(), total.as_u64()), (expected, Some(expected as u64)), "{who}: {sort}");
                assert_eq!(names.contains(&"secret run"), may_see, "{who}: {sort}: {names:?}");
            }
        }
        // With every filter.
        for query in [
            "project=secret-project",
            "tag=secret-tag",
            "owner=mona",
            "name=secret",
            "state=failed&owner=mona",
            "fields=notes,tags,owner&name=secret",
            "created_after=2020-01-01T00:00:00Z&owner=mona",
        ] {
            let (jobs, total) = read_all(&server, client, &format!("/jobs?{query}"), "jobs").await;
            assert_eq!(!jobs.is_empty(), may_see, "{who}: {query}");
            assert_eq!(total.as_u64(), Some(jobs.len() as u64), "{who}: {query}");
        }
        // Projects and their numbers of jobs.
        let (projects, total) = read_all(&server, client, "/projects", "projects").await;
        let shown: Vec<_> =
            projects.iter().map(|p| (p["name"].as_str().unwrap(), p["jobs"].as_u64().unwrap())).collect();
        match may_see {
            true => assert_eq!(shown, [("secret-project", 1), ("shared", 2)], "{who}"),
            false => assert_eq!(shown, [("shared", 1)], "{who}"),
        }
        assert_eq!(total.as_u64(), Some(shown.len() as u64), "{who}");
        // Groups by each key, and their numbers of jobs.
        for (by, expected) in [
            ("owner", if may_see { vec![("mona", 2), ("otto", 1)] } else { vec![("otto", 1)] }),
            ("project", shown.clone()),
            (
                "name",
                if may_see {
                    vec![("open", 1), ("secret run", 1), ("secret too", 1)]
                } else {
                    vec![("open", 1)]
                },
            ),
        ] {
            let path = format!("/jobs/groups?by={by}&metrics=loss,spec.train.lr&sort=group");
            let (groups, total) = read_all(&server, client, &path, "groups").await;
            let key_of = |group: &Value| group["values"][0].as_str().unwrap().to_owned();
            let counts: Vec<_> = groups.iter().map(|g| (key_of(g), g["jobs"].as_u64().unwrap())).collect();
            let expected: Vec<_> = expected.into_iter().map(|(name, jobs)| (name.to_owned(), jobs)).collect();
            assert_eq!(
                (counts, total.as_u64()),
                (expected.clone(), Some(expected.len() as u64)),
                "{who}: {by}"
            );
        }
        let (groups, _) = read_all(&server, client, "/jobs/groups?by=tag,train.lr", "groups").await;
        assert_eq!(json!(groups).to_string().contains("secret-tag"), may_see, "{who}");
        let path = "/jobs?by=tag&group=%5B%22secret-tag%22%5D";
        assert_eq!(!read_all(&server, client, path, "jobs").await.0.is_empty(), may_see, "{who}");
        let newest: jiff::Timestamp =
            projects.last().unwrap()["newest_at"].as_str().unwrap().parse().unwrap();
        let (_, job) = server.send_as(client, "GET", &format!("/jobs/{open}"), None).await;
        let created: jiff::Timestamp = job["created_at"].as_str().unwrap().parse().unwrap();
        assert_eq!(newest > created, may_see, "{who}: the project does not show a private job's time");
        // Datasets.
        let (datasets, total) = read_all(&server, client, "/datasets", "datasets").await;
        let expected = if may_see { 2 } else { 1 };
        assert_eq!((datasets.len(), total.as_u64()), (expected, Some(expected as u64)), "{who}");

        // Entity tags reveal nothing.
        for rest in ["", "/events", "/events?type=metrics", "/checkpoints", "/history", "/metrics?name=loss"]
        {
            let url = server.url(&format!("/api/v1/jobs/{secret}{rest}"));
            let known = client.get(url).header("if-none-match", "*").send().await.unwrap();
            let (status, tagged) = (known.status().as_u16(), known.headers().contains_key("etag"));
            assert!(if may_see { status < 400 } else { status == 404 && !tagged }, "{who}: {rest}: {status}");
        }
        // A private id gets the same response as a missing id.
        let missing_id = "j00000000000000000000000000";
        let query = |ids: &str| format!("/metrics/query?jobs={ids}&name=loss");
        for ids in [secret.clone(), format!("{open},{secret}")] {
            let (status, response) = server.send_as(client, "GET", &query(&ids), None).await;
            assert_eq!(status, if may_see { 200 } else { 404 }, "{who}: {response}");
            if !may_see {
                let ids = ids.replace(&secret, missing_id);
                let (_, missing) = server.send_as(client, "GET", &query(&ids), None).await;
                let detail = response["detail"].as_str().unwrap().replace(&secret, missing_id);
                assert_eq!(detail, missing["detail"].as_str().unwrap(), "{who}");
            }
        }
        let (status, _) = server.send_as(client, "GET", &query(&open), None).await;
        assert_eq!(status, 200, "{who}");
        // Pages.
        for page in ["/jobs", "/jobs?project=secret-project", "/jobs?state=failed,running&tag=secret-tag"] {
            let html = client.get(server.url(page)).send().await.unwrap().text().await.unwrap();
            assert_eq!(html.contains(&secret), may_see, "{who}: {page}");
        }
    }

    // A cursor gives no rights: with a cursor of Mona's list, Otto does not see her private jobs.
    for sort in ["-created", "name", "loss", "spec.train.lr"] {
        let (_, page) =
            server.send_as(&mona, "GET", &format!("/jobs?sort={sort}&limit=1&fields=name"), None).await;
        let mut cursor = page["next_cursor"].as_str().map(str::to_owned);
        assert!(cursor.is_some(), "{page}");
        while let Some(next) = cursor {
            let path = format!("/jobs?sort={sort}&limit=1&count=true&cursor={next}");
            let (status, his) = server.send_as(&otto, "GET", &path, None).await;
            assert_eq!((status, &his["total"]), (200, &json!(1)), "{his}");
            assert!(!his.to_string().contains("secret"), "{his}");
            let (_, hers) = server.send_as(&mona, "GET", &path, None).await;
            cursor = hers["next_cursor"].as_str().map(str::to_owned);
        }
    }
    // Lists of two people have different entity tags.
    let list = async |who: &Client, tag: &str| {
        let url = server.url("/api/v1/datasets");
        who.get(url).header("if-none-match", tag).send().await.unwrap()
    };
    let hers = list(&mona, "\"none\"").await.headers()["etag"].to_str().unwrap().to_owned();
    assert_eq!(list(&mona, &hers).await.status(), 304);
    assert_eq!(list(&otto, &hers).await.status(), 200);
    server.stop().await;
}

#[tokio::test]
async fn changes_of_a_job_are_streamed_to_its_readers() {
    let (server, _agent) = server_with_drained_agent().await;
    let People { mona, otto, mona_secret, otto_secret, .. } = add_people(&server).await;
    let submit = async |who: &Client, private: bool| {
        let mut spec = spec();
        spec["private"] = json!(private);
        spec["notes"] = json!("first notes");
        let (status, job) = server.send_as(who, "POST", "/jobs", Some(spec)).await;
        assert_eq!((status, &job["notes"]), (201, &json!("first notes")), "{job}");
        job["id"].as_str().unwrap().to_owned()
    };
    let (secret, open) = (submit(&mona, true).await, submit(&otto, false).await);
    let mut lists = Vec::new();
    for token in [&mona_secret, &otto_secret] {
        lists.push(server.stream_list(token).await);
    }
    let mut job = Stream::open(server.socket_request(&format!("/jobs/{secret}/stream"), &mona_secret)).await;
    let hello = job.until(|frame| frame["type"] == "live").await.swap_remove(0);
    assert_eq!((hello["type"].as_str(), hello["job"].get("notes")), (Some("hello"), None), "{hello}");

    let labels = |label: &str| json!({"tags": [label], "project": label, "priority": 7, "notes": label});
    let change = async |who: &Client, id: &str, label: &str| {
        let (status, response) =
            server.send_as(who, "PATCH", &format!("/jobs/{id}"), Some(labels(label))).await;
        assert_eq!(status, 200, "{response}");
    };
    change(&mona, &secret, "hidden").await;
    let frame = job.until(|frame| frame["type"] == "changed").await.pop().unwrap();
    let expected = json!({"type": "changed", "project": "hidden", "tags": ["hidden"], "priority": 7});
    assert_eq!(frame, expected);
    // A change of the notes sends a frame that does not contain the notes.
    let (status, _) =
        server.send_as(&mona, "PATCH", &format!("/jobs/{secret}"), Some(json!({"notes": "more"}))).await;
    assert_eq!((status, job.next().await.unwrap()), (200, expected));
    let (_, stored) = server.send_as(&mona, "GET", &format!("/jobs/{secret}"), None).await;
    assert_eq!((&stored["notes"], &stored["spec"]["priority"]), (&json!("more"), &json!(7)));

    // Otto gets the change of his own job, and before it no frame of Mona's job.
    change(&otto, &open, "shown").await;
    for (list, may_see) in lists.iter_mut().zip([true, false]) {
        let is_new = |frame: &Value, id: &str, label: &str| {
            let job = &frame["job"];
            job["id"] == id && job["project"] == label && job["tags"] == json!([label])
        };
        let mut frames = list.until(|frame| is_new(frame, &open, "shown")).await;
        // The two changes may arrive in any order.
        if may_see && !frames.iter().any(|frame| is_new(frame, &secret, "hidden")) {
            frames.extend(list.until(|frame| is_new(frame, &secret, "hidden")).await);
        }
        assert_eq!(frames.iter().any(|frame| frame["job"]["id"] == secret.as_str()), may_see, "{frames:?}");
        assert!(frames.iter().all(|frame| frame["job"].get("notes").is_none()), "{frames:?}");
    }

    // Otto does not get the deletion either.
    assert_eq!(server.send_as(&mona, "POST", &format!("/jobs/{secret}/cancel"), None).await.0, 202);
    assert_eq!(server.send_as(&mona, "DELETE", &format!("/jobs/{secret}"), None).await.0, 204);
    lists[0].until(|frame| frame["type"] == "job_deleted" && frame["id"] == secret.as_str()).await;
    change(&otto, &open, "later").await;
    let frames = lists[1].until(|frame| frame["job"]["project"] == "later").await;
    assert!(frames.iter().all(|frame| frame["type"] != "job_deleted"), "{frames:?}");
    let (_, list) = server.send_as(&otto, "GET", "/jobs", None).await;
    assert!(list["jobs"][0].get("notes").is_none() && list["jobs"][0]["tags"] == json!(["later"]), "{list}");
    let (_, list) = server.send_as(&otto, "GET", "/jobs?fields=id,notes", None).await;
    assert_eq!(list["jobs"], json!([{"id": open, "notes": "later"}]));
    server.stop().await;
}
