//! The time from the submission to the first loss, with a generous limit. BENCHMARKS.md has the
//! measured times.

use crate::{
    pictures,
    server::{Server, exclusive_permit},
    socket::{Socket, is_metric},
    specs,
};
use serde_json::json;
use std::time::{Duration, Instant};

#[tokio::test]
async fn the_first_loss_is_on_the_stream_within_the_limit() {
    let _permit = exclusive_permit().await;
    let server = Server::start().await;
    server.register("fashion", &pictures::bundled_folder()).await;
    let mut seconds = Vec::new();
    for run in 0..3 {
        let spec = specs::with(
            specs::short(&format!("first-loss-{run}"), "fashion", 2, 3),
            json!({"data": {"image_size": 28}, "train": {"batch_size": 32}}),
        );
        let submitted = Instant::now();
        let id = server.submit(&spec).await;
        let mut socket = Socket::of_job(&server, &id, 0).await;
        socket.until(|f| is_metric(f, "loss")).await;
        seconds.push(submitted.elapsed().as_secs_f64());
        server.wait_for_success(&id).await;
    }
    seconds.sort_by(f64::total_cmp);
    eprintln!(
        "POST /jobs to the first loss on the stream, resnet20, 2 ranks, global batch 64: median {:.3} s of {seconds:.3?}",
        seconds[seconds.len() / 2]
    );
    let limit = Duration::from_secs(10);
    assert!(seconds[0] < limit.as_secs_f64(), "{seconds:?}");
    server.stop().await;
}
