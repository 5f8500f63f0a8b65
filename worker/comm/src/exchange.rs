//! Exchange of addresses and handles among ranks before they have a faster connection.

use super::{CommError, ProcessGroup, rendezvous::Store};
use std::time::Duration;

/// An all-gather of bytes, which ranks use to connect. It uses the rendezvous store or an existing group.
#[derive(Clone, Copy)]
pub enum Exchange<'a> {
    /// The attempt's rendezvous store, and the time limit for the other ranks to arrive. A rank may compile kernels first, so
    /// the limit may exceed the rendezvous time-out. A request to stop ends the wait.
    Store(&'a Store, Duration),
    /// A group that is already connected.
    Group(&'a dyn ProcessGroup),
}

impl<'a> Exchange<'a> {
    /// Returns an exchange among the ranks of `group`. It uses `store` if the group contains all ranks of the store.
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

    /// Whether this rank is asked to stop and should stop waiting for the other ranks.
    pub(crate) fn should_stop_waiting(&self) -> bool {
        match self {
            Self::Store(store, _) => store.should_stop_waiting(),
            Self::Group(_) => false,
        }
    }

    /// Collective: returns the values of all ranks, in rank order. `name` must be unique within an attempt. Errors of a
    /// store name `operation`; a group names its own operation.
    ///
    /// # Errors
    /// A rank does not arrive in time, or its connection is lost.
    pub fn all_gather_bytes(
        &self,
        operation: &'static str,
        name: &str,
        value: &[u8],
    ) -> Result<Vec<Vec<u8>>, CommError> {
        match self {
            Self::Store(store, timeout) => store
                .all_gather_within(name, value, *timeout)
                .map_err(|error| CommError::at_rendezvous(operation, error)),
            Self::Group(group) => group.all_gather_bytes(value),
        }
    }
}
