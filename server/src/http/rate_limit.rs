//! Limits of the rate of requests of an address or a token. A request beyond the rate is refused with the time to wait (`Retry-After`).

use crate::util::lock;
use governor::{
    Quota,
    clock::{Clock, DefaultClock},
    middleware::NoOpMiddleware,
    state::{InMemoryState, NotKeyed},
};
use hashlink::LruCache;
use std::{borrow::Borrow, hash::Hash, num::NonZeroU32, sync::Mutex};

/// Burst size: an idle client may make as many requests at once as the rate allows in this many seconds.
const BURST_SECS: NonZeroU32 = NonZeroU32::new(10).unwrap();
/// Maximum number of clients whose rates are known. A further client displaces the client that has been silent longest.
const MAX_KEYS: usize = 16_384;

/// The limiter of one client.
type Bucket<C> = governor::RateLimiter<NotKeyed, InMemoryState, C, NoOpMiddleware<<C as Clock>::Instant>>;

/// One limit for each key, which is an address or the id of a token.
pub(crate) struct RateLimiter<K, C: Clock = DefaultClock> {
    /// `None` if requests are not limited.
    quota: Option<Quota>,
    clock: C,
    buckets: Mutex<LruCache<K, Bucket<C>>>,
}

impl<K: Hash + Eq> RateLimiter<K> {
    /// A limit of `per_second` requests for each key; 0 means no limit.
    pub(crate) fn new(per_second: u32) -> Self {
        Self::with_clock(per_second, DefaultClock::default())
    }
}

impl<K: Hash + Eq, C: Clock + Clone> RateLimiter<K, C> {
    fn with_clock(per_second: u32, clock: C) -> Self {
        let quota = NonZeroU32::new(per_second)
            .map(|rate| Quota::per_second(rate).allow_burst(rate.saturating_mul(BURST_SECS)));
        Self { quota, clock, buckets: Mutex::new(LruCache::new(MAX_KEYS)) }
    }

    /// Counts a request of `key`.
    ///
    /// # Errors
    /// The rate is exceeded. The error is the number of seconds until the next request is allowed.
    pub(crate) fn take<Q>(&self, key: &Q) -> Result<(), u64>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let Some(quota) = self.quota else { return Ok(()) };
        let mut buckets = lock(&self.buckets);
        let checked = match buckets.get(key) {
            Some(bucket) => bucket.check(),
            None => {
                let bucket = Bucket::direct_with_clock(quota, self.clock.clone());
                let checked = bucket.check();
                buckets.insert(key.to_owned(), bucket);
                checked
            }
        };
        checked.map_err(|refused| {
            let wait = refused.wait_time_from(self.clock.now());
            (wait.as_secs_f64().ceil() as u64).max(1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use governor::clock::FakeRelativeClock;
    use std::{net::IpAddr, time::Duration};

    fn v4(number: u32) -> IpAddr {
        IpAddr::from((0xcb00_0000 + number).to_be_bytes())
    }

    #[test]
    fn each_client_may_send_a_burst_and_then_at_the_rate() {
        let clock = FakeRelativeClock::default();
        let limit = RateLimiter::<IpAddr, _>::with_clock(2, clock.clone());
        for n in 0..20 {
            assert_eq!(limit.take(&v4(1)), Ok(()), "{n}");
        }
        assert_eq!(limit.take(&v4(1)), Err(1));
        assert_eq!(limit.take(&v4(2)), Ok(()));
        clock.advance(Duration::from_millis(499));
        assert_eq!(limit.take(&v4(1)), Err(1));
        clock.advance(Duration::from_millis(2));
        assert_eq!(limit.take(&v4(1)), Ok(()));
        // Also after a long pause, only one burst is allowed.
        clock.advance(Duration::from_secs(3600));
        assert_eq!((0..30).filter(|_| limit.take(&v4(1)).is_ok()).count(), 20);
        let none = RateLimiter::<IpAddr>::new(0);
        assert!((0..1000).all(|_| none.take(&v4(1)).is_ok()));
    }

    #[test]
    fn the_client_that_was_silent_longest_is_forgotten_first() {
        let limit = RateLimiter::<String, _>::with_clock(1, FakeRelativeClock::default());
        let takes = |key: &str| (0..20).filter(|_| limit.take(key).is_ok()).count();
        assert_eq!((takes("first"), takes("second")), (10, 10));
        for n in 2..MAX_KEYS {
            assert_eq!(limit.take(n.to_string().as_str()), Ok(()));
        }
        assert_eq!(limit.take("first"), Err(1), "all clients are remembered");
        assert_eq!(limit.take("one more"), Ok(()));
        assert_eq!(limit.buckets.lock().unwrap().len(), MAX_KEYS);
        assert_eq!((takes("first"), takes("second")), (0, 10), "the second was forgotten");
    }
}
