//! Tests against an API server that accepts connections and does not respond.

use super::*;
use std::sync::{Arc, atomic::AtomicUsize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

const JOB: &str = r#"{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a-job"}}"#;

/// A cluster whose first `silent` requests get no response, and the number of requests.
async fn cluster(silent: usize, timeouts: Timeouts) -> (Cluster, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let counted = counted.clone();
            tokio::spawn(async move {
                let mut bytes = [0; 4096];
                while connection.read(&mut bytes).await.is_ok_and(|read| read > 0) {
                    if counted.fetch_add(1, Ordering::Relaxed) < silent {
                        continue;
                    }
                    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
                    let response = format!("{head}{}\r\n\r\n{JOB}", JOB.len());
                    connection.write_all(response.as_bytes()).await.unwrap();
                }
            });
        }
    });
    let client = Client::try_from(Config::new(uri)).unwrap();
    (
        Cluster { client, timeouts, namespace: "vision".into(), is_unreachable: AtomicBool::new(false) },
        requests,
    )
}

#[tokio::test]
async fn a_request_without_a_response_is_retried() {
    let timeouts = Timeouts { response: Duration::from_millis(100), outage: Duration::from_secs(30) };
    let (cluster, requests) = cluster(1, timeouts).await;
    let found = cluster.get(Kind::Job, "a-job").await.unwrap().expect("a Job");
    assert_eq!(found["metadata"]["name"], "a-job");
    assert_eq!(requests.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn retries_end_if_the_api_server_never_responds() {
    let timeouts = Timeouts { response: Duration::from_millis(50), outage: Duration::from_millis(300) };
    let (cluster, _) = cluster(usize::MAX, timeouts).await;
    let message = cluster.get(Kind::Job, "a-job").await.expect_err("nobody answers").to_string();
    assert!(message.contains("reading Job a-job") && message.contains("no answer within 50ms"), "{message}");
}
