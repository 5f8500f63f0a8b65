//! Tokens, sessions and the audit log.

use jiff::Timestamp;
use lockstep_protocol::access::Token;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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

/// A request that changed something, or tried to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Opaque. Ids sort by time.
    pub id: String,
    /// When the request was answered.
    pub at: Timestamp,
    /// Name of the person or token; empty if the caller is unknown.
    pub who: String,
    /// Id of the token; empty if the caller is unknown.
    pub token_id: String,
    /// Network address of the client.
    pub address: String,
    /// Method and route, or `sign in`.
    pub action: String,
    /// The requested path. If the path does not name the object that was created or changed, the object follows after `: `; so do the
    /// changes to a job, a person or an alias, such as `priority: 5 (was 0)`.
    pub object: String,
    /// HTTP status of the response.
    pub status: u16,
    /// Value of the header `x-request-id`.
    pub request_id: String,
}
