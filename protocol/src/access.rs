//! Access tokens (as `GET /tokens` lists them), the rights of each scope, and the audit log.

use crate::spec::named::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Id of the token in a server's data directory. Each start of the server replaces this token if it was revoked.
pub const SERVER_TOKEN: &str = "local";
/// Id of the token of the agent that the server itself starts. Replaced like [`SERVER_TOKEN`].
pub const LOCAL_AGENT_TOKEN: &str = "local-agent";

words! {
    /// The rights of a token. `submit` includes `read`, and `admin` includes both.
    #[derive(Hash, ToSchema)]
    pub enum Scope: "scope" {
        /// Read everything except other owners' private objects.
        Read = "read",
        /// Submit, change and delete jobs and datasets.
        Submit = "submit",
        /// Manage tokens and machines, read the audit log.
        Admin = "admin",
        /// Join as one agent. No other scope includes this scope, and it includes no other scope.
        Agent = "agent",
    }
}

impl Scope {
    /// Limits this scope to `other`: returns `self` if `other` includes `self`, otherwise `other`.
    #[must_use]
    pub fn at_most(self, other: Scope) -> Scope {
        if other.allows(self) { self } else { other }
    }

    /// Whether this scope includes `needed`.
    pub fn allows(self, needed: Scope) -> bool {
        match (self, needed) {
            (Scope::Agent, _) | (_, Scope::Agent) => self == needed,
            _ => self as u8 >= needed as u8,
        }
    }
}

/// A token, without its secret, which is shown only once, when the token is made. Times are RFC 3339 UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Token {
    /// Opaque id.
    pub id: String,
    /// Name for people, also in the audit log.
    pub name: String,
    pub scope: Scope,
    /// With the scope `agent`: name of the agent that may use the token.
    pub agent: Option<String>,
    /// Id of this agent; absent until an agent has used the token.
    pub agent_id: Option<String>,
    /// The person who owns the token; the token allows at most what the person's role allows. Absent: an admin made the token for a program
    /// or a machine.
    pub owner: Option<String>,
    /// Id of the owner's token with which this token was made, if any. When that token is revoked, this token is revoked, too.
    pub made_with: Option<String>,
    pub created_at: jiff::Timestamp,
    /// Time at which the token expires; absent if it does not expire.
    pub expires_at: Option<jiff::Timestamp>,
    pub revoked_at: Option<jiff::Timestamp>,
    /// Time of the last use, to the minute.
    pub last_used_at: Option<jiff::Timestamp>,
}

impl Token {
    /// A token that belongs to no person or agent and does not expire.
    pub fn of(id: String, name: String, scope: Scope, created_at: jiff::Timestamp) -> Self {
        Self {
            id,
            name,
            scope,
            agent: None,
            agent_id: None,
            owner: None,
            made_with: None,
            created_at,
            expires_at: None,
            revoked_at: None,
            last_used_at: None,
        }
    }

    /// The name of the token's holder in the audit log. A person may give a token any name, also another person's, so the owner's name comes
    /// first.
    pub fn who(&self) -> String {
        match &self.owner {
            Some(owner) if *owner != self.name => format!("{owner} ({})", self.name),
            _ => self.name.clone(),
        }
    }

    /// Whether the token is neither revoked nor expired.
    pub fn is_valid(&self, now: jiff::Timestamp) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|at| now < at)
    }
}

/// A request that changed something, or tried to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Opaque. Ids sort by time.
    pub id: String,
    /// When the request was answered.
    pub at: jiff::Timestamp,
    /// Name of the person or token; empty if the caller is unknown.
    pub who: String,
    /// Id of the token; empty if the caller is unknown.
    pub token_id: String,
    /// Network address of the client.
    pub address: String,
    /// Method and route, or `sign in`.
    pub action: String,
    /// The requested path. After `: ` follow the object that was created or changed, if the path does not name it, and the changes to a
    /// job, a person or an alias, such as `priority: 5 (was 0)`.
    pub object: String,
    /// HTTP status of the response.
    pub status: u16,
    /// Value of the header `x-request-id`.
    pub request_id: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_include_earlier_scopes_and_agent_only_itself() {
        use Scope::{Admin, Agent, Read, Submit};
        let allowed = |scope: Scope| Scope::ALL.into_iter().filter(|n| scope.allows(*n)).collect::<Vec<_>>();
        assert_eq!(allowed(Read), [Read]);
        assert_eq!(allowed(Submit), [Read, Submit]);
        assert_eq!(allowed(Admin), [Read, Submit, Admin]);
        assert_eq!(allowed(Agent), [Agent]);
        for (scope, limit, expected) in [(Admin, Read, Read), (Read, Admin, Read), (Submit, Submit, Submit)] {
            assert_eq!(scope.at_most(limit), expected);
        }
    }
}
