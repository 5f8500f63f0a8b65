//! Authentication and access control: tokens, people, sessions, OpenID Connect, owners, and the audit log.

pub(crate) mod access;
pub(crate) mod audit;
pub(crate) mod oidc;
pub(crate) mod token_file;

use crate::{
    config::ServeConfig,
    store::{Result, Store},
};
use access::{Access, Caller};
use audit::Audit;
use lockstep_protocol::{JobId, access::Scope};
use oidc::Oidc;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Name of the token in the data directory, and owner of the jobs that are submitted with this token.
pub(crate) const SERVER_TOKEN_NAME: &str = "this machine";

/// The state of authentication and access control.
pub(crate) struct Auth {
    pub(crate) store: Arc<dyn Store>,
    /// Tokens, people and sessions.
    pub(crate) access: Access,
    pub(crate) audit: Audit,
    /// The OpenID provider, if one is configured.
    pub(crate) oidc: Option<Oidc>,
    /// The name of the session's cookie. It contains the port, because browsers send a host's cookies to all its ports, where another
    /// server may run.
    pub(crate) cookie_name: String,
}

impl Auth {
    pub(crate) fn new(config: &ServeConfig, store: Arc<dyn Store>, audit: Audit, oidc: Option<Oidc>) -> Self {
        Self {
            store,
            access: Access::new(!config.no_auth),
            audit,
            oidc,
            cookie_name: format!("lockstep_{}", config.listen.port()),
        }
    }

    /// Loads people, tokens and sessions from the store.
    pub(crate) async fn load(&self) -> Result<()> {
        let sessions = self.store.sessions(crate::now()).await?;
        let (people, tokens) = (self.store.people().await?, self.store.tokens().await?);
        people.into_iter().for_each(|row| self.access.put_person(row));
        tokens.into_iter().for_each(|row| self.access.put_token(row));
        for row in sessions {
            self.access.put_session(row);
        }
        self.access.load_refused_identities(self.store.refused_identities().await?);
        Ok(())
    }

    /// The id of the job of a run from elsewhere. `id` is the job's id itself, or an id that the caller's program chose for the run. For a
    /// chosen id, the job's id is a hash of the chosen id and the owner. So the job is found without a query, and different owners may
    /// choose the same id.
    pub(crate) fn run_id(&self, caller: &Caller, id: &str) -> JobId {
        id.parse().unwrap_or_else(|_| {
            let owner = caller.owner().unwrap_or_default();
            // U+001F separates the owner from the chosen id, because no name contains it.
            let hash = Sha256::new().chain_update(owner).chain_update("\u{1f}").chain_update(id).finalize();
            let (bits, _) = hash.split_first_chunk().unwrap_or((&[0; 16], &[]));
            JobId::of_bits(u128::from_be_bytes(*bits))
        })
    }

    /// Whether a caller may change an object of this owner. The middleware `authorize` checks this for every request whose path
    /// names an object.
    pub(crate) fn may_change(&self, caller: &Caller, owner: Option<&str>) -> bool {
        caller.may(Scope::Submit) && (caller.sees_all() || !self.access.has_people() || caller.owns(owner))
    }
}
