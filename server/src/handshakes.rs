//! TLS handshakes that are under way. They cost a connection and are made by nobody in particular yet, so there is a number of
//! them for each address and for all: one more ends the oldest. A client that means it needs some milliseconds, and those who
//! open many and say nothing end their own.

use crate::rate_limit::client_key;
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio_util::sync::CancellationToken;

/// Handshakes at once of one address: a thousand agents behind one come back at the same moment when the server is started again.
const PER_ADDRESS: usize = 1024;
/// Handshakes at once at most, however many connections there may be.
const ALL: usize = 2048;

/// All that are under way.
#[derive(Debug)]
pub(crate) struct Handshakes {
    all: usize,
    per_address: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// By their begin.
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

/// One that is under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Handshake {
    all: Arc<Handshakes>,
    number: u64,
    /// Cancelled when it has to make room.
    pub(crate) given_up: CancellationToken,
}

impl Handshakes {
    /// As many as leave half of the connections to those who are past it.
    pub(crate) fn new(connections: usize) -> Arc<Self> {
        let all = (connections / 2).clamp(1, ALL);
        Arc::new(Self { all, per_address: PER_ADDRESS.min(all.div_ceil(2)), open: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes one that begins; others may end for it.
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
