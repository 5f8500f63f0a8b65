//! Random secrets and their hashes.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use std::{fmt, io};
use subtle::ConstantTimeEq;

/// Prefix of tokens, by which people and secret scanners recognise them.
const PREFIX: &str = "lockstep_";
/// Number of random bytes of a secret: 256 bits.
const BYTES: usize = 32;

/// A new secret; only its hash is stored.
pub(crate) struct Secret {
    pub(crate) text: String,
    pub(crate) hash: String,
}

/// Does not show the secret, so that it does not appear in logs.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(crate) fn new_token() -> io::Result<Self> {
        Ok(Self::of(format!("{PREFIX}{}", random()?)))
    }

    /// A new secret for a cookie or a link: without the prefix of tokens.
    pub(crate) fn new_plain() -> io::Result<Self> {
        Ok(Self::of(random()?))
    }

    pub(crate) fn of(text: String) -> Self {
        Self { hash: hash(&text), text }
    }
}

fn random() -> io::Result<String> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(format!("no random bits: {error}")))?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}

/// Whether a text has the format of a token. A text of another format may have been chosen by a person, and be easy to guess.
pub(crate) fn is_token(text: &str) -> bool {
    let random = text.strip_prefix(PREFIX).and_then(|rest| URL_SAFE_NO_PAD.decode(rest).ok());
    random.is_some_and(|bytes| bytes.len() == BYTES)
}

/// SHA-256, hexadecimal.
pub(super) fn hash(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

/// Compares two secrets, or two hashes of secrets, in constant time.
pub(crate) fn is_same_secret(a: &str, b: &str) -> bool {
    a.as_bytes().ct_eq(b.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn tokens_are_random_and_hidden_in_debug_output() {
        let tokens: HashSet<String> = (0..100).map(|_| Secret::new_token().unwrap().text).collect();
        assert_eq!(tokens.len(), 100);
        for text in &tokens {
            assert!(is_token(text), "{text}");
            assert_eq!(hash(text).len(), 64);
        }
        let one = tokens.iter().next().unwrap();
        for wrong in ["", "lockstep_", "lockstep_x", "hunter2", &one[..one.len() - 2], &format!("{one}AA")] {
            assert!(!is_token(wrong), "{wrong}");
        }
        assert!(!format!("{:?}", Secret::new_token().unwrap()).contains(PREFIX));
    }
}
