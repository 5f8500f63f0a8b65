//! Compares GPUs with one pipeline stage each with one CPU rank that has the whole network and as many micro-batches.

use super::{
    rows::{CASE, Case, compare, large_windows},
    *,
};

const STAGES: Case = Case { stages: 2, mesh: [1, 1, 1], ..CASE };

/// A network that can be cut before each convolution but the first, and before the linear layer.
fn chain() -> Network {
    let mut net = Network::new("a chain", 16, 3, 10);
    let mut x = net.input();
    for (number, (channels, stride)) in [(32, 1), (32, 1), (64, 2), (64, 1)].into_iter().enumerate() {
        x = net.conv(format!("conv{number}"), x, channels, 3, stride);
        x = net.batch_norm(format!("bn{number}"), x);
        x = net.relu(x);
    }
    let x = net.global_average_pool(x);
    net.linear("fc", x, 10);
    net
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_with_stages_train_as_one_rank() {
    compare(STAGES, 1e-5, 1e-3);
    compare(Case { accumulate: 2, ..STAGES }, 1e-5, 1e-3);
    compare(Case { accumulate: 5, ragged: true, ..STAGES }, 1e-5, 1e-3);
    compare(Case { accumulate: 3, network: large_windows, ..STAGES }, 1e-5, 1e-3);
    compare(Case { accumulate: 3, network: chain, ..STAGES }, 1e-5, 1e-3);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_with_stages_in_16_bits_are_close_to_one_rank() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        compare(Case { precision, accumulate: 3, ..STAGES }, 2e-2, 0.5);
    }
}

#[test]
#[ignore = "needs 4 GPUs"]
fn gpus_in_a_mesh_with_stages_train_as_one_rank() {
    compare(Case { mesh: [2, 1, 1], accumulate: 3, ragged: true, ..STAGES }, 1e-5, 1e-3);
    compare(Case { stages: 4, accumulate: 6, network: chain, ..STAGES }, 1e-5, 1e-3);
}
