//! Agents that authenticate with certificates, created by `lockstep ca` and by openssl.

mod files;
mod options;

use crate::{
    pictures,
    server::{
        Finished, Folder, TIMEOUT, Terminated, exit_status, faketime, lockstep, training_permit, wait_until,
    },
    specs,
    tls::serve::{Serve, ca, listens},
};
use serde_json::Value;
use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// A `lockstep agent` process.
struct Agent {
    process: Terminated,
    log: PathBuf,
}

impl Agent {
    /// Starts an agent in the server's folder, with a data directory and a log of this name.
    fn start(serve: &Serve, dir: &str, options: &[impl AsRef<OsStr>]) -> Self {
        let log = serve.folder.path().join(format!("{dir}.log"));
        let mut command = lockstep();
        command.args(["agent", "--server", &https(serve), "--ca-file", "data/ca/ca.crt", "--cpu-slots", "1"]);
        command.args(["--data-dir", dir]).args(options).current_dir(serve.folder.path());
        command.stdout(Stdio::null()).stderr(fs::File::create(&log).expect("a log"));
        Self { process: Terminated(command.spawn().expect("an agent")), log }
    }

    fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the agent has ended, with this exit status and these words in its log.
    async fn assert_ends(&mut self, status: i32, words: &str) {
        assert_eq!(exit_status(&mut self.process.0).await.code(), Some(status), "{}", self.output());
        assert!(self.output().contains(words), "{words}: {}", self.output());
    }

    /// Waits until the agent's log has these words.
    async fn wait_for_log(&self, words: &str) {
        wait_until(words, || self.output().contains(words), || self.output()).await;
    }
}

fn https(serve: &Serve) -> String {
    format!("https://localhost:{}", serve.port)
}

/// Issues an agent's certificate by the server's CA, with more arguments of `ca issue`.
fn issue(serve: &Serve, name: &str, more: &[&str]) {
    let args = [&["issue", name, "--agent", "--data-dir", "data"], more].concat();
    ca(serve.folder.path(), &args).ok();
}

/// The lines of the server's log that say that an agent was refused.
fn refusals(serve: &Serve) -> Vec<String> {
    serve.log().lines().filter(|line| line.contains("an agent was refused")).map(str::to_owned).collect()
}

/// Waits until the server's log has this number of refusals, and returns them. The server logs a refusal after the agent has read the reason
/// and closed the connection.
async fn wait_for_refusals(serve: &Serve, count: usize) -> Vec<String> {
    wait_until("the server says so, too", || refusals(serve).len() >= count, || serve.log()).await;
    refusals(serve)
}

async fn agents(serve: &Serve) -> Vec<Value> {
    let client = serve.client(&serve.ca());
    let response = client.get(format!("{}/api/v1/agents", https(serve))).send().await.expect("a response");
    response.json::<Value>().await.expect("JSON")["agents"].as_array().expect("agents").clone()
}

/// Waits until the agent of this name fulfils a condition, and returns it.
async fn wait_for_agent(serve: &Serve, name: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let all = agents(serve).await;
        if let Some(agent) = all.iter().find(|agent| agent["name"] == name && is_so(agent)) {
            return agent.clone();
        }
        assert!(start.elapsed() < TIMEOUT, "{name}: {all:#?} {}", serve.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn is_online(agent: &Value) -> bool {
    agent["online"] == true
}

/// The options that name the files of a certificate.
fn files(name: &str) -> [String; 4] {
    ["--cert-file".into(), format!("{name}.crt"), "--key-file".into(), format!("{name}.key")]
}

#[tokio::test]
async fn an_agent_with_a_certificate_trains_until_the_certificate_is_revoked() {
    let _permit = training_permit().await;
    let serve =
        Serve::start(&["--tls-own-ca", "--no-local-agent", "--agent-auth", "certificate"], listens).await;
    issue(&serve, "node-a", &["--days", "120"]);
    let certificate = files("node-a");
    let mut first = Agent::start(&serve, "one", &certificate);
    let joined = wait_for_agent(&serve, "node-a", is_online).await;
    let warnings = joined["warnings"].as_array().expect("its warnings");
    assert!(!warnings.iter().any(|w| w["text"].to_string().contains("certificate")), "120 days: {joined:#}");

    let dataset = pictures::idx_dataset(serve.folder.path(), 40, 20);
    let here = |args: &[&str]| serve.cli(&https(&serve), Some(&serve.ca()), args);
    here(&["dataset", "add", "pictures", dataset.to_str().expect("UTF-8")]).ok();
    let spec = specs::short("by-certificate", "pictures", 1, 20);
    let client = serve.client(&serve.ca());
    let submitted = client.post(format!("{}/api/v1/jobs", https(&serve))).json(&spec).send().await;
    let submitted = submitted.expect("a response");
    let job: Value = submitted.json().await.expect("JSON");
    here(&["watch", job["id"].as_str().expect("an id")]).assert_prints(&["succeeded"]);

    // The name is bound to this agent: another agent with the same certificate is refused, and ends.
    let mut second = Agent::start(&serve, "two", &certificate);
    second.assert_ends(1, "is bound to another agent").await;
    let bound = wait_for_refusals(&serve, 1).await;
    assert!(
        bound.len() == 1 && bound[0].contains("node-a") && bound[0].contains("bound to another"),
        "{bound:?}"
    );

    // Browsers need no certificate. For an agent, a token alone is not enough.
    let page = client.get(format!("{}/jobs", https(&serve))).send().await.expect("a page");
    assert!(page.status().is_success());
    let token = here(&["token", "create", "--scope", "agent", "--agent", "node-t"]);
    serve.folder.write("node-t.token", token.ok());
    let by_token = Agent::start(&serve, "three", &["--name", "node-t", "--token-file", "node-t.token"]);
    by_token.wait_for_log("presents no certificate").await;
    assert!(by_token.output().contains("--cert-file"), "{}", by_token.output());
    let missing = wait_for_refusals(&serve, 2).await;
    assert!(missing.len() == 2 && missing[1].contains("presents no certificate"), "{missing:?}");
    drop(by_token);

    // After the revocation, the open connection ends within seconds and new ones are refused. Repeated attempts are logged once.
    ca(serve.folder.path(), &["list", "--data-dir", "data"]).assert_prints(&["node-a", "valid"]);
    let revoked = Instant::now();
    ca(serve.folder.path(), &["revoke", "node-a", "--data-dir", "data"]).ok();
    wait_for_agent(&serve, "node-a", |agent| !is_online(agent)).await;
    assert!(revoked.elapsed() < Duration::from_secs(30), "{:?}", revoked.elapsed());
    first.wait_for_log("which was revoked").await;
    wait_until("the agent tries again", || first.output().matches("revoked").count() >= 2, || first.output())
        .await;
    let of_revoked: Vec<_> =
        refusals(&serve).into_iter().filter(|line| line.contains("certificate was revoked")).collect();
    assert!(
        (1..=2).contains(&of_revoked.len()),
        "the end of the connection, and the first new attempt: {of_revoked:?}"
    );
    assert!(of_revoked.iter().all(|line| line.contains("node-a")), "{of_revoked:?}");
    assert!(first.process.0.try_wait().expect("its status").is_none(), "the agent still tries");

    // With new certificate files, the running agent connects again.
    for ending in ["crt", "key"] {
        fs::remove_file(serve.folder.path().join(format!("node-a.{ending}"))).expect("a file");
    }
    issue(&serve, "node-a", &["--days", "20"]);
    let back = wait_for_agent(&serve, "node-a", is_online).await;
    assert_eq!(back["id"], joined["id"]);
}

#[tokio::test]
async fn expiring_certificates_are_reported_to_agents_admins_and_logs() {
    let serve = Serve::start(&["--tls-own-ca", "--no-local-agent"], listens).await;
    // Issued 311 days and an hour ago for 400 days, so 88 days and 23 hours are left.
    issue_at(&serve, "node-a", "-7465h", "400");
    let _agent = Agent::start(&serve, "one", &files("node-a"));
    let warned = |agent: &Value| agent["warnings"].to_string().contains("Its certificate expires in 88 days");
    wait_for_agent(&serve, "node-a", |agent| is_online(agent) && warned(agent)).await;
    wait_until("the log", || serve.log().contains("its certificate expires in 88 days"), || serve.log())
        .await;
    let mut doctor = lockstep();
    doctor.args(["doctor", "--quick", "--tls-cert", "node-a.crt"]).current_dir(serve.folder.path());
    let report = Finished::of(&mut doctor).stdout;
    assert!(report.contains("node-a.crt: 88 days left"), "{report}");
    let client = serve.client(&serve.ca());
    let ready = client.get(format!("{}/readyz", https(&serve))).send().await.expect("a response");
    let ready = ready.text().await.expect("text");
    assert!(ready.contains("note: the certificate of the agent node-a expires in 88 days"), "{ready}");
}

/// As [`issue`], at another time. `clock`: the time relative to now as libfaketime reads it, such as `-31d`.
fn issue_at(serve: &Serve, name: &str, clock: &str, days: &str) {
    let mut command = lockstep();
    command.args(["ca", "issue", name, "--agent", "--days", days, "--data-dir", "data"]);
    Finished::of(with_clock(command.current_dir(serve.folder.path()), clock)).ok();
}

/// Shifts a command's clock, as [`issue_at`] does.
fn with_clock<'a>(command: &'a mut Command, clock: &str) -> &'a mut Command {
    command.env("LD_PRELOAD", faketime()).env("FAKETIME", clock).env("DONT_FAKE_MONOTONIC", "1")
}

#[tokio::test]
async fn expired_foreign_and_missing_certificates_are_refused_with_a_reason() {
    let serve = Serve::start(&["--tls-own-ca", "--no-local-agent"], listens).await;
    issue_at(&serve, "node-old", "-31d", "30");
    let foreign = Folder::new();
    ca(foreign.path(), &["init"]).ok();
    ca(foreign.path(), &["issue", "node-x", "--agent"]).ok();
    for ending in ["crt", "key"] {
        let name = format!("node-x.{ending}");
        let to = serve.folder.path().join(&name);
        fs::copy(foreign.path().join(&name), &to).expect("a copy");
    }
    // A server's certificate of the right CA is not valid for an agent.
    ca(serve.folder.path(), &["issue", "proxy.example", "--data-dir", "data"]).ok();
    for (name, why, reported) in [
        ("node-old", "certificate expired at", "it has expired"),
        (
            "node-x",
            "the authority of its certificate is not in",
            "by an authority (CA) that it does not know",
        ),
        ("proxy.example", "not for clients", "is not acceptable to it"),
    ] {
        let agent = Agent::start(&serve, name, &files(name));
        agent.wait_for_log(reported).await;
        assert!(agent.output().contains("lockstep ca issue NAME --agent"), "{}", agent.output());
        // The server logs the refusal after the agent has read the reason and closed the connection.
        let lines = || refusals(&serve).into_iter().filter(|line| line.contains(name)).collect::<Vec<_>>();
        wait_until("the server says so, too", || !lines().is_empty(), || serve.log()).await;
        let lines = lines();
        assert!(
            lines.len() == 1 && lines[0].contains(why) && lines[0].contains("127.0.0.1"),
            "{name}: {lines:?}"
        );
    }
    // Neither certificate nor token.
    let nobody = Agent::start(&serve, "nobody", &[""; 0]);
    nobody.wait_for_log("neither a certificate nor a token").await;
    nobody.wait_for_log("--token-file").await;
    let lines = || refusals(&serve).into_iter().filter(|line| line.contains("neither")).collect::<Vec<_>>();
    wait_until("the server says so, too", || !lines().is_empty(), || serve.log()).await;
    let lines = lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(agents(&serve).await.is_empty());
    // A name that differs from the certificate's.
    issue(&serve, "node-b", &[]);
    let options = [&files("node-b")[..], &["--name".into(), "node-c".into()]].concat();
    let mut misnamed = Agent::start(&serve, "misnamed", &options);
    misnamed.assert_ends(1, "start this agent with --name node-b").await;
}

#[tokio::test]
async fn pkcs12_files_and_other_authorities_are_accepted() {
    // Certificates of another CA, created only with openssl.
    let folder = Folder::new();
    let openssl = |line: &str| {
        let done = Command::new("openssl")
            .args(line.split(' '))
            .current_dir(folder.path())
            .output()
            .expect("openssl");
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    };
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -keyout root.key -out root.crt -days 900 -subj /O=Lab/CN=Lab-Root",
    );
    openssl("req -newkey rsa:2048 -nodes -keyout node-p.key -out node-p.csr -subj /O=Lab/CN=node-p");
    folder.write("client.ext", "extendedKeyUsage=clientAuth\n");
    openssl(
        "x509 -req -in node-p.csr -CA root.crt -CAkey root.key -CAcreateserial -days 300 -extfile client.ext -out node-p.crt",
    );
    openssl(
        "pkcs12 -export -in node-p.crt -inkey node-p.key -certfile root.crt -name node-p -passout pass:sesame -out node-p.p12",
    );
    let set_mode = |name: &str, mode: u32| {
        fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(mode)).expect("its mode");
    };
    set_mode("node-p.p12", 0o600);
    for (name, text) in [("right", "sesame\n"), ("wrong", "open\n")] {
        folder.write(name, text);
        set_mode(name, 0o600);
    }
    let serve =
        Serve::start_in(folder, &["--tls-own-ca", "--no-local-agent", "--agent-ca", "root.crt"], listens)
            .await;
    let packed = |password: &'static str| ["--pkcs12-file", "node-p.p12", "--pkcs12-password-file", password];
    let mut wrong = Agent::start(&serve, "wrong-password", &packed("wrong"));
    wrong.assert_ends(2, "--pkcs12-password-file").await;
    let right = Agent::start(&serve, "right-password", &packed("right"));
    wait_for_agent(&serve, "node-p", is_online).await;
    drop(right);

    // Key files that other accounts can read are refused before a connection.
    let set_mode = |name: &str, mode: u32| {
        fs::set_permissions(serve.folder.path().join(name), fs::Permissions::from_mode(mode))
            .expect("its mode");
    };
    for (name, options) in [
        ("node-p.p12", packed("right")),
        ("right", packed("right")),
        ("node-p.key", ["--cert-file", "node-p.crt", "--key-file", "node-p.key"]),
    ] {
        set_mode(name, 0o644);
        let mut refused = Agent::start(&serve, "open", &options);
        refused.assert_ends(2, &format!("chmod 600 {name}")).await;
        set_mode(name, 0o600);
    }
    // With --agent-ca, certificates of the server's own CA are refused.
    issue(&serve, "node-a", &[]);
    let own = Agent::start(&serve, "own", &files("node-a"));
    own.wait_for_log("that it does not know").await;

    // openssl can read the PKCS #12 files of `ca issue`.
    issue(&serve, "node-q", &["--pkcs12", "--pkcs12-password-file", "right"]);
    let mut openssl = Command::new("openssl");
    openssl.args(["pkcs12", "-in", "node-q.p12", "-passin", "pass:sesame", "-nodes"]);
    let output = openssl.current_dir(serve.folder.path()).output().expect("openssl");
    let contents = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(contents.contains("BEGIN PRIVATE KEY") && contents.contains("CN = node-q"), "{contents}");
}

#[tokio::test]
async fn a_revocation_list_is_reloaded_and_a_truncated_one_is_ignored() {
    let folder = Folder::new();
    let authority = |args: &[&str]| ca(folder.path(), &[args, &["--data-dir", "lab"]].concat());
    authority(&["init"]).ok();
    for name in ["node-1", "node-2"] {
        authority(&["issue", name, "--agent"]).ok();
    }
    authority(&["revoke", "node-1"]).ok();
    let path = folder.path().to_owned();
    let options =
        ["--tls-own-ca", "--no-local-agent", "--agent-ca", "lab/ca/ca.crt", "--agent-crl", "lab/ca/ca.crl"];
    let serve = Serve::start_in(folder, &options, listens).await;
    let start_agent = |name: &str| Agent::start(&serve, name, &files(name));
    let revoked = start_agent("node-1");
    revoked.wait_for_log("which was revoked").await;
    let still_valid = start_agent("node-2");
    wait_for_agent(&serve, "node-2", is_online).await;

    // A truncated list is ignored: the revoked agent stays refused, the other stays connected.
    let list = path.join("lab/ca/ca.crl");
    let whole = fs::read(&list).expect("a list");
    fs::write(&list, &whole[..whole.len() / 2]).expect("half of it");
    wait_until(
        "the truncated list is reported",
        || serve.log().contains("the old files stay in use"),
        || serve.log(),
    )
    .await;
    assert!(is_online(&wait_for_agent(&serve, "node-2", |_| true).await), "{}", still_valid.output());
    assert!(agents(&serve).await.iter().all(|agent| agent["name"] != "node-1"));
    fs::write(&list, &whole).expect("the whole list");
    ca(&path, &["revoke", "node-2", "--data-dir", "lab"]).ok();
    wait_for_agent(&serve, "node-2", |agent| !is_online(agent)).await;
}
