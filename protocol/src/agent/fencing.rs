//! Fencing tokens decide which attempt may write.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Orders the attempts of all jobs, and cannot be guessed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FencingToken {
    /// Grows with every attempt of any job.
    pub number: u64,
    /// Random; only the agent that received the attempt knows it.
    pub secret: u128,
}

impl FencingToken {
    /// The token of ranks that no server started.
    pub const NONE: Self = Self { number: 0, secret: 0 };

    /// The secret in its stored form.
    pub fn secret_text(self) -> String {
        format!("{:032x}", self.secret)
    }

    /// A token from its stored form; `None` if the secret is invalid.
    pub fn of(number: u64, secret: &str) -> Option<Self> {
        // `from_str_radix` would also accept a sign and fewer digits.
        let is_32_hex_digits = secret.len() == 32 && secret.bytes().all(|byte| byte.is_ascii_hexdigit());
        let secret =
            u128::from_str_radix(secret, 16).ok().filter(|secret| is_32_hex_digits && *secret != 0)?;
        Some(Self { number, secret })
    }
}

/// Shows only the number, so the secret is in no log.
impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FencingToken({})", self.number)
    }
}

/// A token with the secret 0, which no server accepts. For ranks that no server started, and for tests.
impl From<u64> for FencingToken {
    fn from(number: u64) -> Self {
        Self { number, secret: 0 }
    }
}

impl From<FencingToken> for String {
    fn from(token: FencingToken) -> String {
        format!("{}.{}", token.number, token.secret_text())
    }
}

impl TryFrom<String> for FencingToken {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let (number, secret) =
            text.split_once('.').ok_or("a fencing token is a number, a dot and a secret")?;
        let number = number.parse().map_err(|_| "a fencing token begins with its number")?;
        let has_no_secret = !secret.is_empty() && secret.bytes().all(|byte| byte == b'0');
        if has_no_secret {
            Ok(Self::from(number))
        } else {
            Self::of(number, secret).ok_or("a fencing token ends with 32 hexadecimal digits")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_back_from_its_text() {
        let token = FencingToken { number: 41, secret: 0xabc };
        let text = serde_json::to_string(&token).unwrap();
        assert_eq!(text, "\"41.00000000000000000000000000000abc\"");
        assert_eq!(serde_json::from_str::<FencingToken>(&text).unwrap(), token);
        let packed = rmp_serde::to_vec_named(&token).unwrap();
        assert_eq!(rmp_serde::from_slice::<FencingToken>(&packed).unwrap(), token);
        for wrong in [
            "41",
            "\"41\"",
            "\"41.\"",
            "\"41.abc\"",
            "\"x.00000000000000000000000000000abc\"",
            "-1",
            "\"1.+0000000000000000000000000000abc\"",
        ] {
            assert!(serde_json::from_str::<FencingToken>(wrong).is_err(), "{wrong}");
        }
        assert!(token > FencingToken { number: 40, secret: u128::MAX }, "the number decides");
        assert!(!format!("{token:?}").contains("abc"));
        assert_eq!(FencingToken::of(41, ""), None);
        assert_eq!(FencingToken::of(41, &FencingToken::NONE.secret_text()), None);
    }
}
