//! Agents' certificates among tokens.
//!
//! A certificate's name is bound to an agent as a token is: by a row among the tokens, whose id begins with `certificate-`. No secret
//! matches the row. Revoking the row ends the agent's connection and refuses every certificate of this name that was issued before. The
//! certificate's authority and the revocation list decide whether the certificate itself is valid.

use super::{Access, Caller, Denied, Secret};
use crate::store::TokenRow;
use jiff::Timestamp;
use lockstep_protocol::{
    access::{Scope, Token},
    limits::TOKEN_NAME_CHARS,
};

/// Prefix of the ids of certificates' rows. Ids of tokens are random or `local`.
const PREFIX: &str = "certificate-";

/// The id of the row of a certificate's name.
pub(crate) fn certificate_id(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Separates the certificate's id from the time (milliseconds since 1970) in the id of a row that records an earlier revocation.
const UNTIL: &str = " until ";

/// Whether a row belongs to a certificate.
pub(crate) fn is_certificate(token: &Token) -> bool {
    token.id.starts_with(PREFIX)
}

impl Access {
    /// The rows that record earlier revocations of a name.
    pub(crate) fn earlier_revocations(&self, name: &str) -> Vec<TokenRow> {
        let prefix = certificate_id(name) + UNTIL;
        let known = self.read();
        let past = known.tokens.values().filter(|c| c.token.id.starts_with(&prefix));
        past.map(|c| c.row()).collect()
    }

    /// Returns the caller with a valid certificate of this name. `not_before` is the beginning of its validity. Adds a row for a name that
    /// has none or was revoked.
    ///
    /// # Errors
    /// The name was revoked after `not_before`, or the system has no random bits.
    pub(crate) fn authenticate_certificate(
        &self,
        name: &str,
        not_before: Timestamp,
    ) -> Result<Caller, Denied> {
        let id = certificate_id(name);
        let find = || self.read().token_with_id(&id).cloned();
        let known = find();
        let revoked = known.as_ref().filter(|c| c.token.revoked_at.is_some());
        let earlier = self.earlier_revocations(name).into_iter().filter_map(|row| row.token.revoked_at);
        if earlier.chain(revoked.and_then(|c| c.token.revoked_at)).any(|at| at >= not_before) {
            return Err(Denied::Revoked);
        }
        let now = crate::now();
        if known.is_none() || revoked.is_some() {
            // The revoked row stays under another id and another hash, so that certificates from before the revocation stay refused.
            if let Some(mut revoked_row) = self.token(&id)
                && let Some(at) = revoked_row.token.revoked_at
            {
                revoked_row.token.id = format!("{id}{UNTIL}{}", at.as_millisecond());
                revoked_row.token.agent_id = None;
                revoked_row.hash = Secret::new_token().map_err(|_| Denied::Unknown)?.hash;
                self.put_token(revoked_row);
            }
            let label = format!("certificate {name}").chars().take(TOKEN_NAME_CHARS).collect();
            let agent = Some(name.to_owned());
            let token = Token { agent, ..Token::of(id.clone(), label, Scope::Agent, now) };
            // The secret is dropped here, so no secret matches the row. The row is stored when an agent is bound to the name.
            let hash = Secret::new_token().map_err(|_| Denied::Unknown)?.hash;
            self.put_token(TokenRow { token, hash });
        }
        let credential = find().ok_or(Denied::Unknown)?;
        credential.note_use(now);
        Ok(Caller(Some(credential)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_revocation_only_certificates_that_begin_later_are_accepted() {
        let access = Access::new(true);
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let caller = access.authenticate_certificate("node-a", at(100)).unwrap();
        let token = caller.token().unwrap();
        assert_eq!((token.agent.as_deref(), token.scope), (Some("node-a"), Scope::Agent));
        // Certificates are not counted as tokens.
        assert!(is_certificate(token) && access.count_valid_tokens() == 0);
        let mut row = access.token(&certificate_id("node-a")).unwrap();
        row.token.agent_id = Some("1".into());
        row.token.revoked_at = Some(at(200));
        access.put_token(row);
        let is_revoked =
            |begins| matches!(access.authenticate_certificate("node-a", at(begins)), Err(Denied::Revoked));
        assert!(is_revoked(100) && is_revoked(200));
        // The name can be bound again.
        let again = access.authenticate_certificate("node-a", at(201)).unwrap();
        assert_eq!(again.token().unwrap().agent_id, None);
        // Earlier certificates stay refused after a later one was used.
        assert!(is_revoked(100) && is_revoked(200));
        assert_eq!(access.earlier_revocations("node-a").len(), 1);
        assert_eq!(access.earlier_revocations("node").len(), 0);
        // Revocations are never forgotten.
        let mut row = access.token(&certificate_id("node-a")).unwrap();
        row.token.revoked_at = Some(at(300));
        access.put_token(row);
        access.remove_old_tokens(at(1_000_000));
        assert!(is_revoked(250));
    }
}
