//! Histograms of layers and descriptions of networks: reports, storage, requests.

use crate::{
    agent::{Agent, losses, running},
    test_server::{TestServer, on_two_databases, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Ending, Source},
    histograms::{HistogramKind, LayerHistogram, LayerHistograms},
    limits::{HISTOGRAM_BINS, MAX_HISTOGRAM_LAYERS, MAX_HISTOGRAM_STEPS},
    network::{LayerDescription, LayerPlan, NetworkDescription, PlanDescription, PlanPrediction},
    spec::{ShardSpec, Split},
};
use serde_json::{Value, json};

fn layer(name: &str, kind: HistogramKind, max: f32) -> LayerHistogram {
    let counts = (0..HISTOGRAM_BINS as u32).map(|n| n * 1000).collect();
    LayerHistogram { name: name.into(), kind, min: -0.5, max, counts }
}

fn histograms(step: u64, max: f32) -> AttemptEvent {
    let layers = vec![
        layer("conv1.weight", HistogramKind::Weight, max),
        layer("conv1.weight", HistogramKind::Gradient, max / 10.0),
        layer("a.b.weight", HistogramKind::Weight, max),
    ];
    AttemptEvent::Histograms(LayerHistograms { step, layers })
}

fn network(parameters: u64) -> AttemptEvent {
    let layer = |name: &str, time_us| LayerDescription {
        name: name.into(),
        kind: "conv 3x3".into(),
        output_shape: vec![16, 32, 32],
        parameters,
        time_us,
        plan: Some(LayerPlan {
            placement: "own pictures".into(),
            memory_bytes: 1 << 20,
            sent_bytes: 1000,
            time_us: 11.5,
        }),
    };
    let layers = vec![layer("conv1", Some(12.5)), layer("fc", None)];
    let plan = PlanDescription {
        pipeline: 1,
        later_stages: Vec::new(),
        words: "1 (data) x 1 (height) x 2 (model) ranks, fc split by its outputs".into(),
        data: 1,
        height: 1,
        model: 2,
        shard: vec![ShardSpec { pattern: "fc".into(), split: Split::Out }],
        predicted: Some(PlanPrediction {
            step_ms: 24.5,
            images_per_second: 640.0,
            memory_bytes: 1 << 30,
            limited_by: "computing".into(),
            why: "data parallel takes 30.0 ms a step".into(),
        }),
        measured_step_ms: Some(25.5),
        measured_memory_bytes: Some(1 << 29),
    };
    AttemptEvent::Network(NetworkDescription { layers, timed_steps: Some(5), plan: Some(plan) })
}

async fn read_histograms(server: &TestServer, id: &str, query: &str) -> Value {
    server.get_ok(&format!("/jobs/{id}/histograms{query}")).await
}

/// Returns step and attempt of each histogram of a layer.
async fn steps_of_layer(server: &TestServer, id: &str) -> Vec<(u64, u64)> {
    let body = read_histograms(server, id, "?layer=a.b.weight&kind=weight").await;
    let pair = |h: &Value| (h["step"].as_u64().unwrap(), h["attempt"].as_u64().unwrap());
    body["histograms"].as_array().unwrap().iter().map(pair).collect()
}

async fn report(agent: &mut Agent, attempt: &AttemptRef, first: u64, events: Vec<AttemptEvent>) {
    let end = first + events.len() as u64;
    assert_eq!(agent.report(attempt, Source::Rank(0), first, events).await, end);
}

async fn test_layers(server: TestServer) {
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (id, first) = agent.start_job(&server, |_| {}).await;
    assert_eq!(read_histograms(&server, &id, "").await, json!({"steps": [], "layers": [], "histograms": []}));
    assert_eq!(server.get(&format!("/jobs/{id}/network")).await, (200, json!({"layers": []})));
    let page = server.get_text(&format!("/jobs/{id}")).await.1;
    assert!(page.contains(r#"aria-controls="histograms-panel" aria-selected="false" tabindex="-1" hidden"#));

    let events =
        vec![running(1000, 0), network(1), histograms(10, 0.5), losses(0, 1..=3), histograms(20, 0.25)];
    report(&mut agent, &first, 0, events).await;
    // A repeated report is stored once.
    report(&mut agent, &first, 4, vec![histograms(20, 0.25)]).await;
    let index = read_histograms(&server, &id, "").await;
    assert_eq!(index["steps"], json!([10, 20]));
    let names: Vec<_> =
        index["layers"].as_array().unwrap().iter().map(|l| (&l["name"], &l["kind"])).collect();
    let expected = [("conv1.weight", "weight"), ("conv1.weight", "gradient"), ("a.b.weight", "weight")];
    let expected: Vec<_> = expected.iter().map(|(name, kind)| (json!(name), json!(kind))).collect();
    // Layers are in the network's order.
    assert_eq!(names, expected.iter().map(|(name, kind)| (name, kind)).collect::<Vec<_>>());
    assert_eq!(index["histograms"], json!([]), "without a filter, no histograms are returned");
    let of_step = read_histograms(&server, &id, "?step=20&kind=gradient").await;
    assert_eq!(of_step["layers"], json!([{"name": "conv1.weight", "kind": "gradient"}]));
    let counts: Vec<u32> = (0..HISTOGRAM_BINS as u32).map(|n| n * 1000).collect();
    let expected = json!([{"step": 20, "attempt": 1, "layer": "conv1.weight", "kind": "gradient", "min": -0.5, "max": 0.025,
        "counts": counts}]);
    assert_eq!(of_step["histograms"], expected);
    assert_eq!(read_histograms(&server, &id, "?step=20").await["histograms"].as_array().unwrap().len(), 3);
    assert_eq!(read_histograms(&server, &id, "?layer=none").await["histograms"], json!([]));
    assert_eq!(read_histograms(&server, &id, "?step=18446744073709551615").await["histograms"], json!([]));
    assert_eq!(server.get(&format!("/jobs/{id}/histograms?kind=bias")).await.0, 400);
    let (_, shown) = server.get(&format!("/jobs/{id}/network")).await;
    assert_eq!((&shown["timed_steps"], &shown["layers"][0]["time_us"]), (&json!(5), &json!(12.5)));
    assert!(shown["layers"][1].get("time_us").is_none() && shown["layers"][1]["parameters"] == 1, "{shown}");
    // The description has predicted and measured times.
    assert_eq!(shown["plan"]["shard"], json!([{"match": "fc", "split": "out"}]));
    assert_eq!([&shown["plan"]["predicted"]["step_ms"], &shown["plan"]["measured_step_ms"]], [24.5, 25.5]);
    assert_eq!(shown["layers"][0]["plan"]["placement"], "own pictures");
    let page = server.get_text(&format!("/jobs/{id}")).await.1;
    assert!(!page.contains(r#"aria-controls="histograms-panel" aria-selected="false" tabindex="-1" hidden"#));
    // The stream has events for histograms and networks.
    let events = server.stored_events(&id).await;
    let reported: Vec<_> =
        events.iter().filter(|e| e["type"] == "histograms").map(|e| e["step"].clone()).collect();
    assert_eq!(reported, [10, 20]);
    assert_eq!(events.iter().filter(|e| e["type"] == "network").count(), 1);

    // Another attempt continues after step 10. It replaces later histograms of the first attempt.
    agent.end(&first, Ending::Failed { reason: "killed".into(), retriable: true }).await;
    let second = agent.expect_start().await.attempt;
    report(&mut agent, &second, 0, vec![running(1000, 10), network(2), histograms(15, 0.5)]).await;
    assert_eq!(steps_of_layer(&server, &id).await, [(10, 1), (15, 2)]);
    assert_eq!(server.get(&format!("/jobs/{id}/network")).await.1["layers"][1]["parameters"], 2);

    // Histograms with too many layers or of another rank are skipped. Later events are still stored.
    let with_layers = |count: usize| {
        let layers = (0..count).map(|n| layer(&format!("l{n}"), HistogramKind::Weight, 0.5)).collect();
        AttemptEvent::Histograms(LayerHistograms { step: 30, layers })
    };
    let invalid = vec![
        with_layers(MAX_HISTOGRAM_LAYERS + 1),
        AttemptEvent::Histograms(LayerHistograms { step: 0, layers: Vec::new() }),
        losses(0, 11..=12),
    ];
    report(&mut agent, &second, 3, invalid).await;
    assert_eq!(agent.report(&second, Source::Rank(1), 0, vec![histograms(40, 1.0)]).await, 1);
    assert_eq!(read_histograms(&server, &id, "").await["steps"], json!([10, 15]));
    assert_eq!(server.job(&id).await.step, 12);
    report(&mut agent, &second, 6, vec![with_layers(MAX_HISTOGRAM_LAYERS)]).await;
    assert_eq!(
        read_histograms(&server, &id, "?step=30").await["histograms"].as_array().unwrap().len(),
        MAX_HISTOGRAM_LAYERS
    );

    // Beyond the limit of steps, the first and last step stay, and steps between them are removed.
    let last = 31 + MAX_HISTOGRAM_STEPS as u64;
    report(&mut agent, &second, 7, (31..=last).map(|step| histograms(step, 0.5)).collect()).await;
    let steps = read_histograms(&server, &id, "").await["steps"].as_array().unwrap().clone();
    assert_eq!(
        (steps.len(), &steps[0], &steps[MAX_HISTOGRAM_STEPS - 1]),
        (MAX_HISTOGRAM_STEPS, &json!(10), &json!(last))
    );

    agent.end(&second, Ending::Succeeded { step: 1000 }).await;
    assert_eq!(server.delete(&format!("/jobs/{id}")).await.0, 204);
    assert_eq!(server.get(&format!("/jobs/{id}/histograms")).await.0, 404);
    assert_eq!(server.get(&format!("/jobs/{id}/network")).await.0, 404);
    let rows = "SELECT (SELECT count(*) FROM histograms) + (SELECT count(*) FROM networks)";
    wait_until("the rows are deleted", async || server.query_number(rows).await == 0).await;
    server.stop().await;
}

on_two_databases!(
    descriptions_of_layers_are_stored,
    descriptions_of_layers_are_stored_in_postgres,
    test_layers
);
