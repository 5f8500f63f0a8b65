//! Outdated revocation lists, and token files that other accounts can read.

use super::*;

#[tokio::test]
async fn an_outdated_revocation_list_is_used_and_reported() {
    let serve = Serve::start(&["--tls-own-ca", "--no-local-agent"], listens).await;
    for name in ["node-1", "node-2", "node-3", "node-4"] {
        issue(&serve, name, &[]);
    }
    let client = serve.client(&serve.ca());
    let ready = async || {
        let response = client.get(format!("{}/readyz", https(&serve))).send().await.expect("a response");
        response.text().await.expect("text")
    };
    let start_agent = |name: &str| Agent::start(&serve, name, &files(name));
    let revoke = |name: &'static str| ["revoke", name, "--data-dir", "data"];
    let reloaded = "verified with new CA certificates or a new revocation list";
    let outdated = "is out of date: the next list was due at";

    // A list that is up to date.
    ca(serve.folder.path(), &revoke("node-1")).ok();
    wait_until("the list is read", || serve.log().contains(reloaded), || serve.log()).await;
    let revoked = start_agent("node-1");
    revoked.wait_for_log("which was revoked").await;
    assert!(!ready().await.contains(outdated) && !serve.log().contains(outdated), "{}", serve.log());

    // An outdated list, written ten years and a day ago according to the clock of `ca revoke`. It is still enforced.
    let mut revoke_outdated = lockstep();
    revoke_outdated.arg("ca").args(revoke("node-3")).current_dir(serve.folder.path());
    Finished::of(with_clock(&mut revoke_outdated, "-3651d")).ok();
    wait_until("the outdated list is reported", || serve.log().contains(outdated), || serve.log()).await;
    let noted = ready().await;
    assert!(noted.contains("note: the revocation list") && noted.contains(outdated), "{noted}");
    let _still_valid = start_agent("node-2");
    wait_for_agent(&serve, "node-2", is_online).await;
    assert!(agents(&serve).await.iter().all(|agent| agent["name"] != "node-1"));
    assert_eq!(serve.log().matches(outdated).count(), 1, "logged once: {}", serve.log());

    // With a newer list, the note disappears.
    ca(serve.folder.path(), &revoke("node-4")).ok();
    wait_until("the list is read", || serve.log().matches(reloaded).count() >= 3, || serve.log()).await;
    assert!(!ready().await.contains(outdated));
}

#[tokio::test]
async fn a_token_file_readable_by_others_is_used_with_a_warning() {
    let serve = Serve::start(&["--tls-own-ca", "--no-local-agent"], listens).await;
    let token = |name: &str, mode: u32| {
        serve.folder.write(name, "no token of this server");
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(serve.folder.path().join(name), permissions).expect("its mode");
    };
    token("open", 0o644);
    token("closed", 0o600);
    // A link, as Kubernetes mounts secrets.
    std::os::unix::fs::symlink("open", serve.folder.path().join("linked")).expect("a link");
    for (name, warns) in [("open", true), ("linked", true), ("closed", false)] {
        let agent = Agent::start(&serve, &format!("of-{name}"), &["--token-file", name]);
        agent.wait_for_log("token").await;
        agent.wait_for_log("no connection to the server; retrying").await;
        let output = agent.output();
        assert_eq!(output.contains(&format!("close the file with `chmod 600 {name}`")), warns, "{output}");
    }
}
