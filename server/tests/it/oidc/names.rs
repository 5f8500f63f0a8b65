//! The person of an account: accounts are identified by their subject, not by their name.

use super::provider::{Browser, Provider};
use crate::test_server::{TestServer, assert_refused, with_form};
use lockstep_protocol::people::Role;
use lockstep_server::{Groups, NameClaim};
use serde_json::{Value, json};

/// Returns name, role and subject of all people.
async fn list_people(server: &TestServer) -> Vec<String> {
    let (_, people) = server.get("/people").await;
    let word = |person: &Value, key: &str| person[key].as_str().unwrap_or_default().to_owned();
    let line = |person: &Value| {
        format!("{} {} {}", word(person, "name"), word(person, "role"), word(&person["identity"], "subject"))
    };
    people["people"].as_array().unwrap().iter().map(line).collect()
}

#[tokio::test]
async fn new_people_get_the_configured_role_and_no_existing_name() {
    let provider = Provider::start().await;
    let server = provider.server(|c| c.role = Some(Role::Member)).await;
    server.add_person("bob", "admin").await;
    let (id, _) = server.make_token(&json!({"name": "robot", "scope": "submit"})).await;
    // The name of a revoked token stays reserved, because it may be the owner of jobs.
    assert_eq!(server.delete(&format!("/tokens/{id}")).await.0, 204);
    let set_account = |subject: &str, name: &str| {
        let claims = json!({"sub": subject, "preferred_username": name});
        provider.change(|b| b.claims = claims);
    };
    set_account("s1", "Ada");
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(list_people(&server).await, ["ada member s1", "bob admin "]);
    let (_, log) = server.get("/audit").await;
    assert!(log.to_string().contains("added, member, subject \\\"s1\\\""), "{log}");

    // An account with a changed name is the same person. Another account with the same name is refused.
    set_account("s1", "bob");
    let mut browser = Browser::new(&server);
    assert_eq!(browser.sign_in(&provider).await.status(), 303);
    assert!(browser.get("/account").await.text().await.unwrap().contains("ada, member"));
    for (n, name) in ["ada", "bob", "BOB", "robot"].into_iter().enumerate() {
        set_account("s2", name);
        let page = Browser::from(&server, [127, 0, 9, n as u8]).sign_in_error(&provider, 403).await;
        assert!(
            page.contains("cannot be added as") && page.contains("lockstep user link NAME --subject s2"),
            "{page}"
        );
    }
    for (n, name) in ["a b", "ä", "", &"a".repeat(65)].into_iter().enumerate() {
        set_account("s2", name);
        let page = Browser::from(&server, [127, 0, 9, 10 + n as u8]).sign_in_error(&provider, 403).await;
        assert!(page.contains("cannot be your name on this server"), "{page}");
    }
    assert_eq!(list_people(&server).await.len(), 2);

    // An admin links the account to bob, who keeps the password. The account's name has no effect then.
    assert_eq!(server.change_person("bob", &json!({"subject": "s2"})).await.0, 200);
    let mut browser = Browser::new(&server);
    assert_eq!(browser.sign_in(&provider).await.status(), 303);
    let page = browser.get("/account").await.text().await.unwrap();
    assert!(page.contains("bob, admin") && page.contains("own-password"), "{page}");
    // An account belongs to one person.
    assert_refused(server.change_person("ada", &json!({"subject": "s2"})).await, 409, "user unlink bob");
    let linked = json!({"name": "eve", "role": "viewer", "subject": "s2"});
    assert_eq!(server.post("/people", &linked).await.0, 409);
    for wrong in [json!({"subject": "a".repeat(256)}), json!({"subject": "a\n"})] {
        assert_eq!(server.change_person("ada", &wrong).await.0, 422, "{wrong}");
    }
    // A person needs a password or a subject.
    assert_eq!(server.post("/people", &json!({"name": "eve", "role": "viewer"})).await.0, 422);
    assert_eq!(server.change_person("bob", &json!({"subject": ""})).await.0, 200);
    assert!(!browser.is_signed_in().await, "a change of the person ends its sessions");
    assert_eq!(list_people(&server).await, ["ada member s1", "bob admin "]);
    // A person without a password cannot sign in with an empty password.
    let form = with_form(reqwest::Client::new().post(server.url("/login")), "name=ada&password=");
    assert_eq!(form.send().await.unwrap().status(), 401);
    server.stop().await;
}

#[tokio::test]
async fn disabled_and_removed_people_cannot_sign_in() {
    let provider = Provider::start().await;
    let server = provider.server(|c| c.role = Some(Role::Member)).await;
    let mut browser = Browser::new(&server);
    assert_eq!(browser.sign_in(&provider).await.status(), 303);
    assert_eq!(server.change_person("ada", &json!({"disabled": true})).await.0, 200);
    assert!(!browser.is_signed_in().await);
    assert!(
        Browser::new(&server)
            .sign_in_error(&provider, 403)
            .await
            .contains("ada may no longer use this server")
    );
    assert_eq!(server.change_person("ada", &json!({"disabled": false})).await.0, 200);
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);

    assert_eq!(server.delete("/people/ada").await.0, 204);
    let message = "An admin removed the person";
    assert!(Browser::new(&server).sign_in_error(&provider, 403).await.contains(message));
    let dir = server.stop().await;
    let mut oidc = provider.config();
    oidc.role = Some(Role::Member);
    let server = TestServer::open(dir, |c| c.oidc = Some(oidc)).await;
    // The removal is remembered after a restart.
    assert!(Browser::new(&server).sign_in_error(&provider, 403).await.contains(message));
    let new = json!({"name": "ada2", "role": "viewer", "subject": "sub-1"});
    assert_eq!(server.post("/people", &new).await.0, 201);
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(list_people(&server).await, ["ada2 viewer sub-1"]);
    server.stop().await;
}

#[tokio::test]
async fn an_e_mail_address_is_a_name_only_if_verified() {
    let provider = Provider::start().await;
    let server = provider.server(|c| (c.role, c.name_claim) = (Some(Role::Viewer), NameClaim::Email)).await;
    let set_mail = |verified: Value| {
        provider.change(|b| b.claims = json!({"email": "Ada@Example.org", "email_verified": verified}));
    };
    // UserInfo has no e-mail address.
    provider.change(|b| b.user_info = json!({"sub": "sub-1"}));
    for (n, unverified) in [json!(false), json!(null), json!("false"), json!(1)].into_iter().enumerate() {
        set_mail(unverified);
        let page = Browser::from(&server, [127, 0, 10, n as u8]).sign_in_error(&provider, 403).await;
        assert!(page.contains("has not verified your e-mail address"), "{page}");
    }
    // Claims that the token lacks are read from UserInfo, if UserInfo has the same subject.
    provider.change(|b| {
        b.claims = json!({});
        b.user_info = json!({"sub": "another", "email": "eve@example.org", "email_verified": true});
    });
    assert!(Browser::new(&server).sign_in_error(&provider, 401).await.contains("about another account"));
    provider.change(|b| b.user_info["sub"] = json!("sub-1"));
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(list_people(&server).await, ["eve@example.org viewer sub-1"]);
    set_mail(json!("true"));
    provider.change(|b| b.claims["sub"] = json!("sub-2"));
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(list_people(&server).await, ["ada@example.org viewer sub-2", "eve@example.org viewer sub-1"]);
    server.stop().await;
}

#[tokio::test]
async fn groups_determine_the_role_at_every_sign_in() {
    let provider = Provider::start().await;
    let groups = Groups { claim: "groups".into(), admin: Some("ops".into()), member: Some("ml".into()) };
    let server = provider.server(|c| c.groups = Some(groups)).await;
    let sign_in = async |groups: Value, status: u16| {
        provider.change(|b| b.claims = json!({"groups": groups}));
        let mut browser = Browser::new(&server);
        assert_eq!(browser.begin(&provider, "").await["scope"], "openid profile email groups");
        let response = browser.sign_in(&provider).await;
        assert_eq!(response.status().as_u16(), status, "{groups}");
        (browser, response.text().await.unwrap())
    };
    let page = sign_in(json!(["others"]), 403).await.1;
    assert!(page.contains("No person has this account yet"), "{page}");
    let mut first_browser = sign_in(json!(["x", "ml"]), 303).await.0;
    assert_eq!(list_people(&server).await, ["ada member sub-1"]);
    assert!(first_browser.is_signed_in().await);
    sign_in(json!(["ml", "ops"]), 303).await;
    assert_eq!(list_people(&server).await, ["ada admin sub-1"]);
    assert!(!first_browser.is_signed_in().await, "a change of the role ends sessions");
    sign_in(json!("ml"), 303).await;
    assert_eq!(list_people(&server).await, ["ada member sub-1"]);
    let page = sign_in(json!([]), 403).await.1;
    assert!(page.contains("in none of the groups"), "{page}");
    server.stop().await;
}
