//! ID tokens: JSON Web Tokens (RFC 7519) with the checks of OpenID Connect Core 1.0, 3.1.3.7.

use super::{
    Claims, OidcError,
    keys::{self, Key},
};
use crate::{auth::access::is_same_secret, config::oidc::OidcConfig};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use lockstep_protocol::people::subject_mistake;
use serde::Deserialize;
use serde_json::Value;

/// Maximum size of a token in bytes. A token with a few hundred groups has about ten thousand bytes.
pub(super) const MAX_BYTES: usize = 64 << 10;
/// Maximum difference of the clocks of provider and server, in seconds.
const MAX_CLOCK_SKEW: i64 = 60;

/// The header of a token, which names the algorithm and key of the signature.
#[derive(Debug, Deserialize)]
pub(super) struct Header {
    pub(super) alg: String,
    pub(super) kid: Option<String>,
    typ: Option<String>,
    crit: Option<Value>,
}

fn refuse<T>(detail: &str) -> Result<T, OidcError> {
    Err(OidcError::Refused(format!("The provider's ID token is not valid: {detail}.")))
}

/// The three parts of a token.
fn parts(token: &str) -> Result<[&str; 3], OidcError> {
    if token.len() > MAX_BYTES {
        return refuse("it is too long");
    }
    match token.split('.').collect::<Vec<_>>()[..] {
        [header, claims, signature] => Ok([header, claims, signature]),
        _ => refuse("it is not a signed token"),
    }
}

fn json<T: for<'a> Deserialize<'a>>(part: &str) -> Result<T, OidcError> {
    let bytes = URL_SAFE_NO_PAD.decode(part).ok();
    bytes
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .map_or_else(|| refuse("it cannot be read"), Ok)
}

/// The header of a token.
///
/// # Errors
/// The header cannot be read, or names an algorithm that is not allowed.
pub(super) fn header(token: &str) -> Result<Header, OidcError> {
    let header: Header = json(parts(token)?[0])?;
    if !keys::is_allowed(&header.alg) {
        let alg: String = header.alg.chars().take(20).collect();
        return refuse(&format!(
            "it is signed with {alg:?}, and only RS*, PS*, ES256, ES384 and EdDSA are accepted"
        ));
    }
    // The provider signs tokens of other kinds with the same keys.
    if header.typ.as_deref().is_some_and(|typ| !typ.eq_ignore_ascii_case("JWT")) {
        return refuse("it is a token of another kind");
    }
    if header.crit.is_some() {
        return refuse("it has extensions that this server does not know");
    }
    Ok(header)
}

/// The claims of a token, and its subject. `nonce`: the value that was sent with the request for this sign-in.
///
/// # Errors
/// The token is not signed with the key, belongs to another sign-in, or has expired.
pub(super) fn check(
    token: &str,
    header: &Header,
    key: &Key,
    config: &OidcConfig,
    nonce: &str,
) -> Result<(Claims, String), OidcError> {
    let now = crate::now().as_second();
    let [header_part, claims_part, signature] = parts(token)?;
    let Ok(signature) = URL_SAFE_NO_PAD.decode(signature) else {
        return refuse("its signature cannot be read");
    };
    let signed_bytes = header_part.len() + 1 + claims_part.len();
    key.verify(&header.alg, &token.as_bytes()[..signed_bytes], &signature)?;
    let claims: Claims = json(claims_part)?;
    let text = |name: &str| claims.get(name).and_then(Value::as_str);
    if text("iss") != Some(config.issuer.as_str()) {
        return refuse("it was made by another provider");
    }
    // A token with several audiences could have been stolen from another client.
    let is_for_us = match claims.get("aud") {
        Some(Value::String(audience)) => *audience == config.client_id,
        Some(Value::Array(all)) => matches!(&all[..], [Value::String(only)] if *only == config.client_id),
        _ => false,
    };
    if !is_for_us {
        return refuse("it is not for this server, or not only for this server");
    }
    if claims.get("azp").is_some_and(|azp| azp.as_str() != Some(config.client_id.as_str())) {
        return refuse("it was given to another client");
    }
    let seconds = |name: &str| claims.get(name).and_then(Value::as_f64).map(|at| at as i64);
    if seconds("exp").is_none_or(|at| at <= now - MAX_CLOCK_SKEW) {
        return refuse("it has expired, or this server's clock is wrong");
    }
    let latest = now + MAX_CLOCK_SKEW;
    let is_early =
        seconds("iat").is_none_or(|at| at > latest) || seconds("nbf").is_some_and(|at| at > latest);
    if is_early || claims.get("nbf").is_some_and(|nbf| !nbf.is_number()) {
        return refuse("it is from the future, or this server's clock is wrong");
    }
    if !text("nonce").is_some_and(|found| is_same_secret(found, nonce)) {
        return refuse("it was made for another sign-in");
    }
    match text("sub").filter(|subject| subject_mistake(subject).is_none()).map(str::to_owned) {
        Some(subject) => Ok((claims, subject)),
        None => refuse("it names no subject"),
    }
}
