//! Starts the rank processes of this machine, watches them, ends them in order or by force, and says why each ended. Its callers
//! (the agent, `lockstep train`, `doctor`, `bench`) provide a [`Policy`] with what differs.
//!
//! - [`RankProcess`]: one process, started or adopted, which is signalled with what it has started
//! - [`Rank`]: a process and its records in the attempt's folder
//! - [`RankGroup`]: all of them; the ways of [`Stop`], one more urgent than the other
//! - [`failure_cause`]: which rank's end explains the others'

mod cause;
mod group;
mod launch;
mod proc_fs;
mod process;
mod rank;
mod usage;

pub use cause::{Failure, FailureCause, RankEnd, failure_cause};
pub use group::{EndDelays, Orphans, RankGroup, Stop};
pub use launch::{configs, rank_file};
pub use process::{Exit, RankProcess, UnixProcessGroup};
pub use rank::{Rank, RecordSink};
pub use usage::{RankUsage, rank_usage};

use std::{future::Future, time::Duration};

/// What a caller of [`supervise`] decides about its ranks.
pub trait Policy {
    /// The notes that the caller keeps of each rank's records.
    type Records: RecordSink;
    /// Orders that may arrive meanwhile: a signal, a message.
    type Order;
    /// Why watching fails.
    type Error;

    /// How often processes are polled.
    const POLL_EVERY: Duration;

    /// The next order; pending for ever where none can come. It may be dropped and asked for again.
    fn order(&mut self) -> impl Future<Output = Self::Order> + Send;

    /// Does what an order says.
    fn obey(&mut self, order: Self::Order, ranks: &mut RankGroup<Self::Records>);

    /// Reads what is new from the ranks; called after each poll of their processes, also the last.
    ///
    /// # Errors
    /// They cannot be watched any further; [`Orphans`] says what happens to them.
    fn observe(&mut self, ranks: &mut RankGroup<Self::Records>) -> Result<(), Self::Error>;

    /// Decides whether the ranks have to end; called until they are ending.
    fn decide(&mut self, ranks: &mut RankGroup<Self::Records>);

    /// From SIGTERM to SIGKILL; asked repeatedly, as it may depend on what ranks still do.
    fn grace(&self, ranks: &RankGroup<Self::Records>) -> Duration;
}

/// Watches ranks until all have ended, or one cannot be killed ([`RankGroup::is_unkillable`]).
///
/// # Errors
/// That of [`Policy::observe`].
pub async fn supervise<P: Policy>(policy: &mut P, ranks: &mut RankGroup<P::Records>) -> Result<(), P::Error> {
    loop {
        tokio::select! {
            order = policy.order() => policy.obey(order, ranks),
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
