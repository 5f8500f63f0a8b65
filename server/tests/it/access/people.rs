//! People: the first admin, sign-in by password, changes of people, and limits.

use super::sessions::{Browser, location};
use crate::test_server::{TestServer, assert_refused, client_from, with_form};
use lockstep_protocol::limits::{MAX_PEOPLE, PASSWORD_CHARS, PERSON_NAME_CHARS};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The password of all people in these tests.
const PASSWORD: &str = "correct horse";

impl TestServer {
    /// Adds a person with [`PASSWORD`].
    pub async fn add_person(&self, name: &str, role: &str) {
        let body = json!({"name": name, "role": role, "password": PASSWORD});
        self.create("/people", &body).await;
    }

    /// Changes a person.
    pub async fn change_person(&self, name: &str, change: &Value) -> (u16, Value) {
        self.patch(&format!("/people/{name}"), change).await
    }

    /// A browser with a session of a person.
    pub(super) async fn signed_in(&self, name: &str) -> Browser<'_> {
        let mut browser = Browser::new(self);
        let response = browser.sign_in(name, PASSWORD).await;
        assert_eq!(response.status(), 303, "{name}");
        browser.take_cookie(&response);
        browser
    }
}

/// Tries a password from an address of this machine. Returns status, body and duration.
async fn try_password(
    server: &TestServer,
    from: [u8; 4],
    name: &str,
    password: &str,
) -> (u16, String, Duration) {
    let fields = format!("name={name}&password={password}");
    let request = with_form(client_from(from).post(server.url("/login")), fields);
    let since = Instant::now();
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap(), since.elapsed())
}

#[tokio::test]
async fn only_an_admin_s_token_creates_the_first_admin() {
    let server = TestServer::new().await;
    let (_, link) = server.post("/login-links", &json!({})).await;
    let path = link["url"].as_str().unwrap().replace(&format!("http://{}", server.address), "");
    let mut browser = Browser::new(&server);
    let before = browser.get("/login").await.text().await.unwrap();
    // This is the form of a server without people.
    assert!(before.contains("name=\"token\"") && !before.contains("name=\"password\""));
    // Its foot has no link to a page that needs a session.
    assert!(before.contains("href=\"/docs\"") && !before.contains("href=\"/sweeps\""), "{before}");
    let fields = format!("setup=true&name=ada&password={PASSWORD}");
    assert_eq!(browser.post("/login", &fields).await.status(), 403, "without a session");
    let response = browser.get(&path).await;
    assert_eq!(location(&response), "/jobs");
    browser.take_cookie(&response);
    let form = browser.get("/login").await.text().await.unwrap();
    assert!(form.contains("Create the first admin") && form.contains("name=\"setup\""), "{form}");
    for wrong in ["setup=true&name=Ada&password=correct+horse", "setup=true&name=ada&password=short"] {
        assert_eq!(browser.post("/login", wrong).await.status(), 422, "{wrong}");
    }
    let (_, submit_token) = server.make_token(&json!({"name": "r", "scope": "submit"})).await;
    let mut submitter = Browser::new(&server);
    let response = submitter.post("/login", &format!("token={submit_token}")).await;
    submitter.take_cookie(&response);
    assert_eq!(submitter.post("/login", &fields).await.status(), 403, "without admin rights");

    let response = browser.post("/login", &fields).await;
    assert_eq!((response.status().as_u16(), location(&response)), (303, "/people"));
    browser.take_cookie(&response);
    let page = browser.get("/people").await.text().await.unwrap();
    assert!(page.contains("ada") && page.contains("Account") && page.contains("href=\"/audit\""), "{page}");
    let (_, people) = server.get("/people").await;
    assert_eq!(people["people"][0]["role"], "admin", "{people}");
    assert!(!people.to_string().contains("argon2"));
    assert_eq!(browser.post("/login", "setup=true&name=bob&password=correct+horse").await.status(), 403);
    let unhashed = format!("SELECT count(*) FROM people WHERE hash LIKE '%{PASSWORD}%'");
    assert_eq!(server.query_number(&unhashed).await, 0);
    let hashed = "SELECT count(*) FROM people WHERE hash LIKE '$argon2id$v=19$m=19456,t=2,p=1$%'";
    assert_eq!(server.query_number(hashed).await, 1);
    let form = Browser::new(&server).get("/login").await.text().await.unwrap();
    // The form accepts a password or a token.
    assert!(form.contains("name=\"password\"") && form.contains("name=\"token\""));
    server.stop().await;
}

#[tokio::test]
async fn people_sign_in_by_password_and_refusals_reveal_nothing() {
    let server = TestServer::new().await;
    server.add_person("vera", "viewer").await;
    server.add_person("mona", "member").await;
    server.add_person("gone", "member").await;
    assert_eq!(server.change_person("gone", &json!({"disabled": true})).await.0, 200);
    let vera = server.signed_in("vera").await;
    assert_eq!(vera.get("/jobs").await.status(), 200);
    assert_eq!(Browser::new(&server).sign_in("Vera", PASSWORD).await.status(), 303, "names ignore case");
    assert_eq!(vera.post("/jobs/new", "name=x").await.status(), 403, "viewers cannot submit");
    assert_eq!(vera.get("/people").await.status(), 403);
    let mona = server.signed_in("mona").await;
    // Members may submit, but this form is incomplete.
    assert_eq!(mona.post("/jobs/new", "name=x").await.status(), 422);
    assert_eq!(mona.get("/people").await.status(), 403);
    let (_, log) = server.get("/audit").await;
    let has_sign_in_entry = |who: &str| {
        let entries = log["entries"].as_array().unwrap();
        entries
            .iter()
            .any(|e| e["action"] == "sign in" && e["who"] == who && e["token_id"] == format!("person:{who}"))
    };
    assert!(has_sign_in_entry("vera") && has_sign_in_entry("mona"), "{log}");
    assert!(!log.to_string().contains(PASSWORD));

    let mut pages = Vec::new();
    for (n, (name, password)) in
        [("mona", "wrong password"), ("nobody", PASSWORD), ("gone", PASSWORD), ("mona", "")]
            .iter()
            .enumerate()
    {
        let (status, page, _) = try_password(&server, [127, 0, 1, n as u8 + 1], name, password).await;
        assert_eq!(status, 401, "{name}");
        // The tag `<html>` contains the time, so only the text after `<head>` is compared.
        let (_, page) = page.split_once("<head>").unwrap();
        pages.push(page.replace(name, ""));
    }
    assert!(pages.iter().all(|page| *page == pages[0] && page.contains("is wrong")), "{pages:?}");
    // A name that is too long is refused and not stored.
    let long = "a".repeat(100_000);
    assert_eq!(try_password(&server, [127, 0, 1, 9], &long, PASSWORD).await.0, 401);
    server.stop().await;
}

#[tokio::test]
async fn password_guessing_is_limited_without_affecting_others() {
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    server.add_person("bob", "member").await;
    let from = |n: u8| [127, 0, 2, n];
    assert_eq!(try_password(&server, from(9), "ada", PASSWORD).await.0, 303, "from the usual address");
    for n in 0..10 {
        assert_eq!(try_password(&server, from(1), "ada", "wrong password").await.0, 401, "{n}");
    }
    let (status, page, took) = try_password(&server, from(1), "ada", PASSWORD).await;
    assert!(
        status == 429 && page.contains("try again in"),
        "the correct password must also be refused: {status} after {took:?}"
    );
    assert_eq!(try_password(&server, from(1), "bob", PASSWORD).await.0, 429, "the address is blocked");
    for n in 0..20 {
        assert_eq!(try_password(&server, from(2 + n / 10), "ada", "wrong password").await.0, 401, "{n}");
    }
    // The name is blocked for new addresses.
    assert_eq!(try_password(&server, from(4), "ada", PASSWORD).await.0, 429);
    assert_eq!(try_password(&server, from(4), "bob", PASSWORD).await.0, 303, "another person");
    // An address that ada has signed in from before.
    assert_eq!(try_password(&server, from(9), "ada", PASSWORD).await.0, 303);
    server.stop().await;
}

#[tokio::test]
async fn an_unknown_name_takes_as_long_as_a_wrong_password() {
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    // Other tests use the cores meanwhile. So the fastest of several alternating attempts are compared, in up to six rounds. If passwords of
    // unknown names were not hashed, their attempts would be ten times as fast in every round.
    for round in 1..=6 {
        let (mut known, mut unknown) = (Duration::MAX, Duration::MAX);
        for n in 1..=5 {
            known = known.min(try_password(&server, [127, 3, round, n], "ada", "wrong password").await.2);
            unknown =
                unknown.min(try_password(&server, [127, 4, round, n], "nobody", "wrong password").await.2);
        }
        eprintln!("a wrong password: {known:?}, an unknown name: {unknown:?}");
        if unknown * 3 > known * 2 && known * 3 > unknown * 2 {
            server.stop().await;
            return;
        }
    }
    panic!("the times differ in all rounds");
}

#[tokio::test]
async fn changing_a_person_ends_sessions_and_websockets() {
    let mut server = TestServer::new().await;
    server.add_person("ada", "member").await;
    for (n, change) in [
        json!({"password": "another password"}),
        json!({"password": PASSWORD}),
        json!({"role": "viewer"}),
        json!({"disabled": true}),
        Value::Null,
    ]
    .iter()
    .enumerate()
    {
        // The second change only restores the password that the first change has replaced.
        if n == 1 {
            let response = Browser::new(&server).sign_in("ada", PASSWORD).await;
            assert_eq!(response.status(), 401, "the old password");
            assert_eq!(server.change_person("ada", change).await.0, 200);
            continue;
        }
        let browser = server.signed_in("ada").await;
        let cookie = browser.cookie.clone();
        let mut list = browser.stream_list().await;
        let status = match change {
            Value::Null => server.delete("/people/ada").await.0,
            change => server.change_person("ada", change).await.0,
        };
        // Without the time of hashing a password.
        let since = Instant::now();
        assert!(status == 200 || status == 204, "{change}: {status}");
        let (code, _) = list.next().await.unwrap_err();
        assert!(code == 4401 && since.elapsed() < Duration::from_secs(5), "{change}: {code}");
        assert_eq!(location(&browser.get("/jobs").await), "/login?next=/jobs", "{change}");
        assert_eq!(server.query_number("SELECT count(*) FROM sessions").await, 0, "{change}");
        drop(browser);
        // A restart does not restore the sessions.
        let port = server.address.port();
        server = TestServer::open(server.stop().await, |c| c.listen.set_port(port)).await;
        let mut browser = Browser::new(&server);
        browser.cookie = cookie;
        assert_eq!(location(&browser.get("/jobs").await), "/login?next=/jobs", "{change}");
        let is_refused = Browser::new(&server).sign_in("ada", PASSWORD).await.status() == 401;
        assert_eq!(is_refused, change["disabled"] == true || change.is_null() || n == 0, "{change}");
        if change["disabled"] == true {
            assert_eq!(server.change_person("ada", &json!({"disabled": false})).await.0, 200);
        }
    }
    assert_eq!(server.change_person("ada", &json!({"role": "admin"})).await.0, 404);
    assert_eq!(server.delete("/people/ada").await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn people_and_passwords_have_limits() {
    let server = TestServer::new().await;
    let (min, max) = (*PASSWORD_CHARS.start(), *PASSWORD_CHARS.end());
    let longest_name = "a".repeat(PERSON_NAME_CHARS);
    for (name, password, status) in [
        (longest_name.clone(), "é".repeat(max), 201),
        (format!("{longest_name}a"), "é".repeat(max), 422),
        ("b".into(), "é".repeat(max + 1), 422),
        ("b".into(), "é".repeat(min), 201),
        ("b".into(), "é".repeat(min), 409),
        ("c".into(), "é".repeat(min - 1), 422),
        ("C".into(), PASSWORD.into(), 422),
        (String::new(), PASSWORD.into(), 422),
    ] {
        let body = json!({"name": name, "role": "viewer", "password": password});
        let (actual, problem) = server.post("/people", &body).await;
        assert_eq!(actual, status, "{problem}");
        assert!(!problem.to_string().contains(&password), "errors do not contain the password");
    }
    let longest = "%C3%A9".repeat(max);
    assert_eq!(try_password(&server, [127, 0, 5, 1], &longest_name, &longest).await.0, 303);
    assert_eq!(
        server.post("/people", &json!({"name": "d", "role": "root", "password": PASSWORD})).await.0,
        400
    );
    let existing = server.query_number("SELECT count(*) FROM people").await as usize;
    for n in existing..MAX_PEOPLE - 1 {
        let row =
            format!("INSERT INTO people (name, hash, role, created_at) VALUES ('x{n}', 'x', 'viewer', 0)");
        server.execute(&row).await;
    }
    let server = TestServer::open(server.stop().await, |_| {}).await;
    let viewer = |name: &str| json!({"name": name, "role": "viewer", "password": PASSWORD});
    assert_eq!(server.post("/people", &viewer("last")).await.0, 201, "person number {MAX_PEOPLE}");
    assert_refused(server.post("/people", &viewer("one-more")).await, 409, "1000");
    assert_eq!(server.delete("/people/last").await.0, 204);
    assert_eq!(server.post("/people", &viewer("one-more")).await.0, 201);
    server.stop().await;
}

#[tokio::test]
async fn changing_own_password_ends_other_sessions() {
    let server = TestServer::new().await;
    server.add_person("ada", "viewer").await;
    let other_browser = server.signed_in("ada").await;
    let mut browser = server.signed_in("ada").await;
    assert!(browser.get("/account").await.text().await.unwrap().contains("own-password"));
    let response =
        browser.post("/account", "action=password&current=wrong+password&new=another+password").await;
    assert_eq!(response.status(), 422);
    assert!(response.text().await.unwrap().contains("is not your current password"));
    assert_eq!(
        browser.post("/account", "action=password&current=correct+horse&new=short").await.status(),
        422
    );
    let response =
        browser.post("/account", "action=password&current=correct+horse&new=another+password").await;
    assert_eq!((response.status().as_u16(), location(&response)), (303, "/account?done=true"));
    browser.take_cookie(&response);
    assert_eq!(browser.get("/jobs").await.status(), 200, "this session stays valid");
    assert_eq!(other_browser.get("/jobs").await.status(), 303, "other sessions end");
    assert_eq!(Browser::new(&server).sign_in("ada", PASSWORD).await.status(), 401);
    assert_eq!(Browser::new(&server).sign_in("ada", "another password").await.status(), 303);

    let passwords = json!({"current": "another password", "new": PASSWORD});
    assert_refused(server.post("/password", &passwords).await, 409, "person");
    let change = |body: &Value| {
        let request = browser.client.request(Method::POST, server.url("/api/v1/password")).json(body);
        request.header("cookie", &browser.cookie).send()
    };
    let response = change(&json!({"current": "x", "new": PASSWORD})).await.unwrap();
    assert_eq!(response.status(), 422);
    assert_eq!(change(&passwords).await.unwrap().status(), 204);
    assert_eq!(change(&passwords).await.unwrap().status(), 401, "the change has ended this session, too");
    assert_eq!(server.signed_in("ada").await.get("/jobs").await.status(), 200);
    server.stop().await;
}

#[tokio::test]
async fn people_page_has_the_same_effects_as_the_api() {
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    let ada = server.signed_in("ada").await;
    let post = async |fields: &str| ada.post("/people", fields).await.status().as_u16();
    assert_eq!(post("action=add&name=bob&role=viewer&password=correct+horse").await, 303);
    assert_eq!(post("action=add&name=bob&role=viewer&password=correct+horse").await, 409);
    assert_eq!(post("action=add&name=%3Cb%3E&role=viewer&password=correct+horse").await, 422);
    assert_eq!(post("action=role&name=bob&role=member").await, 303);
    assert_eq!(post("action=disable&name=bob").await, 303);
    let page = ada.get("/people").await.text().await.unwrap();
    assert!(page.contains("disabled") && page.contains("value=\"enable\""), "{page}");
    assert_eq!(post("action=enable&name=bob").await, 303);
    assert_eq!(post("action=password&name=bob&password=short").await, 422);
    assert_eq!(post("action=password&name=bob&password=another+password").await, 303);
    let bob = Browser::new(&server).sign_in("bob", "another password").await;
    assert_eq!(bob.status(), 303);
    let (_, people) = server.get("/people").await;
    assert_eq!(people["people"][1]["role"], "member", "{people}");
    for given_up in ["action=role&name=ada&role=member", "action=disable&name=ada", "action=remove&name=ada"]
    {
        let refused = ada.post("/people", given_up).await;
        assert_eq!(refused.status(), 409, "{given_up}");
        assert!(refused.text().await.unwrap().contains("ada is the only admin"), "{given_up}");
    }
    assert_eq!(post("action=remove&name=bob").await, 303);
    assert_eq!(post("action=remove&name=bob").await, 404);
    let (_, log) = server.get("/audit").await;
    let role = "/people: Role \"bob\": role: \"member\" (was \"viewer\")";
    for object in ["/people: Disable \"bob\"", role, "/api/v1/people: ada"] {
        let is_logged = log["entries"].as_array().unwrap().iter().any(|entry| entry["object"] == object);
        assert!(is_logged, "{object}: {log}");
    }
    // A request from another origin is refused in spite of the cookie.
    let request = ada.client.post(server.url("/people")).header("cookie", &ada.cookie);
    let request = with_form(request.header("origin", "http://evil.example"), "action=remove&name=ada");
    assert_eq!(request.send().await.unwrap().status(), 403);
    server.stop().await;
}
