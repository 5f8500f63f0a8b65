//! Attempts to sign in that failed, counted by address. A right token or code is always taken, so nobody is kept out by the attempts
//! of others behind the same address: what is limited is guessing, and what guessing writes into logs.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Failures within [`WINDOW`] that are answered as what they are; those after them are answered 429.
pub(super) const MOST: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Addresses that are remembered. With more of them at once, all that fails is answered 429.
const ADDRESSES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Attempts(Mutex<HashMap<IpAddr, (u32, Instant)>>);

/// Whoever has one IPv6 address has 2^64 of them.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_none() => {
            IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64))
        }
        other => other.to_canonical(),
    }
}

impl Attempts {
    pub(super) fn failed(&self, from: IpAddr) -> Result<(), Duration> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from = network(from);
        if known.len() >= ADDRESSES && !known.contains_key(&from) {
            known.retain(|_, (_, since)| since.elapsed() < WINDOW);
            if known.len() >= ADDRESSES {
                return Err(WINDOW);
            }
        }
        let (count, since) = known.entry(from).or_insert_with(|| (0, Instant::now()));
        if since.elapsed() >= WINDOW {
            (*count, *since) = (0, Instant::now());
        }
        *count = count.saturating_add(1);
        if *count <= MOST { Ok(()) } else { Err(WINDOW.saturating_sub(since.elapsed())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_failures_a_minute_of_an_address_are_told_apart_from_floods() {
        let attempts = Attempts::default();
        let (here, there): (IpAddr, IpAddr) = ([127, 0, 0, 1].into(), [10, 0, 0, 1].into());
        for _ in 0..MOST {
            assert_eq!(attempts.failed(here), Ok(()));
        }
        let wait = attempts.failed(here).expect_err("one too many");
        assert!(wait <= WINDOW && wait > Duration::ZERO, "{wait:?}");
        assert_eq!(attempts.failed(there), Ok(()), "another address");
        if let Some(long_ago) = Instant::now().checked_sub(WINDOW) {
            attempts.0.lock().unwrap().get_mut(&here).unwrap().1 = long_ago;
            assert_eq!(attempts.failed(here), Ok(()), "a minute later");
        }
    }

    #[test]
    fn addresses_that_are_remembered_have_an_end() {
        let attempts = Attempts::default();
        for n in 0..ADDRESSES as u32 {
            assert_eq!(attempts.failed(IpAddr::from(n.to_be_bytes())), Ok(()));
        }
        assert!(attempts.failed([255, 0, 0, 1].into()).is_err());
        let one: IpAddr = "2001:db8::1".parse().unwrap();
        assert_eq!(network(one), network("2001:db8::2".parse().unwrap()));
        assert_ne!(network(one), network("2001:db8:0:1::1".parse().unwrap()));
        assert_eq!(network("::ffff:10.0.0.1".parse().unwrap()), IpAddr::from([10, 0, 0, 1]));
    }
}
