//! Streams: a client that connects at any time, from any event number, reads exactly the stored events.

use crate::{
    server::{Server, number},
    socket::{Socket, assert_unbroken, is_end, is_metric, last_step, stored},
    specs,
};
use serde_json::Value;

#[tokio::test]
async fn clients_that_connect_at_any_time_read_every_event_once() {
    let server = Server::start_training(640, 64).await;
    let id = server.submit(&specs::short("streamed", "fashion", 2, 120)).await;

    // A client that reads from the start. Its progress decides when the others connect.
    let mut first = Socket::of_job(&server, &id, 0).await;
    let mut others = Vec::new();
    for step in [1, 25, 50, 75, 100] {
        first.until(|f| is_metric(f, "loss") && last_step(f) >= step).await;
        let seen = first.last_seq(0);
        // From the start, from the middle, from the first client's last event, and from a future
        // event that is not stored yet.
        for since in [0, seen / 2, seen, seen + 7] {
            others.push((since, Socket::of_job(&server, &id, since).await));
        }
    }
    // A client whose connection drops several times, and which reconnects with its last event number.
    let mut pieces = Vec::new();
    let mut since = 0;
    for frames in [3, 40, 1, 17] {
        let mut socket = Socket::of_job(&server, &id, since).await;
        while socket.events().len() < frames {
            if is_end(&socket.next().await) {
                break;
            }
        }
        since = socket.last_seq(since);
        pieces.extend(socket.drop_connection());
    }
    let ended = pieces.iter().any(is_end);
    if !ended {
        let mut socket = Socket::of_job(&server, &id, since).await;
        socket.read_to_end().await;
        pieces.extend(socket.drop_connection());
    }

    first.read_to_end().await;
    server.wait_for_success(&id).await;
    let all = stored(&server, &id).await;
    let upto_end = all.iter().position(is_end).expect("an end") + 1;
    assert_eq!(first.events(), all[..upto_end], "the client that read from the start");
    assert_eq!(pieces, all[..upto_end], "the client that reconnected");
    for (since, mut socket) in others {
        assert_eq!(socket.hello["first_seq"], 1);
        if !socket.frames.iter().any(is_end) {
            socket.read_to_end().await;
        }
        // The job may end while earlier events are still being sent.
        if !socket.frames.iter().any(|f| f["type"] == "live") {
            socket.until(|f| f["type"] == "live").await;
        }
        // A client that asked for a future event gets all events after the stored ones.
        let since = since.min(number(&socket.hello["last_seq"]));
        assert_unbroken(&socket.events(), since);
        assert_eq!(socket.events(), all[since as usize..upto_end], "the client with since={since}");
        let lives: Vec<_> = socket.frames.iter().filter(|f| f["type"] == "live").collect();
        assert_eq!(lives.len(), 1, "one `live` per connection, since={since}");
        let live_seq = number(&lives[0]["seq"]);
        let before = socket.frames.iter().take_while(|f| f["type"] != "live").count() as u64;
        assert!(before == live_seq.saturating_sub(since), "`live` {live_seq} follows {before} events");
    }

    // After the job's end, from many event numbers.
    for since in (0..all.len() as u64).step_by(13).chain([all.len() as u64]) {
        let mut late = Socket::of_job(&server, &id, since).await;
        late.until(|f| f["type"] == "live").await;
        assert_eq!(late.events(), all[since as usize..], "since={since} after the end");
    }
    assert_stream_equals_rest(&server, &id, &all).await;
    server.stop().await;
}

/// Asserts that the losses and log lines of the events are those of the REST interface.
async fn assert_stream_equals_rest(server: &Server, id: &str, events: &[Value]) {
    let mut streamed = Vec::new();
    for event in events.iter().filter(|e| is_metric(e, "loss")) {
        let list = |key: &str| event[key].as_array().expect("a list").clone();
        for (step, value) in list("steps").iter().zip(list("values")) {
            let value = value.as_f64().expect("finite") as f32;
            streamed.push((number(&event["rank"]), number(step), value.to_bits()));
        }
    }
    streamed.sort_unstable();
    let points = server.points(id, "loss").await;
    let queried: Vec<_> = points.iter().map(|p| (p.rank, p.step, (p.value as f32).to_bits())).collect();
    assert_eq!(streamed, queried);
    for rank in 0..2 {
        let lines: Vec<_> = events
            .iter()
            .filter(|e| e["type"] == "log" && e["rank"] == rank)
            .flat_map(|e| e["lines"].as_array().expect("lines").clone())
            .collect();
        let response = server.get(&format!("/jobs/{id}/logs?rank={rank}")).await;
        let texts = |lines: &[Value]| -> Vec<_> {
            lines.iter().map(|l| (number(&l["number"]), l["text"].clone())).collect()
        };
        assert_eq!(texts(&lines), texts(response["lines"].as_array().expect("lines")), "rank {rank}");
        assert!(lines.len() >= 120, "{} lines", lines.len());
    }
}
