//! Communication among the ranks of one attempt: process groups and their collectives.
//! Callers receive a group, which knows the caller's rank and the number of ranks. [`ProcessGroup::split`] creates
//! groups of some of the ranks. The implementations are:
//!
//! - a TCP ring ([`ring`]);
//! - shared memory in addition to the ring, if all ranks run on one machine ([`shm`]);
//! - NCCL for GPUs ([`nccl`]), which operates on device memory and is enqueued on CUDA streams;
//! - a single rank ([`SingleRank`]).

// Callers need to know how a call can fail.
#![warn(clippy::missing_errors_doc)]

mod error;
mod exchange;
pub mod gather;
pub mod handshake;
pub mod nccl;
pub mod peers;
pub mod rendezvous;
pub mod ring;
pub mod shm;
mod single;
mod values;
pub mod watchdog;

pub use error::CommError;
pub use exchange::Exchange;
pub use single::SingleRank;
pub use values::{DataType, Values, ValuesMut};

use shm::SharedMemory;
use std::{sync::Arc, time::Duration};

/// Maximum number of bytes that a rank may pass to [`ProcessGroup::all_gather_bytes`].
pub const LONGEST_MESSAGE: usize = 1 << 20;

/// The first rank whose value differs from rank 0's, if any. `values` is indexed by rank.
pub fn first_differing_rank(values: &[Vec<u8>]) -> Option<usize> {
    values.iter().position(|value| *value != values[0])
}

/// Collective: whether `own` is true on any rank. The result is the same on every rank.
///
/// # Errors
/// The errors of [every call](ProcessGroup).
pub fn any_rank(group: &dyn ProcessGroup, own: bool) -> Result<bool, CommError> {
    let mut count = [f64::from(u8::from(own))];
    group.all_reduce((&mut count).into())?;
    Ok(count != [0.0])
}

/// Memory that all ranks share, or the reason why they cannot share memory.
pub type SharedMemoryOrReason = Result<SharedMemory, String>;

/// A group of processes. Each process is one rank of the group.
///
/// Every rank of the group calls *collective* methods in the same order, with equal lengths and types. Each call
/// returns when this rank's part is done. Buffers may be empty. In a group of one rank, all
/// collectives return at once.
///
/// Every call may fail with one of these errors. All except [`CommError::Invalid`] end the group on this rank and on
/// its neighbours:
///
/// - [`CommError::Mismatch`]: ranks made different calls, or passed different lengths or types. A rank may get
///   [`CommError::Disconnected`] instead if another rank noticed first.
/// - [`CommError::TimedOut`]: a rank did not make the call in time.
/// - [`CommError::Disconnected`]: a rank has exited.
/// - [`CommError::Aborted`]: the group was aborted, or another call had failed.
/// - [`CommError::Invalid`]: an argument is invalid. The group remains usable.
///
/// Only one thread may call a group at a time, except for [`ProcessGroup::abort`] and [`ProcessGroup::check`], which
/// any thread may call.
#[allow(clippy::missing_errors_doc)] // The errors of all methods are above.
pub trait ProcessGroup: Send + Sync {
    /// Not collective: this process's rank in the group, from 0.
    fn rank(&self) -> u32;
    /// Not collective: the number of ranks in the group.
    fn size(&self) -> u32;
    /// Collective: replaces `values` by the sum of all ranks' `values`. The order of additions is fixed, so the bits are
    /// the same on every rank and in every run.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the values are bytes.
    fn all_reduce(&self, values: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: `input` has one part for each rank, in rank order. `output` receives the sum of all ranks'
    /// parts for this rank. The result has the same bits in every run. [`ProcessGroup::all_reduce`] may add in another
    /// order, so its result may have other bits.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the values are bytes, the types differ, or `input` is not `size` times as long as
    /// `output`.
    fn reduce_scatter(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: `output` receives the `input` of every rank, in rank order. All inputs have the same length.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the types differ, or `output` is not `size` times as long as `input`.
    fn all_gather(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: `input` has one part for each rank, in rank order. `output` receives the part that each rank has
    /// for this rank, in rank order.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the types or lengths differ, or the length is not a multiple of `size`.
    fn all_to_all(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: replaces `values` by the `values` of rank 0.
    fn broadcast(&self, values: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: returns when every rank has called it.
    fn barrier(&self) -> Result<(), CommError>;
    /// Not collective: sends `values` to rank `to`, which calls [`ProcessGroup::recv`] with the same length and type.
    /// Messages from one rank to another arrive in order. The call may return before a short message has arrived. With
    /// a long message, the call waits for the receiver, so two ranks that both send first may block each other until
    /// the time-out.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the group has no rank `to`, or `to` is this rank.
    fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError>;
    /// Not collective: replaces `values` by the values that rank `from` sent.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the group has no rank `from`, or `from` is this rank. [`CommError::Mismatch`] if the
    /// message has another length or type.
    fn recv(&self, values: ValuesMut<'_>, from: u32) -> Result<(), CommError>;
    /// Collective: the ranks that pass the same `color` become a new group, in the same order. Calls,
    /// failures and aborts of a new group affect neither this group nor other groups split from it.
    ///
    /// # Errors
    /// [`CommError::Failed`] on every rank if any rank could not connect. This group remains usable.
    fn split(&self, color: u32) -> Result<Arc<dyn ProcessGroup>, CommError>;
    /// Not collective, may be called by any thread: ends the calls in progress with [`CommError::Aborted`]. This ends
    /// this group, its [concurrent group](ProcessGroup::concurrent_group) and all groups split from either, but not the
    /// group from which this group was split. Other ranks see that their connections to this rank close.
    fn abort(&self, reason: &str);
    /// Not collective: checks that the ranks to which this rank is connected are alive, without sending anything. For callers
    /// that wait for ranks by other means than a collective. `operation` is the name of this wait in errors.
    ///
    /// # Errors
    /// A connection to a rank is lost, or the group was aborted.
    fn check(&self, _operation: &'static str) -> Result<(), CommError> {
        Ok(())
    }
    /// Not collective: the longest wait for another rank before [`CommError::TimedOut`].
    fn timeout(&self) -> Duration;
    /// Not collective: a second group of the same ranks, whose collectives run at the same time as this group's and
    /// in their own order. For example, short statistics need not wait behind a bucket of gradients. `None` if the
    /// implementation has no second group; callers must then order the calls of several threads themselves. Messages sent
    /// over the second group are messages of this group. The two groups end together.
    fn concurrent_group(&self) -> Option<Arc<dyn ProcessGroup>> {
        None
    }
    /// Collective: allocates `bytes` of zeroed memory that all ranks share. Either all ranks get the memory, or
    /// each rank gets a reason why it is not available.
    fn shared_memory(&self, _bytes: usize) -> Result<SharedMemoryOrReason, CommError> {
        Ok(Err("the ranks are not known to be on one machine".into()))
    }
    /// Collective: gathers the `value` of every rank, in rank order. Lengths may differ, up to [`LONGEST_MESSAGE`].
    ///
    /// # Errors
    /// [`CommError::Invalid`] on every rank if any `value` is longer.
    fn all_gather_bytes(&self, value: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let size = self.size() as usize;
        let mut lengths = vec![0u8; 8 * size];
        self.all_gather((&(value.len() as u64).to_le_bytes()).into(), (&mut lengths).into())?;
        let lengths: Vec<u64> =
            lengths.as_chunks::<8>().0.iter().map(|length| u64::from_le_bytes(*length)).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > LONGEST_MESSAGE as u64 {
            let rank = lengths.iter().position(|length| *length == longest).unwrap_or(0);
            let detail = format!("rank {rank} passed {longest} bytes; at most {LONGEST_MESSAGE} are allowed");
            return Err(CommError::Invalid { operation: "all_gather_bytes", detail });
        }
        let longest = longest as usize;
        if longest == 0 {
            return Ok(vec![Vec::new(); size]);
        }
        let mut padded = value.to_vec();
        padded.resize(longest, 0);
        let mut all = vec![0u8; longest * size];
        self.all_gather((&padded).into(), (&mut all).into())?;
        Ok(all
            .chunks(longest)
            .zip(lengths)
            .map(|(value, length)| value[..length as usize].to_vec())
            .collect())
    }
}

#[cfg(test)]
mod tests;
