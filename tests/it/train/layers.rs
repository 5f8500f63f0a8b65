//! A run's records of its layers (descriptions, and histograms of weights and gradients), and frozen batch norms.

use super::{Bench, assert_success, sets};
use crate::tensors::floats;
use lockstep_protocol::{
    agent::AttemptEvent,
    histograms::{HistogramKind, LayerHistogram, LayerHistograms},
    network::NetworkDescription,
};
use lockstep_worker::report::Tail;
use std::collections::BTreeMap;

/// The values of each tensor of a checkpoint's model, except `num_batches_tracked`.
fn tensors(bench: &Bench, out: &str, checkpoint: &str) -> BTreeMap<String, Vec<f32>> {
    floats(&bench.model(out, checkpoint))
}

/// The histograms and network descriptions that a rank has recorded.
pub(super) fn recorded(
    bench: &Bench,
    out: &str,
    rank: u32,
) -> (Vec<LayerHistograms>, Vec<NetworkDescription>) {
    let path = bench.out(out).join(format!("attempts/1/rank.{rank}.events"));
    let mut tail = Tail::open(&path, 0);
    let (mut histograms, mut networks) = (Vec::new(), Vec::new());
    loop {
        let events = tail.poll().expect("whole records");
        if events.is_empty() {
            return (histograms, networks);
        }
        for event in events {
            match event {
                AttemptEvent::Histograms(of_step) => histograms.push(of_step),
                AttemptEvent::Network(network) => networks.push(network),
                _ => {}
            }
        }
    }
}

/// Counts the values in each bin of a histogram.
fn count_bins(LayerHistogram { min, max, .. }: &LayerHistogram, values: &[f32]) -> Vec<u32> {
    let (min, max) = (f64::from(*min), f64::from(*max));
    let mut counts = vec![0; 64];
    for value in values {
        let bin = ((f64::from(*value) - min) / (max - min) * 64.0) as usize;
        counts[bin.min(63)] += 1;
    }
    counts
}

#[tokio::test]
async fn histograms_count_every_weight_and_gradient_and_change_nothing() {
    let bench = Bench::new().await;
    let sets = |more: &[&'static str]| sets(&[&["checkpoint.every_steps=10"], more].concat());
    bench.train_to_success("plain", &sets(&[]));
    bench.train_to_success("one", &sets(&["log.histograms=10"]));
    assert!(tensors(&bench, "one", "2-24") == tensors(&bench, "plain", "2-24"));
    assert!(recorded(&bench, "plain", 0).0.is_empty());
    assert_eq!(recorded(&bench, "one", 1), (Vec::new(), Vec::new()), "only rank 0 records");

    let (histograms, networks) = recorded(&bench, "one", 0);
    assert_eq!(histograms.iter().map(|h| h.step).collect::<Vec<_>>(), [10, 20]);
    for (of_step, checkpoint) in histograms.iter().zip(["1-10", "2-20"]) {
        assert_eq!(of_step.check(), Ok(()));
        let weights = tensors(&bench, "one", checkpoint);
        let trained = weights.iter().filter(|(name, _)| !name.contains("running_"));
        assert_eq!(of_step.layers.len(), 2 * trained.clone().count());
        for (name, values) in trained {
            let find = |kind| {
                let mut layers = of_step.layers.iter();
                layers.find(|l| l.name == *name && l.kind == kind).expect("a histogram")
            };
            let weight = find(HistogramKind::Weight);
            let (min, max) = values.iter().fold((f32::MAX, f32::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
            assert_eq!((weight.min, weight.max), (min, max), "{name}");
            if min < max {
                let differing =
                    weight.counts.iter().zip(count_bins(weight, values)).filter(|(a, b)| *a != b).count();
                // A value on the border of two bins may be counted in either.
                assert!(differing <= 2, "{name}: {differing} bins");
            }
            for layer in [weight, find(HistogramKind::Gradient)] {
                let count: u64 = layer.counts.iter().map(|count| u64::from(*count)).sum();
                assert_eq!(count, values.len() as u64, "{name} {}", layer.kind);
            }
            let gradient = find(HistogramKind::Gradient);
            assert!(gradient.min < gradient.max, "{name} has a gradient");
        }
    }
    // The histograms are the same over TCP and on one rank.
    for (out, ranks, shared_memory) in
        [("over-tcp", "parallel.ranks=2", "0"), ("alone", "parallel.ranks=1", "1")]
    {
        let mut run = bench.train(out, &sets(&["log.histograms=10", ranks]));
        assert_success(&run.env("LOCKSTEP_SHARED_MEMORY", shared_memory).output().expect("it runs"));
        assert!(recorded(&bench, out, 0).0 == histograms, "{out}");
    }

    // The first description has no times. The last one has the medians of steps 3 and 14.
    let [reported, _, timed] = &networks[..] else { panic!("{networks:?}") };
    assert!(networks.iter().all(|network| network.check() == Ok(())), "{networks:?}");
    let timed_steps: Vec<_> = networks.iter().map(|network| network.timed_steps).collect();
    assert_eq!(timed_steps, [None, Some(1), Some(2)]);
    assert_eq!(reported.layers.len(), timed.layers.len());
    assert!(reported.layers.iter().all(|layer| layer.time_us.is_none()));
    let conv1 = &timed.layers[0];
    assert_eq!((conv1.name.as_str(), conv1.kind.as_str(), conv1.parameters), ("conv1", "conv 3x3", 16 * 9));
    assert_eq!(conv1.output_shape, [16, 8, 8]);
    let with_weights = timed.layers.iter().filter(|layer| layer.parameters > 0);
    assert!(with_weights.clone().count() > 40 && with_weights.clone().all(|layer| layer.time_us > Some(0.0)));
}

#[tokio::test]
async fn frozen_batch_norms_keep_the_given_weights() {
    let bench = Bench::new().await;
    bench.train_to_success("before", &[]);
    let pretrained = format!("model.pretrained={}/model.safetensors", bench.checkpoint("before", "1-7"));
    let frozen = sets(&[&pretrained, "model.freeze_norm=true"]);
    for (out, ranks) in [("two", "parallel.ranks=2"), ("one", "parallel.ranks=1")] {
        let more = [&frozen[..], &["--set", ranks]].concat();
        bench.train_to_success(out, &more);
    }
    let (given, trained) = (tensors(&bench, "before", "1-7"), tensors(&bench, "two", "2-24"));
    assert!(given.keys().eq(trained.keys()));
    for (name, values) in &trained {
        let is_of_norm = name.contains("bn") || name.contains("downsample.1") || name.contains("running_");
        assert_eq!(*values == given[name], is_of_norm, "{name}");
    }
    assert!(trained == tensors(&bench, "one", "2-24"), "the same weights on one rank");
    // A continuation gives the same weights.
    let from = bench.checkpoint("two", "1-7");
    bench.train_to_success("resumed", &[&frozen[..], &["--resume", &from]].concat());
    assert!(trained == tensors(&bench, "resumed", "2-24"));
}
