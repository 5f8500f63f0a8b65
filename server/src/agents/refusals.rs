//! Log lines about refused agents. The first refusal of an agent is logged at once with the reason, and repetitions only once in a while,
//! because an agent retries every few seconds, and a scanner more often.

use crate::util::lock;
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::Mutex,
    time::{Duration, Instant},
};

/// The same refusal is logged again after this time, with the number of refusals since the last line.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of distinct refusals that are counted separately. All further refusals share an entry.
const MAX_DISTINCT: usize = 1000;

/// Address, agent, reason.
type Key = (Option<IpAddr>, String, String);

/// The recent refusals: when each was last logged, and how often it was repeated since then.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<HashMap<Key, (Instant, u64)>>);

impl Refusals {
    /// Logs that an agent was refused, or counts the refusal.
    pub(crate) fn note(&self, address: IpAddr, who: &str, why: &str) {
        if let Some(repeated) = self.count((Some(address), who.to_owned(), why.to_owned()), Instant::now()) {
            tracing::warn!(%address, agent = who, reason = why, repeated, "an agent was refused");
        }
    }

    /// Logs that an agent was disconnected because its reports cannot be stored, or counts the disconnection. The agent sends
    /// the reports again.
    pub(crate) fn note_disconnection(&self, agent: &str, why: &str) {
        if let Some(repeated) = self.count((None, agent.to_owned(), why.to_owned()), Instant::now()) {
            tracing::error!(
                agent,
                why,
                repeated,
                "an agent's connection is closed; the agent sends its reports again"
            );
        }
    }

    /// Counts a refusal. If it must be logged now, returns the number of equal refusals since the last line.
    fn count(&self, key: Key, now: Instant) -> Option<u64> {
        let mut known = lock(&self.0);
        if !known.contains_key(&key) && known.len() >= MAX_DISTINCT {
            known.retain(|_, (logged, _)| now.duration_since(*logged) < REPEAT_INTERVAL);
        }
        let key = if known.contains_key(&key) || known.len() < MAX_DISTINCT { key } else { Key::default() };
        match known.get_mut(&key) {
            Some((logged, repeated)) if now.duration_since(*logged) < REPEAT_INTERVAL => {
                *repeated += 1;
                None
            }
            Some((logged, repeated)) => {
                *logged = now;
                Some(std::mem::take(repeated))
            }
            None => {
                known.insert(key, (now, 0));
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> Key {
        (Some(IpAddr::from(n.to_be_bytes())), "node-a".into(), "it was revoked".into())
    }

    #[test]
    fn a_refusal_is_logged_once_a_minute_with_the_number_of_repeats() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.count(key(1), now), Some(0));
        for second in 1..60 {
            assert_eq!(refusals.count(key(1), now + Duration::from_secs(second)), None);
        }
        assert_eq!(refusals.count(key(2), now), Some(0));
        assert_eq!(refusals.count(key(1), now + REPEAT_INTERVAL), Some(59));
        assert_eq!(refusals.count(key(1), now + REPEAT_INTERVAL * 2), Some(0));
    }

    #[test]
    fn memory_and_lines_for_different_refusals_are_limited() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        for n in 0..MAX_DISTINCT as u32 {
            assert_eq!(refusals.count(key(n), now), Some(0));
        }
        assert_eq!(refusals.count(key(5000), now), Some(0), "one line for all above the limit");
        assert_eq!(refusals.count(key(5001), now), None);
        assert!(refusals.0.lock().unwrap().len() <= MAX_DISTINCT + 1);
        assert_eq!(refusals.count(key(5001), now + REPEAT_INTERVAL), Some(0), "old refusals are forgotten");
        assert_eq!(refusals.0.lock().unwrap().len(), 1);
    }
}
