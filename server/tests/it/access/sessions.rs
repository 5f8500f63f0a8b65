//! Sessions of browsers: login links, the sign-in form, cookies, and signing out.

use crate::{
    test_server::{Stream, TestServer, client_builder, client_without_redirects, with_form},
    tls::{Files, http, with_tls},
};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A client that sends requests like a browser.
pub(super) struct Browser<'a> {
    server: &'a TestServer,
    pub(super) client: Client,
    pub(super) cookie: String,
}

impl<'a> Browser<'a> {
    pub(super) fn new(server: &'a TestServer) -> Self {
        Self { server, client: client_without_redirects(""), cookie: String::new() }
    }

    pub(super) async fn get(&self, path: &str) -> Response {
        let request = self.client.get(self.server.url(path)).header("cookie", &self.cookie);
        request.send().await.unwrap()
    }

    pub(super) async fn post(&self, path: &str, fields: &str) -> Response {
        let request = self.client.post(self.server.url(path)).header("cookie", &self.cookie);
        let request = request.header("origin", format!("http://{}", self.server.address));
        with_form(request, fields.to_owned()).send().await.unwrap()
    }

    /// Opens the stream of the list of jobs.
    pub(super) async fn stream_list(&self) -> Stream {
        let mut request = self.server.socket_request("/stream", "");
        request.headers_mut().insert("cookie", self.cookie.parse().unwrap());
        Stream::open_list(request).await
    }

    pub(super) async fn sign_in(&self, name: &str, password: &str) -> Response {
        self.post("/login", &format!("name={name}&password={password}")).await
    }

    /// Stores the cookie that a response sets, and returns the cookie's attributes.
    pub(super) fn take_cookie(&mut self, response: &Response) -> String {
        let cookie = response.headers()["set-cookie"].to_str().unwrap();
        let (cookie, attributes) = cookie.split_once(';').unwrap();
        self.cookie = format!("other=1; {cookie}");
        attributes.to_owned()
    }
}

pub(super) fn location(response: &Response) -> &str {
    response.headers()["location"].to_str().unwrap()
}

#[tokio::test]
async fn a_link_is_valid_once_and_its_session_survives_a_restart() {
    let server = TestServer::new().await;
    let link = server.create("/login-links", &json!({})).await;
    let url = link["url"].as_str().unwrap();
    let path = url.strip_prefix(&format!("http://{}", server.address)).unwrap();
    let mut browser = Browser::new(&server);
    // Some programs send HEAD before a person opens the link.
    let preview = reqwest::Client::new().head(url).send().await.unwrap();
    assert!(preview.status().is_success() && preview.headers().get("set-cookie").is_none(), "{preview:?}");
    let response = browser.get(&format!("{path}&next=/machines")).await;
    assert_eq!((response.status().as_u16(), location(&response)), (303, "/machines"));
    let attributes = browser.take_cookie(&response);
    assert!(attributes.contains("HttpOnly") && attributes.contains("SameSite=Lax"), "{attributes}");
    assert!(!attributes.contains("Secure"), "over plain HTTP, browsers would drop a Secure cookie");
    assert_eq!(browser.get("/jobs").await.status(), 200);
    // The session has the rights of the admin's token that created the link.
    assert_eq!(browser.get("/audit").await.status(), 200);
    assert_eq!(location(&browser.get("/login?next=//evil.example").await), "/jobs", "signed in already");
    let again = Browser::new(&server).get(path).await;
    assert!(again.status() == 401 && again.headers().get("set-cookie").is_none(), "a link is valid once");
    let page = again.text().await.unwrap();
    assert!(page.contains("already used") && page.contains("lockstep login-link"), "{page}");

    let value = browser.cookie.rsplit('=').next().unwrap().to_owned();
    let unhashed =
        server.query_number(&format!("SELECT count(*) FROM sessions WHERE hash = '{value}'")).await;
    assert_eq!(unhashed, 0, "only the hash is stored");
    let port = server.address.port();
    let cookie = browser.cookie.clone();
    let server = TestServer::open(server.stop().await, |c| c.listen.set_port(port)).await;
    let mut browser = Browser::new(&server);
    browser.cookie = cookie;
    let page = browser.get("/jobs").await.text().await.unwrap();
    assert!(page.contains("Sign out") && page.contains("href=\"/audit\""), "{page}");

    // The websocket of a page authenticates by the cookie. Signing out closes the websocket.
    let mut list = browser.stream_list().await;
    let other_page = browser
        .client
        .post(server.url("/logout"))
        .header("cookie", &browser.cookie)
        .header("origin", "http://evil.example");
    assert_eq!(other_page.send().await.unwrap().status(), 403, "a page of another origin cannot sign out");
    let since = Instant::now();
    let response = browser.post("/logout", "").await;
    assert_eq!(location(&response), "/login");
    assert!(response.headers()["set-cookie"].to_str().unwrap().contains("Max-Age=0"));
    let (code, _) = list.next().await.unwrap_err();
    assert!(code == 4401 && since.elapsed() < Duration::from_secs(5), "{code}");
    assert_eq!(location(&browser.get("/jobs").await), "/login?next=/jobs", "the cookie is no longer valid");
    server.stop().await;
}

#[tokio::test]
async fn over_tls_links_and_cookies_are_https_only() {
    let files = Files::new();
    let server = with_tls(files.issue("server", |_| {}), |_| {}).await;
    let base = format!("https://localhost:{}", server.address.port());
    let request = http(&files.client(), &server.token).post(format!("{base}/api/v1/login-links"));
    let link: Value = request.json(&json!({})).send().await.unwrap().json().await.unwrap();
    let link = link["url"].as_str().unwrap();
    assert!(link.starts_with(&format!("{base}/login?code=")), "{link}");
    let client = client_builder("").redirect(reqwest::redirect::Policy::none());
    let client = client.tls_backend_preconfigured((*files.client()).clone()).build().unwrap();
    let response = client.get(link).send().await.unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    assert!(cookie.contains("; Secure") && cookie.contains("HttpOnly"), "{cookie}");
    server.stop().await;
}

#[tokio::test]
async fn the_form_accepts_a_token_and_limits_guesses() {
    let server = TestServer::new().await;
    let (token_id, secret) = server.make_token(&json!({"name": "reader", "scope": "read"})).await;
    let agent_token = server.agent_token("machine").await;
    let mut browser = Browser::new(&server);
    let form = browser.get("/login?next=/jobs%3Fstate%3Drunning").await.text().await.unwrap();
    assert!(form.contains("value=\"/jobs?state=running\"") && form.contains("type=\"password\""), "{form}");
    let response = browser.post("/login", &format!("token={secret}&next=/jobs%3Fstate%3Drunning")).await;
    assert_eq!((response.status().as_u16(), location(&response)), (303, "/jobs?state=running"));
    browser.take_cookie(&response);
    let page = browser.get("/jobs").await.text().await.unwrap();
    // Only admins see the link to the audit log.
    assert!(page.contains("Sign out") && !page.contains("href=\"/audit\""));
    assert_eq!(browser.get("/audit").await.status(), 403);
    let submitted = browser.post("/jobs/new", "name=x").await;
    assert_eq!(submitted.status(), 403, "a session has the rights of its token");

    // Each of these is a failed sign-in. Ten per minute are allowed.
    for (n, wrong) in ["", "hunter2", agent_token.as_str()].into_iter().cycle().take(10).enumerate() {
        let response = Browser::new(&server).post("/login", &format!("token={wrong}")).await;
        assert_eq!(response.status(), 401, "{n}");
        let page = response.text().await.unwrap();
        assert!(!page.contains("id=\"token-error\" role=\"alert\"></p>"), "{n}: {page}");
    }
    for path in ["/login", "/login?code=guessed"] {
        let response = match path {
            "/login" => Browser::new(&server).post(path, "token=hunter2").await,
            _ => Browser::new(&server).get(path).await,
        };
        assert_eq!(response.status(), 429, "{path}");
        let retry_after_secs: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=61).contains(&retry_after_secs), "{retry_after_secs}");
        assert!(response.text().await.unwrap().contains("try again in"));
    }
    // A valid token is still accepted.
    let response = Browser::new(&server).post("/login", &format!("token={secret}")).await;
    assert_eq!(response.status(), 303);
    let (_, log) = server.get("/audit?limit=1000").await;
    let sign_ins = |status: u64| {
        let entries = log["entries"].as_array().unwrap();
        entries.iter().filter(|e| e["action"] == "sign in" && e["status"] == status).count()
    };
    // Refusals by the rate limit are not logged.
    assert_eq!((sign_ins(303), sign_ins(401), sign_ins(429)), (2, 10, 0));
    assert!(!log.to_string().contains("hunter2") && !log.to_string().contains(&secret));

    // Revoking a token ends its sessions.
    assert_eq!(server.delete(&format!("/tokens/{token_id}")).await.0, 204);
    assert_eq!(browser.get("/jobs").await.status(), 303);
    assert_eq!(server.post("/login-links", &json!({})).await.0, 201, "another token still makes links");
    server.stop().await;
}
