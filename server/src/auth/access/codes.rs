//! Links that sign a browser in. A link has a random code, which can be used once and within ten minutes. Codes exist only in memory.

use super::secret::{self, Secret};
use crate::util::{lock, remove_oldest};
use jiff::Timestamp;
use std::{
    collections::HashMap,
    io,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Time for which a code can be used.
pub(crate) const LIFE: Duration = Duration::from_secs(600);
/// Maximum number of unused codes of a token or person. A further code invalidates the oldest.
const MAX_CODES: usize = 10;

/// The unused codes, by their hashes.
#[derive(Debug, Default)]
pub(crate) struct Codes(Mutex<HashMap<String, Code>>);

#[derive(Debug)]
struct Code {
    /// Id of the token or person that the code signs in.
    token_id: String,
    /// The latest end of the session.
    session_until: Option<Timestamp>,
    made_at: Instant,
}

impl Codes {
    /// Makes a code that signs a browser in once, within ten minutes, as a token or a person. `session_until`: the latest end of the
    /// browser's session, which is the end of the token or session that requests the code; `None` if that has no end.
    pub(crate) fn make(&self, token_id: &str, session_until: Option<Timestamp>) -> io::Result<String> {
        let secret = Secret::new_plain()?;
        let mut codes = lock(&self.0);
        codes.retain(|_, code| code.made_at.elapsed() < LIFE);
        if codes.values().filter(|code| code.token_id == token_id).count() >= MAX_CODES {
            remove_oldest(&mut codes, |code| (code.token_id == token_id).then_some(code.made_at));
        }
        let code = Code { token_id: token_id.to_owned(), session_until, made_at: Instant::now() };
        codes.insert(secret.hash, code);
        Ok(secret.text)
    }

    /// Invalidates the codes of a token or a person.
    pub(super) fn forget(&self, token_id: &str) {
        lock(&self.0).retain(|_, code| code.token_id != token_id);
    }

    /// Uses up a code. Returns the id of its token or person, and the latest end of the session.
    pub(super) fn take(&self, code: &str) -> Option<(String, Option<Timestamp>)> {
        let code = lock(&self.0).remove(&secret::hash(code))?;
        (code.made_at.elapsed() < LIFE).then_some((code.token_id, code.session_until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_can_be_used_once_expire_and_are_limited() {
        let codes = Codes::default();
        let code = codes.make("t", None).unwrap();
        assert_eq!(codes.take("another"), None);
        assert_eq!(codes.take(&code).unwrap().0, "t");
        assert_eq!(codes.take(&code), None, "it was used");
        let (mine, other) = (codes.make("t", None).unwrap(), codes.make("u", None).unwrap());
        codes.forget("t");
        assert_eq!((codes.take(&mine), codes.take(&other)), (None, Some(("u".into(), None))));

        let late = codes.make("t", None).unwrap();
        if let Some(then) = Instant::now().checked_sub(LIFE) {
            codes.0.lock().unwrap().values_mut().for_each(|code| code.made_at = then);
            assert_eq!(codes.take(&late), None, "it has expired");
        }

        let other_code = codes.make("u", None).unwrap();
        let made: Vec<_> = (0..=MAX_CODES).map(|_| codes.make("t", None).unwrap()).collect();
        assert!(codes.take(&other_code).is_some(), "codes of other tokens stay");
        assert_eq!(codes.take(&made[0]), None, "the oldest code was removed");
        assert!(made[1..].iter().all(|code| codes.take(code).is_some()));
    }
}
