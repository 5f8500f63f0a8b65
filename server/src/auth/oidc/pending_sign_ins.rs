//! Sign-ins in progress: browsers that were sent to the provider and have not returned. They are only in memory.

use crate::{
    auth::access::{Secret, is_same_secret},
    config::addresses::client_key,
    util::{lock, remove_oldest},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Time limit for a browser to return from the provider.
pub(crate) const LIFE: Duration = Duration::from_secs(600);
/// Maximum number of sign-ins of an address (or IPv6 /64 network). A further sign-in removes the oldest.
const MAX_PER_ADDRESS: usize = 100;
/// Maximum number of sign-ins of all addresses. A further sign-in removes the oldest.
const MAX_SIGN_INS: usize = 10_000;

/// The sign-ins in progress, by the hash of `state`.
#[derive(Debug, Default)]
pub(super) struct PendingSignIns(Mutex<HashMap<String, PendingSignIn>>);

#[derive(Debug, Clone)]
pub(crate) struct PendingSignIn {
    pub(super) nonce: String,
    /// The code verifier of PKCE, of which the provider has the hash.
    pub(super) verifier: String,
    pub(super) callback: String,
    /// Where the browser goes after the sign-in.
    pub(crate) next: String,
    /// The hash of the cookie's value.
    cookie_hash: String,
    from: IpAddr,
    since: Instant,
}

/// The values that a browser gets when it is sent to the provider.
pub(super) struct RedirectValues {
    pub(super) state: String,
    pub(super) nonce: String,
    pub(super) challenge: String,
    pub(super) cookie: String,
}

impl PendingSignIns {
    pub(super) fn begin(&self, callback: &str, next: &str, from: IpAddr) -> io::Result<RedirectValues> {
        let (state, cookie) = (Secret::new_plain()?, Secret::new_plain()?);
        let (nonce, verifier) = (Secret::new_plain()?.text, Secret::new_plain()?.text);
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest(verifier.as_bytes()));
        let from = client_key(from);
        let sign_in = PendingSignIn {
            nonce: nonce.clone(),
            verifier,
            callback: callback.to_owned(),
            next: next.to_owned(),
            cookie_hash: cookie.hash,
            from,
            since: Instant::now(),
        };
        let mut sign_ins = lock(&self.0);
        if sign_ins.values().filter(|sign_in| sign_in.from == from).count() >= MAX_PER_ADDRESS {
            remove_oldest(&mut sign_ins, |sign_in| (sign_in.from == from).then_some(sign_in.since));
        } else if sign_ins.len() >= MAX_SIGN_INS {
            remove_oldest(&mut sign_ins, |sign_in| Some(sign_in.since));
        }
        sign_ins.insert(state.hash, sign_in);
        Ok(RedirectValues { state: state.text, nonce, challenge, cookie: cookie.text })
    }

    /// Takes the sign-in with this `state`, if the browser has its cookie. With another cookie the sign-in stays, so that a person who has
    /// only seen the URL cannot end it.
    pub(super) fn take(&self, state: &str, cookie: &str) -> Option<PendingSignIn> {
        let mut sign_ins = lock(&self.0);
        // Looked up by the hash, so that the time of the lookup does not reveal anything about a state.
        let state = Secret::of(state.to_owned()).hash;
        let sign_in = sign_ins.get(&state)?;
        if !is_same_secret(&sign_in.cookie_hash, &Secret::of(cookie.to_owned()).hash) {
            return None;
        }
        sign_ins.remove(&state).filter(|sign_in| sign_in.since.elapsed() < LIFE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(sign_ins: &PendingSignIns, from: u32) -> RedirectValues {
        sign_ins.begin("https://here/login/oidc/callback", "/jobs", IpAddr::from(from.to_be_bytes())).unwrap()
    }

    #[test]
    fn a_sign_in_can_be_finished_once_in_its_browser_for_ten_minutes() {
        let sign_ins = PendingSignIns::default();
        let (mine, other) = (begin(&sign_ins, 1), begin(&sign_ins, 1));
        assert!(sign_ins.take(&mine.state, &other.cookie).is_none(), "another browser");
        assert!(sign_ins.take(&mine.state, "").is_none() && sign_ins.take("", &mine.cookie).is_none());
        let sign_in = sign_ins.take(&mine.state, &mine.cookie).expect("the sign-in is pending");
        assert_eq!((sign_in.next.as_str(), sign_in.nonce), ("/jobs", mine.nonce));
        assert_eq!(URL_SAFE_NO_PAD.encode(Sha256::digest(&sign_in.verifier)), mine.challenge);
        assert!(sign_ins.take(&mine.state, &mine.cookie).is_none(), "it was used");
        if let Some(then) = Instant::now().checked_sub(LIFE) {
            sign_ins.0.lock().unwrap().values_mut().for_each(|sign_in| sign_in.since = then);
            assert!(sign_ins.take(&other.state, &other.cookie).is_none(), "it has expired");
        }
    }

    #[test]
    fn the_oldest_sign_ins_are_removed_first_per_address() {
        let sign_ins = PendingSignIns::default();
        let elsewhere = begin(&sign_ins, 9);
        let of_one: Vec<_> = (0..=MAX_PER_ADDRESS).map(|_| begin(&sign_ins, 1)).collect();
        let is_pending = |values: &RedirectValues| {
            sign_ins.0.lock().unwrap().contains_key(&Secret::of(values.state.clone()).hash)
        };
        assert!(!is_pending(&of_one[0]) && of_one[1..].iter().all(is_pending) && is_pending(&elsewhere));
        let count = sign_ins.0.lock().unwrap().len();
        for n in count..MAX_SIGN_INS {
            begin(&sign_ins, 100 + n as u32);
        }
        assert!(is_pending(&elsewhere), "at the limit");
        begin(&sign_ins, 50);
        // One more is above the limit.
        assert!(!is_pending(&elsewhere) && sign_ins.0.lock().unwrap().len() == MAX_SIGN_INS);
    }
}
