//! Restricts webhooks to public internet addresses, unless `serve --webhooks-allow-private` is given. Without this restriction, a webhook could send
//! requests to this machine, the local network, or the metadata service of a cloud.

use reqwest::{
    Url,
    dns::{Addrs, Name, Resolve, Resolving},
};
use std::net::{IpAddr, SocketAddr};

/// Whether an address is reachable from the internet. IPv4: all except the IANA special-purpose addresses, multicast, and Azure's platform
/// services. IPv6: global unicast, except the ranges for protocols such as Teredo, for documentation, and for embedded IPv4
/// addresses (6to4).
fn is_public(address: IpAddr) -> bool {
    // An IPv4-mapped address such as `::ffff:10.0.0.1` counts as its IPv4 address.
    match address.to_canonical() {
        IpAddr::V4(address) => !matches!(
            address.octets(),
            [0 | 10 | 127 | 224.., ..]
                | [100, 64..=127, ..]
                | [168, 63, 129, 16]
                | [169, 254, ..]
                | [172, 16..=31, ..]
                | [192, 0, 0 | 2, _]
                | [192, 168, ..]
                | [198, 18 | 19, ..]
                | [198, 51, 100, _]
                | [203, 0, 113, _]
        ),
        IpAddr::V6(address) => {
            let segments = address.segments();
            matches!(segments, [0x2000..=0x3fff, ..])
                && !matches!(segments, [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x2002, ..])
        }
    }
}

/// The error for an address or a name that a webhook must not reach.
fn refusal(what: &str) -> String {
    format!(
        "{what} belongs to this machine or a private network, which webhooks reach only with `serve --webhooks-allow-private`"
    )
}

/// Checks a URL whose host is an IP address. Such a host is not resolved, so [`PublicResolver`] does not check it.
///
/// # Errors
/// The address is not public.
pub(crate) fn check_literal(url: &Url) -> Result<(), String> {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    match host.parse() {
        Ok(address) if !is_public(address) => Err(refusal(host)),
        _ => Ok(()),
    }
}

/// Resolves names to public addresses only. The client connects to exactly the addresses that were checked.
pub(super) struct PublicResolver;

impl Resolve for PublicResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> = addresses.filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err(refusal(name.as_str()).into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_and_reserved_addresses_are_not_public() {
        for address in ["1.1.1.1", "100.63.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8"] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "127.0.0.1",
            "127.1.2.3",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "64:ff9b::7f00:1",
            "2001:0:1::1",
            "2001:db8::1",
            "2002:7f00:1::",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn private_addresses_in_unusual_forms_are_refused() {
        for url in [
            "http://127.0.0.1:7070/x",
            "http://127.1/",
            "http://2130706433/",
            "http://0x7f.0.0.1/",
            "http://0177.0.0.1/",
            "http://[::1]:80/",
            "http://[::ffff:10.0.0.1]/",
            "http://169.254.169.254/latest/meta-data",
        ] {
            let refused = check_literal(&Url::parse(url).unwrap()).unwrap_err();
            assert!(refused.contains("--webhooks-allow-private"), "{url}: {refused}");
        }
        for url in ["https://example.org/", "http://8.8.8.8/", "http://[2606:4700::1111]/"] {
            check_literal(&Url::parse(url).unwrap()).unwrap();
        }
    }
}
