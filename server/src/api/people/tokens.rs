//! Tokens: make, list, revoke.

use crate::api::prelude::*;
use crate::{
    api::list::{Key, List, ListParams, list_of},
    auth::{Auth, access::Secret},
    http::{authorize::AuditSubject, extract::Body},
    store::TokenRow,
};
use lockstep_protocol::{
    access::{Scope, Token},
    invisible::first_invisible,
    limits::{MAX_TOKENS, TOKEN_DAYS, TOKEN_NAME_CHARS},
};
use std::time::Duration;

/// Maximum number of valid tokens of a person, so that no person alone reaches the server's maximum.
const MAX_TOKENS_OF_A_PERSON: usize = 50;

/// A token to make.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewToken {
    /// The token's name, 1 to 100 characters.
    pub(crate) name: String,
    pub(crate) scope: Scope,
    /// For the scope `agent`: the agent's name or id. A token for a new name is bound to the first new agent that joins with this name.
    pub(crate) agent: Option<String>,
    /// Number of seconds until the token expires (default: never).
    pub(crate) expires_in_secs: Option<u64>,
}

/// A new token.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MadeToken {
    /// The token itself. It is shown only here, because the server stores only a hash.
    pub(crate) secret: String,
    #[serde(flatten)]
    token: Token,
}

list_of! {
    /// A page of tokens.
    TokenList
    /// Oldest first, unless `sort` is given. Tokens that are no longer valid are listed for 90 days.
    tokens: Token
}

const LIST: List<Token> = List {
    name: "tokens",
    sorts: &[
        ("created", |token| token.created_at.into()),
        ("name", |token| token.name.as_str().into()),
        ("last_used", |token| token.last_used_at.map_or(Key::Missing, Key::from)),
        ("expires", |token| token.expires_at.map_or(Key::Missing, Key::from)),
    ],
    default_sort: "created",
    id: |token| &token.id,
    created: Some(|token| token.created_at),
};

/// List tokens
///
/// Admins see all tokens, other people their own. `sort`: `created`, `name`, `last_used`, `expires`.
#[utoipa::path(get, path = "/tokens", tag = "access", params(ListParams), responses((status = 200, body = TokenList)))]
pub(crate) async fn list(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<ListParams>,
) -> Result<Json<TokenList>> {
    let mut tokens = auth.access.tokens();
    tokens.retain(|token| may_manage(token, &caller));
    Ok(Json(LIST.page(None, tokens, &params)?.into()))
}

/// Whether a caller may see and revoke a token.
fn may_manage(token: &Token, caller: &Caller) -> bool {
    caller.may(Scope::Admin) || is_owned_by(token, caller)
}

/// Whether a token belongs to the person who makes the request.
pub(super) fn is_owned_by(token: &Token, caller: &Caller) -> bool {
    token.owner.is_some() && token.owner.as_deref() == caller.person()
}

/// Returns the token of a request, or the token with which its session was begun; `None` if the session was begun with a password or an
/// OpenID provider.
fn request_token(auth: &Auth, caller: &Caller) -> Option<Token> {
    auth.access.token(&caller.token()?.id).map(|row| row.token)
}

/// Make a token
///
/// A person makes personal tokens. A personal token has at most the rights and lifetime of the request that makes it. The token is revoked
/// when the person is removed, and when the token of that request is revoked. A personal token with the scope `read` cannot make tokens.
/// Only admins make tokens that belong to no person, for programs and machines.
#[utoipa::path(post, path = "/tokens", tag = "access", request_body = NewToken,
    responses((status = 201, body = MadeToken), (status = 409, body = Problem, description = "There are 5000 valid tokens, or a person has the name")))]
pub(crate) async fn create(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Body(new, _): Body<NewToken>,
) -> Result<(StatusCode, Extension<AuditSubject>, Json<MadeToken>)> {
    let (scope, name) = (new.scope, new.name.clone());
    let made = make(&auth, &caller, new).await?;
    let subject = AuditSubject(format!("{scope} {} {name:?}", made.token.id));
    Ok((StatusCode::CREATED, Extension(subject), Json(made)))
}

pub(crate) async fn make(auth: &Auth, caller: &Caller, new: NewToken) -> Result<MadeToken> {
    let mistake = |pointer: &str, detail: &str| Err(Error::invalid(pointer, detail));
    if new.name.trim().is_empty()
        || new.name.chars().count() > TOKEN_NAME_CHARS
        || first_invisible(&new.name).is_some()
    {
        return mistake("/name", &format!("must have 1 to {TOKEN_NAME_CHARS} plain characters"));
    }
    let max_secs = u64::from(TOKEN_DAYS) * 24 * 3600;
    if new.expires_in_secs.is_some_and(|secs| !(1..=max_secs).contains(&secs)) {
        return mistake("/expires_in_secs", &format!("must be 1 to {max_secs} ({TOKEN_DAYS} days)"));
    }
    let (agent, agent_id) = match (new.scope, &new.agent) {
        (Scope::Agent, Some(agent))
            if agent.trim().is_empty() || agent.len() > 100 || first_invisible(agent).is_some() =>
        {
            return mistake("/agent", "must have 1 to 100 plain characters");
        }
        (Scope::Agent, Some(agent)) => {
            let (name, id) = find_agent(auth, agent).await?;
            (Some(name), id)
        }
        (Scope::Agent, None) => {
            return mistake("/agent", "is missing; give the name of the agent that will use this token");
        }
        (_, Some(_)) => return mistake("/agent", "must be absent, unless the token's scope is agent"),
        (_, None) => (None, None),
    };
    if let Some(own) = caller.scope()
        && !own.allows(new.scope)
        && !caller.may(Scope::Admin)
    {
        return mistake("/scope", &format!("may be at most {own}, which is your own scope"));
    }
    let now = crate::now();
    let expires_at = new.expires_in_secs.map(|secs| now + Duration::from_secs(secs));
    // If a personal token makes the new token, the new token is revoked with it.
    let made_with = request_token(auth, caller).filter(|token| token.owner.is_some());
    if made_with.as_ref().is_some_and(|token| token.scope == Scope::Read) {
        let detail = "a token with the scope read cannot make tokens; sign in with your password, or use a token with the scope submit";
        return Err(Error::Forbidden(detail.into()));
    }
    let latest_expiry =
        caller.token().and_then(|token| token.expires_at).filter(|_| !caller.may(Scope::Admin));
    if latest_expiry.is_some_and(|latest| expires_at.is_none_or(|at| at > latest)) {
        let detail = "must not be longer than the remaining lifetime of the token that makes this request; \
                      sign in with your password to make a token that stays valid for longer";
        return mistake("/expires_in_secs", detail);
    }
    // A machine's token has no owner, so that it stays valid when a person leaves.
    let owner = caller.person().filter(|_| new.scope != Scope::Agent).map(str::to_owned);
    let _one_at_a_time = auth.access.change_lock.lock().await;
    if let Some(owner) = &owner
        && auth.access.person(owner).is_none_or(|row| row.person.disabled_at.is_some())
    {
        return Err(Error::Forbidden(format!("{owner} may no longer use this server; ask an admin")));
    }
    if owner.is_none() && new.scope != Scope::Agent && auth.access.person(&new.name).is_some() {
        let detail = format!("{:?} is the name of a person; choose another name for the token", new.name);
        return Err(Error::Conflict(detail));
    }
    let is_of_owner = |token: &Token| owner.is_some() && token.owner == owner && token.is_valid(now);
    if auth.access.tokens().iter().filter(|token| is_of_owner(token)).count() >= MAX_TOKENS_OF_A_PERSON {
        return Err(Error::Conflict(format!(
            "you have {MAX_TOKENS_OF_A_PERSON} valid tokens already; revoke some that you do not need"
        )));
    }
    if auth.access.count_valid_tokens() >= MAX_TOKENS {
        let detail = format!("there are {MAX_TOKENS} valid tokens already; revoke some that nobody needs");
        return Err(Error::Conflict(detail));
    }
    let secret = Secret::new_token()?;
    let token = Token {
        id: uuid::Uuid::now_v7().simple().to_string(),
        name: new.name,
        scope: new.scope,
        agent,
        agent_id,
        made_with: made_with.filter(|_| owner.is_some()).map(|token| token.id),
        owner,
        created_at: now,
        expires_at,
        revoked_at: None,
        last_used_at: None,
    };
    let row = TokenRow { token: token.clone(), hash: secret.hash };
    auth.store.put_token(&row).await?;
    auth.access.put_token(row);
    Ok(MadeToken { secret: secret.text, token })
}

/// Returns the name and id of the agent with a given name or id. The id is absent for an unknown name.
async fn find_agent(auth: &Auth, agent: &str) -> Result<(String, Option<String>)> {
    let known = auth.store.agents_by_name_or_id(agent, agent).await?;
    let found = known.iter().find(|a| a.id == agent).or_else(|| known.iter().find(|a| a.name == agent));
    Ok(match found {
        Some(row) => (row.name.clone(), Some(row.id.clone())),
        // Agents use UUIDs as ids.
        None => (agent.to_owned(), uuid::Uuid::try_parse(agent).is_ok().then(|| agent.to_owned())),
    })
}

/// Revoke a token
///
/// Requests with the token are refused, and the token's websockets, sessions and login links end at once. Tokens that were made with the
/// token are revoked, too. A token can revoke itself, and other tokens with at most the same rights.
#[utoipa::path(delete, path = "/tokens/{id}", tag = "access", responses((status = 204)))]
pub(crate) async fn revoke(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    revoke_token(&auth, &caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Revokes a token.
///
/// # Errors
/// 404: no token that the caller may see has this id. 403: the token allows more than the caller's token.
pub(crate) async fn revoke_token(auth: &Auth, caller: &Caller, id: &str) -> Result<()> {
    let _one_at_a_time = auth.access.change_lock.lock().await;
    let found = auth.access.token(id).filter(|row| may_manage(&row.token, caller));
    let row = found.ok_or_else(|| Error::NotFound("no token has this id".into()))?;
    let is_weaker = |own: Token| own.id != row.token.id && !own.scope.allows(row.token.scope);
    if !caller.may(Scope::Admin) && request_token(auth, caller).is_some_and(is_weaker) {
        let detail =
            "a token cannot revoke a token that allows more; sign in with your password, or ask an admin";
        return Err(Error::Forbidden(detail.into()));
    }
    // The token, the tokens that were made with it, the tokens that were made with these, and so on.
    let mut to_revoke = vec![row];
    let tokens = auth.access.tokens();
    let mut index = 0;
    while index < to_revoke.len() {
        let id = Some(to_revoke[index].token.id.clone());
        let made = tokens.iter().filter(|token| token.made_with == id && token.revoked_at.is_none());
        to_revoke.extend(made.filter_map(|token| auth.access.token(&token.id)));
        index += 1;
    }
    // In reverse order: if a write fails, the token itself is still valid, and revoking it again also revokes the others.
    for mut row in to_revoke.into_iter().rev().filter(|row| row.token.revoked_at.is_none()) {
        row.token.revoked_at = Some(crate::now());
        auth.store.put_token(&row).await?;
        auth.access.put_token(row);
    }
    Ok(())
}
