//! Servers with copies of one database use the same object store.

use super::{bucket::files_below, newest, spec, start_with_directory, wait_until_stored};
use crate::server::{Agents, Finished, Folder, Server, free_port, lockstep, training_permit};
use std::fs;

#[tokio::test]
async fn a_restored_database_uses_the_store_only_after_adopting_it() {
    let _permit = training_permit().await;
    let external = Folder::new();
    let server = start_with_directory(&external).await;
    let id = server.train(&spec("in both databases", 20)).await;
    wait_until_stored(&server, &id).await;
    let checkpoint = newest(&server.checkpoints(&id).await);
    let weights = server.last_model(&id).await;

    let backup = external.path().join("backup").display().to_string();
    let database = server.database.as_deref().expect("a database outside the data directory");
    server.cli(&["backup", "-o", &backup, "--database", database]).ok();
    let copy = format!("sqlite://{}", external.path().join("copy.db").display());
    server.cli(&["restore", &backup, "--database", &copy]).ok();
    let artifacts = external.path().join("artifacts");
    let before = files_below(&artifacts);
    let serve = |database: &str| {
        let mut command = lockstep();
        command.args(["serve", "--no-local-agent", "--listen", &format!("127.0.0.1:{}", free_port())]);
        command.args(["--database", database, "--artifacts"]).arg(&artifacts).arg("--data-dir");
        Finished::of(command.arg(external.path().join("refused")))
    };
    serve(&copy).assert_usage_error(&[
        "restored from a backup",
        "--artifacts-adopt",
        &artifacts.display().to_string(),
    ]);
    // A backup of the copy is restored to another database.
    let copy_of_copy = format!("sqlite://{}", external.path().join("copy-of-copy.db").display());
    server.cli(&["backup", "-o", &format!("{backup}2"), "--database", &copy]).ok();
    server.cli(&["restore", &format!("{backup}2"), "--database", &copy_of_copy]).ok();
    assert_eq!(files_below(&artifacts), before);

    let environment = |adopts: bool| {
        let store = ("LOCKSTEP_ARTIFACTS".to_owned(), artifacts.display().to_string());
        let adopt = ("LOCKSTEP_ARTIFACTS_ADOPT".to_owned(), adopts.to_string());
        vec![store, adopt]
    };
    let mut copy_server = Server::start_on(Agents::None, Some(copy.clone()), environment(true)).await;
    // The weights come from the store, as this server has none of the first server's folders.
    assert_eq!(copy_server.bytes(&format!("/checkpoints/{checkpoint}/model.safetensors")).await, weights);
    // Later starts need no `--artifacts-adopt`.
    copy_server.kill_serve();
    copy_server.environment = environment(false);
    copy_server.start_serve().await;

    // The objects of a job stay when the first server deletes the job, because the other server has adopted the store.
    server.cli(&["delete", &id, "--yes"]).ok();
    let log = || fs::read_to_string(server.folder().path().join("serve.1.log")).expect("a log");
    server
        .until("the log says why objects stay", async |_: &Server| {
            log().contains("is not the store that has this database's")
        })
        .await;
    assert_eq!(files_below(&artifacts).len(), before.len());
    fs::remove_dir_all(copy_server.job_dir(&id)).expect("fetched files");
    assert_eq!(copy_server.bytes(&format!("/checkpoints/{checkpoint}/model.safetensors")).await, weights);
    // The server that has adopted the store deletes objects.
    copy_server.cli(&["delete", &id, "--yes"]).ok();
    copy_server
        .until("only the store's marker is left", async |_: &Server| {
            files_below(&artifacts) == [artifacts.join("LOCKSTEP.json")]
        })
        .await;
    // The copy of the copy does not know the identity that the store got when it was adopted, and may adopt the store, too.
    serve(&copy_of_copy)
        .assert_usage_error(&["is not the store that has this database's checkpoints", "--artifacts-adopt"]);
    copy_server.stop().await;
    Server::start_on(Agents::None, Some(copy_of_copy), environment(true)).await.stop().await;
    server.stop().await;
}
