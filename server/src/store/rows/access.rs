//! Tokens and sessions.

use jiff::Timestamp;
use lockstep_protocol::access::Token;

/// A token and the hash by which the server recognises it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    pub token: Token,
    /// SHA-256 of the token, hexadecimal.
    pub hash: String,
}

/// The session of a signed-in browser.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// SHA-256 of the cookie's value, hexadecimal.
    pub hash: String,
    /// Id of the token with whose rights the session acts, or the person's principal. The session ends when the token is revoked or the
    /// person is removed.
    pub token_id: String,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}
