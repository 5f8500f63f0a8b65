//! The errors of a rendezvous.

use std::{io, time::Duration};

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// For example, the port is taken, or some ranks did not arrive in time. The text is a phrase.
    #[error("{0}")]
    Failed(String),
    /// The connection to rank 0 broke.
    #[error("lost the connection to rank 0 at the rendezvous: {0}")]
    Lost(io::Error),
    /// This rank was asked to stop.
    #[error("asked to stop during the rendezvous")]
    Stopped,
}

impl RendezvousError {
    /// `ranks` did not arrive within `timeout`. `what` is the exchange for which they waited.
    pub(crate) fn missing(ranks: &[u32], timeout: Duration, what: &str) -> Self {
        let names: Vec<_> = ranks.iter().map(u32::to_string).collect();
        let missing = match names.as_slice() {
            [one] => format!("rank {one} has not arrived"),
            [first @ .., last] => format!("ranks {} and {last} have not arrived", first.join(", ")),
            [] => "a rank has not arrived".into(),
        };
        Self::Failed(format!("{missing} after {:.0} s ({what})", timeout.as_secs_f64()))
    }

    /// Another rank sent an unexpected message or reported a failure.
    pub(crate) fn protocol(detail: impl std::fmt::Display) -> Self {
        Self::Failed(format!("rendezvous: {detail}"))
    }
}
