//! Charts of long runs: what the pyramid tells is what the points are, at every zoom, sealed or not.

use crate::{
    agent::{Agent, running},
    house::{DEADLINE, House},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Source},
    metric::MetricColumn,
};
use serde_json::Value;
use std::time::{Duration, Instant};

const STEPS: u64 = 20_000;

/// A spike at one step, a hole that is not finite, and noise that depends on the step alone.
fn value(rank: u32, step: u64) -> f32 {
    match step {
        7_777 => 99.0,
        12_000..=12_099 => f32::NAN,
        _ => (step.wrapping_mul(2_654_435_761) % 1000) as f32 / 1000.0 + rank as f32,
    }
}

fn points(rank: u32, from: u64, to: u64) -> AttemptEvent {
    let column = |name: &str, steps: Vec<u64>| MetricColumn {
        name: name.into(),
        values: steps.iter().map(|s| value(rank, *s)).collect(),
        steps,
    };
    let mut columns = vec![column("loss", (from..=to).collect())];
    if to.is_multiple_of(1000) {
        columns.push(column("val_loss", vec![to]));
    }
    AttemptEvent::Metrics { rank, columns }
}

/// Every bucket of an answer against the points themselves.
fn check(answer: &Value, from: u64, to: u64, most: usize) {
    let wide = answer["bucket_steps"].as_u64().unwrap();
    assert_eq!(answer["series"].as_array().unwrap().len(), 2);
    for series in answer["series"].as_array().unwrap() {
        let rank = series["rank"].as_u64().unwrap() as u32;
        let steps: Vec<u64> =
            series["steps"].as_array().unwrap().iter().map(|s| s.as_u64().unwrap()).collect();
        assert!(steps.len() <= most && steps.len() * 20 > most, "{} buckets of at most {most}", steps.len());
        assert!(steps[0] <= from && *steps.last().unwrap() + wide > to, "from end to end");
        for (i, first) in steps.iter().enumerate() {
            let end = steps.get(i + 1).copied().unwrap_or_else(|| (first + wide).min(to + 1).min(STEPS + 1));
            let finite: Vec<f32> = (*first..end).map(|s| value(rank, s)).filter(|v| v.is_finite()).collect();
            let told = |key: &str| series[key][i].as_f64().map(|v| v as f32);
            if finite.is_empty() {
                assert_eq!((told("min"), told("mean")), (None, None), "a hole at {first}");
                continue;
            }
            // The bucket at the end is told whole, so it may know of later points.
            if i + 1 == steps.len() && to < STEPS {
                continue;
            }
            assert_eq!(told("min"), finite.iter().copied().reduce(f32::min), "rank {rank}, step {first}");
            assert_eq!(told("max"), finite.iter().copied().reduce(f32::max), "rank {rank}, step {first}");
            let mean = finite.iter().map(|v| f64::from(*v)).sum::<f64>() / finite.len() as f64;
            assert!((f64::from(told("mean").unwrap()) - mean).abs() < 1e-4);
        }
    }
}

#[tokio::test]
async fn a_long_run_is_told_truly_at_every_zoom() {
    let house = House::new().await;
    let mut agent = Agent::with_pictures(&house, 2).await;
    let id = house.submit(|_| {}).await.id.to_string();
    let attempt = agent.started().await.attempt;
    let mut told = agent.report(&attempt, Source::Rank(0), 0, vec![running(STEPS, 0)]).await;
    let mut other = 0;
    for first in (1..=STEPS).step_by(1000) {
        for rank in 0..2 {
            let batch: Vec<_> =
                (first..first + 1000).step_by(4).map(|from| points(rank, from, from + 3)).collect();
            let sent = if rank == 0 { &mut told } else { &mut other };
            *sent = agent.report(&attempt, Source::Rank(rank), *sent, batch).await;
        }
    }
    let get = async |query: &str| {
        let (status, answer) = house.get(&format!("/jobs/{id}/metrics?name=loss&{query}")).await;
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let asked = [
        ("points=100", 1, STEPS, 100),
        ("points=1000", 1, STEPS, 1000),
        ("points=300&from=7001&to=13000", 7001, 13_000, 300),
    ];
    let mut before = Vec::new();
    for (query, from, to, most) in asked {
        let answer = get(query).await;
        assert_eq!(answer["exact"], false);
        check(&answer, from, to, most);
        before.push(answer["series"].clone());
    }
    assert!(before[0].to_string().contains("99.0"), "the spike is never lost");

    // Near enough, every point is there, and it is said.
    let near = get("points=200&from=7700&to=7850").await;
    assert_eq!((near["exact"].as_bool(), near["bucket_steps"].as_u64()), (Some(true), Some(1)));
    assert_eq!(near["series"][0]["steps"].as_array().unwrap().len(), 151);
    assert_eq!(near["series"][0]["min"], near["series"][0]["max"]);
    // A few points far apart are exact however far apart they are.
    let (_, sparse) = house.get(&format!("/jobs/{id}/metrics?name=val_loss&points=50")).await;
    assert_eq!(sparse["exact"], true);
    assert_eq!(sparse["series"][0]["steps"].as_array().unwrap().len(), 20);

    // The database itself says how far events have become chunks.
    let start = Instant::now();
    let (first, last) = loop {
        let (sealed, extent) = house.sealed(&id).await;
        if sealed > 8000 {
            break extent;
        }
        assert!(start.elapsed() < DEADLINE, "events become chunks: {sealed}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(first == 1 && last > 15_000, "{first} to {last}");
    agent.end(&attempt, Ending::Succeeded { step: STEPS }).await;
    let dir = house.stop().await;
    let house = House::open(dir, |_| {}).await;
    for ((query, ..), before) in asked.iter().zip(before) {
        let (_, answer) = house.get(&format!("/jobs/{id}/metrics?name=loss&{query}")).await;
        assert_eq!(answer["series"], before, "{query}");
    }
    house.stop().await;
}
