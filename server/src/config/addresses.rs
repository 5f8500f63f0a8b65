//! Addresses on the command line and in headers: the server's public URL, the networks of trusted proxies.

use ipnet::IpNet;
use reqwest::Url;
use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

/// The address under which people and programs reach the server: `https://lockstep.example.org`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicUrl(Url);

impl PublicUrl {
    /// Whether the URL's scheme is `https`.
    pub fn is_https(&self) -> bool {
        self.0.scheme() == "https"
    }

    /// The host: a name in lower case, or an address without brackets.
    pub fn host(&self) -> &str {
        self.0.host_str().unwrap_or_default().trim_matches(['[', ']'])
    }
}

/// Formats the URL as in an `Origin` header, without a path.
impl fmt::Display for PublicUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.origin().ascii_serialization())
    }
}

impl FromStr for PublicUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let why = match Url::parse(text) {
            Err(_) if !text.contains("://") => "it must begin with https:// or http://".into(),
            Err(error) => error.to_string(),
            Ok(url) if !["https", "http"].contains(&url.scheme()) => {
                "it must begin with https:// or http://".into()
            }
            Ok(url) if !url.username().is_empty() || url.password().is_some() => {
                "it must not have a user name".into()
            }
            Ok(url) if url.path() != "/" || url.query().is_some() || url.fragment().is_some() => {
                "it must not have a path, because the dashboard is at the root of the host".into()
            }
            Ok(url) => return Ok(Self(url)),
        };
        Err(format!("{why}; an example is https://lockstep.example.org"))
    }
}

/// Splits `host`, `host:port`, `[v6]` or `[v6]:port`. Returns the host without brackets.
pub(crate) fn host_and_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            (host, port)
        }
        None => {
            let (host, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
            let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
            if host.is_empty() || !host.bytes().all(is_allowed) {
                return None;
            }
            (host, port)
        }
    };
    match port.strip_prefix(':') {
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
            Some((host, Some(digits.parse().ok()?)))
        }
        None if port.is_empty() => Some((host, None)),
        _ => None,
    }
}

/// A network of trusted proxies: `10.0.0.0/8`, or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyNetwork(IpNet);

impl ProxyNetwork {
    /// Whether an address is in the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for ProxyNetwork {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        match network {
            Err(_) => Err(format!("{text:?} is neither a network nor an address; an example is 10.0.0.0/8")),
            Ok(network) if network.prefix_len() == 0 => {
                let why = "because every client could then pretend to have any address";
                Err(format!("{text:?} must not contain all addresses, {why}; name the proxies' networks"))
            }
            Ok(network) => Ok(Self(network)),
        }
    }
}

/// Whether a host (without brackets) always means this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The address for rate limits. For IPv6 it is the /64 network, because one client can use all addresses of such a network.
pub(crate) fn client_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

/// Parses an address, with or without a port, from `X-Forwarded-For`.
pub(crate) fn forwarded_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let without_port = || text.parse().ok();
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok().map(IpAddr::V6);
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    without_port().or_else(bracketed).or_else(with_port).map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_url_is_an_origin() {
        for (text, origin) in [
            ("https://Lockstep.example.org/", "https://lockstep.example.org"),
            ("https://a:443", "https://a"),
            ("http://a:443", "http://a:443"),
            ("HTTP://10.0.0.7:80", "http://10.0.0.7"),
            ("https://[2001:db8::7]:8443/", "https://[2001:db8::7]:8443"),
        ] {
            assert_eq!(text.parse::<PublicUrl>().unwrap().to_string(), origin);
        }
        for text in [
            "lockstep.example.org",
            "ftp://a",
            "https://",
            "https:///",
            "https://a/b",
            "https://a?b",
            "https://u@a",
            "https://a:x",
            "https://a:70000",
            "https://[::1",
            "https://a b",
            "https://2001:db8::7",
        ] {
            assert!(text.parse::<PublicUrl>().unwrap_err().contains("example"), "{text}");
        }
    }

    #[test]
    fn networks_contain_their_addresses() {
        let inside = |network: &str, address: &str| {
            network.parse::<ProxyNetwork>().unwrap().contains(address.parse().unwrap())
        };
        assert!(inside("10.0.0.0/8", "10.255.0.1") && !inside("10.0.0.0/8", "11.0.0.1"));
        assert!(inside("10.1.2.3", "10.1.2.3") && !inside("10.1.2.3", "10.1.2.4"));
        assert!(inside("10.1.2.3/31", "10.1.2.2") && inside("128.0.0.0/1", "255.0.0.1"));
        assert!(inside("10.0.0.0/8", "::ffff:10.0.0.1"), "as a dual-stack socket reports it");
        assert!(inside("2001:db8::/32", "2001:db8:1::1") && !inside("2001:db8::/32", "2001:db9::1"));
        assert!(!inside("10.0.0.0/8", "2001:db8::1") && !inside("::1", "127.0.0.1"));
        for text in ["", "10.0.0.0/33", "10.0.0.0/x", "::/129", "0.0.0.0/0", "::/0", "10.0.0/8", "a"] {
            assert!(text.parse::<ProxyNetwork>().is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let key = |text: &str| client_key(text.parse().unwrap()).to_string();
        assert_eq!(key("2001:db8::1"), key("2001:db8::ffff:1"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:0:1::1"));
        assert_eq!(key("::ffff:10.0.0.1"), "10.0.0.1");
    }

    #[test]
    fn forwarded_addresses_may_have_ports() {
        for (text, address) in [
            (" 10.0.0.1 ", "10.0.0.1"),
            ("10.0.0.1:8080", "10.0.0.1"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]:8080", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ] {
            assert_eq!(forwarded_address(text), Some(address.parse().unwrap()), "{text}");
        }
        for text in ["", "unknown", "_hidden", "10.0.0.1, 10.0.0.2", "10.0.0.256"] {
            assert_eq!(forwarded_address(text), None, "{text}");
        }
    }
}
