//! Sign-ins in progress: browsers that were sent to the provider and have not returned. They are only in memory.

use crate::{
    auth::access::{Secret, is_same_secret},
    config::addresses::client_key,
    util::lock,
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
pub(super) struct OpenRequests(Mutex<HashMap<String, OpenRequest>>);

/// A sign-in in progress.
#[derive(Debug, Clone)]
pub(crate) struct OpenRequest {
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

impl OpenRequests {
    pub(super) fn begin(&self, callback: &str, next: &str, from: IpAddr) -> io::Result<RedirectValues> {
        let (state, cookie) = (Secret::new_plain()?, Secret::new_plain()?);
        let (nonce, verifier) = (Secret::new_plain()?.text, Secret::new_plain()?.text);
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest(verifier.as_bytes()));
        let from = client_key(from);
        let request = OpenRequest {
            nonce: nonce.clone(),
            verifier,
            callback: callback.to_owned(),
            next: next.to_owned(),
            cookie_hash: cookie.hash,
            from,
            since: Instant::now(),
        };
        let mut open = lock(&self.0);
        if open.values().filter(|request| request.from == from).count() >= MAX_PER_ADDRESS {
            forget_oldest(&mut open, |request| request.from == from);
        } else if open.len() >= MAX_SIGN_INS {
            forget_oldest(&mut open, |_| true);
        }
        open.insert(state.hash, request);
        Ok(RedirectValues { state: state.text, nonce, challenge, cookie: cookie.text })
    }

    /// Takes the sign-in with this `state`, if the browser has its cookie. With another cookie the sign-in stays, so that a person who has
    /// only seen the URL cannot end it.
    pub(super) fn take(&self, state: &str, cookie: &str) -> Option<OpenRequest> {
        let mut open = lock(&self.0);
        // Looked up by the hash, so that the time of the lookup does not reveal anything about a state.
        let state = Secret::of(state.to_owned()).hash;
        let request = open.get(&state)?;
        if !is_same_secret(&request.cookie_hash, &Secret::of(cookie.to_owned()).hash) {
            return None;
        }
        open.remove(&state).filter(|request| request.since.elapsed() < LIFE)
    }
}

/// Removes the oldest of the sign-ins for which `is_candidate` is true.
fn forget_oldest(open: &mut HashMap<String, OpenRequest>, is_candidate: impl Fn(&OpenRequest) -> bool) {
    let candidates = open.iter().filter(|(_, request)| is_candidate(request));
    let oldest = candidates.min_by_key(|(_, request)| request.since);
    if let Some(state) = oldest.map(|(state, _)| state.clone()) {
        open.remove(&state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(requests: &OpenRequests, from: u32) -> RedirectValues {
        requests.begin("https://here/login/oidc/callback", "/jobs", IpAddr::from(from.to_be_bytes())).unwrap()
    }

    #[test]
    fn a_request_can_be_used_once_in_its_browser_for_ten_minutes() {
        let requests = OpenRequests::default();
        let (mine, other) = (begin(&requests, 1), begin(&requests, 1));
        assert!(requests.take(&mine.state, &other.cookie).is_none(), "another browser");
        assert!(requests.take(&mine.state, "").is_none() && requests.take("", &mine.cookie).is_none());
        let request = requests.take(&mine.state, &mine.cookie).expect("the request is open");
        assert_eq!((request.next.as_str(), request.nonce), ("/jobs", mine.nonce));
        assert_eq!(URL_SAFE_NO_PAD.encode(Sha256::digest(&request.verifier)), mine.challenge);
        assert!(requests.take(&mine.state, &mine.cookie).is_none(), "it was used");
        if let Some(then) = Instant::now().checked_sub(LIFE) {
            requests.0.lock().unwrap().values_mut().for_each(|request| request.since = then);
            assert!(requests.take(&other.state, &other.cookie).is_none(), "it has expired");
        }
    }

    #[test]
    fn the_oldest_open_requests_are_removed_first_per_address() {
        let requests = OpenRequests::default();
        let elsewhere = begin(&requests, 9);
        let of_one: Vec<_> = (0..=MAX_PER_ADDRESS).map(|_| begin(&requests, 1)).collect();
        let is_open = |values: &RedirectValues| {
            requests.0.lock().unwrap().contains_key(&Secret::of(values.state.clone()).hash)
        };
        assert!(!is_open(&of_one[0]) && of_one[1..].iter().all(is_open) && is_open(&elsewhere));
        let count = requests.0.lock().unwrap().len();
        for n in count..MAX_SIGN_INS {
            begin(&requests, 100 + n as u32);
        }
        assert!(is_open(&elsewhere), "at the limit");
        begin(&requests, 50);
        assert!(!is_open(&elsewhere) && requests.0.lock().unwrap().len() == MAX_SIGN_INS, "above the limit");
    }
}
