//! Webhooks with a receiver on a real port: messages, signatures, formats, retries, and refused addresses.

use crate::{
    agent::{Agent, running},
    test_server::{TIMEOUT, TestServer, assert_mistake, with_form},
};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use lockstep_protocol::agent::{Ending, Source};
use lockstep_server::{ServeConfig, SmtpConfig};
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};

/// A received request.
struct Message {
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Message {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn id(&self) -> &str {
        self.headers["webhook-id"].to_str().unwrap()
    }
}

#[derive(Clone)]
struct ReceiverState {
    sender: mpsc::UnboundedSender<Message>,
    is_failing: Arc<AtomicBool>,
}

/// Receives messages. The path determines the response.
struct Receiver {
    address: SocketAddr,
    messages: mpsc::UnboundedReceiver<Message>,
    is_failing: Arc<AtomicBool>,
}

async fn respond(State(state): State<ReceiverState>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let path = uri.path().to_owned();
    let _ = state.sender.send(Message { path: path.clone(), headers, body });
    match path.as_str() {
        "/gone" => StatusCode::GONE.into_response(),
        "/moved" => (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, "/elsewhere")]).into_response(),
        "/slow" => std::future::pending().await,
        _ if state.is_failing.load(Ordering::Relaxed) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        _ => StatusCode::NO_CONTENT.into_response(),
    }
}

impl Receiver {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (sender, messages) = mpsc::unbounded_channel();
        let is_failing = Arc::new(AtomicBool::new(false));
        let address = listener.local_addr().unwrap();
        let state = ReceiverState { sender, is_failing: is_failing.clone() };
        let router = Router::new().fallback(respond).with_state(state);
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, messages, is_failing }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    async fn next(&mut self) -> Message {
        timeout(TIMEOUT, self.messages.recv()).await.expect("a message").unwrap()
    }

    /// Whether there is no further message.
    fn is_empty(&mut self) -> bool {
        self.messages.try_recv().is_err()
    }
}

/// A mail server that refuses the recipient `refused`.
struct MailServer {
    address: SocketAddr,
    /// Each e-mail, with the commands before it.
    mails: mpsc::UnboundedReceiver<String>,
}

impl MailServer {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (sender, mails) = mpsc::unbounded_channel();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(receive_mail(stream, sender.clone()));
            }
        });
        Self { address, mails }
    }

    /// Waits for the next e-mail, which must contain all these parts.
    async fn next(&mut self, parts: &[&str]) {
        let mail = timeout(TIMEOUT, self.mails.recv()).await.expect("an e-mail").unwrap();
        for part in parts {
            assert!(mail.contains(part), "{part} is not in:\n{mail}");
        }
    }
}

async fn receive_mail(mut stream: TcpStream, sender: mpsc::UnboundedSender<String>) -> io::Result<()> {
    let (read, mut write) = stream.split();
    let mut lines = BufReader::new(read).lines();
    let (mut mail, mut is_data) = (String::new(), false);
    write.write_all(b"220 mail.example\r\n").await?;
    while let Some(line) = lines.next_line().await? {
        mail.push_str(&line);
        mail.push('\n');
        let reply = match (is_data, line.as_str()) {
            (true, ".") => {
                is_data = false;
                let _ = sender.send(std::mem::take(&mut mail));
                "250 accepted"
            }
            (true, _) => continue,
            (false, "DATA") => {
                is_data = true;
                "354 go on"
            }
            (false, command) if command.contains("<refused@") => "550 unknown recipient",
            (false, _) => "250 mail.example",
        };
        write.write_all(format!("{reply}\r\n").as_bytes()).await?;
    }
    Ok(())
}

fn allow_private(config: &mut ServeConfig) {
    config.webhooks_allow_private = true;
    config.webhook_retries = vec![Duration::from_millis(200); 6];
}

impl TestServer {
    /// Adds a webhook, and returns its id and secret.
    async fn add_webhook(&self, body: &Value) -> (String, String) {
        let webhook = self.create("/webhooks", body).await;
        (webhook["id"].as_str().unwrap().to_owned(), webhook["secret"].as_str().unwrap().to_owned())
    }

    /// Sends the test message of a webhook, and returns its delivery.
    async fn send_test(&self, id: &str) -> Value {
        let (status, sent) = self.post(&format!("/webhooks/{id}/test"), &json!({})).await;
        assert_eq!(status, 200, "{sent}");
        sent
    }

    async fn change_webhook(&self, id: &str, change: &Value) -> (u16, Value) {
        self.patch(&format!("/webhooks/{id}"), change).await
    }

    /// Waits until `are_expected` is true for the messages of a webhook, and returns them, newest first.
    async fn deliveries(&self, id: &str, are_expected: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let since = Instant::now();
        loop {
            let page = self.get_ok(&format!("/webhooks/{id}/deliveries")).await;
            let deliveries = page["deliveries"].as_array().unwrap();
            if are_expected(deliveries) {
                return deliveries.clone();
            }
            assert!(since.elapsed() < TIMEOUT, "{page}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Submits a job that cannot start, because the only machine is drained, and cancels the job. A job called `other` has the project `other`.
    async fn create_cancelled_job(&self, name: &str) -> String {
        assert_eq!(self.post("/agents/id-a/drain", &Value::Null).await.0, 204);
        let submitted = self.submit(|spec| {
            spec["name"] = json!(name);
            spec["project"] = json!(if name == "other" { name } else { "default" });
        });
        let id = submitted.await.id.to_string();
        self.order(&id, "cancel").await;
        id
    }
}

/// Verifies the signature of a message.
fn assert_signed(message: &Message, secret: &str) {
    let verifier = Webhook::new(secret).unwrap();
    verifier.verify(&message.body, &message.headers).unwrap();
    // `verify` also accepts a prefix of a signature, so the whole signature is compared.
    let header = |name: &str| message.headers[name].to_str().unwrap();
    let at = header("webhook-timestamp").parse().unwrap();
    let signed = verifier.sign(message.id(), at, &message.body).unwrap();
    assert_eq!(signed, header("webhook-signature"));
}

fn attempts(delivery: &Value) -> &Vec<Value> {
    delivery["attempts"].as_array().unwrap()
}

/// Starts a server with a dataset, but without an online machine.
async fn server_without_machines() -> TestServer {
    let server = TestServer::with(allow_private).await;
    Agent::join_with_dataset(&server, 2).await.disconnect();
    server
}

#[tokio::test]
async fn each_state_change_is_sent_once_and_signed() {
    let server = TestServer::with(|config| {
        allow_private(config);
        config.public_url = Some("http://lockstep.example:7070".parse().unwrap());
    })
    .await;
    let mut receiver = Receiver::new().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let events = json!([
        "job.started",
        "job.preempted",
        "job.paused",
        "job.restarting",
        "job.succeeded",
        "job.failed",
        "job.cancelled"
    ]);
    let (webhook, secret) = server.add_webhook(&json!({"url": receiver.url("/all"), "events": events})).await;
    let (webhook_of_project, _) =
        server.add_webhook(&json!({"url": receiver.url("/other"), "project": "other"})).await;

    // A private job causes no messages.
    let (hidden, attempt) = agent.start_job(&server, |spec| spec["private"] = json!(true)).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // A job that succeeds, and a job that is cancelled while it runs. The request to cancel causes no second job.started.
    let mut jobs = Vec::new();
    for is_cancelled in [false, true] {
        let (id, attempt) = agent.start_job(&server, |spec| spec["name"] = json!("shoes")).await;
        agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
        if is_cancelled {
            server.order(&id, "cancel").await;
            agent.expect_stop().await;
            agent.end(&attempt, Ending::Stopped).await;
        } else {
            agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
        }
        jobs.push(id);
    }
    let expected = [
        ("job.started", &jobs[0], "running"),
        ("job.succeeded", &jobs[0], "succeeded"),
        ("job.started", &jobs[1], "running"),
        ("job.cancelled", &jobs[1], "cancelled"),
    ];
    for (event, job, state) in expected {
        let message = receiver.next().await;
        assert_signed(&message, &secret);
        assert_eq!(message.path, "/all");
        assert_eq!(message.headers["content-type"], "application/json");
        let body = message.json();
        let data = &body["data"];
        assert_eq!(
            (&body["type"], &data["id"], &data["state"]),
            (&json!(event), &json!(job), &json!(state)),
            "{body}"
        );
        assert_eq!(
            (&data["name"], &data["project"], &data["total_steps"]),
            (&json!("shoes"), &json!("default"), &json!(100))
        );
        assert_eq!(data["url"], format!("http://lockstep.example:7070/jobs/{job}"));
        assert!(body["timestamp"].as_str().unwrap().ends_with('Z'), "{body}");
    }
    let deliveries = server.deliveries(&webhook, |list| list.iter().all(|d| d["next_at"].is_null())).await;
    assert_eq!(deliveries.len(), 4, "{deliveries:?}");
    assert!(deliveries.iter().all(|d| attempts(d)[0]["status"] == 204 && d["job"] != hidden.as_str()));
    assert_eq!(server.deliveries(&webhook_of_project, |_| true).await, Vec::<Value>::new());
    // A job of the project `other` causes a message to the webhook of this project.
    let job = server.create_cancelled_job("other").await;
    server.deliveries(&webhook_of_project, |list| list.len() == 1 && list[0]["job"] == job.as_str()).await;
    server.stop().await;
}

#[tokio::test]
async fn messages_are_retried_with_the_same_id_also_after_a_restart() {
    let mut receiver = Receiver::new().await;
    receiver.is_failing.store(true, Ordering::Relaxed);
    let server = server_without_machines().await;
    let (id, secret) = server.add_webhook(&json!({"url": receiver.url("/")})).await;
    let job = server.create_cancelled_job("shoes").await;
    let first = receiver.next().await;
    server.deliveries(&id, |list| list.len() == 1 && !attempts(&list[0]).is_empty()).await;
    let dir = server.stop().await;
    receiver.is_failing.store(false, Ordering::Relaxed);
    let server = TestServer::open(dir, allow_private).await;
    let delivery = server.deliveries(&id, |list| list[0]["next_at"].is_null()).await.remove(0);
    assert_eq!((&delivery["id"], &delivery["job"]), (&json!(first.id()), &json!(job)));
    let (last, failed) = attempts(&delivery).split_last().unwrap();
    assert!(last["status"] == 204 && last["error"].is_null(), "{delivery}");
    assert!(!failed.is_empty() && failed.iter().all(|attempt| attempt["status"] == 500), "{delivery}");
    assert_eq!(failed[0]["error"], "the receiver answered 500 Internal Server Error");
    let retry = receiver.next().await;
    assert_eq!((retry.id(), &retry.body), (first.id(), &first.body));
    assert_signed(&retry, &secret);
    server.stop().await;
}

#[tokio::test]
async fn messages_are_dropped_after_the_last_attempt_or_with_their_job() {
    let receiver = Receiver::new().await;
    receiver.is_failing.store(true, Ordering::Relaxed);
    let server = TestServer::with(|config| {
        allow_private(config);
        config.webhook_retries = vec![Duration::from_millis(20), Duration::from_millis(20)];
    })
    .await;
    Agent::join_with_dataset(&server, 2).await.disconnect();
    let (id, _) = server.add_webhook(&json!({"url": receiver.url("/")})).await;
    server.create_cancelled_job("given up").await;
    let given_up = server.deliveries(&id, |list| list.len() == 1 && list[0]["next_at"].is_null()).await;
    assert_eq!(attempts(&given_up[0]).len(), 3, "{given_up:?}");
    let dir = server.stop().await;

    let server = TestServer::open(dir, |config| {
        allow_private(config);
        config.webhook_retries = vec![Duration::from_secs(3600)];
    })
    .await;
    let job = server.create_cancelled_job("deleted").await;
    server.deliveries(&id, |list| list.len() == 2 && list[0]["next_at"].is_string()).await;
    assert_eq!(server.delete(&format!("/jobs/{job}")).await.0, 204);
    assert_eq!(server.deliveries(&id, |_| true).await.len(), 1);
    assert_eq!(server.delete(&format!("/webhooks/{id}")).await.0, 204);
    assert_eq!(server.query_number("SELECT count(*) FROM webhook_deliveries").await, 0);
    server.stop().await;
}

#[tokio::test]
async fn redirects_are_not_followed_and_410_disables_a_webhook() {
    let mut receiver = Receiver::new().await;
    let server = server_without_machines().await;
    for (path, status, fragment) in
        [("/moved", 307, "redirects are not followed"), ("/gone", 410, "410 Gone")]
    {
        let (id, _) = server.add_webhook(&json!({"url": receiver.url(path)})).await;
        let sent = server.send_test(&id).await;
        assert_eq!(attempts(&sent)[0]["status"], status, "{sent}");
        assert!(attempts(&sent)[0]["error"].as_str().unwrap().contains(fragment), "{sent}");
        assert_eq!(receiver.next().await.path, path);
        assert!(receiver.is_empty(), "the redirect is not followed");
    }
    let (_, page) = server.get("/webhooks").await;
    let [moved, gone] = &page["webhooks"].as_array().unwrap()[..] else { panic!("{page}") };
    assert!(moved["enabled"] == true && gone["enabled"] == false, "{page}");
    // No message is queued for a disabled webhook.
    let (moved, gone) = (moved["id"].as_str().unwrap(), gone["id"].as_str().unwrap());
    assert_eq!(server.delete(&format!("/webhooks/{moved}")).await.0, 204);
    server.create_cancelled_job("quiet").await;
    assert_eq!(server.deliveries(gone, |_| true).await.len(), 1);
    let (status, changed) =
        server.change_webhook(gone, &json!({"enabled": true, "url": receiver.url("/")})).await;
    assert!(status == 200 && changed["enabled"] == true, "{changed}");
    server.create_cancelled_job("told").await;
    assert_eq!(receiver.next().await.json()["data"]["name"], "told");
    server.stop().await;
}

#[tokio::test]
async fn private_addresses_are_refused_as_numbers_and_by_name() {
    let mut receiver = Receiver::new().await;
    let server = TestServer::with(|config| config.webhooks_allow_private = true).await;
    let (by_number, _) = server.add_webhook(&json!({"url": receiver.url("/")})).await;
    let dir = server.stop().await;
    // A webhook that was added with the option gets no messages without it.
    let server = TestServer::open(dir, |_| {}).await;
    let url = format!("http://localhost:{}/", receiver.address.port());
    let (by_name, _) = server.add_webhook(&json!({"url": url})).await;
    for id in [by_number, by_name] {
        let sent = server.send_test(&id).await;
        let attempt = &attempts(&sent)[0];
        assert!(attempt["error"].as_str().unwrap().contains("--webhooks-allow-private"), "{sent}");
        assert!(attempt["status"].is_null(), "{sent}");
    }
    assert!(receiver.is_empty());
    let refused = server.post("/webhooks", &json!({"url": "http://2130706433/"})).await;
    assert_mistake(refused, "/url", "--webhooks-allow-private");
    server.stop().await;
}

#[tokio::test]
async fn a_slow_receiver_does_not_delay_others() {
    let mut receiver = Receiver::new().await;
    let server = server_without_machines().await;
    for path in ["/slow", "/quick"] {
        server.add_webhook(&json!({"url": receiver.url(path)})).await;
    }
    let since = Instant::now();
    let mut slow_requests = 0;
    for name in ["a", "b", "c"] {
        server.create_cancelled_job(name).await;
        while receiver.next().await.path == "/slow" {
            slow_requests += 1;
        }
    }
    // The messages arrive before the slow request times out.
    assert!(since.elapsed() < Duration::from_secs(14));
    assert!(slow_requests <= 1, "a webhook gets one message at a time, but got {slow_requests}");
    server.stop().await;
}

#[tokio::test]
async fn each_format_matches_its_service() {
    let mut receiver = Receiver::new().await;
    let server = server_without_machines().await;
    let test = "Lockstep: a test of this webhook";
    for (format, path, pointer, expected) in [
        ("standard", "/hook", "/type", "webhook.test"),
        ("slack", "/hook", "/text", test),
        ("discord", "/hook", "/content", "**Lockstep\\: a test of this webhook**"),
        ("teams", "/hook", "/attachments/0/content/body/0/inlines/0/text", test),
        ("ntfy", "/", "/topic", "hook"),
    ] {
        let (id, secret) = server.add_webhook(&json!({"url": receiver.url("/hook"), "form": format})).await;
        server.send_test(&id).await;
        let message = receiver.next().await;
        assert_eq!(message.path, path, "{format}");
        let body = message.json();
        assert_eq!(body.pointer(pointer), Some(&json!(expected)), "{format}: {body}");
        assert_signed(&message, &secret);
    }
    server.stop().await;
}

#[tokio::test]
async fn ends_of_jobs_and_alerts_are_sent_by_e_mail() {
    let mut mails = MailServer::new().await;
    let smtp = |url: &str| SmtpConfig::new(url, "Lockstep <lockstep@example.org>");
    for url in ["mail.example", "http://mail.example"] {
        assert!(smtp(url).unwrap_err().starts_with("--smtp: "), "{url}");
    }
    assert!(
        SmtpConfig::new("smtp://mail.example", "nobody").unwrap_err().starts_with("--smtp-from \"nobody\"")
    );
    let smtp = smtp(&format!("smtp://{}", mails.address)).unwrap();
    // The mail server may have a private address.
    let server = TestServer::with(|config| {
        config.smtp = Some(smtp);
        config.public_url = Some("http://lockstep.example:7070".parse().unwrap());
    })
    .await;
    Agent::join_with_dataset(&server, 2).await.disconnect();
    for (url, format) in [
        ("mailto:ada@example.org", "slack"),
        ("https://hooks.example/a", "email"),
        ("mailto:nobody", "email"),
        ("mailto:ada@example.org,", "email"),
        ("mailto:ada@example.org?cc=ben@example.org", "email"),
    ] {
        let (status, problem) = server.post("/webhooks", &json!({"url": url, "form": format})).await;
        assert_eq!((status, &problem["errors"][0]["pointer"]), (422, &json!("/url")), "{url}: {problem}");
        let is_hinted = problem["errors"][0]["detail"].as_str().unwrap().contains("--form email");
        assert_eq!(is_hinted, format == "slack" && url.starts_with("mailto:"), "{problem}");
    }
    let url = "mailto:ada@example.org, ben@example.org";
    let (id, _) = server.add_webhook(&json!({"url": url, "form": "email"})).await;
    let sent = server.send_test(&id).await;
    assert_eq!(attempts(&sent)[0]["status"], 250, "{sent}");
    let message_id = format!("Message-ID: <{}@example.org>", sent["id"].as_str().unwrap());
    let test = "Subject: Lockstep: a test of this webhook\n";
    let (mail_from, rcpt_to) =
        ("MAIL FROM:<lockstep@example.org>", "RCPT TO:<ada@example.org>\nRCPT TO:<ben@example.org>");
    mails.next(&[mail_from, rcpt_to, "From: Lockstep <lockstep@example.org>", &message_id, test]).await;
    let job = server.create_cancelled_job("shoes").await;
    let link = format!("\nhttp://lockstep.example:7070/jobs/{job}\n");
    mails.next(&["Subject: shoes was cancelled\n", &link]).await;

    // Each update of the summary repeats all alerts. Only new alerts are sent.
    let (_, run) = server.post("/runs", &json!({"name": "elsewhere"})).await;
    let run = run["id"].as_str().unwrap();
    let alerts = [
        json!({"title": "slow", "at": 1}),
        json!({"title": "diverged", "text": "loss is inf", "level": "ERROR", "at": 2}),
    ];
    for count in [1, 1, 2] {
        let change = json!({"summary": {"alerts": alerts[..count]}});
        assert_eq!(server.patch(&format!("/runs/{run}"), &change).await.0, 200);
    }
    mails.next(&["Subject: elsewhere: slow\n"]).await;
    mails.next(&["Subject: elsewhere: diverged\n", "\nloss is inf\n"]).await;
    let (_, history) = server.get(&format!("/jobs/{run}/history")).await;
    let entries = history["entries"].as_array().unwrap().iter();
    let shown: Vec<_> =
        entries.filter(|entry| entry["what"] == "alert").map(|e| (&e["title"], &e["level"])).collect();
    assert_eq!(shown, [(&json!("slow"), &json!("INFO")), (&json!("diverged"), &json!("ERROR"))], "{history}");
    let (_, events) = server.get(&format!("/jobs/{run}/events?type=alert")).await;
    assert_eq!(events["events"][1]["text"], "loss is inf", "{events}");

    let change = json!({"url": "mailto:refused@example.org"});
    assert_eq!(server.change_webhook(&id, &change).await.0, 200);
    let assert_test_fails = async |server: &TestServer, fragment: &str| {
        let sent = server.send_test(&id).await;
        let error = attempts(&sent)[0]["error"].as_str().unwrap();
        assert!(error.contains(fragment), "{error}");
    };
    assert_test_fails(&server, "(550): unknown recipient").await;
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_test_fails(&server, "--smtp URL").await;
    let refused = server.post("/webhooks", &json!({"url": url, "form": "email"})).await;
    assert_mistake(refused, "/form", "--smtp URL");
    server.stop().await;
}

#[tokio::test]
async fn messages_older_than_a_week_or_beyond_100_are_deleted() {
    let receiver = Receiver::new().await;
    let server = server_without_machines().await;
    let (id, _) = server.add_webhook(&json!({"url": receiver.url("/")})).await;
    let now = milliseconds_now();
    let insert = format!(
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 150) INSERT INTO webhook_deliveries \
         (id, webhook_id, event, payload, created_at) SELECT 'm' || n, '{id}', 'job.failed', '{{}}', {now} FROM n"
    );
    assert_eq!(server.execute(&insert).await, 150);
    server.send_test(&id).await;
    let remaining = server.deliveries(&id, |_| true).await;
    assert_eq!((remaining.len(), &remaining[0]["event"]), (100, &json!("webhook.test")));
    // A week and a minute ago.
    let old = now - (7 * 24 * 3600 + 60) * 1000;
    server.execute(&format!("UPDATE webhook_deliveries SET created_at = {old} WHERE id LIKE 'm1%'")).await;
    let recent = server.query_number("SELECT count(*) FROM webhook_deliveries WHERE id NOT LIKE 'm1%'").await;
    let server = TestServer::open(server.stop().await, allow_private).await;
    server.deliveries(&id, |list| list.len() as i64 == recent).await;
    // No message is sent about a run that began and ended long ago or is imported, but about a run that has just begun.
    let change = json!({"events": ["job.started", "job.succeeded", "run.alert"]});
    assert_eq!(server.change_webhook(&id, &change).await.0, 200);
    assert_eq!(server.post("/runs", &json!({"id": "old", "name": "old", "started_at": 0})).await.0, 201);
    let end = json!({"state": "succeeded", "ended_at": 1000, "summary": {"alerts": [{"title": "slow"}]}});
    assert_eq!(server.patch("/runs/old", &end).await.0, 200);
    let imported = json!({"id": "imported", "name": "imported", "imported": true});
    assert_eq!(server.post("/runs", &imported).await.0, 201);
    assert_eq!(server.patch("/runs/imported", &json!({"state": "succeeded"})).await.0, 200);
    let (_, new) = server.post("/runs", &json!({"name": "new"})).await;
    let of_runs = |list: &[Value]| -> Vec<Value> {
        list.iter().map(|delivery| delivery["job"].clone()).filter(Value::is_string).collect()
    };
    let all = server.deliveries(&id, |list| !of_runs(list).is_empty()).await;
    assert_eq!(of_runs(&all), [new["id"].clone()], "{all:?}");
    server.stop().await;
}

fn milliseconds_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}

#[tokio::test]
async fn errors_in_a_webhook_are_named() {
    let server = TestServer::with(allow_private).await;
    let (id, secret) = server.add_webhook(&json!({"url": "https://hooks.example/a"})).await;
    assert!(secret.starts_with("whsec_") && secret.len() == 50, "{secret}");
    for (change, pointer) in [
        (json!({"url": "hooks.example"}), "/url"),
        (json!({"url": "ftp://hooks.example/"}), "/url"),
        (json!({"url": format!("https://hooks.example/{}", "x".repeat(2000))}), "/url"),
        (json!({"url": "https://hooks.example/", "project": "a b"}), "/project"),
        (json!({"url": "https://hooks.example/", "events": []}), "/events"),
    ] {
        assert_mistake(server.post("/webhooks", &change).await, pointer, "");
        assert_mistake(server.change_webhook(&id, &change).await, pointer, "");
    }
    for body in [
        json!({}),
        json!({"url": "https://a.example/", "events": ["job.exploded"]}),
        json!({"url": "https://a.example/", "form": "fax"}),
    ] {
        assert_eq!(server.post("/webhooks", &body).await.0, 400, "{body}");
    }
    let change = json!({"form": "slack", "project": "vision", "events": ["job.failed", "job.failed"], "enabled": false});
    let (_, changed) = server.change_webhook(&id, &change).await;
    assert_eq!(
        (&changed["form"], &changed["project"], &changed["events"]),
        (&json!("slack"), &json!("vision"), &json!(["job.failed"]))
    );
    let (_, page) = server.get("/webhooks").await;
    assert_eq!(page["webhooks"], json!([changed]), "the list has no secret");
    assert_eq!(server.change_webhook(&id, &json!({"project": ""})).await.1["project"], Value::Null);
    // Adds webhooks up to the limit.
    for n in 1..50 {
        server.add_webhook(&json!({"url": format!("https://hooks.example/{n}")})).await;
    }
    assert_eq!(server.post("/webhooks", &json!({"url": "https://hooks.example/51"})).await.0, 409);
    server.stop().await;
}

#[tokio::test]
async fn webhooks_are_added_tested_and_removed_on_their_page() {
    let mut receiver = Receiver::new().await;
    let server = server_without_machines().await;
    let post = async |body: String| {
        let form = with_form(server.http.post(server.url("/webhooks")), body);
        let response = form.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let url = receiver.url("/hook").replace(':', "%3A");
    let add = format!("action=add&url={url}&form=slack&project=&event=job.failed&event=job.started");
    let (status, page) = post(add).await;
    assert!(status == 200 && page.contains("whsec_") && page.contains("started, failed"), "{page}");
    let (_, list) = server.get("/webhooks").await;
    let id = list["webhooks"][0]["id"].as_str().unwrap().to_owned();
    // The client follows the redirect to the page.
    let (status, page) = post(format!("action=test&id={id}")).await;
    assert!(status == 200 && page.contains("webhook test") && page.contains("delivered"), "{page}");
    assert!(!page.contains("whsec_"), "the secret is shown once");
    assert_eq!(receiver.next().await.path, "/hook");
    let (_, page) = post(format!("action=disable&id={id}")).await;
    assert!(page.contains("disabled"), "{page}");
    for (body, status, fragment) in [
        ("action=add&url=nothing&form=slack&event=job.failed", 422, "id=\"w-url-error\">must be a URL"),
        ("action=add&url=nothing&form=slack&event=job.failed", 422, "<option selected>slack"),
        (
            "action=add&url=https://a.example/&form=slack&project=",
            422,
            "id=\"w-events-error\">must name an event",
        ),
        ("action=test&id=nothing", 404, "no webhook has this id"),
        ("action=launch&id=nothing", 404, "this page has no action"),
    ] {
        let (code, page) = post(body.into()).await;
        assert!(code == status && page.contains(fragment), "{body}: {code} {page}");
    }
    let (_, page) = post(format!("action=remove&id={id}")).await;
    assert!(page.contains("No webhooks."), "{page}");
    let (_, log) = server.get("/audit?limit=1").await;
    assert_eq!(log["entries"][0]["object"], format!("/webhooks: remove {id:?}"));
    server.stop().await;
}
