//! How members of a group exchange addresses and handles before they have a faster connection.

use super::{CommError, ProcessGroup, rendezvous::Store};
use std::time::Duration;

/// Where ranks that are about to connect exchange what they need for it: the ranks of the store, or those of the group.
#[derive(Clone, Copy)]
pub enum Exchange<'a> {
    /// The attempt's rendezvous, and how long to wait for the other ranks there. This may exceed the rendezvous timeout: a rank may compile
    /// kernels first. A rank that is asked to stop gives up waiting there.
    Store(&'a Store, Duration),
    /// The ranks of a group that is connected already.
    Group(&'a dyn ProcessGroup),
}

impl<'a> Exchange<'a> {
    /// An exchange among the ranks of `group`: at `store` where all that meet there are in it.
    pub fn of(group: &'a dyn ProcessGroup, store: Option<&'a Store>) -> Self {
        match store {
            Some(store) if store.config().world_size == group.size() => Self::Store(store, group.timeout()),
            _ => Self::Group(group),
        }
    }

    pub fn rank(&self) -> u32 {
        match self {
            Self::Store(store, _) => store.config().rank,
            Self::Group(group) => group.rank(),
        }
    }

    pub fn size(&self) -> u32 {
        match self {
            Self::Store(store, _) => store.config().world_size,
            Self::Group(group) => group.size(),
        }
    }

    /// Whether this rank is asked to stop and should give up waiting for the others.
    pub(crate) fn gives_up(&self) -> bool {
        match self {
            Self::Store(store, _) => store.gives_up(),
            Self::Group(_) => false,
        }
    }

    /// Collective: gives every rank the values of all, in rank order. `what` names the exchange and may be used once an
    /// attempt; `operation` is what an error says was attempted.
    ///
    /// # Errors
    /// Ranks do not come or are gone.
    pub fn exchange(
        &self,
        operation: &'static str,
        what: &str,
        value: &[u8],
    ) -> Result<Vec<Vec<u8>>, CommError> {
        match self {
            Self::Store(store, timeout) => store
                .exchange_within(what, value, *timeout)
                .map_err(|error| CommError::at_rendezvous(operation, error)),
            Self::Group(group) => group.all_gather_bytes(value),
        }
    }
}
