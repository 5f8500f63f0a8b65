//! The queue shows other people only the position (`place`) of a private job.

use super::{People, add_people};
use crate::{
    agent::server_with_agent,
    test_server::{spec, wait_until},
};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use reqwest::Client;
use serde_json::{Value, json};

#[tokio::test]
async fn the_queue_shows_only_places_of_private_jobs_to_others() {
    let (server, mut agent) = server_with_agent(2).await;
    let People { vera, mona, otto, ada, .. } = add_people(&server).await;
    let submit = async |who: &Client, name: &str, ranks: u32, private: bool| {
        let mut spec = spec();
        spec["name"] = json!(name);
        spec["parallel"]["ranks"] = json!(ranks);
        spec["private"] = json!(private);
        spec["project"] = json!(if private { "secret-project" } else { "shared" });
        let (status, job) = server.send_as(who, "POST", "/jobs", Some(spec)).await;
        assert_eq!(status, 201, "{job}");
        job["id"].as_str().unwrap().to_owned()
    };
    submit(&otto, "running", 1, false).await;
    agent.expect_start().await;
    let secret = submit(&mona, "secret run", 2, true).await;
    let open = submit(&otto, "open", 1, false).await;
    wait_until("a slot is reserved and both jobs wait", async || {
        let (_, queue) = server.send_as(&ada, "GET", "/queue", None).await;
        let is_reserved = queue["reservations"][0]["free"] == json!([1]);
        is_reserved && queue["jobs"][1]["id"] == open.as_str() && !queue["jobs"][1]["reason"].is_null()
    })
    .await;

    for (who, client, may_see) in
        [("vera", &vera, false), ("otto", &otto, false), ("mona", &mona, true), ("ada", &ada, true)]
    {
        let get = async |path: &str| {
            let (status, response) = server.send_as(client, "GET", path, None).await;
            assert_eq!(status, 200, "{who}: {path}: {response}");
            assert_eq!(may_see, response.to_string().contains(&secret), "{who}: {path}: {response}");
            response
        };
        let queue = get("/queue?count=true").await;
        assert_eq!((&queue["total"], &queue["jobs"][1]["name"]), (&json!(2), &json!("open")), "{who}");
        // The reason is the same for everybody, including people who may see the private job.
        assert_eq!(
            queue["jobs"][1]["reason"]["words"],
            "waits for 1 slot: 1 of 2 on \"a\" free, kept for another job",
            "{who}"
        );
        let reservation = &queue["reservations"][0];
        assert_eq!((&reservation["agent"], &reservation["free"]), (&json!("a"), &json!([1])), "{who}");
        if may_see {
            assert_eq!(
                (&queue["jobs"][0]["name"], &reservation["name"]),
                (&json!("secret run"), &json!("secret run"))
            );
        } else {
            let reported: Vec<_> =
                queue["jobs"][0].as_object().unwrap().iter().filter(|(_, v)| !v.is_null()).collect();
            assert_eq!(reported, [(&"place".to_owned(), &json!(1))], "{who}");
            assert_eq!((&reservation["job"], &reservation["name"]), (&Value::Null, &Value::Null), "{who}");
            assert!(!queue.to_string().contains("mona") && !queue.to_string().contains("secret"), "{queue}");
        }
        // Filters by owner or project do not find the private job.
        for query in ["owner=mona", "project=secret-project"] {
            let queue = get(&format!("/queue?count=true&{query}")).await;
            let expected = if may_see { json!(1) } else { json!(0) };
            assert_eq!(queue["total"], expected, "{who}: {query}: {queue}");
        }
        let (_, his) = server.send_as(client, "GET", "/queue?owner=otto&fields=place", None).await;
        assert_eq!(his["jobs"], json!([{"place": 2}]), "{who}: places count private jobs, too");
        // A cursor does not contain the private id, and is valid for the next page.
        let (_, first) = server.send_as(client, "GET", "/queue?limit=1", None).await;
        let cursor = first["next_cursor"].as_str().unwrap();
        let text = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(cursor).unwrap()).unwrap();
        assert_eq!(may_see, text.contains(&secret), "{who}: {text}");
        let (_, second) =
            server.send_as(client, "GET", &format!("/queue?limit=1&cursor={cursor}"), None).await;
        assert_eq!(
            (&second["jobs"][0]["name"], &second["next_cursor"]),
            (&json!("open"), &Value::Null),
            "{who}"
        );
        // The slot that is reserved for the private job, and the pages.
        let agents = get("/agents").await;
        let kept_for = &agents["agents"][0]["slots"][1]["kept_for"];
        assert!(kept_for["since"].is_string() && kept_for["job"].is_string() == may_see, "{who}: {kept_for}");
        for (page, text) in
            [("/queue", "A private job of somebody else"), ("/machines", "kept for a private job")]
        {
            let html = client.get(server.url(page)).send().await.unwrap().text().await.unwrap();
            assert_eq!(
                (html.contains(text), html.contains("secret run")),
                (!may_see, may_see),
                "{who}: {page}: {html}"
            );
        }
    }
    server.stop().await;
}
