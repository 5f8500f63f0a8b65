//! The server, agents and ranks fetch no URLs: a URL instead of the path of a dataset, weights or a folder is refused
//! without a connection.

use crate::{pictures, server::Server, specs};
use serde_json::json;
use std::{
    io::ErrorKind,
    net::{TcpListener, TcpStream},
};

#[tokio::test]
async fn a_url_instead_of_a_path_is_refused_without_a_connection() {
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let target = listener.local_addr().expect("its address");
    let weights = |url: &str| {
        let spec = specs::short("weights", "fashion", 1, 1);
        specs::with(
            spec,
            json!({"data": {"image_size": 16}, "model": {"arch": "resnet18", "pretrained": url}}),
        )
    };
    for scheme in ["http", "https", "ftp", "HTTP"] {
        let url = format!("{scheme}://{target}/pictures");
        let needs_absolute_path = [("/path", &["absolute path"][..])];
        server
            .post("/datasets", &json!({"name": "x", "path": url}))
            .await
            .assert_invalid(&needs_absolute_path);
        server.post("/datasets/inspect", &json!({"path": url})).await.assert_invalid(&needs_absolute_path);
        let unknown_dataset = [("/data/dataset", &["no dataset is called"][..])];
        let job = specs::short("data", &url, 1, 1);
        server.post("/jobs", &job).await.assert_invalid(&unknown_dataset);
        server.post("/jobs/validate", &job).await.assert_invalid(&unknown_dataset);
        let file = format!("{url}/model.safetensors");
        let is_a_url = [("/model/pretrained", &["is a URL"][..])];
        server.post("/jobs", &weights(&file)).await.assert_invalid(&is_a_url);
        server.post("/jobs/validate", &weights(&file)).await.assert_invalid(&is_a_url);

        // Commands with and without a server.
        let toml = format!(
            "[model]\narch = \"resnet20\"\n[data]\ndataset = \"{url}\"\n[train]\nsteps = 1\nbatch_size = 8\n"
        );
        server.folder().write("job.toml", &toml);
        let tuned = toml
            .replace(&url, "fashion")
            .replace("resnet20\"", &format!("resnet18\"\npretrained = \"{file}\""));
        server.folder().write("tuned.toml", tuned);
        for args in [
            &["dataset", "add", "x", &url][..],
            &["dataset", "inspect", &url],
            &["dataset", "prepare", &url, "--to", "prepared"],
            &["init", &url],
            &["submit", "job.toml"],
            &["submit", "tuned.toml"],
            &["train", "job.toml", "--out", "out"],
            &["train", "tuned.toml", "--out", "out"],
            &["predict", "--model", &file, "none.png"],
        ] {
            let done = server.cli(args);
            assert!(done.status != 0 && !done.stderr.contains("panicked"), "{args:?}: {}", done.stderr);
        }
    }
    // If no URL was fetched, the listener's first connection is the test's own.
    let own_address = TcpStream::connect(target).expect("a connection").local_addr().expect("its address");
    let (_, first_client) = listener.accept().expect("a connection");
    assert_eq!(first_client, own_address, "an earlier connection fetched a URL");
    listener.set_nonblocking(true).expect("no waiting");
    assert_eq!(listener.accept().expect_err("no other connection").kind(), ErrorKind::WouldBlock);
    assert_eq!(server.get("/jobs?count=true").await["total"], 0, "no job was stored");
    server.stop().await;
}
