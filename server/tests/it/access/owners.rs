//! Owners of jobs, datasets and tokens: the objects that members may change, and private objects.

use super::{People, add_people, server_with_people};
use crate::{
    agent::{dataset_info, server_with_drained_agent},
    document::create_failed_job,
    test_server::{TIMEOUT, TestServer, assert_mistake, assert_refused, client, column, spec},
};
use reqwest::Client;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

impl TestServer {
    /// A client with a new token of a person, and the token's secret.
    pub async fn client_of(&self, name: &str, scope: &str) -> (Client, String) {
        let browser = self.signed_in(name).await;
        let request = browser.client.post(self.url("/api/v1/tokens")).header("cookie", &browser.cookie);
        let request = request.json(&json!({"name": format!("{name}'s"), "scope": scope}));
        let (status, token) = self.send(request).await;
        assert_eq!(status, 201, "{token}");
        let secret = token["secret"].as_str().unwrap().to_owned();
        (client(&secret), secret)
    }

    /// Sends a request with this client.
    pub async fn send_as(&self, who: &Client, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let request = who.request(method.parse().unwrap(), self.url(&format!("/api/v1{path}")));
        self.send(match body {
            Some(body) => request.json(&body),
            None => request,
        })
        .await
    }
}

fn private_spec(name: &str) -> Value {
    let mut spec = named_spec(name);
    spec["private"] = true.into();
    spec
}

fn named_spec(name: &str) -> Value {
    let mut spec = spec();
    spec["name"] = name.into();
    spec
}

#[tokio::test]
async fn members_change_only_their_own_jobs_and_admins_all() {
    let (server, _agent) = server_with_drained_agent().await;
    let ci = server.submitter("ci").await;
    let (_, servers_job) = server.post("/jobs", &named_spec("old")).await;
    assert_eq!(servers_job["owner"], "this machine", "{servers_job}");
    let servers_job = format!("/jobs/{}", servers_job["id"].as_str().unwrap());
    let (_, job_without_owner) = server.post("/jobs", &named_spec("older")).await;
    let job_without_owner = format!("/jobs/{}", job_without_owner["id"].as_str().unwrap());
    let note = || Some(json!({"notes": "n"}));
    // While the server has no people, any token that may submit also changes jobs.
    assert_eq!(server.send_as(&ci, "PATCH", &servers_job, note()).await.0, 200);

    let People { vera, mona, otto, ada, .. } = add_people(&server).await;
    assert_refused(server.send_as(&ci, "PATCH", &servers_job, note()).await, 403, "the server's own token");
    let (status, made) = server.send_as(&mona, "POST", "/jobs", Some(named_spec("hers"))).await;
    assert!(status == 201 && made["owner"] == "mona", "{made}");
    let id = made["id"].as_str().unwrap().to_owned();
    let hers = format!("/jobs/{id}");
    for action in ["pause", "resume", "cancel", "retry"] {
        for (who, status) in [(&vera, 403), (&otto, 403), (&ci, 403), (&mona, 202)] {
            let (actual, response) = server.send_as(who, "POST", &format!("{hers}/{action}"), None).await;
            assert_eq!(actual, status, "{action}: {response}");
        }
    }
    assert_eq!(server.send_as(&otto, "PATCH", &hers, note()).await.0, 403);
    assert_eq!(server.send_as(&otto, "DELETE", &hers, None).await.0, 403);
    assert_eq!(server.send_as(&otto, "GET", &hers, None).await.0, 200, "the job is not private");
    let page = otto.get(server.url(&format!("/jobs/{id}"))).send().await.unwrap().text().await.unwrap();
    assert!(page.contains("href=\"/jobs?owner=mona\"") && page.contains("data-read-only"), "{page}");
    let page = mona.get(server.url(&format!("/jobs/{id}"))).send().await.unwrap().text().await.unwrap();
    assert!(!page.contains("data-read-only"), "{page}");
    assert_eq!(server.send_as(&ada, "PATCH", &hers, note()).await.0, 200);
    assert_eq!(server.send_as(&ada, "POST", &format!("{hers}/cancel"), None).await.0, 202);
    assert_eq!(server.send_as(&mona, "DELETE", &hers, None).await.0, 204);
    for who in [&mona, &otto, &ada] {
        // The job does not exist any more.
        assert_eq!(server.send_as(who, "DELETE", &hers, None).await.0, 404);
    }

    // Only admins change a job that has no owner.
    server.execute("UPDATE jobs SET owner = NULL").await;
    assert_refused(
        server.send_as(&mona, "POST", &format!("{job_without_owner}/cancel"), None).await,
        403,
        "only admins",
    );

    server.send_as(&mona, "POST", "/jobs", Some(named_spec("one"))).await;
    server.send_as(&otto, "POST", "/jobs", Some(named_spec("two"))).await;
    let (_, list) = server.get("/jobs?owner=mona").await;
    assert_eq!(column(&list["jobs"], "name"), ["one"]);
    assert_eq!(server.get(&format!("/jobs?owner={}", "a".repeat(200))).await.0, 200);
    assert_eq!(server.get(&format!("/jobs?owner={}", "a".repeat(201))).await.0, 422);

    // Two people may use the same idempotency key for different jobs.
    let submit_with_key = async |who: &Client| {
        let request = who.post(server.url("/api/v1/jobs")).header("idempotency-key", "k").json(&spec());
        server.send(request).await
    };
    let (status, job) = submit_with_key(&mona).await;
    let (repeated_status, repeated_job) = submit_with_key(&mona).await;
    let (ottos_status, ottos_job) = submit_with_key(&otto).await;
    assert_eq!((status, repeated_status, ottos_status), (201, 200, 201));
    assert!(repeated_job["id"] == job["id"] && ottos_job["id"] != job["id"]);
    // A member cannot delete a dataset that another caller has registered.
    assert_refused(server.send_as(&otto, "DELETE", "/datasets/pictures", None).await, 403, "dataset");
    server.stop().await;
}

#[tokio::test]
async fn private_jobs_are_visible_only_to_owners_and_admins() {
    let (mut server, mut agent, people) = server_with_people().await;
    let People { vera, mona, otto, mona_secret, otto_secret, .. } = people;
    let admin = std::mem::replace(&mut server.http, mona.clone());
    let (job, checkpoint) = create_failed_job(&server, &mut agent, |spec| {
        spec["name"] = "secret run".into();
        spec["private"] = true.into();
    })
    .await;
    let new = json!({"name": "secret-pictures", "path": "/secret", "private": true});
    let dataset = agent.register_dataset(&server, &new, dataset_info()).await;
    assert!(dataset["owner"] == "mona" && dataset["private"] == true, "{dataset}");
    let note = Some(json!({"notes": "a secret note"}));
    assert_eq!(server.send_as(&mona, "PATCH", &format!("/jobs/{job}"), note).await.0, 200);
    server.http = admin;

    // A second private job uses both slots, so that the page Machines has a private job to hide.
    let (_, holding) = server.send_as(&mona, "POST", "/jobs", Some(private_spec("secret holder"))).await;
    let holding = holding["id"].as_str().unwrap().to_owned();
    agent.expect_start().await;
    let pages = [
        "/jobs",
        "/datasets",
        "/jobs/new",
        "/machines",
        "/api/v1/jobs",
        "/api/v1/datasets",
        "/api/v1/annotations",
        "/api/v1/agents",
    ];
    for path in pages {
        for (who, may_see) in [(&vera, false), (&otto, false), (&mona, true), (&server.http, true)] {
            let text = who.get(server.url(path)).send().await.unwrap().text().await.unwrap();
            let is_shown = ["secret", holding.as_str(), job.as_str()].iter().any(|word| text.contains(word));
            assert_eq!(is_shown, may_see, "{path}: {text}");
        }
    }
    let (_, agents) = server.send_as(&otto, "GET", "/agents", None).await;
    let slot = &agents["agents"][0]["slots"][0];
    assert!(
        slot["job"].is_null() && slot["rank"].is_number(),
        "the slot shows that it is used, but not by which job: {slot}"
    );

    // Others cannot use a private dataset.
    let mut with_dataset = spec();
    with_dataset["data"]["dataset"] = "secret-pictures".into();
    assert_refused(
        server.send_as(&otto, "POST", "/jobs", Some(with_dataset.clone())).await,
        422,
        "no dataset is called",
    );
    // The job's page would show the pictures.
    let refused = server.send_as(&mona, "POST", "/jobs", Some(with_dataset.clone())).await;
    assert_mistake(refused, "/private", "");
    with_dataset["private"] = true.into();
    assert_eq!(server.send_as(&mona, "POST", "/jobs", Some(with_dataset)).await.0, 201);
    let augmented = format!("/datasets/pictures/samples?augmented={job}");
    assert_eq!(server.send_as(&otto, "GET", &augmented, None).await.0, 404);
    let mut with_weights = spec();
    with_weights["model"]["pretrained"] = checkpoint.as_str().into();
    assert_refused(server.send_as(&otto, "POST", "/jobs", Some(with_weights)).await, 422, "no checkpoint");
    let form = otto.get(server.url(&format!("/jobs/new?from={job}"))).send().await.unwrap();
    assert_eq!(form.status(), 404);

    // The live list.
    let mut lists = Vec::new();
    for secret in [&mona_secret, &otto_secret] {
        lists.push(server.stream_list(secret).await);
    }
    server.send_as(&mona, "POST", "/jobs", Some(private_spec("secret again"))).await;
    let since = Instant::now();
    let (_, open) = server.send_as(&mona, "POST", "/jobs", Some(named_spec("open"))).await;
    assert_eq!(open["spec"].get("private"), None);
    for (list, may_see) in lists.iter_mut().zip([true, false]) {
        let frames = list.until(|frame| frame["job"]["name"] == "open").await;
        let mut is_shown = frames.iter().any(|frame| frame.to_string().contains("secret"));
        // The two changes may arrive in any order.
        while may_see && !is_shown {
            is_shown = list.next().await.unwrap().to_string().contains("secret");
            assert!(since.elapsed() < TIMEOUT);
        }
        assert_eq!(is_shown, may_see, "{frames:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn people_create_tokens_within_their_role() {
    let server = TestServer::new().await;
    for (name, role) in [("mona", "member"), ("otto", "member"), ("ada", "admin")] {
        server.add_person(name, role).await;
    }
    let mona = server.signed_in("mona").await;
    let make = async |body: Value| {
        let request = mona.client.post(server.url("/api/v1/tokens")).header("cookie", &mona.cookie);
        server.send(request.json(&body)).await
    };
    for (scope, status) in [("read", 201), ("submit", 201), ("admin", 422), ("agent", 422)] {
        let agent = (scope == "agent").then_some("a");
        let (actual, made) = make(json!({"name": scope, "scope": scope, "agent": agent})).await;
        assert_eq!(actual, status, "{made}");
        assert!(status == 422 || made["owner"] == "mona", "{made}");
    }
    let (_, token_of_hour) = make(json!({"name": "h", "scope": "submit", "expires_in_secs": 3600})).await;
    let client_of_hour = client(token_of_hour["secret"].as_str().unwrap());
    for (body, status) in [
        (json!({"name": "x", "scope": "read"}), 422),
        (json!({"name": "x", "scope": "read", "expires_in_secs": 7200}), 422),
        (json!({"name": "x", "scope": "read", "expires_in_secs": 60}), 201),
    ] {
        let (actual, made) = server.send_as(&client_of_hour, "POST", "/tokens", Some(body)).await;
        assert_eq!(actual, status, "{made}");
    }
    let (_, list) = server.send_as(&client_of_hour, "GET", "/tokens", None).await;
    assert_eq!(column(&list["tokens"], "owner"), ["mona"; 4], "{list}");
    let (otto, _) = server.client_of("otto", "submit").await;
    let path = format!("/tokens/{}", token_of_hour["id"].as_str().unwrap());
    assert_eq!(server.send_as(&otto, "DELETE", &path, None).await.0, 404, "a token of another person");
    assert_eq!(server.send_as(&otto, "DELETE", "/tokens/local", None).await.0, 404);
    assert_eq!(server.send_as(&client_of_hour, "DELETE", &path, None).await.0, 204);
    // A token of the scope read cannot create tokens. A token can revoke itself and other tokens with at most the same rights. Tokens that
    // were created with a token are revoked together with it.
    let (_, read_token) = make(json!({"name": "looks", "scope": "read"})).await;
    let (_, submit_token) = make(json!({"name": "works", "scope": "submit"})).await;
    let (reader, worker) =
        [&read_token, &submit_token].map(|made| client(made["secret"].as_str().unwrap())).into();
    assert_refused(
        server.send_as(&reader, "POST", "/tokens", Some(json!({"name": "x", "scope": "read"}))).await,
        403,
        "cannot make tokens",
    );
    let id_of = |made: &Value| format!("/tokens/{}", made["id"].as_str().unwrap());
    assert_refused(server.send_as(&reader, "DELETE", &id_of(&submit_token), None).await, 403, "allows more");
    let (actual, child) =
        server.send_as(&worker, "POST", "/tokens", Some(json!({"name": "child", "scope": "submit"}))).await;
    assert!(actual == 201 && child["made_with"] == submit_token["id"], "{child}");
    let child = client(child["secret"].as_str().unwrap());
    let (_, grandchild) =
        server.send_as(&child, "POST", "/tokens", Some(json!({"name": "next", "scope": "read"}))).await;
    let grandchild = client(grandchild["secret"].as_str().unwrap());
    assert_eq!(server.send_as(&grandchild, "GET", "/jobs", None).await.0, 200);
    // A token may revoke a token with fewer rights.
    assert_eq!(server.send_as(&worker, "DELETE", &id_of(&read_token), None).await.0, 204);
    assert_eq!(server.delete(&id_of(&submit_token)).await.0, 204);
    for ended in [&reader, &worker, &child, &grandchild] {
        assert_eq!(server.send_as(ended, "GET", "/jobs", None).await.0, 401);
    }
    let name_of_person = json!({"name": "mona", "scope": "submit"});
    assert_refused(server.post("/tokens", &name_of_person).await, 409, "person");
    let ci = server.submitter("ci").await;
    // A program's token cannot manage tokens.
    assert_eq!(server.send_as(&ci, "GET", "/tokens", None).await.0, 403);

    // The page creates a token, shows it once, and revokes it.
    let response = mona.post("/account", "action=token&name=cli&scope=submit&days=30").await;
    assert_eq!(response.status(), 200);
    let page = response.text().await.unwrap();
    let secret =
        page.split("data-copy=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap().to_owned();
    assert_eq!(server.send_as(&client(&secret), "GET", "/jobs", None).await.0, 200, "{secret}");
    assert!(!mona.get("/account").await.text().await.unwrap().contains(&secret));
    for wrong in ["scope=admin&days=", "scope=read&days=x", "scope=read&days=36526"] {
        let response = mona.post("/account", &format!("action=token&name=x&{wrong}")).await;
        assert_eq!(response.status(), 422, "{wrong}");
    }
    let (_, list) = server.get("/tokens").await;
    let id = list["tokens"].as_array().unwrap().iter().find(|t| t["name"] == "cli").unwrap()["id"].clone();
    let id = id.as_str().unwrap();
    let page = mona.get("/account").await.text().await.unwrap();
    let revoke = format!(r#"name="action" value="revoke"><input type="hidden" name="id" value="{id}""#);
    assert!(page.contains(&revoke), "{page}");
    assert_eq!(mona.post("/account", &format!("action=revoke&id={id}")).await.status(), 303);
    assert_eq!(server.send_as(&client(&secret), "GET", "/jobs", None).await.0, 401);

    // A change of the person's role changes the rights of tokens and closes websockets; so does disabling the person.
    let (ada, secret) = server.client_of("ada", "admin").await;
    assert_eq!(server.send_as(&ada, "GET", "/people", None).await.0, 200);
    let mut list = server.stream_list(&secret).await;
    assert_eq!(server.change_person("ada", &json!({"role": "viewer"})).await.0, 200);
    // The websocket is closed, so that the client opens it with the new rights.
    assert_eq!(list.next().await.unwrap_err().0, 4401);
    let role = "the role of the token's owner ada allows only read";
    assert_refused(server.send_as(&ada, "GET", "/people", None).await, 403, role);
    assert_eq!(server.send_as(&ada, "GET", "/jobs", None).await.0, 200);
    let mut list = server.stream_list(&secret).await;
    let since = Instant::now();
    assert_eq!(server.change_person("ada", &json!({"disabled": true})).await.0, 200);
    assert_eq!(list.next().await.unwrap_err().0, 4401);
    assert!(since.elapsed() < Duration::from_secs(5));
    assert_refused(server.send_as(&ada, "GET", "/jobs", None).await, 401, "owner of that token");
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_eq!(server.send_as(&ada, "GET", "/jobs", None).await.0, 401, "after a restart");
    assert_eq!(server.change_person("ada", &json!({"disabled": false, "role": "admin"})).await.0, 200);
    assert_eq!(server.send_as(&ada, "GET", "/people", None).await.0, 200);
    assert_eq!(server.change_person("ada", &json!({"password": "another password"})).await.0, 200);
    // A new password does not end tokens.
    assert_eq!(server.send_as(&ada, "GET", "/people", None).await.0, 200);
    // A new person of the same name does not get the tokens of the removed person.
    assert_eq!(server.delete("/people/ada").await.0, 204);
    server.add_person("ada", "admin").await;
    assert_eq!(server.send_as(&ada, "GET", "/people", None).await.0, 401);
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_eq!(server.send_as(&ada, "GET", "/people", None).await.0, 401);
    let signed_in = server.signed_in("ada").await;
    assert_eq!(signed_in.get("/people").await.status(), 200);
    server.stop().await;
}
