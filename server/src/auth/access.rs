//! Access control: tokens, sessions, people and their rights, in memory.
//!
//! All of these are also in the database, which no other server uses. So authenticating a request takes a SHA-256 and a lookup in a map,
//! but no query, and a revocation has effect at once. Tokens are 256 random bits, which cannot be guessed, so a fast hash is sufficient.
//! Slow hashes such as argon2 make guessing expensive, which protects passwords that people choose. Secrets are looked up by their hash, so
//! the time of a response says nothing about a secret.

mod caller;
mod certificates;
mod codes;
mod passwords;
mod people;
mod secret;
mod sign_in_attempts;

pub(crate) use caller::Caller;
pub(crate) use certificates::{certificate_id, is_certificate};
pub(crate) use codes::LIFE as CODE_LIFE;
pub(crate) use passwords::{Password, PasswordError};
pub(crate) use people::{NotSignedIn, SignsInAs};
pub(crate) use secret::{Secret, is_same_secret, is_token};

use crate::{
    store::{SessionRow, Store, TokenRow},
    util::remove_oldest,
};
use caller::{Credential, Usage};
use codes::Codes;
use jiff::Timestamp;
use lockstep_protocol::{
    access::{LOCAL_AGENT_TOKEN, SERVER_TOKEN, Scope, Token},
    limits::{MAX_SESSIONS, MAX_SESSIONS_OF_A_TOKEN},
    people::Identity,
};
use passwords::Passwords;
use people::KnownPerson;
use sign_in_attempts::SignInAttempts;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Duration,
};
use tokio::time::{Instant, interval, interval_at, sleep};
use tokio_util::sync::CancellationToken;

/// Lifetime of a session, after which the browser has to sign in again.
pub(crate) const SESSION_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Interval between two checks for expired tokens, whose websockets are closed.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the times of the tokens' last use are stored.
const STORE_USE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which old tokens and sessions are removed.
const PURGE_INTERVAL: Duration = Duration::from_secs(3600);
/// Time for which lists still show a token after it was revoked or has expired.
const INVALID_TOKEN_LIFE: Duration = Duration::from_secs(90 * 24 * 3600);

/// Why a token is refused. A request without a known token gets no other reason than `Unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    Unknown,
    Revoked,
    /// As `Revoked`, but a restart of the server replaces the token.
    RevokedUntilRestart,
    Expired,
    /// The person who owns the token is disabled.
    Disabled,
}

/// All tokens, sessions and people.
#[derive(Debug)]
pub(crate) struct Access {
    /// Whether callers must authenticate. False with `serve --no-auth`, where everybody may do everything.
    pub(crate) must_authenticate: bool,
    known: RwLock<Known>,
    /// Codes that sign a browser in.
    pub(crate) codes: Codes,
    /// Failed attempts to sign in.
    pub(crate) attempts: SignInAttempts,
    pub(crate) passwords: Passwords,
    /// Held while a token or a person is read, changed and stored, so that concurrent changes do not overwrite each other.
    pub(crate) change_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    /// Tokens by the hash of their secret.
    tokens: HashMap<String, Arc<Credential>>,
    /// Sessions by the hash of their cookie's value.
    sessions: HashMap<String, Arc<Credential>>,
    /// People by name.
    people: BTreeMap<String, KnownPerson>,
    /// Accounts at OpenID providers whose person was removed.
    refused_identities: HashSet<Identity>,
}

impl Access {
    pub(crate) fn new(must_authenticate: bool) -> Self {
        Self {
            must_authenticate,
            known: RwLock::default(),
            codes: Codes::default(),
            attempts: SignInAttempts::default(),
            passwords: Passwords::default(),
            change_lock: tokio::sync::Mutex::default(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a token, or replaces the token with its id. Connections of the old token are closed, unless the new one is valid and has the
    /// same secret.
    pub(crate) fn put_token(&self, row: TokenRow) {
        let now = crate::now();
        let mut known = self.write();
        let old = known.token_with_id(&row.token.id).cloned();
        if let Some(old) = &old {
            known.tokens.remove(&old.hash);
        }
        let (ended, usage) = match old {
            Some(old) if old.hash == row.hash => (old.ended.clone(), old.usage.clone()),
            old => {
                if let Some(old) = old {
                    old.ended.cancel();
                }
                (CancellationToken::new(), Usage::of(&row.token))
            }
        };
        let scope = known.scope_of(&row.token);
        if !row.token.is_valid(now) || scope.is_none() {
            ended.cancel();
        }
        let expires_at = row.token.expires_at;
        let hash = row.hash.clone();
        let token = row.token;
        let credential = Credential { token, hash, scope, session_since: None, expires_at, ended, usage };
        known.tokens.insert(row.hash, Arc::new(credential));
    }

    /// Adds a session. Returns the hash of a session that the caller must remove from the store: of a session that was ended to make room,
    /// or of the new session itself, if its token or person does not exist.
    pub(crate) fn put_session(&self, row: SessionRow) -> Option<String> {
        let mut known = self.write();
        let Some(holder) = known.session_credential(&row.token_id) else { return Some(row.hash) };
        // At the limit per token, this token's oldest session is ended. At the limit of all sessions, the oldest of all.
        let is_of_token = |s: &Credential| s.token.id == row.token_id;
        let removed = if known.sessions.values().filter(|s| is_of_token(s)).count() >= MAX_SESSIONS_OF_A_TOKEN
        {
            remove_oldest(&mut known.sessions, |s| is_of_token(s).then_some(s.session_since))
        } else if known.sessions.len() >= MAX_SESSIONS {
            remove_oldest(&mut known.sessions, |s| Some(s.session_since))
        } else {
            None
        };
        if let Some(session) = &removed {
            session.ended.cancel();
        }
        let credential = Credential {
            token: holder.token.clone(),
            hash: row.hash.clone(),
            scope: holder.scope,
            session_since: Some(row.created_at),
            expires_at: Some(holder.expires_at.map_or(row.expires_at, |end| end.min(row.expires_at))),
            // The session ends with its token.
            ended: holder.ended.child_token(),
            usage: holder.usage.clone(),
        };
        known.sessions.insert(row.hash, Arc::new(credential));
        removed.map(|session| session.hash.clone())
    }

    /// Ends a session, if it exists.
    pub(crate) fn remove_session(&self, hash: &str) {
        let removed = self.write().sessions.remove(hash);
        if let Some(session) = removed {
            session.ended.cancel();
        }
    }

    /// Closes the connections of expired tokens and sessions, and removes sessions that have ended.
    pub(crate) fn expire(&self, now: Timestamp) {
        let has_expired = |c: &Credential| c.expires_at.is_some_and(|at| at <= now);
        let mut known = self.write();
        for token in known.tokens.values().filter(|c| has_expired(c)) {
            token.ended.cancel();
        }
        known.sessions.retain(|_, session| {
            if has_expired(session) {
                session.ended.cancel();
            }
            !session.ended.is_cancelled()
        });
    }

    /// Removes tokens that became invalid at `before` or earlier. Rows of certificates stay, because the certificates still exist.
    pub(crate) fn remove_old_tokens(&self, before: Timestamp) {
        self.write().tokens.retain(|_, c| {
            let invalid_since = [c.token.revoked_at, c.token.expires_at].into_iter().flatten().min();
            invalid_since.is_none_or(|at| at > before) || is_certificate(&c.token)
        });
    }

    /// Returns the caller with this token, and notes the use of the token.
    pub(crate) fn authenticate_token(&self, secret: &str) -> Result<Caller, Denied> {
        let now = crate::now();
        let credential = self.read().tokens.get(&secret::hash(secret)).cloned().ok_or(Denied::Unknown)?;
        if credential.token.revoked_at.is_some() {
            let is_replaced = [SERVER_TOKEN, LOCAL_AGENT_TOKEN].contains(&&*credential.token.id);
            return Err(if is_replaced { Denied::RevokedUntilRestart } else { Denied::Revoked });
        }
        if credential.expires_at.is_some_and(|at| at <= now) {
            return Err(Denied::Expired);
        }
        if credential.scope.is_none() {
            return Err(Denied::Disabled);
        }
        credential.note_use(now);
        Ok(Caller(Some(credential)))
    }

    /// Returns the caller with this session cookie, and notes the use of the session's token.
    pub(crate) fn authenticate_session(&self, secret: &str) -> Option<Caller> {
        let now = crate::now();
        let known = self.read();
        let session = known.sessions.get(&secret::hash(secret))?;
        if session.ended.is_cancelled() || session.expires_at.is_some_and(|at| at <= now) {
            return None;
        }
        session.note_use(now);
        Some(Caller(Some(session.clone())))
    }

    /// All tokens, the oldest first.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        let mut tokens: Vec<_> = self.read().tokens.values().map(|c| c.token_with_use()).collect();
        tokens.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        tokens
    }

    /// The stored row of a token.
    pub(crate) fn token(&self, id: &str) -> Option<TokenRow> {
        self.read().token_with_id(id).map(|c| c.row())
    }

    /// Number of valid tokens, without certificates.
    pub(crate) fn count_valid_tokens(&self) -> usize {
        let now = crate::now();
        self.read().tokens.values().filter(|c| c.token.is_valid(now) && !is_certificate(&c.token)).count()
    }

    /// Whether a token was ever bound to this agent.
    pub(crate) fn has_agent(&self, agent_id: &str) -> bool {
        self.read().tokens.values().any(|c| c.token.agent_id.as_deref() == Some(agent_id))
    }

    /// The tokens that were used since the last call, with the times.
    pub(crate) fn take_new_uses(&self) -> Vec<(String, Timestamp)> {
        self.read().tokens.values().filter_map(|c| Some((c.token.id.clone(), c.take_new_use()?))).collect()
    }

    /// The name of the token or person with this id.
    pub(crate) fn name_of(&self, id: &str) -> Option<String> {
        self.read().session_credential(id).map(|credential| credential.token.who())
    }

    /// Uses up a code. Returns the id of the token or person that it signs in, and the latest end of the new session.
    pub(crate) fn take_login_code(&self, code: &str) -> Option<(String, Option<Timestamp>)> {
        let (id, until) = self.codes.take(code)?;
        let holder = self.read().session_credential(&id)?;
        let is_valid = holder.token.is_valid(crate::now()) && !holder.ended.is_cancelled();
        (is_valid && holder.token.scope != Scope::Agent).then_some((id, until))
    }

    /// Ends expired tokens and sessions, stores when tokens were used, and removes old tokens. Never returns.
    pub(crate) async fn run_upkeep(&self, store: &dyn Store) {
        let mut store_tick = interval_at(Instant::now() + STORE_USE_INTERVAL, STORE_USE_INTERVAL);
        let mut purge_tick = interval(PURGE_INTERVAL);
        loop {
            tokio::select! {
                () = sleep(EXPIRE_INTERVAL) => self.expire(crate::now()),
                _ = store_tick.tick() => self.store_use(store).await,
                _ = purge_tick.tick() => {
                    let now = crate::now();
                    self.remove_old_tokens(now - INVALID_TOKEN_LIFE);
                    if let Err(error) = store.purge_sessions_and_tokens(now, now - INVALID_TOKEN_LIFE).await {
                        tracing::warn!(%error, "old tokens and sessions could not be removed");
                    }
                }
            }
        }
    }

    /// Stores when tokens were last used, in one transaction.
    pub(crate) async fn store_use(&self, store: &dyn Store) {
        let used = self.take_new_uses();
        if !used.is_empty()
            && let Err(error) = store.note_token_use(&used).await
        {
            tracing::warn!(%error, "the times of the tokens' last use could not be stored");
        }
    }
}

#[cfg(test)]
mod tests;
