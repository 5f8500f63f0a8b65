//! Tests how ranks of a group reach each other, by an all-gather and timed all-reduces.

pub use lockstep_comm::gather::AllGatherResult;
use lockstep_comm::{CommError, ProcessGroup, gather, rendezvous::Store};
use std::time::Instant;

/// Collective: runs the test in the group `comm`, over NCCL if this rank has a GPU (`ordinal`) and the group has other ranks
/// (`store`).
///
/// # Errors
/// A rank does not respond.
pub fn measure(
    comm: &dyn ProcessGroup,
    store: Option<&Store>,
    ordinal: Option<i32>,
) -> Result<AllGatherResult, CommError> {
    let result = match (ordinal, store) {
        (Some(ordinal), Some(store)) => gather::run(store, ordinal)?,
        _ => measure_over_tcp(comm)?,
    };
    comm.barrier()?;
    Ok(result)
}

fn measure_over_tcp(comm: &dyn ProcessGroup) -> Result<AllGatherResult, CommError> {
    let mut values = vec![0.0f32; comm.size() as usize];
    comm.all_gather((&[comm.rank() as f32]).into(), (&mut values).into())?;
    // Returns the minimum and the mean duration of an all-reduce in seconds.
    let time_all_reduces = |length: usize, rounds: u32| -> Result<(f64, f64), CommError> {
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
    time_all_reduces(256, 5)?;
    // The mean counts, not the minimum, because a call whose data has already arrived returns early, and the next
    // call waits longer.
    let (_, short_secs) = time_all_reduces(256, 200)?;
    let short_us = short_secs * 1e6;
    let (long_secs, _) = time_all_reduces(4 << 20, 5)?;
    // The vector has 4 << 20 values of 4 bytes.
    let bytes_per_second = f64::from(16u32 << 20) / long_secs.max(1e-9);
    Ok(AllGatherResult { device: "CPU".into(), values, short_us, bytes_per_second, no_peer_memory: None })
}
