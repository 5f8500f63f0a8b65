//! Tests how ranks of a group reach each other, by an all-gather and timed all-reduces.

pub use lockstep_comm::gather::Gathered;
use lockstep_comm::{CommError, ProcessGroup, gather::gather, rendezvous::Store};
use std::time::Instant;

/// Collective: runs the test in a group. Uses NCCL if this rank has a GPU (`ordinal`) and there are other ranks (`store`).
///
/// # Errors
/// A rank does not respond.
pub fn measure(
    comm: &dyn ProcessGroup,
    store: Option<&Store>,
    ordinal: Option<i32>,
) -> Result<Gathered, CommError> {
    let gathered = match (ordinal, store) {
        (Some(ordinal), Some(store)) => gather(store, ordinal)?,
        _ => measure_over_tcp(comm)?,
    };
    comm.barrier()?;
    Ok(gathered)
}

fn measure_over_tcp(comm: &dyn ProcessGroup) -> Result<Gathered, CommError> {
    let mut values = vec![0.0f32; comm.size() as usize];
    comm.all_gather((&[comm.rank() as f32]).into(), (&mut values).into())?;
    // Returns the minimum and the mean duration of a call in seconds.
    let all_reduces = |length: usize, rounds: u32| -> Result<(f64, f64), CommError> {
        let mut vector = vec![0.0f32; length];
        let (mut best, mut sum) = (f64::MAX, 0.0);
        for _ in 0..rounds {
            let began = Instant::now();
            comm.all_reduce((&mut vector).into())?;
            let secs = began.elapsed().as_secs_f64();
            (best, sum) = (best.min(secs), sum + secs);
        }
        Ok((best, sum / f64::from(rounds)))
    };
    // Warm-up.
    all_reduces(256, 5)?;
    // The mean, not the minimum: a call whose data has already arrived returns early, and the next call waits longer.
    let (_, short_secs) = all_reduces(256, 200)?;
    let short_us = short_secs * 1e6;
    let (long_secs, _) = all_reduces(4 << 20, 5)?;
    // The vector has 4 << 20 values of 4 bytes.
    let bytes_per_second = f64::from(16u32 << 20) / long_secs.max(1e-9);
    Ok(Gathered { device: "CPU".into(), values, short_us, bytes_per_second, no_peer_memory: None })
}
