//! Secrets and signatures as specified by Standard Webhooks.

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::hmac;
use std::io;

const PREFIX: &str = "whsec_";
/// Length of a secret: 256 bits.
const SECRET_BYTES: usize = 32;

pub(crate) fn new_secret() -> io::Result<String> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(format!("no random bits: {error}")))?;
    Ok(format!("{PREFIX}{}", STANDARD.encode(bytes)))
}

/// The header `webhook-signature` of a message. `None` if `secret` is not a valid secret.
pub(super) fn sign(secret: &str, id: &str, timestamp: i64, body: &str) -> Option<String> {
    let key = STANDARD.decode(secret.strip_prefix(PREFIX)?).ok()?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
    let tag = hmac::sign(&key, format!("{id}.{timestamp}.{body}").as_bytes());
    Some(format!("v1,{}", STANDARD.encode(tag)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_example_has_its_signature() {
        let signed = sign(
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            "{\"test\": 2432232314}",
        );
        assert_eq!(signed.as_deref(), Some("v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="));
        assert_eq!(sign("secret", "id", 0, ""), None);
        assert!(sign(&new_secret().unwrap(), "id", 0, "").is_some());
    }
}
