//! Connections that are silent, send too much, or violate the protocol.

use super::*;
use crate::test_server::socket_request;
use lockstep_server::tls::addresses;
use std::net::SocketAddr;

/// Returns code and reason of the close frame that the server sends.
async fn close_frame(
    socket: &mut (impl StreamExt<Item = Result<Message, tokio_tungstenite::tungstenite::Error>> + Unpin),
) -> (u16, String) {
    loop {
        match timeout(TIMEOUT, socket.next()).await.expect("the connection is closed") {
            Some(Ok(Message::Close(Some(frame)))) => return (frame.code.into(), frame.reason.to_string()),
            Some(Ok(_)) => {}
            other => panic!("no close frame: {other:?}"),
        }
    }
}

#[tokio::test]
async fn protocol_errors_of_agents_get_a_close_code_and_reason() {
    let server = TestServer::new().await;
    let token = server.agent_token("twice").await;
    // {"x": [[[...]]], "type": "leaving"}: a decoder must buffer fields before the type.
    let mut deep = b"\x82\xa1x".to_vec();
    deep.extend(vec![0x91; MESSAGE_NESTING * 100]);
    deep.extend(b"\xc0\xa4type\xa7leaving");
    let hello = Message::Binary(wire::encode(&hello("twice", 1, Vec::new())).unwrap().into());
    let after_hello = |then: Vec<Message>| [vec![hello.clone()], then].concat();
    let zeros = |bytes: usize| vec![Message::Binary(vec![0; bytes].into())];
    let part = |bytes: Vec<u8>| {
        let part = wire::Part { message: 1, last: true, bytes };
        Message::Binary(wire::encode(&FromAgent::Part(part)).unwrap().into())
    };
    // An invalid message of this size, in parts.
    let parts = |bytes: usize| {
        let zeros = vec![0_u8; bytes];
        let chunks = zeros.chunks(PART_BYTES);
        let count = chunks.len();
        let part_message = |(n, chunk): (usize, &[u8])| {
            let part = wire::Part { message: 1, last: n + 1 == count, bytes: chunk.to_vec() };
            Message::Binary(wire::encode(&FromAgent::Part(part)).unwrap().into())
        };
        chunks.enumerate().map(part_message).collect::<Vec<_>>()
    };
    let cases: Vec<(Vec<Message>, u16, &str)> = vec![
        (vec![Message::text("hello")], 1003, "text"),
        (vec![Message::Binary(vec![0xc1].into())], 1002, "cannot be read"),
        (vec![Message::Binary(deep.clone().into())], 1002, "depth limit"),
        (vec![part(deep)], 1002, "depth limit"),
        (vec![part(vec![0x00; 4000])], 1002, "cannot be read"),
        // Before Hello, the limit is lower, because decoding 16 MB of nulls would need half a gigabyte.
        (zeros(2 << 20), 1002, "cannot be read"),
        (zeros((2 << 20) + 1), 1002, "longer than 2 MiB"),
        (parts(2 << 20), 1002, "cannot be read"),
        (parts((2 << 20) + 1), 1002, "incomplete messages of more than 2 MiB"),
        (after_hello(zeros(16 << 20)), 1002, "cannot be read"),
        (after_hello(zeros((16 << 20) + 1)), 1009, "too long"),
        (after_hello(parts(16 << 20)), 1002, "cannot be read"),
        (after_hello(parts((16 << 20) + 1)), 1002, "incomplete messages of more than 16 MiB"),
        (after_hello(vec![hello.clone()]), 1002, "Hello twice"),
    ];
    for (messages, code, fragment) in cases {
        let (mut socket, _) = connect_async(server.socket_request("/agent/socket", &token)).await.unwrap();
        for message in messages {
            // The server may close the connection before the whole message is sent.
            let _ = socket.send(message).await;
        }
        if code == 1009 {
            // The kernel may drop the close frame if the server has not read all bytes.
            loop {
                match timeout(TIMEOUT, socket.next()).await.expect("the connection is closed") {
                    Some(Ok(Message::Close(Some(frame)))) => break assert_eq!(u16::from(frame.code), code),
                    // `Welcome`.
                    Some(Ok(Message::Binary(_))) => {}
                    Some(Ok(other)) => panic!("{other:?}"),
                    None | Some(Err(_)) => break,
                }
            }
            continue;
        }
        let (actual, reason) = close_frame(&mut socket).await;
        assert!(actual == code && reason.contains(fragment), "{actual} {reason}, not {code} {fragment}");
    }
    assert_eq!(server.get_text("/healthz").await.0, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_heartbeat_may_have_4096_attempts_and_causes_at_most_64_stops() {
    let server = TestServer::new().await;
    let token = server.agent_token("many").await;
    let (mut socket, _) = connect_async(server.socket_request("/agent/socket", &token)).await.unwrap();
    let message = |message: FromAgent| Message::Binary(wire::encode(&message).unwrap().into());
    socket.send(message(hello("many", 1, Vec::new()))).await.unwrap();
    let mut attempts: Vec<_> = (0..4096).map(|_| unknown_attempt()).collect();
    socket.send(message(FromAgent::Heartbeat { attempts: attempts.clone(), no_work: None })).await.unwrap();
    let mut stops = 0;
    loop {
        match timeout(TIMEOUT, socket.next()).await.expect("a message") {
            Some(Ok(Message::Binary(bytes))) => match wire::decode(&bytes).unwrap() {
                ToAgent::Stop { .. } => stops += 1,
                ToAgent::HeartbeatAck => break,
                _ => {}
            },
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(stops, 64, "later heartbeats cause the other stops");
    attempts.push(unknown_attempt());
    socket.send(message(FromAgent::Heartbeat { attempts, no_work: None })).await.unwrap();
    let (code, reason) = close_frame(&mut socket).await;
    assert!(code == 1002 && reason.contains("more than 4096 attempts"), "{code} {reason}");
    server.stop().await;
}

#[tokio::test]
async fn readers_that_send_too_much_get_a_close_code() {
    let server = TestServer::new().await;
    let mut stream = server.stream_list(&server.token).await;
    stream.0.send(Message::text("x".repeat(4096))).await.unwrap();
    stream.0.send(Message::Ping(bytes_of("still there"))).await.unwrap();
    match timeout(TIMEOUT, stream.0.next()).await.unwrap() {
        Some(Ok(Message::Pong(response))) => assert_eq!(&response[..], b"still there"),
        other => panic!("{other:?}"),
    }
    stream.0.send(Message::text("x".repeat(4097))).await.unwrap();
    assert_eq!(close_frame(&mut stream.0).await.0, 1009);
    server.stop().await;
}

fn bytes_of(text: &'static str) -> tokio_tungstenite::tungstenite::Bytes {
    text.into()
}

/// Whether the server closes the connection within this time.
async fn closes_within(socket: &mut TcpStream, within: Duration) -> bool {
    let mut bytes = Vec::new();
    timeout(within, socket.read_to_end(&mut bytes)).await.is_ok()
}

#[tokio::test]
async fn silent_connections_are_closed_in_time() {
    let patience = Duration::from_millis(400);
    let server = TestServer::with(|c| c.head_timeout = patience).await;
    let start = Instant::now();
    let mut sockets = Vec::new();
    for sent in [
        "",
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ] {
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        socket.write_all(sent.as_bytes()).await.unwrap();
        sockets.push(tokio::spawn(async move { closes_within(&mut socket, TIMEOUT).await }));
    }
    for socket in sockets {
        assert!(socket.await.unwrap(), "the connection is not closed");
    }
    assert!(start.elapsed() >= patience, "a connection is closed too early");
    server.stop().await;
}

#[tokio::test]
async fn idle_connections_make_room_for_others() {
    let server = TestServer::with(|c| {
        c.max_connections = Some(8);
        c.head_timeout = Duration::from_secs(600);
    })
    .await;
    // Connections up to the limit stay open.
    let mut idle = Vec::new();
    for i in 0..8 {
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        if i % 2 == 0 {
            socket.write_all(b"GET /healthz HTTP/1.1\r\nHost: loc").await.unwrap();
        }
        idle.push(socket);
    }
    let mut first = idle.remove(0);
    let is_closed = closes_within(&mut first, Duration::from_millis(300)).await;
    assert!(!is_closed, "a connection within the limit stays open");
    let assert_responds = async || {
        let request = reqwest::Client::new().get(server.url("/healthz")).send();
        let response = timeout(TIMEOUT, request).await.expect("at once").unwrap();
        assert_eq!(response.status(), 200);
    };
    // One more connection closes the oldest.
    for _ in 0..3 {
        assert_responds().await;
    }
    assert!(closes_within(&mut first, TIMEOUT).await);
    // The server still responds after ten times as many connections.
    for _ in 0..80 {
        idle.push(TcpStream::connect(server.address).await.unwrap());
    }
    assert_responds().await;
    drop(idle);
    server.stop().await;
}

#[tokio::test]
async fn one_address_has_a_quarter_of_the_connections() {
    // Loopback has no limit per address, because all local programs share it.
    let Some(outside) = addresses().into_iter().find(|a| a.is_ipv4()) else { return };
    let server = TestServer::with(|c| {
        c.listen = "0.0.0.0:0".parse().unwrap();
        c.insecure_http = true;
        c.max_connections = Some(64);
        c.head_timeout = Duration::from_secs(600);
    })
    .await;
    let address = SocketAddr::new(outside, server.address.port());
    let mut idle = Vec::new();
    for _ in 0..16 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let mut first = idle.remove(0);
    let is_closed = closes_within(&mut first, Duration::from_millis(300)).await;
    assert!(!is_closed, "a connection within the limit stays open");
    idle.push(TcpStream::connect(address).await.unwrap());
    assert!(closes_within(&mut first, TIMEOUT).await, "the oldest connection is closed for a new one");
    // Streams in use are not closed for new connections.
    let mut streams = Vec::new();
    for _ in 0..16 {
        streams.push(Stream::open_list(socket_request(address, "/stream", &server.token)).await);
    }
    let one_more = timeout(TIMEOUT, connect_async(socket_request(address, "/stream", &server.token))).await;
    assert!(one_more.expect("the connection is refused at once").is_err());
    let url = format!("http://127.0.0.1:{}/healthz", address.port());
    assert_eq!(server.http.get(url).send().await.unwrap().status(), 200, "other addresses are served");
    drop(streams);
    server.stop().await;
}

#[tokio::test]
async fn a_stalled_body_gets_408_in_time() {
    let patience = Duration::from_secs(2);
    let server = TestServer::with(|c| c.body_timeout = patience).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (_, checkpoint) = create_checkpoint(&server, &mut agent).await;
    for (path, mime) in [
        ("/api/v1/jobs".to_owned(), "application/json"),
        (format!("/api/v1/checkpoints/{checkpoint}/predict"), "application/octet-stream"),
        (format!("/api/v1/checkpoints/{checkpoint}/predict"), "multipart/form-data; boundary=B"),
    ] {
        let start = Instant::now();
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        let token = &server.token;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Type: {mime}\r\n\
             Content-Length: 100\r\n\r\n"
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        // The time limit counts from the last received part.
        for part in ["--", "B"] {
            tokio::time::sleep(patience / 2).await;
            socket.write_all(part.as_bytes()).await.unwrap();
        }
        let mut response = Vec::new();
        timeout(TIMEOUT, socket.read_to_end(&mut response)).await.expect("the response ends").unwrap();
        let response = String::from_utf8_lossy(&response);
        assert!(response.starts_with("HTTP/1.1 408"), "{path}: {response}");
        assert!(response.contains("application/problem+json") && response.contains("no byte of the body"));
        assert!(start.elapsed() >= patience * 2, "the response comes too early");
    }
    server.stop().await;
}
