//! Lists: pages, orders, filters, fields; projects and tags; entity tags.

use crate::{
    agent::{losses, running, server_with_agent},
    test_server::{TestServer, assert_refused},
};
use lockstep_protocol::agent::{Ending, Source};
use serde_json::{Value, json};

/// Submits jobs one after another. The agent is drained, so that no job starts.
pub async fn submit_jobs(server: &TestServer, specs: &[(&str, f64, &str)]) -> Vec<String> {
    assert_eq!(server.post("/agents/id-a/drain", &json!({})).await.0, 204);
    let mut ids = Vec::new();
    for (name, lr, project) in specs {
        let job = server.submit(|spec| {
            spec["name"] = json!(name);
            spec["train"]["lr"] = json!(lr);
            if !project.is_empty() {
                spec["project"] = json!(project);
            }
        });
        ids.push(job.await.id.to_string());
    }
    // Waits for the reason of each job's wait. After that the jobs do not change any more.
    for id in &ids {
        server.wait_for_reason(id, "").await;
    }
    ids
}

/// Reads all pages of a list, and returns the names of the jobs.
pub async fn read_names(server: &TestServer, query: &str, limit: usize) -> Vec<String> {
    let mut names = Vec::new();
    for page in server.read_pages(&format!("/jobs?limit={limit}&{query}")).await {
        let jobs = page["jobs"].as_array().unwrap();
        assert!(jobs.len() <= limit);
        names.extend(jobs.iter().map(|job| job["name"].as_str().unwrap().to_owned()));
    }
    names
}

#[tokio::test]
async fn jobs_are_listed_in_every_order_with_any_page_size() {
    let (server, _agent) = server_with_agent(2).await;
    let specs = [("b", 0.1, "vision"), ("a", 0.4, ""), ("c", 0.1, "vision"), ("d", 0.2, "x")];
    submit_jobs(&server, &specs).await;
    for limit in 1..=5 {
        for (query, expected) in [
            ("", "dcab"),
            ("sort=created", "bacd"),
            ("sort=name", "abcd"),
            ("sort=-name", "dcba"),
            ("sort=spec.train.lr", "bcda"),
            ("sort=-spec.train.lr", "adcb"),
            ("sort=project", "abcd"),
            // No job has a value, so the order is by id, and so by time.
            ("sort=loss", "bacd"),
            ("sort=-loss", "dcab"),
            ("sort=started", "bacd"),
            ("sort=spec.train.optimizer", "bacd"),
            ("project=vision&sort=name", "bc"),
            ("project=default", "a"),
            ("state=queued,failed", "dcab"),
            ("state=failed", ""),
            ("name=A", "a"),
            ("q=A", "a"),
            ("sort=owner", "bacd"),
            ("sort=-speed", "dcab"),
            ("where=train.lr%3E0.1&sort=name", "ad"),
            ("where=train.lr%3E%3D0.1%2Ctrain.lr%20%21%3D%200.2&sort=name", "abc"),
            ("where=project%3Dvision&sort=name", "bc"),
            ("where=data.dataset%3D%27%20OR%201%3D1", ""),
            ("where=lr%3E0.1&sort=name", "ad"),
            // No job has a result.
            ("where=best%3E0.1", ""),
            ("where=val_loss%21%3D0.1&sort=name", "abcd"),
            ("sort=spec.lr", "bcda"),
            ("created_after=2020-01-01T00:00:00Z", "dcab"),
            ("created_after=2020-01-01", "dcab"),
            ("created_before=2020-01-01T00:00:00Z", ""),
        ] {
            assert_eq!(read_names(&server, query, limit).await.concat(), expected, "{query} by {limit}");
        }
    }
    // An unreadable job does not break the order.
    assert_eq!(server.execute("UPDATE jobs SET spec = '{', last = 'x' WHERE name = 'b'").await, 1);
    for limit in [1, 4] {
        assert_eq!(read_names(&server, "sort=spec.train.lr", limit).await.concat(), "cdab");
        assert_eq!(read_names(&server, "sort=-spec.train.lr", limit).await.concat(), "adcb");
        assert_eq!(read_names(&server, "sort=loss", limit).await.concat(), "bacd");
    }
    server.stop().await;
}

#[tokio::test]
async fn jobs_are_sorted_and_filtered_by_loss() {
    let (server, mut agent) = server_with_agent(2).await;
    let mut last_id = String::new();
    for (name, steps) in [("a", 1..=3), ("b", 1..=9), ("c", 1..=1)] {
        let (id, attempt) = agent.start_job(&server, |spec| spec["name"] = json!(name)).await;
        agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, steps)]).await;
        agent.end(&attempt, Ending::Failed { reason: "the end".into(), retriable: false }).await;
        last_id = id;
    }
    let losses: Vec<f64> = {
        let (_, page) = server.get("/jobs?sort=loss&fields=last").await;
        page["jobs"].as_array().unwrap().iter().map(|job| job["last"]["loss"].as_f64().unwrap()).collect()
    };
    assert!(losses.is_sorted() && losses[0] < losses[2], "{losses:?}");
    let by_loss = read_names(&server, "sort=loss", 1).await;
    assert_eq!(read_names(&server, "sort=loss", 3).await, by_loss);
    let reversed: Vec<_> = by_loss.iter().rev().cloned().collect();
    assert_eq!(read_names(&server, "sort=-loss", 1).await, reversed);

    let middle = f64::midpoint(losses[0], losses[2]);
    let lower = losses.iter().filter(|loss| **loss < middle).count();
    assert_eq!(read_names(&server, &format!("where=loss%3C{middle}"), 3).await.len(), lower);

    // The reason of a failure is also available as fields.
    let (_, job) = server.get(&format!("/jobs/{last_id}")).await;
    assert_eq!((&job["failure"]["words"], &job["failure"]["code"]), (&job["reason"], &job["cause"]["code"]));
    assert!(job["failure"].get("rank").is_some() && job["failure"].get("step").is_some(), "{job}");
    server.stop().await;
}

#[tokio::test]
async fn unknown_fields_of_lists_are_refused_by_name() {
    let (server, _agent) = server_with_agent(2).await;
    submit_jobs(&server, &[("a", 0.1, ""), ("b", 0.1, "")]).await;
    for (path, message) in [
        ("/jobs?sort=nam".to_owned(), "did you mean \"name\"?"),
        ("/jobs?sort=spec.tags".into(), "tag:NAME"),
        ("/jobs?sort=tag:".into(), "tag"),
        ("/jobs?sort=grad_nrom".into(), "did you mean \"grad_norm\"?"),
        ("/jobs?metrics=grad_nrom".into(), "did you mean \"grad_norm\"?"),
        ("/jobs?sort=spec.train.lr'--".into(), "not a setting"),
        ("/jobs?where=train.lrr%3E1".into(), "did you mean \"train.lr\"?"),
        (format!("/jobs?where={}", ["train.lr%3E0"; 11].join(",")), "at most 10"),
        ("/jobs?fields=id,nane".into(), "did you mean \"name\"?"),
        ("/jobs?state=running,done".into(), "the states are"),
        ("/jobs?project=a%20b".into(), "project has a space"),
        ("/jobs?created_after=yesterday".into(), "RFC 3339"),
        ("/jobs?limit=1001".into(), "1 to 1000"),
        ("/datasets?limit=0".into(), "1 to 1000"),
        ("/tokens?sort=nam".into(), "did you mean \"name\"?"),
        ("/agents?created_after=2020-01-01T00:00:00Z".into(), "no time of creation"),
        ("/projects?sorted=name".into(), "did you mean \"sort\"?"),
        ("/audit?fields=whom".into(), "did you mean \"who\"?"),
    ] {
        let (status, problem) = server.get(&path).await;
        assert_eq!((status, &problem["code"]), (400, &json!("bad_request")), "{path}");
        assert_eq!(problem["type"], "urn:lockstep:problem:bad_request");
        assert!(problem["detail"].as_str().unwrap().contains(message), "{path}: {problem}");
    }
    server.stop().await;
}

#[tokio::test]
async fn every_list_has_pages_fields_and_a_count() {
    let (server, _agent) = server_with_agent(2).await;
    let ids = submit_jobs(&server, &[("a", 0.1, "vision"), ("b", 0.1, "")]).await;
    for name in ["one", "two"] {
        server.make_token(&json!({"name": name, "scope": "read"})).await;
        server.add_person(name, "viewer").await;
    }
    let mut webhooks = Vec::new();
    for name in ["one", "two"] {
        let webhook = server.create("/webhooks", &json!({"url": format!("http://localhost:1/{name}")})).await;
        webhooks.push(webhook["id"].as_str().unwrap().to_owned());
    }
    assert_eq!(server.post(&format!("/webhooks/{}/test", webhooks[0]), &json!({})).await.0, 200);
    let messages = format!("/webhooks/{}/deliveries", webhooks[0]);
    let events = format!("/jobs/{}/events", ids[0]);
    // The last number is the lowest total that is possible; 0 for lists without a total.
    for (path, list, fields, min_total) in [
        ("/jobs", "jobs", "id,spec", 2),
        ("/projects", "projects", "name,states", 2),
        ("/queue", "jobs", "name,place", 2),
        ("/datasets", "datasets", "name,path", 1),
        ("/agents", "agents", "id,slots", 1),
        ("/tokens", "tokens", "id,name", 4),
        ("/people", "people", "name,role", 2),
        ("/audit", "entries", "at,id", 0),
        ("/webhooks", "webhooks", "id,url", 2),
        (&messages, "deliveries", "event,id", 1),
        (&events, "events", "seq,type", 0),
    ] {
        let count = if min_total > 0 { "&count=true" } else { "" };
        let page = server.get_ok(&format!("{path}?fields={fields}&limit=1{count}")).await;
        let items = page[list].as_array().unwrap_or_else(|| panic!("{path}: {page}"));
        let names: Vec<_> = items[0].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!((items.len(), names), (1, fields.split(',').collect()), "{path}");
        assert!(page.as_object().unwrap().contains_key("next_cursor"), "{path}");
        // Every field of an element can be requested.
        let (_, complete) = server.get(&format!("{path}?limit=1")).await;
        let all_fields: Vec<_> = complete[list][0].as_object().unwrap().keys().map(String::as_str).collect();
        let same = server.get_ok(&format!("{path}?limit=1&fields={}", all_fields.join(","))).await;
        let returned: Vec<_> = same[list][0].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(returned, all_fields, "{path}");
        if min_total > 0 {
            assert!(page["total"].as_u64().unwrap() >= min_total, "{path}: {page}");
        }
    }
    // The audit log can be filtered by time.
    let (_, page) = server.get("/audit?created_after=2020-01-01T00:00:00Z&limit=1").await;
    assert!(page["next_cursor"].is_string() && page["entries"].as_array().unwrap().len() == 1, "{page}");
    for query in ["created_after=2100-01-01T00:00:00Z", "created_before=2020-01-01T00:00:00Z"] {
        let (_, page) = server.get(&format!("/audit?{query}")).await;
        assert_eq!((page["entries"].as_array().unwrap().len(), &page["next_cursor"]), (0, &Value::Null));
    }
    server.stop().await;
}

#[tokio::test]
async fn projects_tags_and_notes_are_submitted_with_a_job_and_can_be_changed() {
    let (server, _agent) = server_with_agent(2).await;
    submit_jobs(&server, &[("a", 0.1, "")]).await;
    let labelled = server
        .submit(|spec| {
            spec["project"] = json!("vision");
            spec["tags"] = json!(["sweep", " base line", "sweep"]);
            spec["notes"] = json!("first line\nsecond");
        })
        .await;
    let id = labelled.id.to_string();
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!((&job["project"], &job["tags"]), (&json!("vision"), &json!(["base line", "sweep"])));
    assert_eq!(job["notes"], "first line\nsecond");
    assert!(job["spec"].get("tags").is_none() && job["spec"].get("notes").is_none(), "{job}");
    assert_eq!(server.get("/annotations").await.1["jobs"][&id]["notes"], "first line\nsecond");
    for (query, count) in [
        ("tag=sweep", 1),
        ("tag=sweep,base%20line", 1),
        ("tag=sweep,other", 0),
        ("tag=weep", 0),
        ("tag=SWEEP", 0),
        ("project=vision", 1),
        ("project=visio", 0),
    ] {
        let (_, page) = server.get(&format!("/jobs?{query}&count=true")).await;
        assert_eq!(
            (page["jobs"].as_array().unwrap().len(), &page["total"]),
            (count, &json!(count)),
            "{query}"
        );
    }
    let projects = async || {
        let (_, page) = server.get("/projects").await;
        let list = page["projects"].as_array().unwrap().clone();
        list.iter().map(|p| (p["name"].as_str().unwrap().to_owned(), p["states"].clone())).collect::<Vec<_>>()
    };
    let queued = json!({"queued": 1});
    assert_eq!(projects().await, [("default".into(), queued.clone()), ("vision".into(), queued.clone())]);

    // The change of the project also changes the stored specification.
    let change = async |body: Value| server.patch(&format!("/jobs/{id}"), &body).await;
    assert_eq!(change(json!({"project": "audio", "tags": [], "notes": "n"})).await.0, 200);
    let (_, job) = server.get(&format!("/jobs/{id}")).await;
    assert_eq!((&job["project"], &job["spec"]["project"]), (&json!("audio"), &json!("audio")));
    assert_eq!((&job["tags"], &job["notes"]), (&json!([]), &json!("n")));
    assert_eq!(projects().await, [("audio".into(), queued.clone()), ("default".into(), queued)]);

    for (body, pointer) in [
        (json!({"project": "a b"}), "/project"),
        (json!({"project": "x".repeat(101)}), "/project"),
        (json!({"tags": ["a,b"]}), "/tags"),
        (json!({"tags": ["a\u{200b}"]}), "/tags"),
        (json!({"tags": vec!["ß".repeat(41)]}), "/tags"),
        (json!({"tags": (0..21).map(|n| n.to_string()).collect::<Vec<_>>()}), "/tags"),
        (json!({"notes": "x".repeat(20_001)}), "/notes"),
        (json!({"priority": 1001}), "/priority"),
    ] {
        let mut spec = crate::test_server::spec();
        spec.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        for (status, problem) in [change(body.clone()).await, server.post("/jobs", &spec).await] {
            assert_eq!((status, &problem["code"]), (422, &json!("invalid")), "{problem}");
            assert_eq!(problem["errors"][0]["pointer"], pointer);
        }
    }
    let tags: Vec<_> = (0..20).map(|n| format!("{n:ß>40}")).collect();
    let longest =
        json!({"project": "x".repeat(100), "tags": tags, "notes": "x".repeat(20_000), "priority": 1000});
    assert_eq!(change(longest.clone()).await.0, 200);
    let mut spec = crate::test_server::spec();
    spec.as_object_mut().unwrap().extend(longest.as_object().unwrap().clone());
    assert_eq!(server.post("/jobs", &spec).await.0, 201);
    server.stop().await;
}

#[tokio::test]
async fn unchanged_responses_are_not_sent_again() {
    let (server, _agent) = server_with_agent(2).await;
    let ids = submit_jobs(&server, &[("a", 0.1, "")]).await;
    let job = format!("/jobs/{}", ids[0]);
    // A cancelled job changes only by requests.
    assert_eq!(server.post(&format!("{job}/cancel"), &json!({})).await.0, 202);
    for path in [&job, "/datasets", "/datasets/pictures", &format!("{job}/checkpoints")] {
        let url = server.url(&format!("/api/v1{path}"));
        let first = server.http.get(&url).send().await.unwrap();
        let tag = first.headers()["etag"].to_str().unwrap().to_owned();
        assert!(first.text().await.unwrap().starts_with('{'), "{path}");
        let again = server.http.get(&url).header("if-none-match", &tag).send().await.unwrap();
        assert_eq!((again.status().as_u16(), again.headers()["etag"].to_str().unwrap()), (304, tag.as_str()));
        assert_eq!(again.text().await.unwrap(), "", "{path}");
    }
    let url = server.url(&format!("/api/v1{job}"));
    let tag = server.http.get(&url).send().await.unwrap().headers()["etag"].clone();
    assert_eq!(server.patch(&job, &json!({"tags": ["new"]})).await.0, 200);
    let changed = server.http.get(&url).header("if-none-match", tag).send().await.unwrap();
    assert_eq!(changed.status().as_u16(), 200);
    server.stop().await;
}

#[tokio::test]
async fn a_search_reads_names_tags_and_notes_up_to_200_characters() {
    let (server, _agent) = server_with_agent(2).await;
    submit_jobs(&server, &[("plain", 0.1, "")]).await;
    let labelled = server.submit(|spec| {
        spec["name"] = json!("labelled");
        spec["tags"] = json!(["50% more", "x"]);
        spec["notes"] = json!("tried\nwith a Warm start");
    });
    labelled.await;
    let count_matches = async |q: &str| {
        let url = server.url("/api/v1/jobs");
        let request = server.http.get(&url).query(&[("q", q), ("count", "true"), ("fields", "name")]);
        let (status, page) = server.send(request).await;
        assert_eq!(status, 200, "{q}: {page}");
        assert_eq!(page["total"].as_u64().unwrap(), page["jobs"].as_array().unwrap().len() as u64);
        page["jobs"].as_array().unwrap().len()
    };
    for (q, expected) in [
        ("l", 2),
        ("LABEL", 1),
        ("0% m", 1),
        ("0_ m", 0),
        ("warm START", 1),
        ("\",\"", 0),
        (",", 0),
        ("xx", 0),
    ] {
        assert_eq!(count_matches(q).await, expected, "{q}");
    }
    assert_eq!(count_matches(&"é".repeat(200)).await, 0);
    assert_refused(server.get(&format!("/jobs?q={}", "x".repeat(201))).await, 422, "at most 200");
    server.stop().await;
}
