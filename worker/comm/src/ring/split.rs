//! Splits a ring into groups.

use super::{
    Call, Identity, Operation, Ring,
    connect::{Addresses, Listeners, PendingRing},
};
use crate::{CommError, ProcessGroup, SingleRank};
use serde::{Deserialize, Serialize};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// Time limit for connecting. It is shorter than the time-out of a call, because live ranks connect soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum length of a reason sent to other ranks, in bytes.
const MAX_REASON_BYTES: usize = 1000;

/// A rank's request, sent to the other ranks before a split.
#[derive(Debug, Serialize, Deserialize)]
struct SplitRequest {
    color: u32,
    /// The addresses at which this rank listens, or why it cannot listen.
    addresses: Result<Addresses, String>,
}

impl Ring {
    /// Collective: as [`ProcessGroup::split`]. `build` makes a group from the ring of the ranks of `color`, unless this rank is the
    /// only one. If `build` fails on one rank, the split fails on all ranks.
    pub(crate) fn split_with(
        &self,
        color: u32,
        build: impl FnOnce(Arc<Ring>) -> Result<Arc<dyn ProcessGroup>, CommError>,
    ) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.announce(Call::empty(Operation::Split))?;
        let split_index = self.split_count.fetch_add(1, Ordering::Relaxed);
        let listeners = Listeners::bind(self.identity.local_ip);
        let addresses = listeners.as_ref().map_err(ToString::to_string);
        let addresses = addresses.and_then(|listeners| listeners.addresses().map_err(|e| e.to_string()));
        let request = serde_json::to_vec(&SplitRequest { color, addresses }).unwrap_or_default();
        let requests = self.gather_requests(&request)?;
        let joined = listeners
            .map_err(|error| failed(error.to_string()))
            .and_then(|listeners| self.join(&requests, color, split_index, listeners))
            .and_then(|ring| ring.map_or_else(|| Ok(Arc::new(SingleRank) as Arc<dyn ProcessGroup>), build));
        // The split succeeds on all ranks or on none, because otherwise a rank would wait in its new group for a rank that could
        // not join.
        let reason = joined.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let reason: String = reason.chars().take(MAX_REASON_BYTES / 4).collect();
        let reasons = self.all_gather_bytes(reason.as_bytes())?;
        match reasons.iter().position(|reason| !reason.is_empty()) {
            None => joined,
            Some(rank) => {
                let reason = String::from_utf8_lossy(&reasons[rank]);
                Err(failed(format!("rank {rank} could not join its group: {reason}")))
            }
        }
    }

    /// Collective: gathers the requests of all ranks. Fails if a rank cannot listen.
    fn gather_requests(&self, own: &[u8]) -> Result<Vec<SplitRequest>, CommError> {
        let all = self.all_gather_bytes(own)?;
        let parse = |(rank, bytes): (usize, &Vec<u8>)| -> Result<SplitRequest, CommError> {
            let request: SplitRequest = serde_json::from_slice(bytes)
                .map_err(|e| failed(format!("rank {rank} sent an invalid request: {e}")))?;
            match &request.addresses {
                Err(why) => Err(failed(format!("rank {rank} cannot listen for connections: {why}"))),
                Ok(_) => Ok(request),
            }
        };
        all.iter().enumerate().map(parse).collect()
    }

    /// Connects the ranks of `color` in a ring. `None` if this rank is the only one.
    fn join(
        &self,
        requests: &[SplitRequest],
        color: u32,
        split_index: u64,
        listeners: Listeners,
    ) -> Result<Option<Arc<Ring>>, CommError> {
        let members: Vec<(u32, Addresses)> = (0..)
            .zip(requests)
            .filter(|(_, request)| request.color == color)
            .filter_map(|(rank, request)| Some((rank, *request.addresses.as_ref().ok()?)))
            .collect();
        let rank = members.iter().position(|(rank, _)| *rank == self.rank).unwrap_or(0) as u32;
        if members.len() == 1 {
            return Ok(None);
        }
        let end = self.end.clone();
        let pending = PendingRing {
            identity: Identity {
                name: format!("{}/split {split_index} color {color}", self.identity.name),
                ..self.identity.clone()
            },
            rank,
            addresses: members.into_iter().map(|(_, addresses)| addresses).collect(),
            connect_timeout: self.timeout.min(CONNECT_TIMEOUT),
            timeout: self.timeout,
            should_stop_waiting: &|| end.has_ended(),
        };
        let ring = pending.connect(listeners).map_err(|error| failed(error.to_string()))?;
        self.end.propagate_abort_to(&ring.end);
        Ok(Some(ring))
    }
}

fn failed(detail: String) -> CommError {
    CommError::Failed { operation: Operation::Split.name(), detail }
}
