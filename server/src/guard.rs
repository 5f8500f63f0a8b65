//! The outermost layer, before any route: which requests are accepted at all. Listening on loopback keeps other machines out,
//! but not web pages in a browser on this machine. Therefore:
//!
//! - `Host` must be a loopback name, or a page could reach the server under a name of its own that resolves
//!   to 127.0.0.1 (DNS rebinding) and read the answers;
//! - on unsafe methods and websockets an `Origin`, which browsers always send there, must be this server's own.
//!
//! Every response has headers (Content-Security-Policy and others) that allow only what our pages need.

use crate::error::Error;
use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// On every answer that does not say otherwise. `same-origin` and not `no-referrer`: under that, browsers send `Origin: null` with our own
/// forms.
const HEADERS: [(HeaderName, &str); 7] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "same-origin"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
];

pub(crate) async fn guard(request: Request, next: Next) -> Response {
    let mut response = match check(request.method(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    for (name, value) in HEADERS {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

fn check(method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Error> {
    // Databases end a text there, or refuse it: no name and no text to search for has it.
    if [Some(uri.path()), uri.query()].into_iter().flatten().any(|part| part.contains("%00")) {
        return Err(Error::BadRequest("the address has a NUL character (%00); leave it out".into()));
    }
    let text = |name: HeaderName| headers.get(name).map(|v| v.to_str().unwrap_or("\u{fffd}"));
    let host = text(header::HOST).or(uri.authority().map(|a| a.as_str()));
    let Some(host) = host.filter(|h| is_loopback(h)) else {
        return Err(Error::Refused(
            StatusCode::MISDIRECTED_REQUEST,
            "this server answers only to 127.0.0.1, [::1] and localhost; use one of these in the address"
                .into(),
        ));
    };
    let socket = text(header::UPGRADE).is_some_and(|u| u.eq_ignore_ascii_case("websocket"));
    let safe = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) && !socket;
    if safe {
        return Ok(());
    }
    let own = match text(header::ORIGIN) {
        Some(origin) => origin.strip_prefix("http://").is_some_and(|o| o.eq_ignore_ascii_case(host)),
        // Programs send no Origin; a browser that leaves it out still says where the request comes from.
        None => text(HeaderName::from_static("sec-fetch-site"))
            .is_none_or(|s| matches!(s, "same-origin" | "none")),
    };
    if own {
        Ok(())
    } else {
        Err(Error::Forbidden(format!("requests from other web pages are refused; open http://{host} itself")))
    }
}

/// Whether `host[:port]` is a name that always means this machine.
fn is_loopback(host: &str) -> bool {
    let port_ok =
        |rest: &str| rest.is_empty() || rest.strip_prefix(':').is_some_and(|p| p.parse::<u16>().is_ok());
    ["localhost", "[::1]"].iter().any(|name| {
        host.get(..name.len()).is_some_and(|h| h.eq_ignore_ascii_case(name)) && port_ok(&host[name.len()..])
    }) || {
        let (name, port) = host.split_at(host.find(':').unwrap_or(host.len()));
        name.parse::<std::net::Ipv4Addr>().is_ok_and(|a| a.is_loopback()) && port_ok(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_hosts() {
        for host in ["localhost", "LOCALHOST:7070", "127.0.0.1:80", "127.8.8.8", "[::1]", "[::1]:7070"] {
            assert!(is_loopback(host), "{host}");
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
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
