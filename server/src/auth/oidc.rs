//! Signing in with an OpenID provider: the authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636, RFC 9700).
//!
//! The server sends a browser to the provider with a `state` that is valid once, in that browser, for ten minutes. The code that comes back
//! is exchanged for an ID token, which must pass all checks of `id_token.rs`. The provider is not contacted before the first sign-in, so
//! the server starts and runs while the provider is unreachable.
//!
//! The crate `openidconnect` is not used, because it depends on `rsa`, whose timing leak RUSTSEC-2023-0071 has no fix, on `chrono`, and on
//! about thirty crates of arithmetic. This module verifies signatures with `ring`.

mod id_token;
mod keys;
mod pending_sign_ins;
mod provider;

pub(crate) use pending_sign_ins::{LIFE as SIGN_IN_LIFE, PendingSignIn};

use crate::config::oidc::{NameClaim, OidcConfig};
use lockstep_protocol::people::{Identity, Role, name_mistake};
use pending_sign_ins::PendingSignIns;
use provider::Provider;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{io, net::IpAddr, sync::Arc};

/// Claims of an ID token, with further claims of the UserInfo endpoint.
type Claims = Map<String, Value>;

/// Why a sign-in failed. The text is shown on the sign-in page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OidcError {
    /// The provider cannot be reached now. A retry may succeed.
    Unavailable(String),
    /// The provider declined the sign-in.
    Declined(String),
    /// The provider's response failed a check.
    Refused(String),
}

/// The OpenID provider of a server.
pub(crate) struct Oidc {
    pub(crate) config: Arc<OidcConfig>,
    provider: Provider,
    sign_ins: PendingSignIns,
}

/// The parameters with which a browser returns from the provider.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Answer {
    pub(crate) state: String,
    code: Option<String>,
    error: Option<String>,
    #[serde(rename = "error_description")]
    description: Option<String>,
    /// The provider's issuer (RFC 9207).
    #[serde(rename = "iss")]
    issuer: Option<String>,
}

/// An account that the provider has signed in.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) identity: Identity,
    /// The name of a new person for this account, or why the name cannot be used.
    pub(crate) name: Result<String, String>,
    /// The role by the account's groups, or the default role. `None`: the account may not sign in.
    pub(crate) role: Option<Role>,
}

impl Oidc {
    /// # Errors
    /// The CA file cannot be used. The error is a sentence.
    pub(crate) fn new(config: OidcConfig) -> Result<Self, String> {
        let config = Arc::new(config);
        let provider = Provider::new(config.clone())?;
        Ok(Self { config, provider, sign_ins: PendingSignIns::default() })
    }

    /// The provider's name on pages.
    pub(crate) fn name(&self) -> &str {
        self.config.name.as_deref().unwrap_or_else(|| self.config.issuer.host())
    }

    /// Begins a sign-in, after which the browser goes to `next`. Returns the provider's URL with all parameters, and the value of the
    /// cookie that the browser must send when it returns.
    pub(crate) async fn begin(
        &self,
        callback: &str,
        next: &str,
        from: IpAddr,
    ) -> Result<(String, String), OidcError> {
        let metadata = self.provider.metadata().await?;
        let failed = |error: io::Error| OidcError::Unavailable(error.to_string());
        let redirect = self.sign_ins.begin(callback, next, from).map_err(failed)?;
        let scope = metadata.scope(self.config.groups.as_ref());
        let mut location = metadata.authorization_endpoint.0.clone();
        location
            .query_pairs_mut()
            .append_pair("response_type", "code")
            .append_pair("client_id", &self.config.client_id)
            .append_pair("redirect_uri", callback)
            .append_pair("scope", &scope)
            .append_pair("state", &redirect.state)
            .append_pair("nonce", &redirect.nonce)
            .append_pair("code_challenge", &redirect.challenge)
            .append_pair("code_challenge_method", "S256");
        Ok((location.into(), redirect.cookie))
    }

    /// Removes and returns the sign-in that a returning browser began. `None`: unknown, expired, already used, or of another browser.
    pub(crate) fn take_sign_in(&self, state: &str, cookie: Option<&str>) -> Option<PendingSignIn> {
        self.sign_ins.take(state, cookie?)
    }

    /// Exchanges the code of a returning browser for the account that the provider has signed in.
    pub(crate) async fn finish(&self, sign_in: &PendingSignIn, answer: Answer) -> Result<Account, OidcError> {
        let refused = |detail: String| Err(OidcError::Refused(detail));
        let metadata = self.provider.metadata().await?;
        match &answer.issuer {
            Some(issuer) if issuer != self.config.issuer.as_str() => {
                return refused("The response does not come from the provider that was asked.".into());
            }
            None if metadata.sends_issuer => {
                return refused("The response does not name its provider.".into());
            }
            _ => {}
        }
        if let Some(error) = &answer.error {
            let text = error_in_words(error, answer.description.as_deref());
            return Err(OidcError::Declined(format!("{} did not sign you in: {text}", self.name())));
        }
        let Some(code) = &answer.code else {
            return refused(format!("{} sent neither a code nor an error.", self.name()));
        };
        let tokens = self.provider.exchange(&metadata, code, sign_in).await?;
        let header = id_token::header(&tokens.id_token)?;
        let (alg, kid) = (header.alg.as_str(), header.kid.as_deref());
        let check =
            |key: &keys::Key| id_token::check(&tokens.id_token, &header, key, &self.config, &sign_in.nonce);
        let key = self.provider.key(&metadata, alg, kid).await?;
        let (mut claims, subject) = match check(&key) {
            Ok(checked) => checked,
            Err(error) => {
                // The provider may have replaced the key, and kept its id.
                let replaced = self.provider.replaced_key(&metadata, alg, kid, &key).await;
                check(&replaced.ok_or(error)?)?
            }
        };
        let verified_claim = (self.config.name_claim == NameClaim::Email).then_some("email_verified");
        let groups_claim = self.config.groups.as_ref().map(|groups| groups.claim.as_str());
        let needed_claims = [Some(self.config.name_claim.as_str()), verified_claim, groups_claim];
        if needed_claims.into_iter().flatten().any(|claim| !claims.contains_key(claim)) {
            self.provider.add_user_info(&metadata, &tokens, &subject, &mut claims).await?;
        }
        let identity = Identity { issuer: self.config.issuer.as_str().to_owned(), subject };
        Ok(Account { identity, name: self.name_of(&claims), role: self.role_of(&claims) })
    }

    fn name_of(&self, claims: &Claims) -> Result<String, String> {
        let claim = self.config.name_claim;
        let Some(name) = claims.get(claim.as_str()).and_then(Value::as_str) else {
            return Err(format!("{} does not say your {claim}", self.name()));
        };
        if claim == NameClaim::Email {
            let verified = claims.get("email_verified");
            // Some providers send a string instead of a boolean.
            if !verified.is_some_and(|v| v == &Value::Bool(true) || v.as_str() == Some("true")) {
                return Err(format!("{} has not verified your e-mail address", self.name()));
            }
        }
        let name = name.to_lowercase();
        name_mistake(&name).map_or(Ok(name), |detail| {
            Err(format!("your {claim} cannot be your name on this server: a name {detail}"))
        })
    }

    /// The role by the account's groups. An account in none of the groups has the default role.
    fn role_of(&self, claims: &Claims) -> Option<Role> {
        let Some(groups) = &self.config.groups else { return self.config.role };
        let is_in = |group: &Option<String>| match (group, claims.get(&groups.claim)) {
            (Some(group), Some(Value::Array(all))) => all.iter().any(|name| name.as_str() == Some(group)),
            (Some(group), Some(Value::String(name))) => name == group,
            _ => false,
        };
        if is_in(&groups.admin) {
            Some(Role::Admin)
        } else if is_in(&groups.member) {
            Some(Role::Member)
        } else {
            self.config.role
        }
    }
}

/// An OAuth error (RFC 6749, 4.1.2.1 and 5.2) with the provider's description.
fn error_in_words(error: &str, description: Option<&str>) -> String {
    let known = match error {
        "access_denied" => "the sign-in was cancelled there, or you may not use this server",
        "invalid_grant" => "the code was used already, or is too old; sign in again",
        "invalid_client" => {
            "it does not accept this server's client id and secret; an admin has to check them"
        }
        "unauthorized_client" | "invalid_request" | "invalid_scope" | "unsupported_response_type" => {
            "it refuses this server's kind of request; an admin has to check the client's registration there"
        }
        "server_error" | "temporarily_unavailable" => "it fails at the moment; try again later",
        "login_required" | "interaction_required" | "consent_required" | "account_selection_required" => {
            "it needs you to sign in or to agree there first"
        }
        _ => "",
    };
    let cleaned = |text: &str| text.chars().filter(|c| !c.is_control()).take(200).collect::<String>();
    let description = description.map(|text| format!(": {}", cleaned(text))).unwrap_or_default();
    match known {
        "" => format!("{}{description}", cleaned(error)),
        known => format!("{known} ({}{description})", cleaned(error)),
    }
}
