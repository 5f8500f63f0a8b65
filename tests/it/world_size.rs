//! A job gives the same result with any number of ranks, and the same bits with the same number of ranks.

use crate::{
    server::{Agents, Server},
    specs,
    tensors::tensors,
};
use serde_json::json;
use std::collections::BTreeMap;

const STEPS: u64 = 30;

struct Run {
    ranks: u32,
    /// The mean loss of each step over all ranks.
    losses: Vec<f64>,
    accuracy: f64,
    /// The last `model.safetensors`.
    model: Vec<u8>,
}

#[tokio::test]
async fn losses_do_not_depend_on_the_number_of_ranks() {
    let server = Server::start_training_with(Agents::Separate { cpu_slots: 4 }, 1600, 400).await;

    let mut runs = Vec::new();
    // Two runs on 2 ranks, which must have the same bits.
    for ranks in [1, 2, 4, 2] {
        let spec = specs::with(
            specs::short(&format!("on-{ranks}-ranks"), "fashion", ranks, STEPS),
            json!({
                "data": {"image_size": 16},
                "train": {"batch_size": null, "global_batch_size": 64, "seed": 7},
                "parallel": {"sync_batch_norm": true},
            }),
        );
        let id = server.submit(&spec).await;
        let job = server.wait_for_success(&id).await;
        let mut by_step = BTreeMap::<u64, Vec<f64>>::new();
        for point in server.points(&id, "loss").await {
            by_step.entry(point.step).or_default().push(point.value);
        }
        assert!(by_step.values().all(|of_step| of_step.len() == ranks as usize), "a loss from every rank");
        let losses: Vec<_> = by_step.values().map(|l| l.iter().sum::<f64>() / l.len() as f64).collect();
        assert_eq!(losses.len() as u64, STEPS);
        let accuracy = job["last"]["val_accuracy"].as_f64().expect("a validation accuracy");
        runs.push(Run { ranks, losses, accuracy, model: server.last_model(&id).await });
    }

    let Run { losses: reference, accuracy, model, .. } = &runs[0];
    assert!(reference[STEPS as usize - 1] < 0.8 * reference[0], "the loss falls: {reference:?}");
    for Run { ranks, losses, accuracy: other_accuracy, .. } in &runs[1..] {
        let (index, difference) = reference
            .iter()
            .zip(losses)
            .map(|(a, b)| (a - b).abs() / a.abs())
            .enumerate()
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .expect("steps");
        eprintln!(
            "1 rank and {ranks}: losses differ by at most {:.1e} relative (step {}), accuracy {accuracy:.4} and {other_accuracy:.4}",
            difference,
            index + 1,
        );
        assert!(difference < 1e-4, "on {ranks} ranks, step {}: {difference:.2e}", index + 1);
        assert!((accuracy - other_accuracy).abs() <= 0.005, "accuracy {accuracy} and {other_accuracy}");
    }
    for Run { ranks, model: other, .. } in &runs[1..3] {
        assert!(tensors(other) == tensors(model), "on {ranks} ranks the weights have the same bits");
    }
    let (second, fourth) = (&runs[1], &runs[3]);
    let mut losses = second.losses.iter().zip(&fourth.losses);
    assert!(losses.all(|(a, b)| a.to_bits() == b.to_bits()), "the same losses");
    assert!(second.model == fourth.model, "two runs of one job give the same model.safetensors");
    server.stop().await;
}
