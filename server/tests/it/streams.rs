//! Streams: readers get each event once, from any sequence number on.

use crate::{
    agent::{Agent, line, losses, running, start_job},
    test_server::{Stream, TIMEOUT, TestServer, socket_request, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Source, ToAgent},
    job::JobState,
    metric::MetricColumn,
    random::Random,
};
use serde_json::{Value, json};
use std::{net::SocketAddr, time::Duration};

/// Loss and accuracy of a step.
fn loss_and_accuracy(rank: u32, step: u64) -> AttemptEvent {
    let column =
        |name: &str, value| MetricColumn { name: name.into(), steps: vec![step], values: vec![value] };
    AttemptEvent::Metrics { rank, columns: vec![column("loss", 1.0 / step as f32), column("accuracy", 0.5)] }
}

/// Maximum number of unacknowledged reports. The agent waits for acknowledgements before it sends more.
const MAX_IN_FLIGHT: u64 = 8;

/// Reads events after `since` until the end of the job. Reconnects at random times with the last event's sequence number.
async fn read_with_reconnects(
    path: String,
    (address, token): (SocketAddr, String),
    since: u64,
    seed: u64,
) -> Vec<Value> {
    let mut random = Random(seed);
    let mut events = Vec::new();
    let mut last = since;
    loop {
        let mut stream = Stream::open(socket_request(address, &format!("{path}?since={last}"), &token)).await;
        let hello = stream.next().await.unwrap();
        assert_eq!(hello["type"], "hello");
        let frames_until_reconnect = 1 + random.below(80);
        for _ in 0..frames_until_reconnect {
            let frame = stream.next().await.unwrap();
            if frame["type"] == "live" {
                assert_eq!(frame["seq"], last, "the frame `live` has the last sent event's number");
                continue;
            }
            last = frame["seq"].as_u64().unwrap();
            let is_last = frame["state"] == "succeeded";
            events.push(frame);
            if is_last {
                return events;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_receive_all_stored_events_whenever_they_connect() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(2000, 0)]).await;

    let path = format!("/jobs/{id}/stream");
    let mut readers = Vec::new();
    let mut random = Random(7);
    let mut acknowledged = 0;
    for burst in 0..100_u64 {
        if burst % 5 == 0 {
            // A random number, at most the number of the last stored event: every acknowledged report has stored at least two events.
            let since = random.below(acknowledged * 2 + 1);
            readers.push((
                since,
                tokio::spawn(read_with_reconnects(
                    path.clone(),
                    (server.address, server.token.clone()),
                    since,
                    random.below(u64::MAX),
                )),
            ));
        }
        for rank in 0..2 {
            let steps = burst * 13 + 1..=burst * 13 + 13;
            let mut events: Vec<_> = steps.map(|s| loss_and_accuracy(rank, s)).collect();
            if rank == 0 {
                events[0] = line(0, burst, "a line");
            }
            // Rank 0's first record is `Running`.
            let first = burst * 13 + u64::from(rank == 0);
            agent.send_report(&attempt, Source::Rank(rank), first, events).await;
        }
        let sent = (burst + 1) * 2;
        while acknowledged + MAX_IN_FLIGHT < sent {
            assert!(matches!(agent.next().await, Some(ToAgent::Ack(_))));
            acknowledged += 1;
        }
    }
    while acknowledged < 200 {
        assert!(matches!(agent.next().await, Some(ToAgent::Ack(_))));
        acknowledged += 1;
    }
    agent.end(&attempt, Ending::Succeeded { step: 1300 }).await;

    let stored = server.stored_events(&id).await;
    let seqs: Vec<u64> = stored.iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs, (1..=stored.len() as u64).collect::<Vec<_>>(), "numbered from 1 without a gap");
    // There are four events before the first burst. Each burst has five: a log line of rank 0, and loss and accuracy of both ranks. The last
    // event is the end.
    assert_eq!(stored.len(), 4 + 100 * 5 + 1);
    for rank in 0..2 {
        let of_rank = stored.iter().filter(|e| e["name"] == "accuracy" && e["rank"] == rank);
        let steps = of_rank.flat_map(|e| e["steps"].as_array().unwrap().clone()).map(|s| s.as_u64().unwrap());
        // Rank 0 reports a line instead of each burst's first step.
        let expected: Vec<u64> = (1..=1300).filter(|s| rank == 1 || s % 13 != 1).collect();
        assert_eq!(steps.collect::<Vec<_>>(), expected);
    }
    for (since, reader) in readers {
        let events = tokio::time::timeout(TIMEOUT, reader).await.unwrap().unwrap();
        assert_eq!(events.len(), stored.len() - since as usize);
        assert!(events == stored[since as usize..], "since {since}: the events are the same");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_reader_is_disconnected_and_loses_nothing() {
    let server = TestServer::with(|c| c.stream_timeout = Duration::from_millis(300)).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (id, attempt) = agent.start_job(&server, |_| {}).await;
    let mut slow = server.stream(&id, 0).await;
    slow.until(|f| f["type"] == "live").await;

    // The log is larger than the buffers of the sockets.
    let long = "x".repeat(4000);
    for report in 0..40_u64 {
        let lines = (0..200).map(|i| line(0, report * 200 + i + 1, &long)).collect();
        agent.report(&attempt, Source::Rank(0), report * 200, lines).await;
    }
    // The number of open streams shows when the server has disconnected the reader.
    wait_until("the slow reader is disconnected", async || {
        server.get_text("/metrics").await.1.contains("lockstep_stream_clients 0")
    })
    .await;
    let mut last = 0;
    let close_frame = loop {
        use futures_util::StreamExt;
        match slow.0.next().await {
            Some(Ok(tokio_tungstenite::tungstenite::Message::Text(text))) => {
                let frame: Value = serde_json::from_str(&text).unwrap();
                last = frame["seq"].as_u64().unwrap();
            }
            Some(Ok(tokio_tungstenite::tungstenite::Message::Close(Some(frame)))) => break Some(frame),
            None | Some(Err(_)) => break None,
            Some(Ok(_)) => {}
        }
    };
    // The close frame follows the sent events.
    let close_frame = close_frame.expect("a close frame");
    assert_eq!(u16::from(close_frame.code), 4008);
    assert_eq!(close_frame.reason.parse::<u64>().unwrap(), last);
    let stored = server.job(&id).await.last_seq;
    assert!(last < stored, "the reader was disconnected before the last event");
    let next_frames = server.stream(&id, last).await.until(|f| f["type"] == "live").await;
    assert_eq!(next_frames[1]["seq"], last + 1);
    assert_eq!(next_frames.len() as u64, stored - last + 2, "the next connection gets the rest");
    server.stop().await;
}

#[tokio::test]
async fn since_above_the_last_event_starts_after_the_last_event() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    let last_seq = server.job(&id).await.last_seq;

    let mut readers = Vec::new();
    for since in [last_seq, last_seq + 3, u64::MAX] {
        let mut reader = server.stream(&id, since).await;
        let frames = reader.until(|f| f["type"] == "live").await;
        assert_eq!(frames[0]["last_seq"], last_seq, "the frame `hello` has the last event's number");
        assert_eq!((frames.len(), &frames[1]["seq"]), (2, &json!(last_seq)), "{frames:?}");
        readers.push(reader);
    }
    // The store keeps these five events in one row.
    let columns = ["loss", "accuracy", "lr", "step_ms", "data_ms"];
    let columns = columns.map(|name| MetricColumn { name: name.into(), steps: vec![1], values: vec![0.5] });
    let metrics = AttemptEvent::Metrics { rank: 0, columns: columns.into() };
    agent.report(&attempt, Source::Rank(0), 1, vec![metrics]).await;
    for mut reader in readers {
        for seq in last_seq + 1..=last_seq + 5 {
            assert_eq!(reader.next().await.unwrap()["seq"], seq);
        }
    }
    // A reader that has three of the row's five events gets the other two.
    let frames = server.stream(&id, last_seq + 3).await.until(|f| f["type"] == "live").await;
    let seqs: Vec<_> = frames[1..3].iter().map(|f| f["seq"].as_u64().unwrap()).collect();
    assert_eq!((frames.len(), seqs), (4, vec![last_seq + 4, last_seq + 5]), "{frames:?}");
    server.stop().await;
}

#[tokio::test]
async fn a_stream_ends_with_its_job_unless_keep_open_is_set() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0), losses(0, 1..=10)]).await;
    let path = format!("/jobs/{id}/stream?since=0&keep_open=true");
    let mut kept_open = Stream::open(server.socket_request(&path, &server.token)).await;
    let mut reader = server.stream(&id, 0).await;
    reader.until(|f| f["type"] == "live").await;
    agent.end(&attempt, Ending::Succeeded { step: 10 }).await;
    // The end is sent to an earlier reader and to a reader that connects after the end.
    for mut reader in [reader, server.stream(&id, 0).await] {
        let frames = reader.until(|f| f["type"] == "end").await;
        let [.., previous, end] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(*end, json!({"type": "end", "state": "succeeded"}));
        assert!(previous["type"] == "live" || previous["state"] == "succeeded", "{frames:?}");
        assert_eq!(reader.next().await.unwrap_err(), (1000, "the job is over".to_owned()));
    }
    kept_open.until(|f| f["state"] == "succeeded").await;
    assert_eq!(server.patch(&format!("/jobs/{id}"), &json!({"tags": ["kept"]})).await.0, 200);
    assert_eq!(kept_open.next().await.unwrap()["tags"], json!(["kept"]));
    server.stop().await;
}

#[tokio::test]
async fn a_request_for_a_job_waits_for_its_end() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0)]).await;
    let (status, job) = server.get(&format!("/jobs/{id}?wait=1")).await;
    assert_eq!((status, &job["state"]), (200, &json!("running")), "{job}");
    for wait in ["121", "-1", "soon"] {
        assert_eq!(server.get(&format!("/jobs/{id}?wait={wait}")).await.0, 400, "{wait}");
    }
    let path = format!("/jobs/{id}?wait=120");
    let ((status, job), ()) = tokio::join!(server.get(&path), async {
        agent.report(&attempt, Source::Rank(0), 1, vec![losses(0, 1..=10)]).await;
        agent.end(&attempt, Ending::Succeeded { step: 10 }).await;
    });
    assert_eq!((status, &job["state"]), (200, &json!("succeeded")), "{job}");
    assert_eq!(server.get(&path).await.1["state"], "succeeded", "an ended job is returned at once");
    server.stop().await;
}

#[tokio::test]
async fn job_list_stream_has_every_change_and_deletion() {
    let server = TestServer::new().await;
    let mut list = server.stream_list(&server.token).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (id, attempt) = agent.start_job(&server, |_| {}).await;
    list.until(|f| f["type"] == "job" && f["job"]["state"] == "starting").await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(10, 0)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 10 }).await;
    let frames = list.until(|f| f["job"]["state"] == "succeeded").await;
    assert!(frames.iter().all(|f| f["job"]["id"] == id.as_str()));
    server.delete(&format!("/jobs/{id}")).await;
    list.until(|f| f["type"] == "job_deleted" && f["id"] == id.as_str()).await;
    server.stop().await;
}

#[tokio::test]
async fn acknowledged_events_and_running_jobs_survive_a_restart() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=10)]).await;
    let before = server.stored_events(&id).await;
    let dir = server.stop().await;
    agent.disconnect();

    let server = TestServer::open(dir, |_| {}).await;
    assert_eq!(server.stored_events(&id).await, before);
    // The agent may return until its lease expires.
    assert_eq!(server.job(&id).await.state, JobState::Running);
    let hello = crate::agent::hello("a", 2, vec![attempt.clone()]);
    let mut agent = Agent::connect(&server, hello).await.unwrap();
    let (acknowledged, revoked) = agent.welcome.clone();
    assert_eq!((acknowledged[0].records, acknowledged[0].source, revoked.len()), (2, Source::Rank(0), 0));
    // The agent repeats a record that the server has stored, and continues.
    let repeated = vec![losses(0, 1..=10), losses(0, 11..=20)];
    assert_eq!(agent.report(&attempt, Source::Rank(0), 1, repeated).await, 3);
    agent.end(&attempt, Ending::Succeeded { step: 20 }).await;
    let after = server.stored_events(&id).await;
    assert_eq!(after[..before.len()], before[..]);
    assert_eq!(after.len(), before.len() + 2, "one event for the new points and one for the end");
    server.stop().await;
}
