//! Starts the rank processes of this machine, watches them, stops or kills them, and determines why each ended. The
//! agent and `lockstep train` have their own [`Policy`].
//!
//! - [`RankProcess`]: the process of one rank, started by this supervisor or adopted from an earlier one. Signals to it
//!   also reach the processes that it has started
//! - [`Spare`]: a process that has opened a GPU, so that a rank on this GPU starts sooner
//! - [`Rank`]: a rank's process and its records in the attempt's folder
//! - [`RankGroup`]: all ranks of an attempt, which are ended by a [`Stop`]
//! - [`failure_cause`]: finds the rank whose end explains the ends of the other ranks

mod cause;
mod group;
mod launch;
mod proc_fs;
mod process;
mod rank;
mod spare;
mod usage;

pub use cause::{Failure, FailureCause, RankEnd, failure_cause};
pub use group::{EndDelays, Orphans, RankGroup, Stop};
pub use launch::{configs, rank_file};
pub use process::{Exit, RankProcess};
pub use rank::{Rank, RecordSink};
pub use spare::Spare;
pub use usage::{RankUsage, rank_usage};

use std::{future::Future, time::Duration};

/// The decisions that a caller of [`supervise`] makes about its ranks.
pub trait Policy {
    /// Where the caller stores the records of each rank.
    type Records: RecordSink;
    /// Orders that may arrive: a signal, or a message.
    type Order;
    type Error;

    const POLL_EVERY: Duration;

    /// Waits for the next order. Never completes if there are none. Cancel safe: the future may be dropped and requested again.
    fn next_order(&mut self) -> impl Future<Output = Self::Order> + Send;

    fn obey(&mut self, order: Self::Order, ranks: &mut RankGroup<Self::Records>);

    /// Reads new records of the ranks. Called after each poll of their processes, including the last poll.
    ///
    /// # Errors
    /// The ranks cannot be watched any further. [`Orphans`] decides what happens to them.
    fn observe(&mut self, ranks: &mut RankGroup<Self::Records>) -> Result<(), Self::Error>;

    /// Decides whether the ranks must end, and if so calls [`RankGroup::stop`]. Called until the ranks are ending.
    fn decide(&mut self, ranks: &mut RankGroup<Self::Records>);

    /// Time from SIGTERM to SIGKILL. Requested repeatedly, because it may depend on what ranks are still doing.
    fn grace(&self, ranks: &RankGroup<Self::Records>) -> Duration;
}

/// Watches ranks until all have ended, or until a rank cannot be killed ([`RankGroup::is_unkillable`]).
///
/// # Errors
/// The error of [`Policy::observe`].
pub async fn supervise<P: Policy>(policy: &mut P, ranks: &mut RankGroup<P::Records>) -> Result<(), P::Error> {
    loop {
        tokio::select! {
            order = policy.next_order() => policy.obey(order, ranks),
            () = tokio::time::sleep(P::POLL_EVERY) => {}
        }
        ranks.poll();
        policy.observe(ranks)?;
        if ranks.has_ended() || ranks.is_unkillable() {
            return Ok(());
        }
        if ranks.is_stopping() {
            let grace = policy.grace(ranks);
            ranks.escalate(grace);
        } else {
            policy.decide(ranks);
        }
    }
}
