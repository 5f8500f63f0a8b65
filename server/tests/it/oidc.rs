//! Sign-in with an OpenID provider: valid sign-ins and refused responses.

mod names;
mod provider;
mod upkeep;

use crate::{
    starting::start_error,
    test_server::{TestServer, assert_refused, client_without_redirects, config},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use lockstep_protocol::people::Role;
use lockstep_server::ServeConfig;
use provider::{Behaviour, Browser, CLIENT, Provider, SECRET, Signer, location};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn added_people_sign_in_and_out() {
    let provider = Provider::start().await;
    let server = provider.server(|c| c.name = Some("Team & Co".into())).await;
    let (status, person) =
        server.post("/people", &json!({"name": "ada", "role": "member", "subject": "sub-1"})).await;
    assert_eq!((status, &person["identity"]["subject"]), (201, &json!("sub-1")), "{person}");
    let mut browser = Browser::new(&server);
    let form = browser.get("/login?next=/jobs%3Fstate%3Drunning").await.text().await.unwrap();
    assert!(form.contains("Sign in with Team &#38; Co"), "{form}");
    let query =
        form.split("href=\"/login/oidc?").nth(1).and_then(|rest| rest.split('"').next()).expect("the button");

    let params = browser.begin(&provider, query).await;
    assert_eq!(params["scope"], "openid profile email");
    let code = provider.issue_code(&params);
    let response = browser.call_back(&[("state", &params["state"]), ("code", &code)]).await;
    assert_eq!((response.status().as_u16(), location(&response)), (303, "/jobs?state=running"));
    assert_eq!(browser.cookies.len(), 1, "only the session's cookie is left");
    assert!(browser.is_signed_in().await);
    let page = browser.get("/account").await.text().await.unwrap();
    assert!(
        page.contains("ada") && page.contains(&provider.issuer()) && !page.contains("own-password"),
        "{page}"
    );

    let (_, log) = server.get("/audit").await;
    let entries = log["entries"].as_array().unwrap();
    let entry = entries.iter().find(|e| e["who"] == "ada").expect("the sign-in is logged");
    let expected = json!(["sign in", "/login/oidc/callback", "person:ada", 303]);
    assert_eq!(json!([entry["action"], entry["object"], entry["token_id"], entry["status"]]), expected);
    assert!(!log.to_string().contains("code0") && !log.to_string().contains(&params["state"]));

    let session: Vec<_> = browser.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
    // A login link that this session creates gives a session that does not last longer.
    let link =
        client_without_redirects("").post(server.url("/api/v1/login-links")).header("cookie", &session[0]);
    let link: Value = link.send().await.unwrap().json().await.unwrap();
    let response =
        client_without_redirects("").get(link["url"].as_str().expect("a link")).send().await.unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    let max_age_secs =
        cookie.split("Max-Age=").nth(1).and_then(|rest| rest.split(';').next()).expect("Max-Age");
    let max_age_secs: u64 = max_age_secs.parse().unwrap();
    assert!((1..=24 * 3600).contains(&max_age_secs), "{cookie}");
    let sign_out = client_without_redirects("").post(server.url("/logout")).header("cookie", &session[0]);
    assert_eq!(sign_out.send().await.unwrap().status(), 303);
    assert!(!browser.is_signed_in().await, "the session has ended");

    // The provider signs with ES256 after a restart of the server.
    let key = Signer::ec();
    provider.change(|b| (b.keys, b.header, b.signer) = (vec![key.public("ec")], json!({"kid": null}), key));
    let dir = server.stop().await;
    let oidc = provider.config();
    let server = TestServer::open(dir, |c| c.oidc = Some(oidc)).await;
    let mut browser = Browser::new(&server);
    assert_eq!(browser.sign_in(&provider).await.status(), 303);
    assert!(browser.is_signed_in().await);
    server.stop().await;
}

#[tokio::test]
async fn invalid_id_tokens_are_refused() {
    let provider = Provider::start().await;
    let server = provider.server(|c| (c.role, c.key_refresh) = (Some(Role::Viewer), Duration::ZERO)).await;
    let public = |b: &Behaviour| URL_SAFE_NO_PAD.decode(b.keys[0]["n"].as_str().unwrap()).unwrap();
    let now = jiff::Timestamp::now().as_second();
    type Change = Box<dyn FnOnce(&mut Behaviour)>;
    let claims = |changes: Value| -> Change { Box::new(move |b| b.claims = changes) };
    let header = |changes: Value| -> Change { Box::new(move |b| b.header = changes) };
    let cases: Vec<(&str, Change)> = vec![
        ("another sign-in", claims(json!({"nonce": "another"}))),
        ("another sign-in", claims(json!({"nonce": null}))),
        ("not for this server", claims(json!({"aud": "another"}))),
        ("not for this server", claims(json!({"aud": [CLIENT, "another"], "azp": CLIENT}))),
        ("not for this server", claims(json!({"aud": []}))),
        ("another client", claims(json!({"azp": "another"}))),
        ("another provider", claims(json!({"iss": "https://evil.example"}))),
        ("another provider", claims(json!({"iss": format!("{}/", provider.issuer())}))),
        ("expired", claims(json!({"exp": now - 120}))),
        ("expired", claims(json!({"exp": null}))),
        ("expired", claims(json!({"exp": "9999999999"}))),
        ("from the future", claims(json!({"iat": now + 600}))),
        ("from the future", claims(json!({"iat": null}))),
        ("from the future", claims(json!({"nbf": now + 600}))),
        ("names no subject", claims(json!({"sub": null}))),
        ("names no subject", claims(json!({"sub": "a".repeat(256)}))),
        ("names no subject", claims(json!({"sub": 7}))),
        ("signed with &#34;none&#34;", Box::new(|b| b.signer = Signer::Nothing)),
        ("signed with &#34;None&#34;", header(json!({"kid": "first", "alg": "None"}))),
        ("signed with &#34;HS256&#34;", Box::new(|b| b.signer = Signer::Hmac(SECRET.into()))),
        ("signed with &#34;HS256&#34;", Box::new(move |b| b.signer = Signer::Hmac(public(b)))),
        // The provider publishes the client secret as its key.
        (
            "signed with &#34;HS256&#34;",
            Box::new(|b| {
                b.signer = Signer::Hmac(SECRET.into());
                b.keys = vec![b.signer.public("first")];
            }),
        ),
        ("does not publish", header(json!({"kid": "first", "alg": "ES256"}))),
        (
            "signature is wrong",
            Box::new(|b| (b.keys, b.signer) = (vec![Signer::ec().public("first")], Signer::ec())),
        ),
        ("does not publish", header(json!({"kid": "first", "alg": "PS256"}))),
        ("another kind", header(json!({"kid": "first", "typ": "at+jwt"}))),
        ("extensions", header(json!({"kid": "first", "crit": ["x"]}))),
        (
            "signature is wrong",
            Box::new(|b| b.corrupt = |token| token[..token.len() - 8].to_owned() + "AAAAAAAA"),
        ),
        ("signature is wrong", Box::new(|b| b.corrupt = |token| token.replacen(".e", ".eyJ4IjoxfQ", 1))),
        ("not a signed token", Box::new(|b| b.corrupt = |token| token + ".x")),
        ("not a signed token", Box::new(|b| b.corrupt = |_| "x".into())),
        ("too long", Box::new(|b| b.corrupt = |token| token + &"a".repeat(64 << 10))),
    ];
    let reset = || {
        provider.change(|b| {
            b.signer = Signer::rsa();
            b.keys = vec![b.signer.public("first")];
            (b.header, b.claims, b.corrupt) = (json!({"kid": "first"}), json!({}), |token| token);
        });
    };
    for (n, (fragment, change)) in cases.into_iter().enumerate() {
        reset();
        provider.change(change);
        let page = Browser::from(&server, [127, 0, 8, n as u8 + 1]).sign_in_error(&provider, 401).await;
        assert!(page.contains(fragment), "{n}: {fragment}: {page}");
    }
    assert_eq!(server.get("/people").await.1["people"], json!([]));
    // Times within the tolerance for clocks are valid. This sign-in also shows that the server has refused the others for their token.
    reset();
    provider.change(|b| b.claims = json!({"exp": now - 30, "iat": now + 30, "aud": [CLIENT], "azp": CLIENT}));
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    server.stop().await;
}

#[tokio::test]
async fn a_state_is_valid_once_and_only_in_its_browser() {
    let provider = Provider::start().await;
    let server = provider.server(|c| c.role = Some(Role::Viewer)).await;
    let message = "begun in another browser";
    let mut mine = Browser::from(&server, [127, 0, 5, 1]);
    let params = mine.begin(&provider, "next=//evil.example").await;
    let code = provider.issue_code(&params);
    let fields = [("state", params["state"].as_str()), ("code", code.as_str())];

    // The state in the URL is not valid without the cookie, or with the cookie of another browser.
    let mut other = Browser::from(&server, [127, 0, 5, 2]);
    let response = other.call_back(&fields).await;
    assert_eq!(response.status(), 400);
    assert!(response.text().await.unwrap().contains(message));
    other.begin(&provider, "").await;
    assert_eq!(other.call_back(&fields).await.status(), 400, "another browser's cookie");
    let cookie = mine.cookies.clone();
    for wrong in [&[][..], &[("code", "x")], &[("state", "wrong"), ("code", &code)]] {
        assert_eq!(mine.call_back(wrong).await.status(), 400, "{wrong:?}");
        mine.cookies = cookie.clone();
    }
    assert_eq!(provider.read(|b| b.token_requests), 0, "the server sends no token request");
    let response = mine.call_back(&[&fields[..], &[("next", "//evil.example")]].concat()).await;
    assert_eq!(response.status(), 303, "failed attempts do not invalidate the state");
    assert_eq!(location(&response), "/jobs", "the redirect stays on this server");
    mine.cookies.extend(cookie);
    assert_eq!(mine.call_back(&fields).await.status(), 400, "a state is valid once");
    assert_eq!(provider.read(|b| b.token_requests), 1);

    // The provider refuses a used code, and a code of another sign-in.
    let mut browser = Browser::from(&server, [127, 0, 5, 3]);
    let other = Browser::from(&server, [127, 0, 5, 4]).begin(&provider, "").await;
    for code in [code.clone(), provider.issue_code(&other)] {
        let params = browser.begin(&provider, "").await;
        let response = browser.call_back(&[("state", &params["state"]), ("code", &code)]).await;
        assert_eq!(response.status(), 401);
        let page = response.text().await.unwrap();
        assert!(page.contains("the code was used already") && page.contains("no &#60;b&#62;"), "{page}");
    }
    server.stop().await;
}

#[tokio::test]
async fn errors_of_the_provider_are_explained() {
    let provider = Provider::start().await;
    let server = provider.server(|c| c.role = Some(Role::Viewer)).await;
    let mut n = 0;
    let mut call_back = async |parameters: &[(&str, &str)]| {
        n += 1;
        let mut browser = Browser::from(&server, [127, 0, 6, n]);
        let params = browser.begin(&provider, "").await;
        let response =
            browser.call_back(&[&[("state", params["state"].as_str())], parameters].concat()).await;
        assert!(browser.cookies.is_empty());
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let (status, page) =
        call_back(&[("error", "access_denied"), ("error_description", "<script>alert(1)</script>")]).await;
    assert!(
        status == 400 && page.contains("cancelled there") && page.contains("&#60;script&#62;alert"),
        "{page}"
    );
    assert!(!page.contains("<script>alert"));
    let (status, page) = call_back(&[("error", "<b>odd")]).await;
    assert!(status == 400 && page.contains("did not sign you in: &#60;b&#62;odd"), "{page}");
    let long = "a".repeat(300);
    let (_, page) = call_back(&[("error", &long)]).await;
    assert!(page.contains(&long[..200]) && !page.contains(&long[..201]));
    assert!(call_back(&[]).await.1.contains("neither a code nor an error"));
    let (status, page) = call_back(&[("code", "x"), ("iss", "https://evil.example")]).await;
    assert!(status == 401 && page.contains("does not come from the provider"), "{page}");
    assert_eq!(provider.read(|b| b.token_requests), 0);
    provider.change(|b| b.refusal = Some(json!({"error": "invalid_client"})));
    let (status, page) = call_back(&[("code", "x")]).await;
    assert!(status == 401 && page.contains("client id and secret"), "{page}");
    server.stop().await;

    // A provider that promises the parameter iss must send it.
    provider.change(|b| {
        b.refusal = None;
        b.description = json!({"authorization_response_iss_parameter_supported": true});
    });
    let server = provider.server(|c| c.role = Some(Role::Viewer)).await;
    assert!(Browser::new(&server).sign_in_error(&provider, 401).await.contains("does not name its provider"));
    let mut browser = Browser::new(&server);
    let params = browser.begin(&provider, "").await;
    let (code, iss) = (provider.issue_code(&params), provider.issuer());
    let response = browser.call_back(&[("state", &params["state"]), ("code", &code), ("iss", &iss)]).await;
    assert_eq!(response.status(), 303);
    server.stop().await;
}

#[tokio::test]
async fn failed_sign_ins_are_limited_and_logged() {
    let provider = Provider::start().await;
    let server = provider.server(|_| {}).await;
    let address = [127, 0, 7, 1];
    // Callbacks with an unknown state do not count as failed sign-ins. Otherwise a web page could block people by redirects.
    for _ in 0..12 {
        assert_eq!(
            Browser::from(&server, address).call_back(&[("state", "x"), ("code", "x")]).await.status(),
            400
        );
    }
    for n in 0..10 {
        let page = Browser::from(&server, address).sign_in_error(&provider, 403).await;
        assert!(page.contains("lockstep user add ada --subject sub-1"), "{n}: {page}");
    }
    let requests = provider.read(|b| b.token_requests);
    let mut browser = Browser::from(&server, address);
    let response = browser.sign_in(&provider).await;
    assert_eq!(response.status(), 429);
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(provider.read(|b| b.token_requests), requests, "the server sends no token request");
    let (_, log) = server.get("/audit").await;
    let refused = log["entries"].as_array().unwrap().iter().filter(|e| {
        e["status"] == 403
            && e["action"] == "sign in"
            && e["object"] == "/login/oidc/callback: subject \"sub-1\""
    });
    assert_eq!(refused.count(), 10, "{log}");
    // Another address is not limited.
    assert_eq!(Browser::from(&server, [127, 0, 7, 2]).sign_in(&provider).await.status(), 403);
    server.stop().await;
}

#[tokio::test]
async fn incomplete_oidc_settings_are_named_and_routes_need_a_provider() {
    let provider = Provider::start().await;
    let error_with = async |change: &dyn Fn(&mut ServeConfig)| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(&dir);
        config.oidc = Some(provider.config());
        change(&mut config);
        start_error(config).await.to_string()
    };
    let on_all_addresses = |c: &mut ServeConfig| {
        (c.listen, c.insecure_http) = ("0.0.0.0:0".parse().unwrap(), true);
    };
    assert!(error_with(&on_all_addresses).await.contains("--public-url"));
    assert!(error_with(&|c| c.no_auth = true).await.contains("--no-auth"));
    let no_ca = |c: &mut ServeConfig| c.oidc.as_mut().unwrap().ca_file = Some("/nowhere".into());
    assert!(error_with(&no_ca).await.contains("/nowhere"));

    let server = TestServer::new().await;
    let mut browser = Browser::new(&server);
    for path in ["/login/oidc", "/login/oidc/callback?state=x&code=y"] {
        assert_eq!(browser.get(path).await.status(), 404, "{path}");
    }
    assert!(!browser.get("/login").await.text().await.unwrap().contains("/login/oidc"));
    assert_refused(
        server.post("/people", &json!({"name": "ada", "role": "viewer", "subject": "s"})).await,
        409,
        "--oidc-issuer",
    );
    server.stop().await;
}
