//! The configuration of an OpenID provider, and the rights of its accounts.

use super::addresses::is_loopback;
use lockstep_protocol::{people::Role, words};
use reqwest::Url;
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

/// Maximum length of a client secret, in bytes.
const MAX_SECRET_BYTES: usize = 4096;

/// The provider's issuer URL, such as `https://accounts.example.org`, exactly as in its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issuer {
    text: String,
    host: String,
}

impl Issuer {
    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Whether the provider is reached without TLS, which is only allowed on this machine.
    pub(crate) fn is_plain(&self) -> bool {
        self.text.starts_with("http:")
    }

    /// Whether `endpoint` is allowed as an endpoint of this provider.
    pub(crate) fn allows(&self, endpoint: &Url) -> bool {
        match endpoint.scheme() {
            "https" => endpoint.has_host(),
            "http" => self.is_plain() && is_on_this_machine(endpoint),
            _ => false,
        }
    }
}

impl FromStr for Issuer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            |why: &str| Err(format!("{why}; an example is https://keycloak.example.org/realms/team"));
        let url = match Url::parse(text) {
            Ok(url) => url,
            Err(error) => return invalid(&error.to_string()),
        };
        let Some(host) = url.host_str() else { return invalid("it must have a host") };
        if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
            return invalid("it must not have a query, a fragment or a user name");
        }
        match url.scheme() {
            "https" => {}
            "http" if is_on_this_machine(&url) => {}
            _ => return invalid("it must begin with https:// (http:// only for a provider on this machine)"),
        }
        Ok(Self { host: host.to_owned(), text: text.to_owned() })
    }
}

fn is_on_this_machine(url: &Url) -> bool {
    is_loopback(url.host_str().unwrap_or_default().trim_matches(['[', ']']))
}

/// The client secret of this server at the provider. Never logged.
#[derive(Clone)]
pub struct ClientSecret(String);

impl ClientSecret {
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ClientSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientSecret")
    }
}

impl FromStr for ClientSecret {
    type Err = String;

    /// Surrounding white space is removed.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "" => Err("it is empty".into()),
            secret if secret.len() > MAX_SECRET_BYTES => {
                Err(format!("it is longer than {MAX_SECRET_BYTES} bytes"))
            }
            secret => Ok(Self(secret.to_owned())),
        }
    }
}

words! {
    /// The claim that gives a new person's name.
    pub enum NameClaim: "name claim" {
        PreferredUsername = "preferred_username",
        /// `email`, if the provider has verified it.
        Email = "email",
    }
}

/// Groups of the provider that set a person's role at every sign-in.
#[derive(Debug, Clone)]
pub struct Groups {
    /// The claim that lists an account's groups.
    pub claim: String,
    /// Members of this group are admins.
    pub admin: Option<String>,
    /// Members of this group have the role member.
    pub member: Option<String>,
}

/// An OpenID provider that signs people in.
#[derive(Debug, Clone)]
pub struct OidcConfig {
    pub issuer: Issuer,
    /// The client id of this server at the provider.
    pub client_id: String,
    /// `None`: this server is a public client.
    pub client_secret: Option<ClientSecret>,
    /// The text of the sign-in button. `None`: the issuer's host.
    pub name: Option<String>,
    /// The role of a person who signs in for the first time. `None`: an admin must add the person first.
    pub role: Option<Role>,
    /// The claim that gives the name of a person who signs in for the first time.
    pub name_claim: NameClaim,
    pub groups: Option<Groups>,
    /// Authorities (PEM) that are trusted in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// Minimum interval between two requests for the provider's keys.
    pub key_refresh: Duration,
}

impl OidcConfig {
    /// The defaults: only persons that an admin has added may sign in.
    pub fn new(issuer: Issuer, client_id: String) -> Self {
        Self {
            issuer,
            client_id,
            client_secret: None,
            name: None,
            role: None,
            name_claim: NameClaim::PreferredUsername,
            groups: None,
            ca_file: None,
            key_refresh: Duration::from_secs(30),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issuers_need_https_except_on_this_machine() {
        for good in [
            "https://a.example",
            "https://a.example/realms/x/",
            "http://127.0.0.1:80/x",
            "http://[::1]",
            "http://localhost:1",
        ] {
            assert_eq!(good.parse::<Issuer>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            "a.example",
            "http://a.example",
            "https://a.example?x=1",
            "https://a.example#x",
            "https://u@a.example",
            "ftp://a.example",
            "http://localhost.a.example",
        ] {
            assert!(bad.parse::<Issuer>().is_err(), "{bad}");
        }
    }

    #[test]
    fn endpoints_need_https_except_on_this_machine() {
        let allows =
            |issuer: &str, url: &str| issuer.parse::<Issuer>().unwrap().allows(&url.parse().unwrap());
        assert!(allows("https://a.example", "https://b.example/token"));
        assert!(allows("http://127.0.0.1:9", "http://127.0.0.1:9/token"));
        for url in ["http://a.example/token", "http://127.0.0.1/token", "file:///etc/passwd", "javascript:x"]
        {
            assert!(!allows("https://a.example", url), "{url}");
        }
        assert!(!allows("http://127.0.0.1:9", "http://a.example/token"));
    }

    #[test]
    fn a_secret_has_a_size_limit_and_is_not_shown() {
        let longest = "a".repeat(MAX_SECRET_BYTES);
        assert_eq!(format!(" {longest}\n").parse::<ClientSecret>().unwrap().expose(), longest);
        assert!(
            format!("{longest}a").parse::<ClientSecret>().is_err() && " \n".parse::<ClientSecret>().is_err()
        );
        assert!(!format!("{:?}", "hunter2".parse::<ClientSecret>().unwrap()).contains("hunter2"));
    }
}
