//! A provider's public keys (RFC 7517), and the verification of signatures, by `ring`.

use super::OidcError;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::signature::{
    self, EdDSAParameters, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;
use serde_json::Value;

/// Maximum number of keys that are read from a set.
const MAX_KEYS: usize = 100;

/// A signature algorithm. Symmetric algorithms and `none` are left out, so a token cannot be forged with a client's secret, or with a
/// public key that is used as a secret.
enum Algorithm {
    Rsa(&'static RsaParameters),
    Ecdsa { curve: &'static str, coordinate_bytes: usize, verification: &'static dyn VerificationAlgorithm },
    Ed25519(&'static EdDSAParameters),
}

fn algorithm(name: &str) -> Option<Algorithm> {
    use Algorithm::{Ecdsa, Ed25519, Rsa};
    Some(match name {
        "RS256" => Rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
        "RS384" => Rsa(&signature::RSA_PKCS1_2048_8192_SHA384),
        "RS512" => Rsa(&signature::RSA_PKCS1_2048_8192_SHA512),
        "PS256" => Rsa(&signature::RSA_PSS_2048_8192_SHA256),
        "PS384" => Rsa(&signature::RSA_PSS_2048_8192_SHA384),
        "PS512" => Rsa(&signature::RSA_PSS_2048_8192_SHA512),
        "ES256" => {
            Ecdsa { curve: "P-256", coordinate_bytes: 32, verification: &signature::ECDSA_P256_SHA256_FIXED }
        }
        "ES384" => {
            Ecdsa { curve: "P-384", coordinate_bytes: 48, verification: &signature::ECDSA_P384_SHA384_FIXED }
        }
        "EdDSA" => Ed25519(&signature::ED25519),
        _ => return None,
    })
}

/// Whether tokens may be signed with this algorithm.
pub(super) fn is_allowed(name: &str) -> bool {
    algorithm(name).is_some()
}

/// A public key. Missing fields are reported when the key is used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Key {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    used_for: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    n: String,
    e: String,
    x: String,
    y: String,
}

/// The keys of a set. Keys that cannot be read are skipped.
pub(super) fn read_set(set: &Value) -> Option<Vec<Key>> {
    let keys = set.get("keys")?.as_array()?.iter().take(MAX_KEYS);
    Some(keys.filter_map(|key| Key::deserialize(key).ok()).collect())
}

/// The key that a token names, or, if the token names no key, the only key that fits the algorithm. `None` if there is no such key.
pub(super) fn find(keys: &[Key], alg: &str, kid: Option<&str>) -> Option<Key> {
    let mut fitting = keys.iter().filter(|key| key.fits(alg, kid));
    let first = fitting.next()?;
    let is_only = fitting.next().is_none();
    (kid.is_some() || is_only).then(|| first.clone())
}

impl Key {
    fn fits(&self, alg: &str, kid: Option<&str>) -> bool {
        let has_kind = match algorithm(alg) {
            Some(Algorithm::Rsa(_)) => self.kty == "RSA",
            Some(Algorithm::Ecdsa { curve, .. }) => self.kty == "EC" && self.crv.as_deref() == Some(curve),
            Some(Algorithm::Ed25519(_)) => self.kty == "OKP" && self.crv.as_deref() == Some("Ed25519"),
            None => false,
        };
        has_kind
            && self.used_for.as_deref().is_none_or(|used_for| used_for == "sig")
            && self.alg.as_deref().is_none_or(|own| own == alg)
            && kid.is_none_or(|kid| self.kid.as_deref() == Some(kid))
    }

    /// Verifies that `signed` was signed with the private part of this key.
    pub(super) fn verify(&self, alg: &str, signed: &[u8], signature: &[u8]) -> Result<(), OidcError> {
        let wrong = || OidcError::Refused("The ID token's signature is wrong.".into());
        let decode = |text: &str| URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).map_err(|_| wrong());
        let verified = match algorithm(alg).ok_or_else(wrong)? {
            Algorithm::Rsa(parameters) => {
                let (n, e) = (decode(&self.n)?, decode(&self.e)?);
                // Some providers write leading zeros, which `ring` does not accept.
                let n = &n[n.iter().position(|byte| *byte != 0).unwrap_or(n.len())..];
                RsaPublicKeyComponents { n, e: &e[..] }.verify(parameters, signed, signature)
            }
            Algorithm::Ecdsa { coordinate_bytes, verification, .. } => {
                let (x, y) = (decode(&self.x)?, decode(&self.y)?);
                if x.len() != coordinate_bytes || y.len() != coordinate_bytes {
                    return Err(wrong());
                }
                // An uncompressed point is the byte 4 and the two coordinates.
                let point = [&[4], &x[..], &y[..]].concat();
                UnparsedPublicKey::new(verification, point).verify(signed, signature)
            }
            Algorithm::Ed25519(parameters) => {
                UnparsedPublicKey::new(parameters, decode(&self.x)?).verify(signed, signature)
            }
        };
        verified.map_err(|_| wrong())
    }
}
