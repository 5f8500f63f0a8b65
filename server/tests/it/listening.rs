//! Listening addresses, and unusual connections: from other machines, not through the proxy, without TLS, incomplete.

use crate::{
    test_server::{TIMEOUT, TestServer, config},
    tls::{Files, get_text, http, start_error, with_tls},
};
use lockstep_server::{ServeConfig, tls::addresses};
use rustls::pki_types::ServerName;
use std::{
    fs,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tokio_rustls::TlsConnector;

#[tokio::test]
async fn other_machines_are_admitted_only_with_an_explicit_option() {
    let files = Files::new();
    let tls = files.issue("server", |_| {});
    let dir = tempfile::tempdir().unwrap();
    let config_for_all_addresses = |change: &dyn Fn(&mut ServeConfig)| {
        let mut config = config(&dir);
        config.listen = "0.0.0.0:0".parse().unwrap();
        change(&mut config);
        config
    };
    let unauthenticated = config_for_all_addresses(&|c| {
        c.tls = Some(tls.clone());
        c.no_auth = true;
    });
    let error = start_error(unauthenticated).await;
    assert!(error.contains("--no-auth") && error.contains("token"), "{error}");
    let error = start_error(config_for_all_addresses(&|_| {})).await;
    for word in ["--tls-cert", "--tls-own-ca", "--trusted-proxy", "--insecure-http"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "a refused start writes no file");
    type Change = Box<dyn Fn(&mut ServeConfig)>;
    let options: [Change; 3] = [
        Box::new(move |c| c.tls = Some(tls.clone())),
        Box::new(|c| c.insecure_http = true),
        Box::new(|c| c.trusted_proxies = vec!["192.0.2.200".parse().unwrap()]),
    ];
    for option in options {
        let server = TestServer::with(|c| {
            c.listen = "0.0.0.0:0".parse().unwrap();
            option(c);
        })
        .await;
        server.stop().await;
    }
}

#[tokio::test]
async fn behind_a_proxy_direct_connections_are_refused() {
    // The test needs an address that is not loopback.
    let Some(outside) = addresses().into_iter().find(|a| a.is_ipv4()) else { return };
    let open = |proxy: &str, insecure_http: bool| {
        let proxies = vec![proxy.parse().unwrap()];
        TestServer::with(move |c| {
            c.listen = "0.0.0.0:0".parse().unwrap();
            c.insecure_http = insecure_http;
            c.trusted_proxies = proxies;
        })
    };
    let request_directly = async |server: &TestServer| {
        let url = format!("http://{outside}:{}/healthz", server.address.port());
        server.http.get(url).send().await.unwrap().status().as_u16()
    };
    let server = open("203.0.113.1", false).await;
    assert_eq!(request_directly(&server).await, 403);
    let url = format!("http://127.0.0.1:{}/healthz", server.address.port());
    assert_eq!(server.http.get(url).send().await.unwrap().status().as_u16(), 200, "loopback");
    server.stop().await;
    let server = open(&outside.to_string(), false).await;
    assert_eq!(request_directly(&server).await, 200, "the proxy's address");
    server.stop().await;
    let server = open("203.0.113.1", true).await;
    assert_eq!(request_directly(&server).await, 200, "--insecure-http");
    server.stop().await;
}

async fn send_bytes(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut response = Vec::new();
    // The server may also reset the connection.
    let _ = timeout(TIMEOUT, stream.read_to_end(&mut response)).await.expect("the connection is closed");
    response
}

#[tokio::test]
async fn connections_without_tls_get_an_error_or_are_closed() {
    let files = Files::new();
    let server =
        with_tls(files.issue("server", |_| {}), |c| c.handshake_timeout = Duration::from_millis(600)).await;
    let plain = reqwest::Client::new().get(server.url("/api/v1/jobs")).send().await.unwrap();
    assert_eq!(plain.status().as_u16(), 400);
    assert_eq!(plain.headers()["content-type"], "application/problem+json");
    assert!(plain.text().await.unwrap().contains("https://"));
    let post = reqwest::Client::new()
        .post(server.url("/api/v1/jobs"))
        .body(vec![b'x'; 1 << 20])
        .send()
        .await
        .unwrap();
    assert_eq!(post.status().as_u16(), 400, "the error comes before the body is read");
    let upgrade = b"GET /api/v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n\r\n";
    assert!(send_bytes(server.address, upgrade).await.starts_with(b"HTTP/1.1 400"));
    for garbage in
        [&b"\0\0\0\0garbage"[..], b"\x16\x03\x01\xff\xff", b"ssh-2.0", &[0x16; 4000], b"\x16", b"GET / HT"]
    {
        let response = send_bytes(server.address, garbage).await;
        assert!(!response.windows(3).any(|w| w == b"200"), "{garbage:?}: {response:?}");
    }
    let start = Instant::now();
    send_bytes(server.address, b"").await;
    assert!(start.elapsed() >= Duration::from_millis(600), "the connection is closed too early");
    assert_eq!(get_text(&http(&files.client(), ""), &server, "/healthz").await.0, 200);
    server.stop().await;
}

/// Connects from an address of loopback. There are 16 million of these addresses.
async fn connect_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((source, 0).into()).unwrap();
    timeout(TIMEOUT, socket.connect(to)).await.expect("the kernel accepts the connection").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_half_open_connections_do_not_block_others() {
    let files = Files::new();
    let server = with_tls(files.issue("server", |_| {}), |c| {
        c.max_connections = Some(600);
        c.handshake_timeout = Duration::from_secs(600);
    })
    .await;
    let config = files.client();
    for from_one_address in [true, false] {
        let mut half_open = Vec::new();
        for n in 0..1000_u16 {
            let [high, low] = n.to_be_bytes();
            let source = if from_one_address { [127, 0, 0, 9] } else { [127, 7, high, low] };
            let mut stream = connect_from(source, server.address).await;
            // Half of the connections have sent bytes.
            if n % 2 == 0 {
                stream.write_all(b"\x16\x03\x01").await.unwrap();
            }
            half_open.push(stream);
        }
        // New connections, from other addresses and from the same address.
        let mut longest = Duration::ZERO;
        for source in [[127, 0, 0, 1], [127, 0, 0, 9], [127, 7, 0, 1]] {
            let start = Instant::now();
            let stream = connect_from(source, server.address).await;
            let name = ServerName::try_from("localhost").unwrap();
            let handshake = TlsConnector::from(config.clone()).connect(name, stream);
            let mut stream = timeout(TIMEOUT, handshake).await.expect("in time").unwrap();
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut response = Vec::new();
            let _ = timeout(TIMEOUT, stream.read_to_end(&mut response)).await.expect("in time");
            assert!(response.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&response));
            longest = longest.max(start.elapsed());
        }
        eprintln!("one address: {from_one_address}: longest response time {longest:?}");
        assert!(longest < TIMEOUT, "{longest:?}");
        // The server has closed all but the newest connections before their time limit.
        let mut ended = 0;
        for stream in &mut half_open {
            let mut byte = [0];
            if timeout(Duration::from_millis(1), stream.read(&mut byte)).await.is_ok() {
                ended += 1;
            }
        }
        assert!(ended >= 1000 - 600, "{ended}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_local_agent_s_listener_is_only_on_loopback() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&dir);
    config.local_listener = Some(Arc::new(std::net::TcpListener::bind("0.0.0.0:0").unwrap()));
    assert!(start_error(config).await.contains("0.0.0.0"));
    let files = Files::new();
    let local_listener = Arc::new(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let address = local_listener.local_addr().unwrap();
    let server = with_tls(files.issue("server", |_| {}), |c| c.local_listener = Some(local_listener)).await;
    let response = server.http.get(format!("http://{address}/healthz")).send().await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    server.stop().await;
}
