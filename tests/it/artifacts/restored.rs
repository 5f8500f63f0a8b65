//! Two servers with copies of one database and one object store.

use super::{bucket::files_below, newest, spec, start_with_directory, wait_until_stored};
use crate::server::{Agents, Finished, Folder, Server, free_port, lockstep, training_permit};
use std::fs;

#[tokio::test]
async fn a_restored_database_uses_the_store_only_after_adopting_it() {
    let _permit = training_permit().await;
    let kept = Folder::new();
    let server = start_with_directory(&kept).await;
    let id = server.train(&spec("in both databases", 20)).await;
    wait_until_stored(&server, &id).await;
    let checkpoint = newest(&server.checkpoints(&id).await);
    let weights = server.last_model(&id).await;

    let backup = kept.path().join("backup").display().to_string();
    let database = server.database.as_deref().expect("a database outside the data directory");
    server.cli(&["backup", "-o", &backup, "--database", database]).ok();
    let copy = format!("sqlite://{}", kept.path().join("copy.db").display());
    server.cli(&["restore", &backup, "--database", &copy]).ok();
    let artifacts = kept.path().join("artifacts");
    let before = files_below(&artifacts);
    let serve_copy = || {
        let mut command = lockstep();
        command.args(["serve", "--no-local-agent", "--listen", &format!("127.0.0.1:{}", free_port())]);
        command.args(["--database", &copy, "--artifacts"]).arg(&artifacts).arg("--data-dir");
        Finished::of(command.arg(kept.path().join("copy")))
    };
    serve_copy().assert_usage_error(&[
        "restored from a backup",
        "--artifacts-adopt",
        &artifacts.display().to_string(),
    ]);
    // A second copy, made from the first.
    let second = format!("sqlite://{}", kept.path().join("second.db").display());
    server.cli(&["backup", "-o", &format!("{backup}2"), "--database", &copy]).ok();
    server.cli(&["restore", &format!("{backup}2"), "--database", &second]).ok();
    assert_eq!(files_below(&artifacts), before);

    let environment = |adopts: bool| {
        let store = ("LOCKSTEP_ARTIFACTS".to_owned(), artifacts.display().to_string());
        let adopt = ("LOCKSTEP_ARTIFACTS_ADOPT".to_owned(), adopts.to_string());
        vec![store, adopt]
    };
    let mut other = Server::start_on(Agents::None, Some(copy.clone()), environment(true)).await;
    // The weights come from the store, as the second server has none of the first server's folders.
    assert_eq!(other.bytes(&format!("/checkpoints/{checkpoint}/model.safetensors")).await, weights);
    // Later starts need no `--artifacts-adopt`.
    other.kill_serve();
    other.environment = environment(false);
    other.start_serve().await;

    // The second server keeps objects of jobs that the first server deletes.
    server.cli(&["delete", &id, "--yes"]).ok();
    let log = || fs::read_to_string(server.folder().path().join("serve.1.log")).expect("a log");
    server
        .until("the log says why objects stay", async |_: &Server| {
            log().contains("is not the store that has this database's")
        })
        .await;
    assert_eq!(files_below(&artifacts).len(), before.len());
    fs::remove_dir_all(other.job_dir(&id)).expect("fetched files");
    assert_eq!(other.bytes(&format!("/checkpoints/{checkpoint}/model.safetensors")).await, weights);
    // The server that has adopted the store deletes objects.
    other.cli(&["delete", &id, "--yes"]).ok();
    other
        .until("only the store's marker is left", async |_: &Server| {
            files_below(&artifacts) == [artifacts.join("LOCKSTEP.json")]
        })
        .await;
    // The second copy's database does not know the adopted store's new identity.
    let mut command = lockstep();
    command.args(["serve", "--no-local-agent", "--artifacts-adopt", "--database", &second, "--artifacts"]);
    command.arg(&artifacts).args(["--listen", &format!("127.0.0.1:{}", free_port()), "--data-dir"]);
    Finished::of(command.arg(kept.path().join("second")))
        .assert_usage_error(&["is not the store that has this database's checkpoints", "may have adopted"]);
    other.stop().await;
    server.stop().await;
}
