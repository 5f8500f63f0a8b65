//! TLS handshakes in progress. They cost a connection before the client is known, so there is a limit per address and one for all: beyond
//! it the oldest is ended. An honest client needs some milliseconds, and one that opens many and sends nothing ends its own.

use crate::http::rate_limit::client_key;
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio_util::sync::CancellationToken;

/// Handshakes of one address at a time: a thousand agents behind it reconnect at the same moment when the server restarts.
const PER_ADDRESS: usize = 1024;
/// Handshakes at a time at most, however many connections are allowed.
const ALL: usize = 2048;

/// All handshakes in progress.
#[derive(Debug)]
pub(crate) struct Handshakes {
    all: usize,
    per_address: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// In the order in which they began.
    by_age: BTreeMap<u64, (IpAddr, CancellationToken)>,
    of: HashMap<IpAddr, usize>,
}

impl Open {
    fn remove(&mut self, number: u64) -> Option<CancellationToken> {
        let (address, token) = self.by_age.remove(&number)?;
        if let Some(count) = self.of.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.of.remove(&address);
            }
        }
        Some(token)
    }

    /// Ends the oldest, or the oldest of an address.
    fn end_oldest(&mut self, of: Option<IpAddr>) {
        let oldest = self.by_age.iter().find(|(_, (address, _))| of.is_none_or(|of| *address == of));
        if let Some(token) = oldest.map(|(number, _)| *number).and_then(|number| self.remove(number)) {
            token.cancel();
        }
    }
}

/// A handshake in progress, until this is dropped.
#[derive(Debug)]
pub(crate) struct Handshake {
    all: Arc<Handshakes>,
    number: u64,
    /// Cancelled when the handshake is ended for a newer one.
    pub(crate) given_up: CancellationToken,
}

impl Handshakes {
    /// Limits that leave half of the connections to clients past their handshake.
    pub(crate) fn new(connections: usize) -> Arc<Self> {
        let all = (connections / 2).clamp(1, ALL);
        Arc::new(Self { all, per_address: PER_ADDRESS.min(all.div_ceil(2)), open: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a handshake that begins; this may end older ones.
    pub(crate) fn begin(self: &Arc<Self>, address: IpAddr) -> Handshake {
        let address = client_key(address);
        let mut open = self.lock();
        if open.of.get(&address).is_some_and(|count| *count >= self.per_address) {
            open.end_oldest(Some(address));
        }
        if open.by_age.len() >= self.all {
            open.end_oldest(None);
        }
        let number = open.next;
        open.next += 1;
        let given_up = CancellationToken::new();
        open.by_age.insert(number, (address, given_up.clone()));
        *open.of.entry(address).or_default() += 1;
        Handshake { all: self.clone(), number, given_up }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.all.lock().remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_agents_behind_one_address_come_back_at_once() {
        let all = Handshakes::new(8192);
        let address = |last: u8| IpAddr::from([203, 0, 113, last]);
        let held: Vec<_> = (0..PER_ADDRESS).map(|_| all.begin(address(1))).collect();
        assert!(held.iter().all(|h| !h.given_up.is_cancelled()));
        let _one_past = all.begin(address(1));
        assert!(held[0].given_up.is_cancelled() && !held[1].given_up.is_cancelled());
        // Others have as many.
        let others: Vec<_> = (0..ALL - PER_ADDRESS).map(|n| all.begin(address(2 + (n % 4) as u8))).collect();
        assert!(held[1..].iter().chain(&others).all(|h| !h.given_up.is_cancelled()));
        let _one_past = all.begin(address(9));
        assert!(held[1].given_up.is_cancelled() && !held[2].given_up.is_cancelled());
    }

    #[test]
    fn one_more_ends_the_oldest_of_its_address_or_of_all() {
        let all = Handshakes::new(16);
        let address = |last: u8| IpAddr::from([203, 0, 113, last]);
        // At the limit of an address, and one past it.
        let mut held: Vec<_> = (0..4).map(|_| all.begin(address(1))).collect();
        assert!(held.iter().all(|h| !h.given_up.is_cancelled()));
        held.push(all.begin(address(1)));
        assert!(held[0].given_up.is_cancelled() && !held[1].given_up.is_cancelled());
        // At the limit of all, and one past it.
        held.extend((2..6).map(|n| all.begin(address(n))));
        assert_eq!(held.iter().filter(|h| h.given_up.is_cancelled()).count(), 1);
        held.push(all.begin(address(9)));
        assert!(held[1].given_up.is_cancelled() && !held[2].given_up.is_cancelled());
        assert_eq!(all.lock().by_age.len(), 8);
        held.clear();
        assert!(
            all.lock().by_age.is_empty() && all.lock().of.is_empty(),
            "nothing is kept of those that are over"
        );
    }
}
