//! The caller of a request.

use crate::store::{Ownership, TokenRow};
use jiff::Timestamp;
use lockstep_protocol::{
    Job,
    access::{Scope, Token},
};
use lockstep_web::layout::CurrentUser;
use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};
use tokio_util::sync::CancellationToken;

/// A token, a session, or a person. A session has the rights of its token or person.
#[derive(Debug, Clone)]
pub(crate) struct Credential {
    /// The token; of a session, the session's token; of a person, a token that represents the person.
    pub(super) token: Token,
    /// The hash of the secret; empty for a person's own credential, which has no secret.
    pub(super) hash: String,
    /// The scope, limited by the owner's role; `None` while the owner is disabled or removed.
    pub(super) scope: Option<Scope>,
    /// When the browser signed in; `None` for a token.
    pub(super) session_since: Option<Timestamp>,
    pub(super) expires_at: Option<Timestamp>,
    /// Cancelled when the credential becomes invalid. Its websockets are then closed.
    pub(super) ended: CancellationToken,
    /// When the token was last used, itself or by one of its sessions.
    pub(super) usage: Arc<Usage>,
}

/// When a token was last used.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// Time of the last use, in milliseconds since 1970; 0 if the token was never used.
    last: AtomicI64,
    /// The value of `last` that is stored in the database.
    stored: AtomicI64,
}

impl Usage {
    pub(super) fn of(token: &Token) -> Arc<Self> {
        let used = token.last_used_at.map_or(0, Timestamp::as_millisecond);
        Arc::new(Self { last: used.into(), stored: used.into() })
    }
}

impl Credential {
    pub(super) fn note_use(&self, now: Timestamp) {
        self.usage.last.fetch_max(now.as_millisecond(), Ordering::Relaxed);
    }

    /// The time of the last use, if it is not stored yet.
    pub(super) fn take_new_use(&self) -> Option<Timestamp> {
        let used = self.usage.last.load(Ordering::Relaxed);
        let stored = self.usage.stored.swap(used, Ordering::Relaxed);
        if used > stored { Timestamp::from_millisecond(used).ok() } else { None }
    }

    /// The token with the time of its last use.
    pub(super) fn token_with_use(&self) -> Token {
        let used = self.usage.last.load(Ordering::Relaxed);
        let last_used_at = (used > 0).then(|| Timestamp::from_millisecond(used).ok()).flatten();
        Token { last_used_at, ..self.token.clone() }
    }

    /// The row to store.
    pub(super) fn row(&self) -> TokenRow {
        TokenRow { token: self.token_with_use(), hash: self.hash.clone() }
    }
}

/// The caller of a request, as determined by the middleware `authorize`; `None` under `--no-auth`.
#[derive(Debug, Clone)]
pub(crate) struct Caller(pub(super) Option<Arc<Credential>>);

impl Caller {
    /// A caller under `--no-auth`.
    pub(crate) fn anybody() -> Self {
        Self(None)
    }

    /// Whether the caller has at least the scope `needed`.
    pub(crate) fn may(&self, needed: Scope) -> bool {
        self.0.as_ref().is_none_or(|c| c.scope.is_some_and(|scope| scope.allows(needed)))
    }

    /// The caller's current scope; `None` under `--no-auth`, and while the token's owner is disabled.
    pub(crate) fn scope(&self) -> Option<Scope> {
        self.0.as_ref().and_then(|c| c.scope)
    }

    /// The name of the person who is signed in or owns the token; `None` for other callers.
    pub(crate) fn person(&self) -> Option<&str> {
        self.token().and_then(|token| token.owner.as_deref())
    }

    /// The owner of the jobs and datasets that the caller creates: a person's or a token's name; `None` under `--no-auth`.
    pub(crate) fn owner(&self) -> Option<&str> {
        self.token().map(|token| token.owner.as_deref().unwrap_or(&token.name))
    }

    /// The token, also of a session; `None` under `--no-auth`.
    pub(crate) fn token(&self) -> Option<&Token> {
        self.0.as_ref().map(|c| &c.token)
    }

    /// Whether the caller sees all objects: an admin, or any caller under `--no-auth`.
    pub(crate) fn sees_all(&self) -> bool {
        self.may(Scope::Admin)
    }

    /// Whether the caller sees an object of this owner. `private`: whether the object is private.
    pub(crate) fn sees(&self, private: bool, owner: Option<&str>) -> bool {
        !private || self.sees_all() || self.owns(owner)
    }

    /// Whether the caller sees an object with this owner and privacy.
    pub(crate) fn sees_owned(&self, ownership: &Ownership) -> bool {
        self.sees(ownership.private, ownership.owner.as_deref())
    }

    /// Whether the caller sees a job.
    pub(crate) fn sees_job(&self, job: &Job) -> bool {
        self.sees(job.spec.private, job.owner.as_deref())
    }

    /// Whether the caller is this owner.
    pub(crate) fn owns(&self, owner: Option<&str>) -> bool {
        owner.is_some() && owner == self.owner()
    }

    /// The owner by which lists are filtered for the caller: they show objects that are not private, and private objects of this owner.
    /// `None` if lists show every object.
    pub(crate) fn viewer_name(&self) -> Option<String> {
        // Only a caller under `--no-auth` has no name, and that caller sees all.
        (!self.sees_all()).then(|| self.owner().unwrap_or_default().to_owned())
    }

    /// The caller's properties that pages need.
    pub(crate) fn current_user(&self) -> CurrentUser {
        CurrentUser {
            who: self.token().map(Token::who).unwrap_or_default(),
            signed_in: self.session().is_some(),
            is_admin: self.may(Scope::Admin),
            is_person: self.person().is_some(),
            reads_only: !self.may(Scope::Submit),
        }
    }

    /// When the session or token expires.
    pub(crate) fn expires_at(&self) -> Option<Timestamp> {
        self.0.as_ref()?.expires_at
    }

    /// The hash of the session's secret, if the caller uses a session.
    pub(crate) fn session(&self) -> Option<&str> {
        self.0.as_ref().filter(|c| c.session_since.is_some()).map(|c| c.hash.as_str())
    }

    /// Waits until the token is revoked or expired, or the session has ended.
    pub(crate) async fn wait_until_ended(&self) {
        match &self.0 {
            Some(credential) => credential.ended.cancelled().await,
            None => std::future::pending().await,
        }
    }
}
