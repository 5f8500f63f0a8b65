//! TLS: the server's own certificates, agents and commands over HTTPS, and a server behind nginx.

mod nginx;
pub(crate) mod serve;

use crate::{
    pictures,
    server::{Finished, Folder, TIMEOUT, Terminated, free_port, lockstep, training_permit, wait_until},
    specs,
};
use nginx::start_nginx;
use reqwest::StatusCode;
use serde_json::{Value, json};
use serve::{Serve, ca, client_config_for, listens};
use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use tokio_tungstenite::{Connector, tungstenite};

#[tokio::test]
async fn a_job_is_trained_over_tls_with_the_servers_own_certificates() {
    let _permit = training_permit().await;
    let serve =
        Serve::start(&["--tls-own-ca", "--cpu-slots", "1", "--access-log", "access.log"], listens).await;
    let (https, ca) = (format!("https://localhost:{}", serve.port), serve.ca());
    let start = Instant::now();
    while serve.cli(&https, Some(&ca), &["list"]).status != 0 {
        assert!(start.elapsed() < TIMEOUT, "{}", serve.log());
    }
    let link = serve.cli(&https, Some(&ca), &["login-link"]);
    assert!(link.ok().starts_with(&format!("{https}/login?code=")), "{}", link.stdout);
    assert!(serve.log().contains(&format!("sign in: https://127.0.0.1:{}/login?code=", serve.port)));
    // The local agent starts with the server; another agent joins over TLS.
    let token = serve.cli(&https, Some(&ca), &["token", "create", "--scope", "agent", "--agent", "beside"]);
    let token = serve.folder.write("beside.token", token.ok());
    let beside = serve.folder.path().join("beside");
    let mut command = lockstep();
    command.args(["agent", "--server", &https, "--cpu-slots", "1", "--name", "beside", "--ca-file"]).arg(&ca);
    command
        .arg("--token-file")
        .arg(&token)
        .arg("--data-dir")
        .arg(&beside)
        .current_dir(serve.folder.path())
        .stderr(Stdio::null());
    let _agent = Terminated(command.spawn().expect("an agent"));
    let client = serve.client(&ca);
    let online_agents = async || -> Vec<String> {
        let response = client.get(format!("{https}/api/v1/agents")).send().await.expect("a response");
        let response: Value = response.json().await.expect("JSON");
        let agents = response["agents"].as_array().expect("agents").clone();
        let online = agents.iter().filter(|agent| agent["online"] == true);
        online.map(|agent| agent["name"].as_str().expect("a name").to_owned()).collect()
    };
    while online_agents().await.len() < 2 {
        assert!(start.elapsed() < TIMEOUT, "{:?} {}", online_agents().await, serve.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // A job on each of the two agents; one agent uses TLS.
    let dataset = pictures::idx_dataset(serve.folder.path(), 40, 20);
    serve.cli(&https, Some(&ca), &["dataset", "add", "pictures", dataset.to_str().expect("UTF-8")]).ok();
    let job = specs::short("over-tls", "pictures", 1, 20);
    for (target, other) in [("local", "beside"), ("beside", "local")] {
        serve.cli(&https, Some(&ca), &["machine", "drain", other]).ok();
        let spec = specs::with(job.clone(), json!({"name": target}));
        let submitted =
            client.post(format!("{https}/api/v1/jobs")).json(&spec).send().await.expect("a response");
        assert_eq!(submitted.status(), StatusCode::CREATED);
        let id = submitted.json::<Value>().await.expect("JSON")["id"].as_str().expect("an id").to_owned();
        serve.cli(&https, Some(&ca), &["watch", &id]).assert_prints(&["succeeded"]);
        serve.cli(&https, Some(&ca), &["machine", "undrain", other]).ok();
    }

    // `ca show` prints the certificate that clients trust, with the SHA-256 that openssl computes.
    let shown = serve::ca(serve.folder.path(), &["show", "--data-dir", "data"]);
    assert_eq!(shown.ok().trim(), fs::read_to_string(&ca).expect("the CA").trim());
    let openssl =
        Command::new("openssl").args(["x509", "-noout", "-fingerprint", "-sha256", "-in"]).arg(&ca).output();
    let openssl = String::from_utf8(openssl.expect("openssl").stdout).expect("UTF-8");
    let (_, fingerprint) = openssl.trim().split_once('=').expect("a fingerprint");
    assert!(shown.stderr.contains(fingerprint), "{fingerprint}: {}", shown.stderr);
    let curl =
        Command::new("curl").args(["-sS", "--cacert"]).arg(&ca).arg(format!("{https}/readyz")).output();
    assert_eq!(curl.expect("curl").stdout, b"ready\n");
    let mut doctor = lockstep();
    doctor.args(["doctor", "--ranks", "1", "--json", "--data-dir", "data"]).current_dir(serve.folder.path());
    let findings = Finished::of(&mut doctor);
    assert_eq!(findings.stdout.matches("\"certificate\"").count(), 2, "{}", findings.stdout);
    let log = fs::read_to_string(serve.folder.path().join("access.log")).expect("the access log");
    assert!(log.contains(" GET /api/v1/jobs/") && log.contains("/stream?since 101 "), "{log}");
}

/// Starts a proxy that connects every request, for any host, to a port of this machine. Returns the proxy's URL and the request lines.
fn connect_proxy(port: u16) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (sender, requests) = mpsc::channel();
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                client.read_exact(&mut byte).expect("a request");
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).expect("text");
            let _ = sender.send(head.lines().next().unwrap_or_default().to_owned());
            let server = TcpStream::connect(("127.0.0.1", port)).expect("the server");
            client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").expect("a response");
            for (mut from, mut to) in [(&client, &server), (&server, &client)]
                .map(|(from, to)| (from.try_clone().expect("a handle"), to.try_clone().expect("a handle")))
            {
                thread::spawn(move || {
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    (address, requests)
}

#[tokio::test]
async fn commands_reach_a_remote_server_through_the_proxy_of_the_environment() {
    let _permit = training_permit().await;
    let folder = Folder::new();
    for args in [&["init"][..], &["issue", "lockstep.example.org"]] {
        ca(folder.path(), args).ok();
    }
    let ca = folder.path().join("lockstep-data/ca/ca.crt");
    let certificate = ["--tls-cert", "lockstep.example.org.crt", "--tls-key", "lockstep.example.org.key"];
    let serve = Serve::start_in(folder, &[&certificate[..], &["--cpu-slots", "1"]].concat(), listens).await;
    let (proxy, requests) = connect_proxy(serve.port);
    let server = format!("https://lockstep.example.org:{}", serve.port);
    let run = |server: &str, variables: &[(&str, &str)], args: &[&str]| {
        let mut command = lockstep();
        command.args(args).env("LOCKSTEP_SERVER", server).env("LOCKSTEP_CA_FILE", &ca);
        command.env("LOCKSTEP_TOKEN_FILE", serve.folder.path().join("data/token"));
        for name in ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"] {
            command.env_remove(name);
        }
        Finished::of(command.envs(variables.iter().copied()).current_dir(serve.folder.path()))
    };
    let start = Instant::now();
    while !run(&server, &[("HTTPS_PROXY", &proxy)], &["machine", "list"]).stdout.contains("online") {
        assert!(start.elapsed() < TIMEOUT, "{}", serve.log());
    }
    let dataset = pictures::idx_dataset(serve.folder.path(), 40, 20);
    let dataset = dataset.to_str().expect("UTF-8");
    run(&server, &[("HTTPS_PROXY", &proxy)], &["dataset", "add", "pictures", dataset]).ok();
    let spec = toml::to_string(&specs::short("by-proxy", "pictures", 1, 3)).expect("a job");
    let job = serve.folder.write("job.toml", spec);
    // The job's stream uses the proxy, too.
    let job = job.to_str().expect("UTF-8");
    run(&server, &[("https_proxy", &proxy)], &["submit", job, "--watch"]).assert_prints(&["succeeded"]);
    let requests: Vec<_> = requests.try_iter().collect();
    let line = format!("CONNECT lockstep.example.org:{} HTTP/1.1", serve.port);
    assert!(requests.len() > 3 && requests.iter().all(|request| *request == line), "{requests:?}");

    let no_proxy = [("HTTPS_PROXY", proxy.as_str()), ("NO_PROXY", "lockstep.example.org")];
    run(&server, &no_proxy, &["list"])
        .assert_fails(1, &["the name of the host was not found", "HTTPS_PROXY is set", "NO_PROXY"]);
    // A server on this machine is reached without the proxy.
    let plain = Serve::start(&["--no-local-agent"], listens).await;
    let mut local = lockstep();
    local
        .args(["list", "--server", &format!("http://127.0.0.1:{}", plain.port)])
        .env("HTTP_PROXY", "http://127.0.0.1:1");
    local.env("LOCKSTEP_TOKEN_FILE", plain.folder.path().join("data/token"));
    Finished::of(&mut local).ok();
}

#[tokio::test]
async fn tls_errors_of_clients_are_explained() {
    let serve = Serve::start(&["--tls-own-ca", "--no-local-agent"], listens).await;
    let plain = Serve::start(&["--no-local-agent"], listens).await;
    let url = |scheme: &str, host: &str, port: u16| format!("{scheme}://{host}:{port}");
    let https = url("https", "localhost", serve.port);
    serve.cli(&https, Some(&serve.ca()), &["list"]).ok();
    serve
        .cli(&https, None, &["list"])
        .assert_fails(1, &["does not know the authority", "lockstep ca show", "--ca-file"]);
    // Another server has a certificate of the same CA for another name.
    ca(serve.folder.path(), &["issue", "other.example", "--data-dir", "data"]).ok();
    let file =
        |ending: &str| serve.folder.path().join(format!("other.example.{ending}")).display().to_string();
    let options = ["--no-local-agent", "--tls-cert", &file("crt"), "--tls-key", &file("key")];
    let other_server = Serve::start(&options, listens).await;
    let other_url = url("https", "localhost", other_server.port);
    serve
        .cli(&other_url, Some(&serve.ca()), &["list"])
        .assert_fails(1, &["not for localhost", "other.example"]);
    serve
        .cli(&url("http", "localhost", serve.port), None, &["list"])
        .assert_usage_error(&["HTTPS", "https://"]);
    serve
        .cli(&url("https", "localhost", plain.port), None, &["list"])
        .assert_fails(1, &["plain HTTP", "http://"]);
    let no_file = serve.cli(&https, Some(Path::new("none.crt")), &["list"]);
    no_file.assert_usage_error(&["CA file none.crt"]);
    plain.cli(&url("http", "localhost", plain.port), Some(Path::new("none.crt")), &["list"]).ok();
    let no_pem = serve.folder.write("no.crt", "nothing");
    serve.cli(&https, Some(&no_pem), &["list"]).assert_usage_error(&["no certificate"]);

    // An agent reports the same errors, and tries again.
    for (server, ca, words) in [
        (https.clone(), None, "does not know the authority"),
        (url("http", "localhost", serve.port), None, "https://"),
        (url("https", "localhost", plain.port), None, "plain HTTP"),
        (other_url, Some(serve.ca()), "not for localhost"),
    ] {
        let log = serve.folder.path().join("agent.log");
        let mut command = lockstep();
        command.args(["agent", "--server", &server, "--cpu-slots", "1", "--data-dir", "agent"]);
        if let Some(ca) = ca {
            command.arg("--ca-file").arg(ca);
        }
        command.current_dir(serve.folder.path()).stderr(fs::File::create(&log).expect("a log"));
        let _agent = Terminated(command.spawn().expect("an agent"));
        let text = || fs::read_to_string(&log).expect("the log");
        // On a busy machine, the first connections may fail because of their time limit.
        let has_reported = || text().contains("no connection") && text().contains(words);
        wait_until(&format!("the agent reports the error of {server}"), has_reported, text).await;
    }
}

#[test]
fn certificates_are_issued_for_other_servers() {
    let folder = Folder::new();
    let ca = |args: &[&str]| ca(folder.path(), args);
    ca(&["show"]).assert_usage_error(&["--data-dir", "lockstep ca init"]);
    let created = ca(&["init"]);
    assert!(created.ok().starts_with("-----BEGIN CERTIFICATE-----") && created.stderr.contains("SHA-256"));
    ca(&["init"]).assert_usage_error(&["exists already"]);
    ca(&["issue", "proxy.example", "10.0.0.7", "--days", "30"]).ok();
    ca(&["issue", "proxy.example"]).assert_usage_error(&["proxy.example.crt", "exists already"]);
    ca(&["issue", "not a name"]).assert_usage_error(&["neither a DNS name"]);
    ca(&["issue", "a", "--days", "826"]).assert_usage_error(&["826"]);
    let verify = |name: &str| {
        let mut openssl = Command::new("openssl");
        openssl.args([
            "verify",
            "-purpose",
            "sslserver",
            "-CAfile",
            "lockstep-data/ca/ca.crt",
            "-verify_hostname",
            name,
        ]);
        openssl.arg("proxy.example.crt").current_dir(folder.path()).output().expect("openssl")
    };
    assert!(verify("proxy.example").status.success(), "{:?}", verify("proxy.example"));
    assert!(!verify("other.example").status.success());
}

#[tokio::test]
async fn the_server_works_behind_nginx_with_tls() {
    let port = free_port();
    let public = format!("https://lockstep.example.org:{port}");
    let serve = Serve::start(
        &[
            "--no-local-agent",
            "--trusted-proxy",
            "127.0.0.1",
            "--public-url",
            &public,
            "--requests-per-second",
            "3",
            "--access-log",
            "access.log",
        ],
        listens,
    )
    .await;
    assert!(serve.log().contains(&format!("dashboard: {public}")), "{}", serve.log());
    let folder = Folder::new();
    let ca = |args: &[&str]| ca(folder.path(), args);
    ca(&["init"]).ok();
    ca(&["issue", "lockstep.example.org"]).ok();
    // The header that nginx adds for a client on another machine.
    let client_address = ("$proxy_add_x_forwarded_for", "'$http_x_forwarded_for, 198.51.100.7'");
    let _nginx =
        start_nginx(folder.path(), "lockstep.example.org", port, serve.port, &[client_address]).await;
    let trusted = client_config_for(&folder.path().join("lockstep-data/ca/ca.crt"));
    let url = |path: &str| format!("{public}{path}");
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured((*trusted).clone())
        .default_headers(serve.bearer())
        .resolve("lockstep.example.org", ([127, 0, 0, 1], port).into())
        .build()
        .expect("a client");
    let page = client.get(url("/jobs")).send().await.expect("a page");
    assert_eq!(page.status(), StatusCode::OK);
    assert_eq!(page.headers()["strict-transport-security"], "max-age=31536000");
    // A form of the server's own page is accepted, a form of another site refused.
    for (origin, status) in [(public.as_str(), 422), ("https://evil.example", 403)] {
        let spec = specs::short("x", "none", 1, 1);
        let post = client
            .post(url("/api/v1/jobs"))
            .header("origin", origin)
            .json(&spec)
            .send()
            .await
            .expect("a response");
        assert_eq!(post.status().as_u16(), status, "{origin}");
    }
    // The dashboard's websocket, through TLS and nginx.
    for (origin, is_allowed) in [(public.as_str(), true), ("https://evil.example", false)] {
        let mut request = tungstenite::client::IntoClientRequest::into_client_request(format!(
            "wss://127.0.0.1:{port}/api/v1/stream"
        ))
        .expect("a request");
        request.headers_mut().insert("host", format!("lockstep.example.org:{port}").parse().expect("a host"));
        request.headers_mut().extend(serve.bearer());
        request.headers_mut().insert("origin", origin.parse().expect("an origin"));
        // The name in the certificate is the public one, not the address that the test connects to.
        let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.expect("nginx");
        *request.uri_mut() = "wss://lockstep.example.org/api/v1/stream".parse().expect("an address");
        let connector = Some(Connector::Rustls(trusted.clone()));
        match tokio_tungstenite::client_async_tls_with_config(request, stream, None, connector).await {
            Ok((mut socket, _)) => {
                assert!(is_allowed, "{origin}");
                let frame = tokio::time::timeout(TIMEOUT, futures_util::StreamExt::next(&mut socket)).await;
                let frame = frame.expect("in time").expect("a frame").expect("a valid frame");
                assert!(frame.is_text(), "{frame:?}");
            }
            Err(tungstenite::Error::Http(response)) => {
                assert!(!is_allowed && response.status() == 403, "{origin} {response:?}")
            }
            Err(error) => panic!("{origin}: {error}"),
        }
    }
    // A client's own forwarded address is ignored: all requests count for the rightmost address, which nginx adds.
    let mut statuses = Vec::new();
    while statuses.last() != Some(&StatusCode::TOO_MANY_REQUESTS) {
        let count = statuses.len();
        assert!(count < 1000, "there is a limit: {statuses:?}");
        let forwarded = format!("203.0.{}.{}", count / 256, count % 256);
        let response = client.get(url("/healthz")).header("x-forwarded-for", forwarded).send().await;
        statuses.push(response.expect("a response").status());
    }
    assert!(
        statuses.len() > 10 && statuses[..10].iter().all(|status| *status == StatusCode::OK),
        "{statuses:?}"
    );
    // The server writes the log line after it has sent the response.
    let log = || fs::read_to_string(serve.folder.path().join("access.log")).expect("the access log");
    let is_complete = || log().matches("/healthz").count() >= statuses.len() && log().ends_with('\n');
    wait_until("all requests are logged", is_complete, log).await;
    let log = log();
    let mut probes = log.lines().filter(|line| line.contains("/healthz"));
    assert!(probes.all(|line| line.contains(" 198.51.100.7 ")), "{log}");
}
