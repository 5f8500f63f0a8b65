//! The interface of a running server for the process in which it runs. The process owns the data directory, so it needs no token.

use crate::{
    auth::{Auth, SERVER_TOKEN_NAME, access::Secret, token_file},
    config::ServeConfig,
    http::tls::addresses,
    store::TokenRow,
    util::private_files,
};
use lockstep_protocol::access::{LOCAL_AGENT_TOKEN, SERVER_TOKEN, Scope, Token};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

/// Id and name of the token in the data directory.
const ADMIN_TOKEN: (&str, &str) = (SERVER_TOKEN, SERVER_TOKEN_NAME);
/// Id and name of the token of this machine's agent.
const AGENT_TOKEN: (&str, &str) = (LOCAL_AGENT_TOKEN, "this machine's agent");

/// A server that accepts connections. Cheap to clone.
#[derive(Clone)]
pub struct Running {
    pub(super) config: Arc<ServeConfig>,
    pub(super) auth: Arc<Auth>,
}

impl Running {
    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.config.listen
    }

    /// The URL to open in a browser.
    pub fn url(&self) -> String {
        let config = &self.config;
        if let Some(url) = &config.public_url {
            return url.to_string();
        }
        let mut address = config.listen;
        if address.ip().is_unspecified() {
            address.set_ip(addresses().first().copied().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        }
        format!("{}://{address}", if config.tls.is_some() { "https" } else { "http" })
    }

    /// A link that signs a browser in once, within ten minutes, and leads to `page`, a path of this server. If the server requires no
    /// authentication, the page's URL.
    ///
    /// # Errors
    /// The system has no random bits.
    pub fn login_link(&self, page: &str) -> io::Result<String> {
        let url = self.url();
        if !self.auth.access.must_authenticate {
            return Ok(format!("{url}{page}"));
        }
        Ok(format!("{url}/login?code={}&next={page}", self.auth.access.codes.make(ADMIN_TOKEN.0, None)?))
    }

    /// Makes sure that the file `path` has a token with which only this agent may join. Returns false if no token is needed.
    ///
    /// # Errors
    /// The file or the database cannot be read or written.
    pub async fn ensure_agent_token(&self, agent_id: &str, path: &Path) -> io::Result<bool> {
        if !self.auth.access.must_authenticate {
            return Ok(false);
        }
        let agent = Some(("local".to_owned(), agent_id.to_owned()));
        ensure_token(&self.auth, AGENT_TOKEN, Scope::Agent, agent, path).await?;
        Ok(true)
    }
}

/// Makes sure that the data directory has a token for programs of this machine.
pub(super) async fn ensure_own_token(config: &ServeConfig, auth: &Auth) -> io::Result<()> {
    if !auth.access.must_authenticate {
        return Ok(());
    }
    ensure_token(auth, ADMIN_TOKEN, Scope::Admin, None, &config.data_dir.join("token")).await
}

/// Makes sure that a file has a valid token. A token that the database lacks, such as after a change of the database, is added. This is
/// safe, because only the owner of the data directory can write the file. A revoked token is replaced. `agent`: name and id of the only
/// agent that may use the token.
async fn ensure_token(
    auth: &Auth,
    (id, name): (&str, &str),
    scope: Scope,
    agent: Option<(String, String)>,
    path: &Path,
) -> io::Result<()> {
    let known = auth.access.token(id);
    let (agent, agent_id) = agent.unzip();
    let mut secret = token_file::read(path)?.map(Secret::of);
    if let Some(found) = &secret {
        let own_row = known.as_ref().filter(|row| row.hash == found.hash);
        let is_usable = |row: &TokenRow| row.token.is_valid(crate::now()) && row.token.agent_id == agent_id;
        if own_row.is_some_and(is_usable) {
            return Ok(());
        }
        if own_row.is_some() || auth.access.authenticate_token(&found.text).is_ok() {
            secret = None;
        }
    }
    let is_new = secret.is_none();
    let secret = secret.map_or_else(Secret::new_token, Ok)?;
    let token = Token { agent, agent_id, ..Token::of(id.into(), name.into(), scope, crate::now()) };
    let row = TokenRow { token, hash: secret.hash.clone() };
    auth.store.put_token(&row).await.map_err(|error| io::Error::other(error.to_string()))?;
    auth.access.put_token(row);
    if is_new { private_files::replace(path, format!("{}\n", secret.text).as_bytes()) } else { Ok(()) }
}
