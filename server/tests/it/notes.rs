//! `GET /annotations`: notes and tags of all jobs.

use crate::{
    agent::Agent,
    test_server::{TestServer, client},
};
use serde_json::json;

#[tokio::test]
async fn notes_and_tags_of_all_jobs_are_paged() {
    let mut server = TestServer::new().await;
    let _agent = Agent::join_with_dataset(&server, 2).await;
    let mut ids = Vec::new();
    for n in 0..5 {
        let job = server.submit(|spec| {
            spec["notes"] = json!(format!("note {n}"));
            spec["private"] = json!(n == 2);
        });
        ids.push(job.await.id.to_string());
    }
    server.submit(|_| {}).await;
    let (_, token) = server.make_token(&json!({"name": "other", "scope": "read"})).await;
    for (token, visible) in [(server.token.clone(), vec![0, 1, 2, 3, 4]), (token, vec![0, 1, 3, 4])] {
        server.http = client(&token);
        for limit in 1..=6 {
            let mut listed = Vec::new();
            let path = format!("/annotations?fields=notes&count=true&limit={limit}");
            for page in server.read_pages(&path).await {
                assert_eq!(page["total"], visible.len(), "{page}");
                let jobs = page["jobs"].as_object().unwrap();
                assert!(jobs.len() <= limit && jobs.values().all(|job| job.get("tags").is_none()), "{page}");
                listed.extend(jobs.iter().map(|(id, job)| (id.clone(), job["notes"].clone())));
            }
            let expected: Vec<_> =
                visible.iter().map(|n| (ids[*n].clone(), json!(format!("note {n}")))).collect();
            assert_eq!(listed, expected, "{limit}");
        }
    }
    for query in ["limit=0", "limit=1001", "cursor=x", "fields=note"] {
        assert_eq!(server.get(&format!("/annotations?{query}")).await.0, 400, "{query}");
    }
    server.stop().await;
}
