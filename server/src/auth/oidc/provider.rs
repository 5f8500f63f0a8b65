//! Requests to the provider: its configuration, its keys, tokens for a code, and UserInfo. Every response has a limit of size and time,
//! redirects are not followed, and a failed request is not repeated at once.

use super::{
    Claims, OidcError, error_in_words,
    keys::{self, Key},
    pending_sign_ins::PendingSignIn,
};
use crate::{
    config::oidc::{Groups, NameClaim, OidcConfig},
    util::{http_client, pem_files},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use reqwest::{Client, RequestBuilder, Url, header};
use rustls::RootCertStore;
use serde::Deserialize;
use serde_json::Value;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{Mutex, Semaphore};

/// Maximum size of a response in bytes. The largest known configuration has about ten thousand bytes.
pub(super) const MAX_BYTES: usize = 256 << 10;
const TIMEOUT: Duration = Duration::from_secs(10);
/// Configuration and keys are requested again after this time, at the next sign-in.
const MAX_AGE: Duration = Duration::from_secs(3600);
/// For this time after a failure, further callers get the same error.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of codes that are exchanged at the same time.
const MAX_EXCHANGES: usize = 32;

/// A client of the provider.
pub(super) struct Provider {
    config: Arc<OidcConfig>,
    http: Client,
    metadata: Mutex<CachedResponse<Metadata>>,
    keys: Mutex<CachedResponse<Vec<Key>>>,
    exchanges: Semaphore,
}

/// The newest response of the provider and the time of its arrival, and the newest failure and its time.
struct CachedResponse<T> {
    value: Option<(Arc<T>, Instant)>,
    last_failure: Option<(OidcError, Instant)>,
}

impl<T> Default for CachedResponse<T> {
    fn default() -> Self {
        Self { value: None, last_failure: None }
    }
}

impl<T> CachedResponse<T> {
    /// The cached response if it is younger than `max_age`. Otherwise a new response, or, if the request fails, the cached response.
    async fn get(
        &mut self,
        max_age: Duration,
        request: impl Future<Output = Result<T, OidcError>>,
    ) -> Result<Arc<T>, OidcError> {
        if let Some((value, since)) = &self.value
            && since.elapsed() < max_age
        {
            return Ok(value.clone());
        }
        let error = match &self.last_failure {
            Some((error, at)) if at.elapsed() < RETRY_PAUSE => error.clone(),
            _ => match request.await {
                Ok(value) => {
                    let value = Arc::new(value);
                    *self = Self { value: Some((value.clone(), Instant::now())), last_failure: None };
                    return Ok(value);
                }
                Err(error) => {
                    self.last_failure = Some((error.clone(), Instant::now()));
                    error
                }
            },
        };
        self.value.as_ref().map(|(value, _)| value.clone()).ok_or(error)
    }
}

/// The needed part of `/.well-known/openid-configuration`.
#[derive(Debug, Deserialize)]
pub(super) struct Metadata {
    issuer: String,
    pub(super) authorization_endpoint: Endpoint,
    token_endpoint: Endpoint,
    jwks_uri: Endpoint,
    userinfo_endpoint: Option<Endpoint>,
    #[serde(default)]
    scopes_supported: Vec<String>,
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
    /// Whether the provider adds its issuer when it sends a browser back (RFC 9207).
    #[serde(default, rename = "authorization_response_iss_parameter_supported")]
    pub(super) sends_issuer: bool,
}

/// A URL in the configuration.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Endpoint(pub(super) Url);

impl TryFrom<String> for Endpoint {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Url::parse(&text).map(Self).map_err(|error| format!("one of its URLs: {error}"))
    }
}

impl Metadata {
    /// The requested scopes. Some providers have a separate scope for groups.
    pub(super) fn scope(&self, groups: Option<&Groups>) -> String {
        let mut scope = format!("openid profile {}", NameClaim::Email);
        if let Some(groups) = groups
            && self.scopes_supported.contains(&groups.claim)
        {
            scope.push(' ');
            scope.push_str(&groups.claim);
        }
        scope
    }
}

/// The provider's response to a code.
#[derive(Deserialize)]
pub(super) struct Tokens {
    pub(super) id_token: String,
    #[serde(default)]
    access_token: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Refusal {
    error: String,
    error_description: Option<String>,
}

impl Provider {
    pub(super) fn new(config: Arc<OidcConfig>) -> Result<Self, String> {
        let builder = http_client::builder(authorities(&config)?).map_err(|error| error.to_string())?;
        let builder = builder.timeout(TIMEOUT).connect_timeout(TIMEOUT / 2);
        // Only a provider on this machine may use plain HTTP. Requests to this machine do not use a proxy.
        let builder = if config.issuer.is_plain() { builder.no_proxy() } else { builder };
        Ok(Self {
            config,
            http: builder.build().map_err(|error| error.to_string())?,
            metadata: Mutex::default(),
            keys: Mutex::default(),
            exchanges: Semaphore::new(MAX_EXCHANGES),
        })
    }

    pub(super) async fn metadata(&self) -> Result<Arc<Metadata>, OidcError> {
        self.metadata.lock().await.get(MAX_AGE, self.fetch_metadata()).await
    }

    async fn fetch_metadata(&self) -> Result<Metadata, OidcError> {
        let issuer = self.config.issuer.as_str();
        let url = format!("{}/.well-known/openid-configuration", issuer.trim_end_matches('/'));
        let metadata: Metadata = self.send(self.http.get(&url), &url).await?;
        if metadata.issuer != issuer {
            let other: String = metadata.issuer.chars().take(200).collect();
            return Err(log_unusable(&format!(
                "it calls itself {other:?} and this server knows it as {issuer:?}; \
                 start the server with --oidc-issuer as the provider writes it"
            )));
        }
        let endpoints = [&metadata.authorization_endpoint, &metadata.token_endpoint, &metadata.jwks_uri];
        for Endpoint(url) in endpoints.into_iter().chain(&metadata.userinfo_endpoint) {
            if !self.config.issuer.allows(url) {
                return Err(log_unusable(&format!("its endpoint {url} is not https")));
            }
        }
        Ok(metadata)
    }

    /// The key with the id `kid` for `alg`. If it is unknown, all keys are requested again, at most once per `OidcConfig::key_refresh`.
    pub(super) async fn key(
        &self,
        metadata: &Metadata,
        alg: &str,
        kid: Option<&str>,
    ) -> Result<Key, OidcError> {
        let mut keys = self.keys.lock().await;
        let known = keys.get(MAX_AGE, self.fetch_keys(metadata)).await?;
        if let Some(key) = keys::find(&known, alg, kid) {
            return Ok(key);
        }
        let renewed = keys.get(self.config.key_refresh, self.fetch_keys(metadata)).await?;
        keys::find(&renewed, alg, kid).ok_or_else(|| match &keys.last_failure {
            Some((error, _)) => error.clone(),
            None => OidcError::Refused(
                "The ID token is signed with a key that the provider does not publish.".into(),
            ),
        })
    }

    /// The newly published key with the same id, if it differs, because some providers replace a key and keep its id. Keys are requested at
    /// most once per `OidcConfig::key_refresh`.
    pub(super) async fn replaced_key(
        &self,
        metadata: &Metadata,
        alg: &str,
        kid: Option<&str>,
        old: &Key,
    ) -> Option<Key> {
        let renewed =
            self.keys.lock().await.get(self.config.key_refresh, self.fetch_keys(metadata)).await.ok()?;
        keys::find(&renewed, alg, kid).filter(|key| key != old)
    }

    async fn fetch_keys(&self, metadata: &Metadata) -> Result<Vec<Key>, OidcError> {
        let set: Value =
            self.send(self.http.get(metadata.jwks_uri.0.clone()), metadata.jwks_uri.0.as_str()).await?;
        keys::read_set(&set).ok_or_else(|| log_unusable("its keys cannot be read"))
    }

    /// Exchanges a code for tokens.
    pub(super) async fn exchange(
        &self,
        metadata: &Metadata,
        code: &str,
        sign_in: &PendingSignIn,
    ) -> Result<Tokens, OidcError> {
        let Ok(_permit) = self.exchanges.try_acquire() else {
            return Err(OidcError::Unavailable(
                "Too many people are signing in at this moment; try again.".into(),
            ));
        };
        let mut form = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", &sign_in.callback),
            ("code_verifier", &sign_in.verifier),
        ];
        let mut request_builder =
            self.http.post(metadata.token_endpoint.0.clone()).header(header::ACCEPT, "application/json");
        let methods = metadata.token_endpoint_auth_methods_supported.as_deref();
        let supports = |method: &str| methods.is_some_and(|names| names.iter().any(|name| name == method));
        match &self.config.client_secret {
            None => form.push(("client_id", &self.config.client_id)),
            Some(secret) if supports("client_secret_post") && !supports("client_secret_basic") => {
                form.extend([
                    ("client_id", self.config.client_id.as_str()),
                    ("client_secret", secret.expose()),
                ]);
            }
            // Basic authentication, also if the provider names no method.
            Some(secret) => {
                // Id and secret are form-encoded and joined with a colon (RFC 6749, 2.3.1).
                let encoded =
                    form_encoded(&[(&self.config.client_id, secret.expose())]).replacen('=', ":", 1);
                let mut value = header::HeaderValue::try_from(format!("Basic {}", STANDARD.encode(encoded)))
                    .map_err(|error| log_unusable(&error.to_string()))?;
                value.set_sensitive(true);
                request_builder = request_builder.header(header::AUTHORIZATION, value);
            }
        }
        let request_builder = request_builder
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            .body(form_encoded(&form));
        self.send(request_builder, metadata.token_endpoint.0.as_str()).await
    }

    /// Adds claims that are only at the UserInfo endpoint.
    pub(super) async fn add_user_info(
        &self,
        metadata: &Metadata,
        tokens: &Tokens,
        subject: &str,
        claims: &mut Claims,
    ) -> Result<(), OidcError> {
        let Some(Endpoint(url)) =
            metadata.userinfo_endpoint.as_ref().filter(|_| !tokens.access_token.is_empty())
        else {
            return Ok(());
        };
        let request_builder = self.http.get(url.clone()).bearer_auth(&tokens.access_token);
        let user_info: Claims = self.send(request_builder, url.as_str()).await?;
        // The response must be about the same account (OpenID Connect Core 1.0, 5.3.2).
        if user_info.get("sub").and_then(Value::as_str) != Some(subject) {
            return Err(OidcError::Refused("The provider's UserInfo is about another account.".into()));
        }
        for (name, value) in user_info {
            claims.entry(name).or_insert(value);
        }
        Ok(())
    }

    /// Sends a request and reads the response, within the limits.
    async fn send<T: for<'a> Deserialize<'a>>(
        &self,
        request_builder: RequestBuilder,
        url: &str,
    ) -> Result<T, OidcError> {
        let failed = |error: reqwest::Error| {
            log_unreachable(self.config.issuer.host(), &format!("{url}: {}", http_client::root_cause(&error)))
        };
        let mut response = request_builder.send().await.map_err(failed)?;
        let status = response.status();
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            if body.len() + chunk.len() > MAX_BYTES {
                return Err(log_unusable(&format!("{url} responds with more than {} KiB", MAX_BYTES >> 10)));
            }
            body.extend_from_slice(&chunk);
        }
        if status.is_success() {
            return serde_json::from_slice(&body)
                .map_err(|error| log_unusable(&format!("{url} gives an unexpected response: {error}")));
        }
        let refusal: Refusal = serde_json::from_slice(&body).unwrap_or_default();
        if status.is_client_error() && !refusal.error.is_empty() {
            let text = error_in_words(&refusal.error, refusal.error_description.as_deref());
            return Err(OidcError::Refused(format!("The provider refuses this sign-in: {text}")));
        }
        Err(log_unreachable(self.config.issuer.host(), &format!("{url} answers {status}")))
    }
}

/// The CA certificates of the system and of the configured file.
fn authorities(config: &OidcConfig) -> Result<RootCertStore, String> {
    let mut roots =
        if config.issuer.is_plain() { RootCertStore::empty() } else { http_client::system_authorities() };
    if let Some(path) = &config.ca_file {
        for certificate in
            pem_files::read_certificates(path).map_err(|error| format!("the CA file {error}"))?
        {
            roots
                .add(certificate)
                .map_err(|error| format!("the CA file {} cannot be used: {error}", path.display()))?;
        }
    }
    Ok(roots)
}

/// Encodes pairs as the body of a form.
fn form_encoded(pairs: &[(&str, &str)]) -> String {
    let mut url = Url::parse("http://none/").ok();
    let encoded = url.as_mut().map(|url| {
        url.query_pairs_mut().extend_pairs(pairs);
        url.query().unwrap_or_default().to_owned()
    });
    encoded.unwrap_or_default()
}

/// Logs the details and returns an error, which does not reveal the provider's addresses.
fn log_unreachable(host: &str, detail: &str) -> OidcError {
    tracing::warn!(detail, "the OpenID provider cannot be reached");
    OidcError::Unavailable(format!(
        "{host} cannot be reached at the moment; try again, or sign in another way."
    ))
}

/// Logs the details and returns an error without them.
fn log_unusable(detail: &str) -> OidcError {
    tracing::error!(detail, "the OpenID provider cannot be used");
    OidcError::Unavailable("The OpenID provider cannot be used; this server's log says why.".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_and_a_client_s_name_are_encoded() {
        assert_eq!(form_encoded(&[("a b", "c&d=:"), ("e", "ä")]), "a+b=c%26d%3D%3A&e=%C3%A4");
        assert_eq!(form_encoded(&[("my:id=", "se=cret")]).replacen('=', ":", 1), "my%3Aid%3D:se%3Dcret");
    }
}
