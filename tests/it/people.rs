//! `lockstep user`.

use crate::server::{Agents, Finished, Server, client_without_redirects, lockstep};
use std::fs::File;

/// Runs a command with a password on its standard input.
fn run_with_password(server: &Server, args: &[&str], input: &str) -> Finished {
    let file = server.folder().write("password", input);
    let mut command = lockstep();
    command.args(args).current_dir(server.folder().path()).envs(server.client_variables());
    Finished::of(command.stdin(File::open(file).expect("the password")))
}

#[tokio::test]
async fn users_are_managed_by_command_with_passwords_from_standard_input() {
    let server = Server::start_with(Agents::None).await;
    let added = run_with_password(&server, &["user", "add", "ada", "--role", "admin"], "correct horse\n");
    assert!(added.ok().starts_with("ada") && added.stdout.contains("admin"), "{}", added.stdout);
    run_with_password(&server, &["user", "add", "bob"], "correct horse").ok();
    run_with_password(&server, &["user", "add", "bob"], "correct horse")
        .assert_usage_error(&["\"bob\" is taken"]);
    run_with_password(&server, &["user", "add", "Bob"], "correct horse").assert_usage_error(&["lower-case"]);
    run_with_password(&server, &["user", "add", "eve"], "short\n")
        .assert_usage_error(&["10 to 1024 characters"]);
    server.cli(&["user", "add", "eve"]).assert_usage_error(&["give the password on standard input"]);
    server.cli(&["user", "add", "eve", "--password", "correct horse"]).assert_usage_error(&["--password"]);
    let listed = server.cli(&["user", "list"]);
    let lines: Vec<_> =
        listed.ok().lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>()).collect();
    assert_eq!(lines, [["USER", "ROLE"], ["ada", "admin"], ["bob", "member"]]);
    assert!(server.cli(&["user", "role", "bob", "viewer"]).ok().contains("viewer"));
    server.cli(&["user", "role", "bob", "root"]).assert_usage_error(&["the roles are viewer, member, admin"]);
    server.cli(&["user", "role", "adda", "viewer"]).assert_usage_error(&["did you mean \"ada\"?"]);
    let sign_in = async |password: &str| {
        let request = client_without_redirects().post(format!("{}/login", server.url));
        let request = request.body(format!("name=bob&password={password}"));
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        request.send().await.expect("a response").status().as_u16()
    };
    assert_eq!(sign_in("correct horse").await, 303);
    run_with_password(&server, &["user", "password", "bob"], "another password\n").ok();
    assert_eq!((sign_in("correct horse").await, sign_in("another password").await), (401, 303));
    assert!(server.cli(&["user", "disable", "bob"]).ok().contains("disabled"));
    assert_eq!(sign_in("another password").await, 401);
    server.cli(&["user", "enable", "bob", "--json"]).json();
    assert_eq!(sign_in("another password").await, 303);
    server.cli(&["user", "remove", "bob"]).assert_usage_error(&["user bob stays as it is", "--yes"]);
    server.cli(&["user", "remove", "bob", "--yes"]).ok();
    server.cli(&["user", "remove", "bob"]).assert_usage_error(&["no user is called bob"]);
    server.stop().await;
}
