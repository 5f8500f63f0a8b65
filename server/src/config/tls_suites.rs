//! The versions and cipher suites of TLS that the server accepts, which the operator may restrict.

use lockstep_protocol::words;
use rustls::{
    ConfigBuilder, ServerConfig, SignatureAlgorithm, SupportedCipherSuite, SupportedProtocolVersion,
    WantsVerifier,
    crypto::{CryptoProvider, ring},
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};
use std::{
    str::FromStr,
    sync::{Arc, LazyLock},
};

/// Maximum length of a list of suites, in bytes.
const MAX_LIST_BYTES: usize = 4096;

words! {
    /// The minimum version of TLS.
    #[derive(Default, PartialOrd, Ord)]
    pub enum TlsVersion: "TLS version" {
        /// TLS 1.2, RFC 5246.
        #[default]
        V1_2 = "1.2",
        /// TLS 1.3, RFC 8446.
        V1_3 = "1.3",
    }
}

/// Cipher suites in the given order.
#[derive(Debug, Clone, PartialEq)]
pub struct TlsSuites(Vec<SupportedCipherSuite>);

impl FromStr for TlsSuites {
    type Err = String;

    /// Parses names of the IANA or of OpenSSL, separated by commas or colons.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > MAX_LIST_BYTES {
            return Err(format!("a list of suites must have at most {MAX_LIST_BYTES} bytes"));
        }
        let known = &provider().cipher_suites;
        let mut suites: Vec<SupportedCipherSuite> = Vec::new();
        for name in text.split([',', ':']).map(str::trim).filter(|name| !name.is_empty()) {
            let found = known.iter().find(|suite| names(suite).iter().any(|n| n.eq_ignore_ascii_case(name)));
            let Some(found) = found else {
                let supported: Vec<_> = known.iter().map(iana_name).collect();
                return Err(format!(
                    "{name:?} is not a supported cipher suite; the supported suites are {}",
                    supported.join(", ")
                ));
            };
            if !suites.contains(found) {
                suites.push(*found);
            }
        }
        if suites.is_empty() {
            return Err("name at least one cipher suite, such as TLS_AES_256_GCM_SHA384".into());
        }
        Ok(Self(suites))
    }
}

fn iana_name(suite: &SupportedCipherSuite) -> String {
    format!("{:?}", suite.suite()).replacen("TLS13_", "TLS_", 1)
}

fn names(suite: &SupportedCipherSuite) -> [String; 3] {
    let (rustls, iana) = (format!("{:?}", suite.suite()), iana_name(suite));
    // OpenSSL has its own names for suites before TLS 1.3, such as ECDHE-RSA-AES128-GCM-SHA256.
    let openssl = iana.strip_prefix("TLS_").unwrap_or(&iana).replace("_WITH_", "-");
    let openssl = openssl.replace("AES_", "AES").replace("_POLY1305_SHA256", "-POLY1305").replace('_', "-");
    [rustls, iana, openssl]
}

/// The cryptography provider of all TLS connections.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(ring::default_provider()));
    PROVIDER.clone()
}

/// Begins the TLS settings of the server with the requested versions and suites, as far as they fit the server's key.
///
/// # Errors
/// No client could connect.
pub(crate) fn server_config(
    suites: Option<&TlsSuites>,
    lowest: TlsVersion,
    key: &CertifiedKey,
) -> Result<ConfigBuilder<ServerConfig, WantsVerifier>, String> {
    let mut provider = CryptoProvider::clone(&provider());
    if let Some(TlsSuites(suites)) = suites {
        provider.cipher_suites.clone_from(suites);
    }
    if lowest == TlsVersion::V1_3 {
        provider.cipher_suites.retain(|suite| suite.tls13().is_some());
    }
    // The name of a suite before TLS 1.3 contains the kind of key that the suite requires.
    let key_kind = match key.key.algorithm() {
        SignatureAlgorithm::RSA => "_RSA_",
        _ => "_ECDSA_",
    };
    let has = |version: &SupportedProtocolVersion| {
        provider.cipher_suites.iter().any(|suite| {
            suite.version() == version && (suite.tls13().is_some() || iana_name(suite).contains(key_kind))
        })
    };
    let versions: Vec<_> = [&TLS13, &TLS12].into_iter().filter(|version| has(version)).collect();
    if versions.is_empty() {
        return Err(match lowest {
            TlsVersion::V1_3 => {
                "--tls-suites has no suite of TLS 1.3, which --tls-min-version asks for; add one, such as \
                 TLS_AES_256_GCM_SHA384"
                    .into()
            }
            TlsVersion::V1_2 => format!(
                "--tls-suites has no suite for the kind of key of this server's certificate; add one with {} in its name, or one of \
                 TLS 1.3 such as TLS_AES_256_GCM_SHA384",
                key_kind.trim_matches('_')
            ),
        });
    }
    let builder = ServerConfig::builder_with_provider(Arc::new(provider));
    builder.with_protocol_versions(&versions).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_may_be_given_by_each_of_their_names() {
        for name in [
            "TLS_AES_128_GCM_SHA256",
            "TLS13_AES_128_GCM_SHA256",
            "tls_ecdhe_rsa_with_aes_128_gcm_sha256",
            "ECDHE-ECDSA-AES256-GCM-SHA384",
            "ECDHE-RSA-CHACHA20-POLY1305",
        ] {
            assert_eq!(name.parse::<TlsSuites>().map(|suites| suites.0.len()), Ok(1), "{name}");
        }
        let both: TlsSuites =
            "TLS_AES_128_GCM_SHA256, ECDHE-RSA-AES128-GCM-SHA256,TLS_AES_128_GCM_SHA256".parse().unwrap();
        assert_eq!(both.0.len(), 2);
    }

    #[test]
    fn unknown_suites_are_refused_with_a_list_of_known_ones() {
        let refused = "TLS_AES_128_GCM_SHA256,RC4-MD5".parse::<TlsSuites>().unwrap_err();
        assert!(refused.contains("RC4-MD5") && refused.contains("TLS_AES_256_GCM_SHA384"), "{refused}");
        assert!(" , ".parse::<TlsSuites>().is_err());
        let long = |bytes: usize| format!("{}TLS_AES_128_GCM_SHA256", ",".repeat(bytes - 22));
        assert!(long(MAX_LIST_BYTES).parse::<TlsSuites>().is_ok());
        assert!(long(MAX_LIST_BYTES + 1).parse::<TlsSuites>().is_err());
        assert!("1.1".parse::<TlsVersion>().is_err() && "1.3".parse() == Ok(TlsVersion::V1_3));
    }
}
