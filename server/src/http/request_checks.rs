//! The outermost layer, before any route, which decides whether a request is accepted at all. Listening on loopback keeps other machines
//! out, but not web pages in a browser on this machine, and a server on a network gets requests from anybody. Therefore:
//!
//! - The rate of requests of an address is limited, except for authenticated agents.
//! - `Host` must be a name of this server (`peer.rs`). Otherwise a foreign page could reach the server under a name of its own that
//!   resolves to the server's address (DNS rebinding), and read the responses.
//! - With unsafe methods and websockets, the `Origin`, which browsers then always send, must be this server's own.
//!
//! Every response has headers (Content-Security-Policy and others) that allow only what this server's pages need.

use crate::http::{HttpState, authorize::is_agent, error::Error, peer::Peer};
use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::sync::Arc;

const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// Headers of every response that does not set them itself. The referrer policy is not `no-referrer`, because browsers would then send
/// `Origin: null` with this server's own forms.
const HEADERS: [(HeaderName, &str); 7] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "same-origin"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
];

/// `Strict-Transport-Security`: browsers use only HTTPS for this host for a year.
const HSTS: HeaderValue = HeaderValue::from_static("max-age=31536000");

/// Refuses a request that must not reach any route, and adds headers to the response.
pub(crate) async fn check_request(
    State(http): State<Arc<HttpState>>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    let has_hsts = peer
        .authority(request.headers(), request.uri())
        .is_some_and(|authority| http.peer_policy.has_hsts(authority, &peer));
    let mut response = match http.peer_policy.check_rate(&peer) {
        // Agents are exempt, because hundreds of them may be behind one address and reconnect at the same time.
        Err(seconds) if !is_agent(&http, request.headers(), &peer) => too_many(seconds),
        _ => match check_host_and_origin(&http, &peer, &request) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        },
    };
    for (name, value) in HEADERS {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    if has_hsts {
        response.headers_mut().insert(header::STRICT_TRANSPORT_SECURITY, HSTS);
    }
    response
}

fn too_many(seconds: u64) -> Response {
    let detail = format!(
        "too many requests from this address; ask again in {seconds} s (`lockstep serve --requests-per-second` sets how many \
         are answered)"
    );
    Error::TooMany(detail, seconds).into_response()
}

fn check_host_and_origin(http: &HttpState, peer: &Peer, request: &Request) -> Result<(), Error> {
    let policy = &http.peer_policy;
    let (method, uri, headers) = (request.method(), request.uri(), request.headers());
    // Databases end a text at NUL or refuse it. No valid name or search contains NUL.
    if [Some(uri.path()), uri.query()].into_iter().flatten().any(|part| part.contains("%00")) {
        return Err(Error::BadRequest("the URL has a NUL character (%00); leave it out".into()));
    }
    let public_url = || http.config.public_url.as_ref().map(ToString::to_string);
    if policy.has_bypassed_proxy(peer) {
        let url = public_url().unwrap_or_else(|| "the proxy's address".into());
        let detail =
            format!("this server must be reached through its proxy, which terminates TLS; use {url}");
        return Err(Error::Forbidden(detail));
    }
    let header_text = |name: HeaderName| headers.get(name).map(|v| v.to_str().unwrap_or("\u{fffd}"));
    // With two `Host` headers, a proxy may have used the other header (RFC 9112, section 3.2).
    if headers.get_all(header::HOST).iter().nth(1).is_some() {
        return Err(Error::BadRequest("the request has more than one Host header".into()));
    }
    // Behind a proxy, Host is checked in addition to X-Forwarded-Host, because the proxy may pass on an X-Forwarded-Host from the client.
    let is_ours = |host: &str| policy.is_ours(host, peer);
    let are_host_and_uri_ours = header_text(header::HOST).is_none_or(is_ours)
        && uri.authority().is_none_or(|authority| is_ours(authority.as_str()));
    let Some(host) = peer.authority(headers, uri).filter(|host| are_host_and_uri_ours && is_ours(host))
    else {
        let detail = match public_url() {
            Some(url) => format!("this server answers only to {}; open {url}", policy.names_in_words(peer)),
            None => format!(
                "this server answers only to {}; use one of these in the address, or give the server the name that you use with \
                 `serve --public-url`",
                policy.names_in_words(peer)
            ),
        };
        return Err(Error::Refused(StatusCode::MISDIRECTED_REQUEST, detail));
    };
    let is_websocket = header_text(header::UPGRADE).is_some_and(|u| u.eq_ignore_ascii_case("websocket"));
    if method.is_safe() && !is_websocket {
        return Ok(());
    }
    let is_own_page = match header_text(header::ORIGIN) {
        Some(origin) => policy.is_own_origin(origin, host, peer),
        // Programs send no Origin. Browsers that leave it out send Sec-Fetch-Site.
        None => header_text(HeaderName::from_static("sec-fetch-site"))
            .is_none_or(|s| matches!(s, "same-origin" | "none")),
    };
    if is_own_page {
        return Ok(());
    }
    let url =
        public_url().unwrap_or_else(|| format!("{}://{host}", if peer.is_https { "https" } else { "http" }));
    Err(Error::Forbidden(format!("requests from other web pages are refused; open {url} itself")))
}
