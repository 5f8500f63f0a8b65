//! Determines, for each request, who sent it and how (directly or through a proxy, with TLS or not), and whether its host is a name of this
//! server. Also limits the rate of requests of an address.

use crate::{
    config::{
        ServeConfig,
        addresses::{client_key, forwarded_address, host_and_port, is_loopback},
    },
    http::{
        rate_limit::RateLimiter,
        tls::{AgentTrust, ClientCertificate, ServerCertificate},
    },
};
use axum::http::{HeaderMap, HeaderName, header};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Instant,
};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The addresses of the two ends of a connection, and whether the connection is encrypted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transport {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    pub(crate) is_tls: bool,
}

impl Transport {
    pub(crate) fn new(from: SocketAddr, to: Option<SocketAddr>, is_tls: bool) -> Self {
        let to = to.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |to| to.ip());
        Self { from: from.ip().to_canonical(), to: to.to_canonical(), is_tls }
    }
}

/// The sender of a request and the kind of connection. Every request has this extension.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// The client: the other end of the connection, or the client that a trusted proxy names.
    pub(crate) address: IpAddr,
    /// Whether the client uses HTTPS, with this server or with a trusted proxy. Cookies are then `Secure`.
    pub(crate) is_https: bool,
    /// Whether the connection comes from a trusted proxy.
    pub(crate) is_by_proxy: bool,
    /// The `host[:port]` in the URL that the client used, if a trusted proxy names it (`X-Forwarded-Host`).
    host: Option<Box<str>>,
    transport: Transport,
    /// The client's certificate from the handshake. A proxy's certificate is ignored.
    pub(crate) certificate: Option<Arc<ClientCertificate>>,
}

/// Which proxies are trusted, which names are this server's, and how many requests an address may send.
pub(crate) struct PeerPolicy {
    config: Arc<ServeConfig>,
    pub(crate) certificate: Option<Arc<ServerCertificate>>,
    limit: RateLimiter<IpAddr>,
    /// Time and result of the latest check of `/readyz` for a client without a token. Further such clients get this result for a while.
    pub(crate) last_ready_check: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

impl PeerPolicy {
    pub(crate) fn new(config: Arc<ServeConfig>, certificate: Option<Arc<ServerCertificate>>) -> Self {
        let limit = RateLimiter::new(config.requests_per_second);
        Self { config, certificate, limit, last_ready_check: tokio::sync::Mutex::default() }
    }

    /// The CA certificates that agents' certificates must come from. `None` if agents identify themselves by tokens only.
    pub(crate) fn agent_trust(&self) -> Option<&Arc<AgentTrust>> {
        self.certificate.as_ref()?.agents.as_ref()
    }

    /// Whether an address is a trusted proxy.
    pub(crate) fn is_proxy(&self, address: IpAddr) -> bool {
        self.config.trusted_proxies.iter().any(|network| network.contains(address))
    }

    /// The sender of a request. `X-Forwarded-*` headers are used only if the request comes from a trusted proxy.
    pub(crate) fn peer(&self, transport: Transport, headers: &HeaderMap) -> Peer {
        let Transport { from, is_tls, .. } = transport;
        let direct = Peer {
            address: from,
            is_https: is_tls,
            is_by_proxy: false,
            host: None,
            transport,
            certificate: None,
        };
        if !self.is_proxy(from) {
            return direct;
        }
        // The proxy has added the last of several values.
        let last = |name: HeaderName| {
            let text = headers.get_all(name).iter().next_back()?.to_str().ok()?;
            text.rsplit(',').next().map(str::trim).filter(|text| !text.is_empty())
        };
        let is_https = last(FORWARDED_PROTO).map_or(is_tls, |proto| proto.eq_ignore_ascii_case("https"));
        let host = last(FORWARDED_HOST).map(Into::into);
        Peer { address: self.client_address(from, headers), is_https, is_by_proxy: true, host, ..direct }
    }

    /// The client's address in `X-Forwarded-For`. Every proxy appends the address from which it got the request, so the client is the
    /// right-most address that is not a trusted proxy. Addresses to the left of it were sent by the client.
    fn client_address(&self, from: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = from;
        for line in headers.get_all(FORWARDED_FOR).iter().rev() {
            for part in line.to_str().unwrap_or_default().rsplit(',') {
                // Clients on this machine do not use a proxy, so a proxy must not name loopback.
                let Some(address) = forwarded_address(part).filter(|address| !address.is_loopback()) else {
                    return client;
                };
                client = address;
                if !self.is_proxy(address) {
                    return client;
                }
            }
        }
        client
    }

    /// Whether `authority` (`host[:port]`) is a name of this server: from its public URL or its certificate, the address of the connection,
    /// or loopback. This prevents DNS rebinding: requests from a foreign web page have that page's host name.
    pub(crate) fn is_ours(&self, authority: &str, peer: &Peer) -> bool {
        let Some((host, _)) = host_and_port(authority) else { return false };
        is_loopback(host)
            || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical() == peer.transport.to)
            || self.config.public_url.as_ref().is_some_and(|url| url.host().eq_ignore_ascii_case(host))
            || (peer.is_https
                && self.certificate.as_ref().is_some_and(|certificate| certificate.matches(host)))
    }

    /// The names of this server, for a client that used another name. The names in the certificate are public, because each handshake has
    /// them.
    pub(crate) fn names_in_words(&self, peer: &Peer) -> String {
        let bracketed = |host: &str| match host.parse::<Ipv6Addr>() {
            Ok(address) => format!("[{address}]"),
            Err(_) => host.to_owned(),
        };
        let url = self.config.public_url.as_ref().map(|url| url.host().to_owned());
        let certificate =
            self.certificate.as_ref().filter(|_| peer.is_https).map(|certificate| certificate.names());
        // The connection's address is left out in two cases: behind a proxy, to which clients connect instead, and if the system did not
        // report the address.
        let reached = Some(peer.transport.to).filter(|to| !peer.is_by_proxy && !to.is_unspecified());
        let reached = reached.map(|to| to.to_string());
        let fixed = ["127.0.0.1", "::1", "localhost"].map(str::to_owned);
        let mut names: Vec<String> = Vec::new();
        for name in url.into_iter().chain(reached).chain(certificate.into_iter().flatten()).chain(fixed) {
            let name = bracketed(&name);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let last = names.pop().unwrap_or_default();
        format!("{} and {last}", names.join(", "))
    }

    /// Whether a client that verifies certificates accepts this server as `host`. True if the server has no certificate.
    pub(crate) fn is_certified_as(&self, host: &str) -> bool {
        self.certificate.as_ref().is_none_or(|certificate| certificate.matches(host))
    }

    /// Whether a page of this `origin` is this server's own, when the request is for `authority`.
    pub(crate) fn is_own_origin(&self, origin: &str, authority: &str, peer: &Peer) -> bool {
        let scheme = if peer.is_https { "https://" } else { "http://" };
        origin.strip_prefix(scheme).is_some_and(|rest| rest.eq_ignore_ascii_case(authority))
            || self.config.public_url.as_ref().is_some_and(|url| url.to_string().eq_ignore_ascii_case(origin))
    }

    /// Whether a request without TLS has bypassed the proxy through which all requests of other machines must come.
    pub(crate) fn has_bypassed_proxy(&self, peer: &Peer) -> bool {
        let ServeConfig { listen, tls, insecure_http, .. } = &*self.config;
        let requires_proxy = !listen.ip().is_loopback() && tls.is_none() && !insecure_http;
        requires_proxy && !peer.is_by_proxy && !peer.transport.from.is_loopback()
    }

    /// Counts a request against the rate limit of its address. Programs of this machine are not limited.
    ///
    /// # Errors
    /// The rate is exceeded. The error is the number of seconds to wait.
    pub(crate) fn check_rate(&self, peer: &Peer) -> Result<(), u64> {
        let is_local = !peer.is_by_proxy && peer.transport.from.is_loopback();
        if is_local { Ok(()) } else { self.limit.take(&client_key(peer.address)) }
    }

    /// Whether the response has `Strict-Transport-Security`: the request used HTTPS, and its host is the host of an HTTPS public URL.
    pub(crate) fn has_hsts(&self, authority: &str, peer: &Peer) -> bool {
        let host = host_and_port(authority).map(|(host, _)| host);
        peer.is_https
            && self.config.public_url.as_ref().is_some_and(|url| {
                url.is_https() && host.is_some_and(|host| url.host().eq_ignore_ascii_case(host))
            })
    }
}

impl Peer {
    /// Whether the connection itself has no TLS. If the server uses TLS, only programs of this machine connect like that.
    pub(crate) fn is_unencrypted(&self) -> bool {
        !self.transport.is_tls
    }

    /// The `host[:port]` in the URL that the client used.
    pub(crate) fn authority<'a>(
        &'a self,
        headers: &'a HeaderMap,
        uri: &'a axum::http::Uri,
    ) -> Option<&'a str> {
        let host = || headers.get(header::HOST).map(|host| host.to_str().unwrap_or("\u{fffd}"));
        self.host.as_deref().or_else(host).or_else(|| uri.authority().map(|a| a.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(change: impl FnOnce(&mut ServeConfig)) -> PeerPolicy {
        let mut config = ServeConfig::new("nowhere");
        config.trusted_proxies = ["10.0.0.0/8", "127.0.0.1"].map(|n| n.parse().unwrap()).into();
        change(&mut config);
        PeerPolicy::new(Arc::new(config), None)
    }

    fn peer(policy: &PeerPolicy, from: &str, headers: &[(&'static str, &str)]) -> Peer {
        let transport =
            Transport { from: from.parse().unwrap(), to: "192.0.2.1".parse().unwrap(), is_tls: false };
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            all.append(*name, value.parse().unwrap());
        }
        policy.peer(transport, &all)
    }

    #[test]
    fn only_names_of_this_machine_are_accepted_as_hosts() {
        let policy = policy(|_| {});
        let peer = peer(&policy, "127.0.0.1", &[]);
        for host in
            ["localhost", "LOCALHOST:7070", "127.0.0.1:80", "127.8.8.8", "[::1]", "[::1]:7070", "192.0.2.1:9"]
        {
            assert!(policy.is_ours(host, &peer), "{host}");
        }
        for host in [
            "",
            "example.com",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "10.0.0.1",
            "[::2]",
            "localhost:x",
            "0.0.0.0",
            "localhost@evil",
            "[::1]evil",
            "::1",
            "192.0.2.2",
        ] {
            assert!(!policy.is_ours(host, &peer), "{host}");
        }
    }

    #[test]
    fn refusals_list_the_accepted_names() {
        let plain = policy(|_| {});
        let reached = peer(&plain, "203.0.113.9", &[]);
        assert_eq!(plain.names_in_words(&reached), "192.0.2.1, 127.0.0.1, [::1] and localhost");
        let named = policy(|c| c.public_url = Some("https://lockstep.example.org".parse().unwrap()));
        let all = named.names_in_words(&reached);
        assert_eq!(all, "lockstep.example.org, 192.0.2.1, 127.0.0.1, [::1] and localhost");
        for name in all.split([',', ' ']).filter(|word| !word.is_empty() && *word != "and") {
            assert!(named.is_ours(name, &reached), "{name}");
        }
        let by_proxy = named.names_in_words(&peer(&named, "10.0.0.1", &[]));
        assert_eq!(by_proxy, "lockstep.example.org, 127.0.0.1, [::1] and localhost");
    }

    #[test]
    fn the_last_address_that_is_not_a_proxy_is_the_client() {
        let policy = policy(|_| {});
        let client = |from: &str, lines: &[&str]| {
            let headers: Vec<_> = lines.iter().map(|line| ("x-forwarded-for", *line)).collect();
            peer(&policy, from, &headers).address.to_string()
        };
        assert_eq!(client("10.0.0.1", &["203.0.113.7"]), "203.0.113.7");
        assert_eq!(client("10.0.0.1", &["1.1.1.1, 203.0.113.7, 10.9.9.9"]), "203.0.113.7");
        assert_eq!(client("10.0.0.1", &["1.1.1.1", "203.0.113.7:55, 10.9.9.9"]), "203.0.113.7");
        assert_eq!(client("10.0.0.1", &["1.1.1.1, nonsense"]), "10.0.0.1");
        assert_eq!(client("10.0.0.1", &["1.1.1.1, nonsense, 10.2.2.2"]), "10.2.2.2");
        assert_eq!(client("10.0.0.1", &["10.3.3.3, 10.2.2.2"]), "10.3.3.3");
        assert_eq!(client("10.0.0.1", &[]), "10.0.0.1");
        // Headers from an address that is not a trusted proxy are ignored.
        assert_eq!(client("203.0.113.9", &["127.0.0.1"]), "203.0.113.9");
    }
}
