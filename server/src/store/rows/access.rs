//! Tokens, sessions and the audit log.

use jiff::Timestamp;
use lockstep_protocol::access::Token;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A token and the hash by which it is recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    /// As it is shown.
    pub token: Token,
    /// SHA-256 of the token, hexadecimal.
    pub hash: String,
}

/// A browser that is signed in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// SHA-256 of what the cookie holds, hexadecimal.
    pub hash: String,
    /// The token that it stands for: it ends with it.
    pub token_id: String,
    /// When it was signed in.
    pub created_at: Timestamp,
    /// When it is signed out.
    pub expires_at: Timestamp,
}

/// Something that somebody did, or tried to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Sorts by time.
    pub id: String,
    #[schema(value_type = String)]
    /// When it was answered.
    pub at: Timestamp,
    /// Name of the token; empty for nobody.
    pub who: String,
    /// Its id; empty for nobody.
    pub token_id: String,
    /// Where the request came from.
    pub address: String,
    /// Method and route, or `sign in`.
    pub action: String,
    /// The address that was asked for; behind `: ` what was created or concerned, where the address does not say it.
    pub object: String,
    /// HTTP status of the answer.
    pub status: u16,
    /// As in `x-request-id`.
    pub request_id: String,
}
