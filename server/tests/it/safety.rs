//! Host names, security headers, and completeness of the OpenAPI document.

use crate::{agent::server_with_agent, document::create_failed_job, test_server::TestServer};
use lockstep_server::openapi;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

#[tokio::test]
async fn requests_with_unknown_host_names_are_refused() {
    let server = TestServer::new().await;
    for host in ["evil.example", "evil.example:7070", "127.0.0.1.evil.example", "0.0.0.0"] {
        for path in ["/", "/api/v1/jobs", "/healthz", "/static/styles/base.css"] {
            let response = server.http.get(server.url(path)).header("host", host).send().await.unwrap();
            assert_eq!(response.status().as_u16(), 421, "{host} {path}");
            let text = response.text().await.unwrap();
            assert!(
                text.contains("answers only to 127.0.0.1, [::1] and localhost; use one of these"),
                "{text}"
            );
        }
    }
    for host in ["localhost", "localhost:1", "[::1]:7070"] {
        let response = server.http.get(server.url("/healthz")).header("host", host).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200, "{host}");
    }
    // The host of an absolute URL is checked, too, and a request has one Host header.
    let address = server.url("");
    let address = address.trim_start_matches("http://");
    for (target, hosts, status) in [
        ("/healthz".to_owned(), vec![address], "200"),
        (format!("http://{address}/healthz"), vec![address], "200"),
        ("http://evil.example/healthz".to_owned(), vec![address], "421"),
        (format!("http://{address}/healthz"), vec!["evil.example"], "421"),
        ("/healthz".to_owned(), vec![address, "evil.example"], "400"),
        ("/healthz".to_owned(), vec!["evil.example", address], "400"),
    ] {
        let lines: String = hosts.iter().map(|host| format!("Host: {host}\r\n")).collect();
        let mut socket = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {target} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        socket.read_to_string(&mut response).await.unwrap();
        assert_eq!(response.split(' ').nth(1), Some(status), "{target} {hosts:?}: {response}");
    }
    server.stop().await;
}

#[tokio::test]
async fn every_response_has_security_headers() {
    let (server, mut agent) = server_with_agent(2).await;
    let (job, checkpoint) = create_failed_job(&server, &mut agent, |_| {}).await;
    let pages =
        ["/jobs", "/api/v1/jobs", "/api/v1/nothing", "/nothing", "/static/styles/base.css", "/healthz"];
    let mut paths: Vec<_> = pages.iter().map(|path| (path.to_string(), None)).collect();
    // Browsers must not interpret files and logs of jobs as HTML.
    for (path, expected_type) in [
        (format!("/api/v1/checkpoints/{checkpoint}/model.safetensors"), "application/octet-stream"),
        (format!("/api/v1/checkpoints/{checkpoint}/state.json"), "application/json"),
        (format!("/api/v1/jobs/{job}/metrics.csv"), "text/csv"),
        (format!("/api/v1/jobs/{job}/logs?format=text"), "text/plain"),
    ] {
        paths.push((path, Some(expected_type)));
    }
    for (path, expected_type) in &paths {
        let response = server.http.get(server.url(path)).send().await.unwrap();
        let headers = response.headers();
        if let Some(expected_type) = expected_type {
            assert_eq!(response.status(), 200, "{path}");
            let content_type = headers["content-type"].to_str().unwrap();
            assert_eq!(content_type.split(';').next(), Some(*expected_type), "{path}");
        }
        let csp = headers["content-security-policy"].to_str().unwrap();
        assert!(csp.contains("default-src 'none'") && csp.contains("frame-ancestors 'none'"), "{path}");
        assert!(!csp.contains("unsafe"));
        assert_eq!(headers["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(headers["referrer-policy"], "same-origin", "{path}");
    }
    server.stop().await;
}

#[tokio::test]
async fn every_documented_call_has_a_route() {
    let server = TestServer::new().await;
    let served = server.get_ok("/openapi.json").await;
    assert_eq!(served, openapi());
    for (path, item) in served["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys().filter(|m| *m != "parameters") {
            let url = server.url(&path.replace(['{', '}'], ""));
            let request = server.http.request(method.to_uppercase().parse().unwrap(), url);
            let response = request.send().await.unwrap();
            let status = response.status().as_u16();
            let text = response.text().await.unwrap();
            assert!(status != 405 && !text.contains("no such call"), "{method} {path}: {status} {text}");
        }
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(server.get_text(path).await.0, 200);
    }
    server.stop().await;
}
