//! How many requests an address or a token may make: a token bucket each. A request beyond the rate is refused with the time to wait (`Retry-After`).

use std::{
    borrow::Borrow,
    collections::HashMap,
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Whoever was idle may make so many seconds' worth of requests at once.
const BURST_SECONDS: f64 = 10.0;
/// Keys that are known at once. What was not heard for [`BURST_SECONDS`] has a full bucket and is forgotten.
const KEYS: usize = 16_384;
/// How often a full table is looked through for such.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// One limit for each key, which is an address or the id of a token.
pub(crate) struct RateLimiter<K> {
    per_second: f64,
    table: Mutex<Table<K>>,
}

struct Table<K> {
    buckets: HashMap<K, Bucket>,
    /// Shared by those for whom the table has no room.
    others: Option<Bucket>,
    swept: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

/// Whoever has an IPv6 network has all addresses of a /64.
pub(crate) fn client_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

impl<K: Hash + Eq> RateLimiter<K> {
    /// `per_second` requests of a key; 0 is no limit.
    pub(crate) fn new(per_second: u32) -> Self {
        let table = Table { buckets: HashMap::new(), others: None, swept: None };
        Self { per_second: per_second.into(), table: Mutex::new(table) }
    }

    /// Takes one request of a key; the seconds until it may make the next when it has none left.
    pub(crate) fn take<Q>(&self, key: &Q) -> Result<(), u64>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.take_at(key, Instant::now())
    }

    fn take_at<Q>(&self, key: &Q, now: Instant) -> Result<(), u64>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if self.per_second == 0.0 {
            return Ok(());
        }
        let full = Bucket { left: self.per_second * BURST_SECONDS, at: now };
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.buckets.len() >= KEYS && !table.buckets.contains_key(key) {
            table.sweep(now);
        }
        let has_room = table.buckets.len() < KEYS;
        let bucket = match table.buckets.get_mut(key) {
            Some(bucket) => bucket,
            None if has_room => table.buckets.entry(key.to_owned()).or_insert(full),
            None => table.others.get_or_insert(full),
        };
        let gained = now.saturating_duration_since(bucket.at).as_secs_f64() * self.per_second;
        *bucket = Bucket { left: (bucket.left + gained).min(full.left), at: now };
        if bucket.left < 1.0 {
            return Err((((1.0 - bucket.left) / self.per_second).ceil() as u64).max(1));
        }
        bucket.left -= 1.0;
        Ok(())
    }
}

impl<K> Table<K> {
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|last| now.saturating_duration_since(last) < SWEEP_EVERY) {
            return;
        }
        self.swept = Some(now);
        self.buckets
            .retain(|_, bucket| now.saturating_duration_since(bucket.at).as_secs_f64() < BURST_SECONDS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(number: u32) -> IpAddr {
        IpAddr::from((0xcb00_0000 + number).to_be_bytes())
    }

    #[test]
    fn a_burst_then_the_rate_and_others_are_not_touched() {
        let limit = RateLimiter::<IpAddr>::new(2);
        let start = Instant::now();
        for n in 0..20 {
            assert_eq!(limit.take_at(&v4(1), start), Ok(()), "{n}");
        }
        assert_eq!(limit.take_at(&v4(1), start), Err(1));
        assert_eq!(limit.take_at(&v4(2), start), Ok(()));
        assert_eq!(limit.take_at(&v4(1), start + Duration::from_millis(499)), Err(1));
        assert_eq!(limit.take_at(&v4(1), start + Duration::from_millis(501)), Ok(()));
        // However long it was silent, it has one burst.
        let later = start + Duration::from_secs(3600);
        assert_eq!((0..30).filter(|_| limit.take_at(&v4(1), later).is_ok()).count(), 20);
        let none = RateLimiter::<IpAddr>::new(0);
        assert!((0..1000).all(|_| none.take_at(&v4(1), start).is_ok()));
    }

    #[test]
    fn the_table_has_an_end_and_makes_room_again() {
        let limit = RateLimiter::<IpAddr>::new(1);
        let start = Instant::now();
        for n in 0..KEYS as u32 {
            assert_eq!(limit.take_at(&v4(n), start), Ok(()));
        }
        // One past it: these share a bucket.
        let past = (0..1000).filter(|n| limit.take_at(&v4((1 << 20) + n), start).is_ok()).count();
        assert_eq!(past, 10);
        assert_eq!(limit.table.lock().unwrap().buckets.len(), KEYS);
        assert_eq!(limit.take_at(&v4(5), start), Ok(()), "who is known has its own");
        let later = start + Duration::from_secs(11);
        assert_eq!(limit.take_at(&v4(1 << 21), later), Ok(()));
        assert_eq!(limit.table.lock().unwrap().buckets.len(), 1);
    }

    #[test]
    fn tokens_are_limited_as_addresses_are() {
        let limit = RateLimiter::<String>::new(1);
        let start = Instant::now();
        assert_eq!((0..20).filter(|_| limit.take_at("a", start).is_ok()).count(), 10);
        assert_eq!(limit.take_at("b", start), Ok(()));
        let len = || limit.table.lock().unwrap().buckets.len();
        for n in 2..KEYS {
            assert_eq!(limit.take_at(n.to_string().as_str(), start), Ok(()));
        }
        assert_eq!(len(), KEYS);
        assert_eq!(limit.take_at("one past it", start), Ok(()));
        assert_eq!(len(), KEYS, "the table does not grow");
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one() {
        let parse = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(client_key(parse("2001:db8::1")), client_key(parse("2001:db8::ffff:1")));
        assert_ne!(client_key(parse("2001:db8::1")), client_key(parse("2001:db8:0:1::1")));
        assert_eq!(client_key(parse("::ffff:10.0.0.1")), parse("10.0.0.1"));
    }
}
