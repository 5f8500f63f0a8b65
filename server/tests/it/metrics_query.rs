//! A metric of several jobs in one request.

use crate::{
    agent::{losses, running, server_with_agent},
    test_server::assert_refused,
};
use lockstep_protocol::agent::{Ending, Source};
use serde_json::json;

#[tokio::test]
async fn one_request_returns_a_metric_of_several_jobs() {
    let (server, mut agent) = server_with_agent(2).await;
    let mut ids = Vec::new();
    for steps in [3, 40] {
        let (id, attempt) = agent.start_job(&server, |_| {}).await;
        agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=steps)]).await;
        agent.end(&attempt, Ending::Failed { reason: "the end".into(), retriable: false }).await;
        ids.push(id);
    }
    let query = |parameters: &str| format!("/metrics/query?jobs={}&{parameters}", ids.join(","));
    for points in [4, 500] {
        let response = server.get_ok(&query(&format!("name=loss&points={points}"))).await;
        for (id, mut of_query) in ids.iter().zip(response["jobs"].as_array().unwrap().iter().cloned()) {
            let (_, of_job) = server.get(&format!("/jobs/{id}/metrics?name=loss&points={points}")).await;
            assert_eq!(of_query.as_object_mut().unwrap().remove("job"), Some(json!(id)));
            assert_eq!(of_query, of_job);
            assert!(!of_query["series"].as_array().unwrap().is_empty());
        }
    }
    let repeated_ids = |count: usize| vec!["j00000000000000000000000000"; count].join(",");
    let distinct_ids = |count: usize| (0..count).map(|n| format!("j{n:026}")).collect::<Vec<_>>().join(",");
    for (path, expected, message) in [
        (query("name=losss"), 400, "no metric is called"),
        (query("name=loss&points=10001"), 400, "1 to 10000"),
        ("/metrics/query?jobs=&name=loss".to_owned(), 400, "1 to 50"),
        // Repeated ids count once.
        (format!("/metrics/query?jobs={}&name=loss", repeated_ids(60)), 404, "no job has the id"),
        (format!("/metrics/query?jobs={}&name=loss&points=2000", distinct_ids(50)), 404, "no job has the id"),
        (format!("/metrics/query?jobs={}&name=loss&points=2001", distinct_ids(50)), 400, "at most 2000"),
        (format!("/metrics/query?jobs={}&name=loss", distinct_ids(51)), 400, "1 to 50"),
    ] {
        assert_refused(server.get(&path).await, expected, message);
    }
    server.stop().await;
}
