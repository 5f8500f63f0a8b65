//! The cipher suites of a server, and contradictory options.

use super::{ca, https};
use crate::{
    server::{Finished, Folder, lockstep},
    tls::serve::{Serve, listens},
};
use std::process::{Command, Stdio};

/// openssl is the client, because the program's own client uses the same TLS library as the server.
#[tokio::test]
async fn only_configured_tls_versions_and_cipher_suites_are_accepted() {
    let offered = "TLS_AES_128_GCM_SHA256,ECDHE-ECDSA-AES256-GCM-SHA384";
    let serve = Serve::start(&["--tls-own-ca", "--no-local-agent", "--tls-suites", offered], listens).await;
    let tls13_server = ["--tls-own-ca", "--no-local-agent", "--tls-min-version", "1.3"];
    let tls13_server = Serve::start(&tls13_server, listens).await;
    let connects = |serve: &Serve, version: &str, suite: &str| {
        let mut openssl = Command::new("openssl");
        openssl.args([
            "s_client",
            "-connect",
            &format!("127.0.0.1:{}", serve.port),
            "-servername",
            "localhost",
        ]);
        openssl.args([
            version,
            if version == "-tls1_3" { "-ciphersuites" } else { "-cipher" },
            suite,
            "-brief",
        ]);
        openssl.args(["-verify_return_error", "-CAfile"]).arg(serve.ca());
        let output = openssl.stdin(Stdio::null()).output().expect("openssl");
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        let connected = report.contains("CONNECTION ESTABLISHED");
        assert!(
            connected || report.contains("SSL alert number"),
            "the server sends an alert: {version} {suite}: {report}"
        );
        assert!(!connected || report.contains(suite), "{report}");
        connected
    };
    // At its default security level, openssl refuses old versions itself.
    for (version, suite, is_listed, is_tls13) in [
        ("-tls1", "DEFAULT@SECLEVEL=0", false, false),
        ("-tls1_1", "DEFAULT@SECLEVEL=0", false, false),
        ("-tls1_3", "TLS_AES_128_GCM_SHA256", true, true),
        ("-tls1_3", "TLS_AES_256_GCM_SHA384", false, true),
        ("-tls1_3", "TLS_CHACHA20_POLY1305_SHA256", false, true),
        ("-tls1_2", "ECDHE-ECDSA-AES256-GCM-SHA384", true, false),
        ("-tls1_2", "ECDHE-ECDSA-AES128-GCM-SHA256", false, false),
        ("-tls1_2", "ECDHE-ECDSA-CHACHA20-POLY1305", false, false),
    ] {
        assert_eq!(connects(&serve, version, suite), is_listed, "{version} {suite}");
        assert_eq!(connects(&tls13_server, version, suite), is_tls13, "only TLS 1.3: {version} {suite}");
    }
    // The program's own client can connect to both servers.
    serve.cli(&https(&serve), Some(&serve.ca()), &["list"]).ok();
    tls13_server.cli(&https(&tls13_server), Some(&tls13_server.ca()), &["list"]).ok();
}

#[test]
fn contradictory_options_are_refused_with_advice() {
    let folder = Folder::new();
    let start = |args: &[&str]| {
        let mut command = lockstep();
        command.args(["serve", "--listen", "127.0.0.1:0", "--no-local-agent"]).args(args);
        Finished::of(command.current_dir(folder.path()))
    };
    start(&["--tls-own-ca", "--tls-suites", "RC4-MD5"])
        .assert_usage_error(&["RC4-MD5", "TLS_AES_256_GCM_SHA384"]);
    start(&["--tls-own-ca", "--tls-min-version", "1.1"]).assert_usage_error(&["1.2, 1.3"]);
    let old = ["--tls-own-ca", "--tls-min-version", "1.3", "--tls-suites", "ECDHE-ECDSA-AES256-GCM-SHA384"];
    start(&old).assert_usage_error(&["--tls-suites", "TLS 1.3"]);
    start(&["--tls-own-ca", "--tls-suites", "ECDHE-RSA-AES256-GCM-SHA384"]).assert_usage_error(&["ECDSA"]);
    start(&["--tls-suites", "TLS_AES_256_GCM_SHA384"]).assert_usage_error(&["--tls-suites", "--tls-own-ca"]);
    start(&["--agent-auth", "certificate"]).assert_usage_error(&["--agent-auth", "--tls-cert"]);
    start(&["--tls-own-ca", "--agent-auth", "password"]).assert_usage_error(&["token, certificate, either"]);
    start(&["--tls-own-ca", "--agent-ca", "none.crt"]).assert_usage_error(&["none.crt"]);
    start(&["--tls-own-ca", "--agent-crl", "list.crl"]).assert_usage_error(&["--agent-ca"]);
    start(&["--tls-own-ca", "--agent-auth", "certificate", "--no-auth"]).assert_usage_error(&["--no-auth"]);
    let agent = |args: &[&str]| {
        let mut command = lockstep();
        Finished::of(command.arg("agent").args(args).current_dir(folder.path()))
    };
    agent(&["--server", "http://10.0.0.5:7070"]).assert_usage_error(&["--insecure-http", "https://"]);
    agent(&["--server", "https://10.0.0.5:7070", "--cert-file", "a.crt"]).assert_usage_error(&["--key-file"]);
    agent(&["--server", "https://10.0.0.5:7070", "--pkcs12-file", "a.p12"])
        .assert_usage_error(&["--pkcs12-password-file"]);
    let ca = |args: &[&str]| ca(folder.path(), &[args, &["--data-dir", "lab"]].concat());
    ca(&["init"]).ok();
    ca(&["issue", "a b", "--agent"]).assert_usage_error(&["node-a"]);
    ca(&["issue", "a", "b", "--agent"]).assert_usage_error(&["one name"]);
    ca(&["issue", &"a".repeat(65), "--agent"]).assert_usage_error(&["1 to 64"]);
    ca(&["issue", &"a".repeat(64), "--agent"]).ok();
    ca(&["issue", "a", "--agent", "--pkcs12"]).assert_usage_error(&["--pkcs12-password-file"]);
    ca(&["issue", "a", "--pkcs12"]).assert_usage_error(&["--agent"]);
    ca(&["revoke", "nobody"]).assert_usage_error(&["lockstep ca list"]);
    // Only the one valid request has issued a certificate.
    let issued = ca(&["list", "--json"]).json();
    assert_eq!(issued.as_array().map(Vec::len), Some(1), "{issued:#}");
    assert_eq!((&issued[0]["kind"], &issued[0]["state"]), (&"agent".into(), &"valid".into()), "{issued:#}");
}
