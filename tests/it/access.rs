//! Tokens: commands on the server's machine find them, and other accounts of the machine cannot read them.

use crate::{
    pictures,
    server::{
        Agents, Finished, Server, client, client_without_redirects, lockstep, training_permit, wait_until,
    },
    specs,
    tls::serve::{Serve, listens},
};
use reqwest::StatusCode;
use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
};

#[tokio::test]
async fn commands_find_the_token_of_a_server_on_the_same_machine() {
    let server = Server::start_with(Agents::None).await;
    assert_eq!(fs::symlink_metadata(server.token_file()).expect("a token").mode() & 0o7777, 0o600);
    let list = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = lockstep();
        command
            .arg("list")
            .args(args)
            .current_dir(server.folder().path())
            .env("LOCKSTEP_SERVER", &server.url);
        Finished::of(command.envs(variables.iter().copied()))
    };
    list(&[], &[]).assert_usage_error(&["access token", "--token-file", "LOCKSTEP_TOKEN", "--data-dir"]);
    list(&["--data-dir", "data"], &[]).ok();
    list(&["--data-dir", "nowhere"], &[]).assert_usage_error(&[
        "--data-dir",
        "nowhere does not exist",
        "`lockstep serve`",
    ]);
    list(&[], &[("LOCKSTEP_DATA_DIR", ".")]).assert_usage_error(&[
        "LOCKSTEP_DATA_DIR",
        "is not the data directory of a server",
        "--server",
    ]);
    list(&["--token-file", "data/token"], &[]).ok();
    list(&[], &[("LOCKSTEP_TOKEN", &server.token())]).ok();
    list(&[], &[("LOCKSTEP_TOKEN", "lockstep_of-another")]).assert_usage_error(&[
        "does not know that token",
        "makes another",
        "the environment variable LOCKSTEP_TOKEN",
    ]);
    server.folder().write("other", "lockstep_of-another");
    list(&["--token-file", "other"], &[]).assert_usage_error(&["the token in the file other (--token-file"]);
    list(&["--token-file", "none"], &[]).assert_usage_error(&["the token file none does not exist"]);
    let empty = server.folder().write("empty", "\n");
    list(&["--token-file", &empty.display().to_string()], &[]).assert_usage_error(&["empty"]);
    // The default data directory of `serve`.
    symlink(server.data_dir(), server.folder().path().join("lockstep-data")).expect("a link");
    list(&[], &[]).ok();
    server.stop().await;
}

#[tokio::test]
async fn tokens_are_created_listed_and_revoked_by_command() {
    let server = Server::start_with(Agents::None).await;
    let created = server.cli(&["token", "create", "--scope", "read", "--name", "board", "--expires", "30d"]);
    let token = created.ok().trim().to_owned();
    assert!(token.starts_with("lockstep_") && !token.contains(char::is_whitespace), "{token}");
    assert!(created.stderr.contains("shown once"), "{}", created.stderr);
    assert_eq!(client(&token).get(server.api("/jobs")).send().await.expect("a response").status(), 200);
    let refused = client(&token).delete(server.api("/datasets/x")).send().await.expect("a response");
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    let listed = server.cli(&["token", "list"]);
    let line = listed.ok().lines().find(|line| line.contains("board")).expect("a line").to_owned();
    assert!(line.contains("read") && line.contains("expires 20") && line.contains("last used 20"), "{line}");
    assert!(!listed.stdout.contains(&token));
    let revoked = server.cli(&["token", "revoke", "board"]);
    assert!(revoked.ok().starts_with("board revoked: token "), "{}", revoked.stdout);
    let refused = client(&token).get(server.api("/jobs")).send().await.expect("a response");
    assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
    server.cli(&["token", "revoke", "board"]).assert_usage_error(&["no token is called board"]);
    // The command itself uses this token.
    let own = server.cli(&["token", "revoke", "this machine"]);
    own.assert_usage_error(&["token local stays as it is", "--yes"]);
    server.cli(&["token", "create", "--scope", "agent"]).assert_usage_error(&["agent"]);
    server
        .cli(&["token", "create", "--scope", "root"])
        .assert_usage_error(&["the scopes are read, submit, admin, agent"]);
    server.cli(&["token", "create", "--expires", "soon"]).assert_usage_error(&["30d"]);

    let link = server.cli(&["login-link"]).ok().trim().to_owned();
    assert!(link.starts_with(&format!("{}/login?code=", server.url)), "{link}");
    let response = client_without_redirects().get(&link).send().await.expect("a response");
    assert!(response.status() == StatusCode::SEE_OTHER && response.headers().contains_key("set-cookie"));
    server.cli(&["token", "revoke", "this machine", "--yes"]).ok();
    server.cli(&["token", "list"]).assert_usage_error(&["was revoked; restart the server"]);
    server.stop().await;
}

/// The arguments of a process, which any account may read, and its environment, which its children inherit.
fn arguments_and_environment(pid: i32) -> String {
    let part = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    String::from_utf8_lossy(&[part("cmdline"), part("environ")].concat()).into_owned()
}

#[tokio::test]
async fn arguments_and_environments_of_ranks_contain_no_token() {
    let _permit = training_permit().await;
    let secret = "lockstep_a-token-of-the-person-who-started-this";
    let environment = vec![("LOCKSTEP_TOKEN".to_owned(), secret.to_owned())];
    let server = Server::start_in(Agents::Local { cpu_slots: 2 }, environment).await;
    let agent_token = server.data_dir().join("agent/token");
    assert_eq!(fs::symlink_metadata(&agent_token).expect("a token").mode() & 0o7777, 0o600);
    let agent_token = fs::read_to_string(agent_token).expect("a token").trim().to_owned();
    assert_ne!(agent_token, server.token(), "the agent has its own token");
    let as_agent = client(&agent_token).get(server.api("/jobs")).send().await.expect("a response");
    assert_eq!(as_agent.status(), StatusCode::FORBIDDEN, "the agent's token allows nothing else");
    let mut agent = lockstep();
    agent.args(["agent", "--server", &server.url, "--cpu-slots", "1"]);
    agent.arg("--token-file").arg(server.token_file());
    agent.arg("--data-dir").arg(server.folder().path().join("wrong-agent"));
    Finished::of(&mut agent)
        .assert_fails(1, &["refused this agent", "--token-file", "`lockstep token create --scope agent"]);

    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let id = server.submit(&specs::short("long", "fashion", 2, 100_000)).await;
    server.until("both ranks run", async |s: &Server| s.ranks(&id).len() == 2).await;
    let mut checked = Vec::new();
    for process in server.processes() {
        let words = arguments_and_environment(process.pid);
        let command = process.command().to_owned();
        // Only the server's process was started with LOCKSTEP_TOKEN.
        let forbidden = [server.token(), agent_token.clone(), secret.to_owned()];
        let forbidden = forbidden.iter().filter(|text| command != "serve" || *text != secret);
        for text in forbidden {
            assert!(!words.contains(text.as_str()), "{command} (process {})", process.pid);
        }
        assert!(!process.args.iter().any(|a| a.contains("lockstep_")), "{:?}", process.args);
        checked.push(command);
    }
    checked.sort();
    assert_eq!(checked, ["agent", "rank", "rank", "serve"]);
    server.order(&id, "cancel").await;
    server.wait_for_end(&id).await;
    server.stop().await;
}

#[tokio::test]
async fn without_authentication_commands_and_agents_need_no_token() {
    let serve = Serve::start(&["--no-auth", "--cpu-slots", "1"], listens).await;
    let url = format!("http://127.0.0.1:{}", serve.port);
    let list_machines = || {
        let mut command = lockstep();
        command.args(["machine", "list"]).current_dir(serve.folder.path()).env("LOCKSTEP_SERVER", &url);
        Finished::of(&mut command).ok().to_owned()
    };
    wait_until("the local agent joins", || list_machines().contains("online"), list_machines).await;
    assert!(!serve.folder.path().join("data/token").exists());
    assert_eq!(reqwest::get(format!("{url}/jobs")).await.expect("a page").status(), 200);
}
