//! How ranks of a group reach each other: a real all-gather, and timed all-reduces.

use lockstep_comm::{CommError, ProcessGroup, Reduction, rendezvous::Store};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What the ranks found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gathered {
    /// `CPU` or `GPU`.
    pub device: String,
    /// Every rank's value: its own number.
    pub values: Vec<f32>,
    /// Time of an all-reduce of 1 KiB, in microseconds, the mean of many.
    pub short_us: f64,
    /// All-reduced bytes of a 16 MiB vector, a second.
    pub bytes_per_second: f64,
    /// Why the GPUs do not share memory, if they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_peer_memory: Option<String>,
}

/// Collective: gathers and reduces in a group, over NCCL where ranks have the GPUs `ordinal`.
///
/// # Errors
/// Ranks do not answer.
pub fn measure(
    comm: &dyn ProcessGroup,
    store: Option<&Store>,
    ordinal: Option<i32>,
) -> Result<Gathered, CommError> {
    let gathered = match (ordinal, store) {
        (Some(ordinal), Some(store)) => {
            let found = lockstep_comm::gather::gather(store, ordinal)?;
            Gathered {
                device: "GPU".into(),
                values: found.values,
                short_us: found.short_us,
                bytes_per_second: found.bytes_per_second,
                no_peer_memory: found.no_peer_memory,
            }
        }
        _ => over_tcp(comm)?,
    };
    comm.barrier()?;
    Ok(gathered)
}

fn over_tcp(comm: &dyn ProcessGroup) -> Result<Gathered, CommError> {
    let mut values = vec![0.0f32; comm.size() as usize];
    comm.all_gather((&[comm.rank() as f32]).into(), (&mut values).into())?;
    let all_reduces = |length: usize, rounds: u32| -> Result<(f64, f64), CommError> {
        let mut vector = vec![1.0f32; length];
        let (mut best, mut sum) = (f64::MAX, 0.0);
        for _ in 0..rounds {
            let began = Instant::now();
            comm.all_reduce((&mut vector).into(), Reduction::Mean)?;
            let secs = began.elapsed().as_secs_f64();
            (best, sum) = (best.min(secs), sum + secs);
        }
        Ok((best, sum / f64::from(rounds)))
    };
    all_reduces(256, 5)?;
    // Where others are ahead one finds all that it needs; the next one waits the longer for it.
    let short_us = all_reduces(256, 200)?.1 * 1e6;
    let bytes_per_second = f64::from(16u32 << 20) / all_reduces(4 << 20, 5)?.0.max(1e-9);
    Ok(Gathered { device: "CPU".into(), values, short_us, bytes_per_second, no_peer_memory: None })
}
