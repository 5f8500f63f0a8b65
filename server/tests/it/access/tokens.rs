//! Tokens: creation, list, revocation, limits, and the server's own token in a file.

use crate::{
    starting::start_error,
    test_server::{TestServer, assert_refused, client, config},
};
use lockstep_protocol::limits::{MAX_TOKENS, TOKEN_DAYS, TOKEN_NAME_CHARS};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    time::{Duration, Instant},
};

#[tokio::test]
async fn a_token_is_shown_once_and_its_secret_never_stored() {
    let server = TestServer::new().await;
    let token = server.create("/tokens", &json!({"name": "ci", "scope": "submit"})).await;
    let secret = token["secret"].as_str().unwrap();
    assert!(secret.len() >= 40 && secret.starts_with("lockstep_"), "the secret is too short");
    let (_, list) = server.get("/tokens").await;
    assert!(!list.to_string().contains(secret));
    let listed = list["tokens"].as_array().unwrap().iter().find(|t| t["id"] == token["id"]).unwrap();
    assert!(listed["last_used_at"].is_null() && listed["revoked_at"].is_null(), "{listed}");

    assert_eq!(server.send(client(secret).get(server.url("/api/v1/jobs"))).await.0, 200);
    let (_, list) = server.get("/tokens").await;
    let listed = list["tokens"].as_array().unwrap().iter().find(|t| t["id"] == token["id"]).unwrap();
    assert!(listed["last_used_at"].is_string(), "{listed}");
    assert_eq!(server.query_number("SELECT count(*) FROM tokens WHERE last_used_at IS NOT NULL").await, 0);
    let unhashed =
        format!("SELECT count(*) FROM tokens WHERE hash LIKE '%{secret}%' OR name LIKE '%{secret}%'");
    assert_eq!(server.query_number(&unhashed).await, 0);
    // The server stores last_used_at once a minute and at shutdown.
    let dir = server.stop().await;
    let server = TestServer::open(dir, |_| {}).await;
    assert_eq!(server.query_number("SELECT count(*) FROM tokens WHERE last_used_at IS NOT NULL").await, 2);
    assert_eq!(server.send(client(secret).get(server.url("/api/v1/jobs"))).await.0, 200, "after a restart");

    let path = format!("/tokens/{}", token["id"].as_str().unwrap());
    assert_eq!(server.delete(&path).await.0, 204);
    assert_eq!(server.delete(&path).await.0, 204, "a second revocation changes nothing");
    assert_eq!(server.delete("/tokens/none").await.0, 404);
    assert_refused(server.send(client(secret).get(server.url("/api/v1/jobs"))).await, 401, "revoked");
    server.stop().await;
}

#[tokio::test]
async fn tokens_have_limits() {
    let server = TestServer::new().await;
    let longest = "é".repeat(TOKEN_NAME_CHARS);
    let max_secs = u64::from(TOKEN_DAYS) * 24 * 3600;
    for (body, status) in [
        (json!({"name": longest, "scope": "read"}), 201),
        (json!({"name": format!("{longest}x"), "scope": "read"}), 422),
        (json!({"name": " ", "scope": "read"}), 422),
        (json!({"name": "a\u{202e}b", "scope": "read"}), 422),
        (json!({"name": "t", "scope": "root"}), 400),
        (json!({"name": "t", "scope": "read", "expires_in_secs": max_secs}), 201),
        (json!({"name": "t", "scope": "read", "expires_in_secs": max_secs + 1}), 422),
        (json!({"name": "t", "scope": "read", "expires_in_secs": 0}), 422),
        (json!({"name": "t", "scope": "read", "expires_in_secs": -1}), 400),
        (json!({"name": "t", "scope": "read", "agent": "a"}), 422),
        (json!({"name": "t", "scope": "agent"}), 422),
        (json!({"name": "t", "scope": "agent", "agent": "a".repeat(100)}), 201),
        (json!({"name": "t", "scope": "agent", "agent": "a".repeat(101)}), 422),
        (json!({"name": "t", "scope": "read", "admin": true}), 400),
    ] {
        let (actual, response) = server.post("/tokens", &body).await;
        assert_eq!(actual, status, "{body}: {response}");
    }
    // Inserts tokens until one more is allowed.
    let valid = server.query_number("SELECT count(*) FROM tokens WHERE revoked_at IS NULL").await;
    let rows = (valid..MAX_TOKENS as i64 - 1).map(|n| format!("('x{n}', 'x', 'x{n}', 'read', 0)"));
    let rows = rows.collect::<Vec<_>>().join(", ");
    server.execute(&format!("INSERT INTO tokens (id, name, hash, scope, created_at) VALUES {rows}")).await;
    let server = TestServer::open(server.stop().await, |_| {}).await;
    let one = json!({"name": "one", "scope": "read"});
    let (last, _) = server.make_token(&one).await;
    assert_refused(server.post("/tokens", &one).await, 409, "revoke");
    assert_eq!(server.delete(&format!("/tokens/{last}")).await.0, 204);
    assert_eq!(server.post("/tokens", &one).await.0, 201);
    server.stop().await;
}

#[tokio::test]
async fn people_have_up_to_fifty_tokens() {
    let server = TestServer::new().await;
    server.add_person("mona", "member").await;
    let (mona, _) = server.client_of("mona", "submit").await;
    let create = async || {
        server.send_as(&mona, "POST", "/tokens", Some(json!({"name": "one more", "scope": "read"}))).await
    };
    let mut last = Value::Null;
    for n in 2..=50 {
        let (status, token) = create().await;
        assert_eq!(status, 201, "{n}: {token}");
        last = token["id"].clone();
    }
    let detail = "you have 50 valid tokens already; revoke some that you do not need";
    assert_refused(create().await, 409, detail);
    // Tokens of others and revoked tokens do not count.
    server.make_token(&json!({"name": "another's", "scope": "read"})).await;
    let path = format!("/tokens/{}", last.as_str().unwrap());
    assert_eq!(server.send_as(&mona, "DELETE", &path, None).await.0, 204);
    assert_eq!(create().await.0, 201);
    server.stop().await;
}

#[tokio::test]
async fn connections_of_revoked_or_expired_tokens_are_closed_in_five_seconds() {
    let server = TestServer::new().await;
    for expires_in_secs in [None, Some(5)] {
        let body = json!({"name": "t", "scope": "read", "expires_in_secs": expires_in_secs});
        let since = Instant::now();
        let (id, secret) = server.make_token(&body).await;
        let mut list = server.stream_list(&secret).await;
        if expires_in_secs.is_none() {
            assert_eq!(server.delete(&format!("/tokens/{id}")).await.0, 204);
        }
        let (code, reason) = loop {
            if let Err(closed) = list.next().await {
                break closed;
            }
        };
        assert_eq!(code, 4401, "{reason}");
        let valid = Duration::from_secs(expires_in_secs.unwrap_or(0));
        let took = since.elapsed();
        assert!(valid <= took && took < valid + Duration::from_secs(5), "{took:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_server_s_own_token_is_private_and_recreated() {
    let server = TestServer::new().await;
    let path = server.dir.path().join("token");
    let metadata = fs::symlink_metadata(&path).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o600);
    let first = server.token.clone();

    // A restart keeps the token. If others could read the file, a new token replaces and revokes the token.
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_eq!(server.token, first);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_ne!(server.token, first);
    assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o7777, 0o600);
    assert_eq!(server.send(client(&first).get(server.url("/api/v1/jobs"))).await.0, 401);

    // The next start replaces a revoked token.
    let second = server.token.clone();
    assert_eq!(server.delete("/tokens/local").await.0, 204);
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_ne!(server.token, second);
    assert_eq!(server.get("/jobs").await.0, 200);
    assert_eq!(server.send(client(&second).get(server.url("/api/v1/jobs"))).await.0, 401);

    // If the database does not have the file's token, the server inserts the token.
    let third = server.token.clone();
    server.execute("DELETE FROM tokens").await;
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_eq!(server.token, third);
    assert_eq!(server.get("/jobs").await.0, 200);

    // The server does not read or write through a symbolic link.
    let dir = server.stop().await;
    fs::rename(&path, dir.path().join("jobs/elsewhere")).unwrap();
    symlink(dir.path().join("jobs/elsewhere"), &path).unwrap();
    let error = start_error(config(&dir)).await.to_string();
    assert!(error.contains("symbolic link"), "{error}");
}
