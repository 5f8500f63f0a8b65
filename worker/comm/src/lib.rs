//! Communication among the ranks of one attempt: groups of processes and their collectives.
//!
//! Code is given groups and asks them for its rank and their size. Which ranks of the job a group has is decided where it is
//! made ([`ProcessGroup::split`]). Implementations are a TCP ring ([`ring`]), shared memory on top of it where all ranks
//! are on one machine ([`shm`]), NCCL on GPUs ([`nccl`], which also has calls on device memory in the order of a CUDA stream)
//! and a single rank.

// What a call can fail with is part of what its caller has to know.
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
pub use values::{DataType, Reduction, Values, ValuesMut};

use shm::SharedMemory;
use std::{sync::Arc, time::Duration};

/// Most bytes that a rank may give to [`ProcessGroup::all_gather_bytes`].
pub const LONGEST_MESSAGE: usize = 1 << 20;

/// The first rank that said something else than rank 0, of what each rank said.
pub fn first_to_differ(said: &[Vec<u8>]) -> Option<usize> {
    said.iter().position(|other| *other != said[0])
}

/// Memory that all ranks see, or why there is none.
pub type SharedMemoryOrReason = Result<SharedMemory, String>;

/// A group of processes, each of which is one rank of it.
///
/// *Collective* methods are called by every rank of the group, in the same order and with equal lengths, types, reductions
/// and roots; each returns when this rank's part is done. Ranks that call different ones, or with different lengths or
/// types, get [`CommError::Mismatch`] (or [`CommError::Disconnected`] where another rank found out first); one that never
/// calls is a [`CommError::TimedOut`], one that is gone a [`CommError::Disconnected`]. Every call may fail with these three and
/// with [`CommError::Aborted`], which all end the group here and at its neighbours; and with [`CommError::Invalid`], which
/// ends nothing. Buffers may be empty. In a group of one all collectives return at once.
///
/// One thread calls at a time; [`ProcessGroup::abort`] and [`ProcessGroup::check`] may come from any thread.
pub trait ProcessGroup: Send + Sync {
    /// This process's rank in the group, from 0. Not collective.
    fn rank(&self) -> u32;
    /// Ranks in the group. Not collective.
    fn size(&self) -> u32;
    /// Collective: replaces `values` by their reduction over all ranks; bit-identical on every rank.
    ///
    /// # Errors
    /// [`CommError::Invalid`] for bytes; else as said above.
    fn all_reduce(&self, values: ValuesMut<'_>, reduction: Reduction) -> Result<(), CommError>;
    /// Collective: `input` has a part for each rank, in their order; `output` gets the reduction of all ranks' parts for this
    /// one. The same bits in every run, but not always those of [`ProcessGroup::all_reduce`], which may add in another order.
    ///
    /// # Errors
    /// [`CommError::Invalid`] for bytes, or where `input` is not as long as `size` times `output`, of one type.
    fn reduce_scatter(
        &self,
        input: Values<'_>,
        output: ValuesMut<'_>,
        reduction: Reduction,
    ) -> Result<(), CommError>;
    /// Collective: `output` gets the `input` of every rank (equally long), in rank order.
    ///
    /// # Errors
    /// [`CommError::Invalid`] where `output` is not as long as `size` times `input`, of one type.
    fn all_gather(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: `input` has a part for each rank, in their order; `output` gets what each rank has for this one, in rank
    /// order.
    ///
    /// # Errors
    /// [`CommError::Invalid`] where the two are not equally long, of one type, and a multiple of `size`.
    fn all_to_all(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError>;
    /// Collective: replaces `values` by those of rank `root`.
    ///
    /// # Errors
    /// [`CommError::Invalid`] where the group has no rank `root`.
    fn broadcast(&self, values: ValuesMut<'_>, root: u32) -> Result<(), CommError>;
    /// Collective: returns when every rank has called it.
    ///
    /// # Errors
    /// As said above.
    fn barrier(&self) -> Result<(), CommError>;
    /// Not collective: gives `values` to rank `to`, which calls [`ProcessGroup::recv`] with as many of the same type.
    /// Messages from one rank to another keep their order. A short one may be on its way when this returns; a long one waits
    /// for the other side, so two ranks that both send first may wait for each other until the time-out.
    ///
    /// # Errors
    /// [`CommError::Invalid`] where the group has no rank `to`, or it is this one.
    fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError>;
    /// Not collective: replaces `values` by what rank `from` sent.
    ///
    /// # Errors
    /// [`CommError::Invalid`] where the group has no rank `from`, or it is this one. [`CommError::Mismatch`] where it sent
    /// another number of values or another type.
    fn recv(&self, values: ValuesMut<'_>, from: u32) -> Result<(), CommError>;
    /// Collective: a group of the ranks that give the same `color`, numbered by `key` and, where keys are equal, by their
    /// rank here; `None` for those that give `None`. The new group has an order of calls, a failure and an end of its own: a
    /// rank that fails in it, or aborts it, ends neither this group nor others that were split from it.
    ///
    /// # Errors
    /// [`CommError::Failed`] on every rank where any could not connect; this group can be used on then.
    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn ProcessGroup>>, CommError>;
    /// Ends what is under way here with [`CommError::Aborted`], from any thread: in this group, in the one concurrent to it,
    /// and in all that were split from either; not in the group that this one was split from. Other ranks see the connections
    /// of this group end. Not collective.
    fn abort(&self, reason: &str);
    /// Checks that the ranks which this one is connected to are alive, as far as their connections show, without sending anything:
    /// for callers that wait for ranks by other means than a call (`operation`). Not collective.
    ///
    /// # Errors
    /// One is gone, or the group was aborted.
    fn check(&self, _operation: &'static str) -> Result<(), CommError> {
        Ok(())
    }
    /// Longest wait for another rank before [`CommError::TimedOut`]. Not collective.
    fn timeout(&self) -> Duration;
    /// A second group of the same ranks whose collectives run at the same time as this one's, in an
    /// order of their own: a few statistics need not wait behind a bucket of gradients. `None`:
    /// there is only this one, and calls from several threads must keep one order by themselves.
    /// Messages of [`ProcessGroup::send`] are those of this group. The two end together. Not collective.
    fn concurrent(&self) -> Option<Arc<dyn ProcessGroup>> {
        None
    }
    /// Collective: `bytes` of zeroed memory that all ranks see, or why there is none; every rank gets the same answer.
    ///
    /// # Errors
    /// As said above.
    fn shared_memory(&self, _bytes: usize) -> Result<SharedMemoryOrReason, CommError> {
        Ok(Err("the ranks are not known to be on one machine".into()))
    }
    /// Collective: what every rank gives, in rank order; lengths may differ, up to [`LONGEST_MESSAGE`] each.
    ///
    /// # Errors
    /// [`CommError::Invalid`] on every rank where one gives more.
    fn all_gather_bytes(&self, value: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let size = self.size() as usize;
        let mut lengths = vec![0u8; 8 * size];
        self.all_gather((&(value.len() as u64).to_le_bytes()).into(), (&mut lengths).into())?;
        let lengths: Vec<u64> =
            lengths.as_chunks::<8>().0.iter().map(|length| u64::from_le_bytes(*length)).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > LONGEST_MESSAGE as u64 {
            let rank = lengths.iter().position(|length| *length == longest).unwrap_or(0);
            let detail = format!("rank {rank} gives {longest} bytes; {LONGEST_MESSAGE} at most");
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
