//! A test server that records requests, accepts all uploads and has no files.

use super::{
    address::{self, tests::options},
    remote::Remote,
};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

/// The requests so far: each method, and the path after the attempt.
pub(super) type RecordedRequests = Arc<Mutex<Vec<String>>>;

/// The status and body of the response to a method.
type Responses = fn(method: &str) -> (&'static str, &'static str);

/// Starts a server, and returns an agent's client of it.
pub(super) fn server() -> (Remote, RecordedRequests) {
    server_with(|method| match method {
        "GET" => ("404 Not Found", r#"{"code":"not_found","detail":"nothing is here"}"#),
        _ => ("204 No Content", ""),
    })
}

/// As [`server`], with other responses.
pub(super) fn server_with(responses: Responses) -> (Remote, RecordedRequests) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let requests = RecordedRequests::default();
    let recorded = Arc::clone(&requests);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // An interrupted request is not recorded.
            let _ = respond(stream.unwrap(), &recorded, responses);
        }
    });
    (remote(&url), requests)
}

/// An agent's client of the server at `url`.
pub(super) fn remote(url: &str) -> Remote {
    let address = Arc::new(address::parse(&options(url)).unwrap());
    Remote { address, agent_id: "id-a".into(), name: "a".into() }
}

fn respond(mut stream: TcpStream, requests: &RecordedRequests, responses: Responses) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut request_line, mut length) = (String::new(), 0);
    reader.read_line(&mut request_line)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.parse().unwrap_or(0);
            }
            Some(_) => {}
            None => break,
        }
    }
    reader.take(length).read_to_end(&mut Vec::new())?;
    let mut parts = request_line.split(' ');
    let (method, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    // The first seven parts are those of /api/v1/agent/attempts/<job>/<attempt>, beginning with an empty part.
    let rest: Vec<_> = path.split('/').skip(7).collect();
    requests.lock().unwrap().push(format!("{method} {}", rest.join("/")));
    let (status, body) = responses(method);
    let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    write!(stream, "HTTP/1.1 {status}\r\n{length}connection: close\r\n\r\n{body}")
}
