//! Attempts to sign in that failed, counted by address and by name.
//!
//! A correct token or code is accepted even above the limit, so failures of others behind the same address lock nobody out. Above the
//! limit, a failure is answered 429 instead of 401, which slows down guessing and limits its log lines.
//!
//! A password is expensive to check and may be guessed from many addresses. An attempt with a password is therefore counted before the
//! check. Above the limit, it is refused unchecked, and so is a sign-in with OpenID Connect. An address from which the person has signed in before (since the server's
//! start) has its own counter, so guessing elsewhere does not lock the person out.

use crate::{
    config::addresses::client_key,
    util::{lock, remove_oldest},
};
use std::{
    collections::HashMap,
    hash::Hash,
    net::IpAddr,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Maximum number of failures of an address within [`WINDOW`] that are answered 401. Further failures are answered 429.
pub(super) const MAX_FAILURES: u32 = 10;
/// Maximum number of failures for a name, from all addresses together.
pub(super) const MAX_FAILURES_OF_A_NAME: u32 = 30;
const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of addresses with a counter. At the limit, every failure of a further address is answered 429.
const MAX_ADDRESSES: usize = 10_000;
/// Maximum number of names with a counter, and of pairs in [`Counters::familiar`]. A further entry displaces the oldest.
const MAX_NAMES: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct SignInAttempts(Mutex<Counters>);

type Counts<K> = HashMap<K, Counter>;

/// Number of attempts within [`WINDOW`], which begins at `since`.
#[derive(Debug, Clone, Copy)]
struct Counter {
    count: u32,
    since: Instant,
}

impl Counter {
    fn new() -> Self {
        Self { count: 0, since: Instant::now() }
    }
}

#[derive(Debug, Default)]
struct Counters {
    addresses: Counts<IpAddr>,
    names: Counts<String>,
    /// Pairs of a person's name and an address from which the person has signed in.
    familiar: Counts<(String, IpAddr)>,
}

/// The time until a counter is reset. `None` if it is not full.
fn time_until_reset<K: Hash + Eq>(counts: &Counts<K>, key: &K, max: u32) -> Option<Duration> {
    let Counter { count, since } = counts.get(key)?;
    let wait = WINDOW.checked_sub(since.elapsed()).filter(|wait| !wait.is_zero())?;
    (*count >= max).then_some(wait)
}

fn add<K: Hash + Eq>(counts: &mut Counts<K>, key: K) -> Counter {
    let counter = counts.entry(key).or_insert_with(Counter::new);
    if counter.since.elapsed() >= WINDOW {
        *counter = Counter::new();
    }
    counter.count = counter.count.saturating_add(1);
    *counter
}

fn uncount<K: Hash + Eq>(counts: &mut Counts<K>, key: &K) {
    if let Some(counter) = counts.get_mut(key) {
        counter.count = counter.count.saturating_sub(1);
    }
}

/// Removes the oldest counter if there are [`MAX_NAMES`] counters, so that another can be added.
fn forget_oldest<K: Hash + Eq + Clone>(counts: &mut Counts<K>) {
    if counts.len() >= MAX_NAMES {
        remove_oldest(counts, |counter| Some(counter.since));
    }
}

impl Counters {
    /// Makes sure that an address can have a counter.
    ///
    /// # Errors
    /// There are too many addresses. The error is the time to wait.
    fn make_room(&mut self, from: IpAddr) -> Result<(), Duration> {
        if self.addresses.len() >= MAX_ADDRESSES && !self.addresses.contains_key(&from) {
            self.addresses.retain(|_, counter| counter.since.elapsed() < WINDOW);
            if self.addresses.len() >= MAX_ADDRESSES {
                return Err(WINDOW);
            }
        }
        Ok(())
    }
}

impl SignInAttempts {
    fn counters(&self) -> std::sync::MutexGuard<'_, Counters> {
        lock(&self.0)
    }

    /// Counts a failure with a token or a code.
    ///
    /// # Errors
    /// Too many attempts have failed. The error is the time to wait.
    pub(crate) fn count_failure(&self, from: IpAddr) -> Result<(), Duration> {
        let mut counters = self.counters();
        let from = client_key(from);
        counters.make_room(from)?;
        let Counter { count, since } = add(&mut counters.addresses, from);
        if count <= MAX_FAILURES { Ok(()) } else { Err(WINDOW.saturating_sub(since.elapsed())) }
    }

    /// Counts a sign-in with OpenID Connect before it is made. After a success, the caller calls [`SignInAttempts::uncount_attempt`].
    ///
    /// # Errors
    /// Too many attempts have failed. The error is the time to wait.
    pub(crate) fn count_attempt(&self, from: IpAddr) -> Result<(), Duration> {
        time_until_reset(&self.counters().addresses, &client_key(from), MAX_FAILURES).map_or(Ok(()), Err)?;
        self.count_failure(from)
    }

    /// Takes back [`SignInAttempts::count_attempt`], because the sign-in did not fail.
    pub(crate) fn uncount_attempt(&self, from: IpAddr) {
        uncount(&mut self.counters().addresses, &client_key(from));
    }

    /// Counts an attempt with a name and a password before it is checked. Returns whether the person has signed in from this address
    /// before.
    ///
    /// # Errors
    /// Too many attempts have failed. The error is the time to wait.
    pub(super) fn count_password_attempt(&self, name: &str, from: IpAddr) -> Result<bool, Duration> {
        let mut counters = self.counters();
        let from = client_key(from);
        let pair = (name.to_owned(), from);
        if counters.familiar.contains_key(&pair) {
            if let Some(wait) = time_until_reset(&counters.familiar, &pair, MAX_FAILURES) {
                return Err(wait);
            }
            add(&mut counters.familiar, pair);
            return Ok(true);
        }
        counters.make_room(from)?;
        let waits = [
            time_until_reset(&counters.addresses, &from, MAX_FAILURES),
            time_until_reset(&counters.names, &pair.0, MAX_FAILURES_OF_A_NAME),
        ];
        if let Some(wait) = waits.into_iter().flatten().max() {
            return Err(wait);
        }
        if !counters.names.contains_key(name) {
            forget_oldest(&mut counters.names);
        }
        add(&mut counters.addresses, from);
        add(&mut counters.names, pair.0);
        Ok(false)
    }

    /// Takes back [`SignInAttempts::count_password_attempt`], because the password was correct, and remembers the address as familiar.
    pub(super) fn note_success(&self, name: &str, from: IpAddr) {
        self.uncount_password_attempt(name, from);
        let mut counters = self.counters();
        let pair = (name.to_owned(), client_key(from));
        if !counters.familiar.contains_key(&pair) {
            forget_oldest(&mut counters.familiar);
            counters.familiar.insert(pair, Counter::new());
        }
    }

    /// Takes back [`SignInAttempts::count_password_attempt`], because the password was correct or was not checked.
    pub(super) fn uncount_password_attempt(&self, name: &str, from: IpAddr) {
        let mut counters = self.counters();
        let from = client_key(from);
        let pair = (name.to_owned(), from);
        if counters.familiar.contains_key(&pair) {
            uncount(&mut counters.familiar, &pair);
        } else {
            uncount(&mut counters.addresses, &from);
            uncount(&mut counters.names, &pair.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_guesses_are_forgotten_after_a_minute() {
        let Some(earlier) = Instant::now().checked_sub(WINDOW) else { return };
        let attempts = SignInAttempts::default();
        let address = |n: u32| IpAddr::from((0x0a00_0000 + n).to_be_bytes());
        for _ in 0..MAX_FAILURES {
            assert_eq!(attempts.count_failure(address(0)), Ok(()));
        }
        let wait = attempts.count_failure(address(0)).expect_err("too many failures");
        assert!(wait <= WINDOW && wait > Duration::ZERO, "{wait:?}");
        attempts.counters().addresses.get_mut(&address(0)).unwrap().since = earlier;
        assert_eq!(attempts.count_failure(address(0)), Ok(()));

        for n in 1..=MAX_FAILURES_OF_A_NAME {
            assert_eq!(attempts.count_password_attempt("ada", address(n)), Ok(false), "{n}");
        }
        assert!(attempts.count_password_attempt("ada", address(0)).is_err());
        attempts.counters().names.get_mut("ada").unwrap().since = earlier;
        assert_eq!(attempts.count_password_attempt("ada", address(0)), Ok(false));
    }

    #[test]
    fn the_number_of_remembered_addresses_is_limited() {
        let attempts = SignInAttempts::default();
        for n in 0..MAX_ADDRESSES as u32 {
            assert_eq!(attempts.count_failure(IpAddr::from(n.to_be_bytes())), Ok(()));
        }
        assert!(attempts.count_failure([255, 0, 0, 1].into()).is_err());
        assert!(attempts.count_password_attempt("ada", [255, 0, 0, 1].into()).is_err());
    }

    #[test]
    fn guesses_of_others_do_not_lock_out_known_addresses() {
        let attempts = SignInAttempts::default();
        let (office, elsewhere): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        for n in 0..100 {
            // Right passwords are not limited.
            assert_eq!(attempts.count_password_attempt("ada", office), Ok(n > 0));
            attempts.note_success("ada", office);
        }
        for _ in 0..MAX_FAILURES {
            assert_eq!(attempts.count_password_attempt("bob", office), Ok(false));
        }
        assert!(attempts.count_password_attempt("bob", office).is_err());
        for n in 3..200 {
            let _ = attempts.count_password_attempt("ada", [10, 0, 0, n].into());
        }
        assert!(attempts.count_password_attempt("ada", elsewhere).is_err());
        for n in 0..MAX_FAILURES {
            assert_eq!(attempts.count_password_attempt("ada", office), Ok(true), "{n}");
        }
        // A familiar address has a limit of ten, too.
        assert!(attempts.count_password_attempt("ada", office).is_err());
        attempts.uncount_password_attempt("ada", office);
        assert_eq!(attempts.count_password_attempt("ada", office), Ok(true));
    }

    #[test]
    fn the_number_of_remembered_names_is_limited() {
        let attempts = SignInAttempts::default();
        for n in 0..=MAX_NAMES as u32 {
            let from = IpAddr::from((n / 5).to_be_bytes());
            assert_eq!(attempts.count_password_attempt(&format!("n{n}"), from), Ok(false));
            attempts.note_success(&format!("n{n}"), from);
        }
        let counters = attempts.counters();
        assert_eq!((counters.names.len(), counters.familiar.len()), (MAX_NAMES, MAX_NAMES));
        // The oldest was removed.
        assert!(!counters.names.contains_key("n0") && counters.names.contains_key("n1"));
    }
}
