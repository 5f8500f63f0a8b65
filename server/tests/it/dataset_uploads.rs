//! Zip files of pictures that are uploaded in pieces and become datasets.

use crate::{
    agent::{Agent, dataset_info},
    test_server::{TestServer, assert_refused},
};
use lockstep_protocol::agent::{AgentReply, AgentRequest};
use serde_json::json;
use std::{
    io::{Cursor, Write},
    path::Path,
};
use zip::{ZipWriter, write::SimpleFileOptions};

/// Returns a zip file with these files. The content of each file is its name.
pub fn zip_file(names: &[&str]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for name in names {
        zip.start_file(*name, SimpleFileOptions::default()).unwrap();
        zip.write_all(name.as_bytes()).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

#[tokio::test]
async fn an_uploaded_zip_file_becomes_a_dataset_and_is_removed_with_it() {
    // Members may register only folders below this root.
    let server = TestServer::with(|c| c.dataset_roots = vec!["/some".into()]).await;
    let mut agent = Agent::join(&server, 1).await;
    let mona = server.submitter("mona").await;
    let upload_piece = async |name: &str, offset: usize, bytes: &[u8]| {
        let url = server.url(&format!("/api/v1/datasets/uploads/{name}/archive?offset={offset}"));
        server.send(mona.put(url).body(bytes.to_vec())).await
    };
    let register = async |name: &str| {
        let url = server.url(&format!("/api/v1/datasets/uploads/{name}"));
        server.send(mona.post(url).json(&json!({"private": true}))).await
    };

    let bytes = zip_file(&["photos/cat/1.png", "photos/dog/2.png"]);
    let (first, rest) = bytes.split_at(50);
    assert_eq!(upload_piece("pets", 0, first).await.0, 204);
    assert_refused(upload_piece("pets", 60, rest).await, 409, "offset=50");
    assert_eq!(upload_piece("pets", 50, rest).await.0, 204);
    let inspect = async {
        let (id, request) = agent.expect_request().await;
        let AgentRequest::InspectDataset { path, allowed } = request else { panic!("{request:?}") };
        assert_eq!(allowed, None, "the server has unpacked the files, so any path is allowed");
        assert_eq!(std::fs::read(Path::new(&path).join("cat/1.png")).unwrap(), b"photos/cat/1.png");
        let reply = AgentReply::Dataset { path: path.clone(), info: dataset_info() };
        agent.reply(id, Ok(reply)).await;
        path
    };
    let ((status, dataset), path) = tokio::join!(register("pets"), inspect);
    assert_eq!(
        (status, &dataset["owner"], &dataset["private"]),
        (201, &json!("mona"), &json!(true)),
        "{dataset}"
    );
    assert_eq!(dataset["path"], path);
    assert!(!Path::new(&path).with_file_name("archive.zip").exists(), "the zip file is deleted");

    assert_eq!(register("pets").await, (201, dataset), "the request can be repeated");
    assert_eq!(upload_piece("pets", 0, first).await.0, 409, "the name is taken");
    // A renamed dataset still uses the folder of its first name.
    for (from, to) in [("pets", "renamed"), ("renamed", "pets")] {
        let rename = format!("UPDATE datasets SET name = '{to}' WHERE name = '{from}'");
        assert_eq!(server.execute(&rename).await, 1);
        assert_eq!(upload_piece("pets", 0, first).await.0, 409);
        assert!(Path::new(&path).join("cat/1.png").exists());
    }
    let other = json!({"name": "other", "path": path});
    let (status, problem) = server.send(mona.post(server.url("/api/v1/datasets")).json(&other)).await;
    assert_eq!(status, 422, "paths in the data directory are refused: {problem}");
    assert_eq!(server.send(mona.delete(server.url("/api/v1/datasets/pets"))).await.0, 204);
    assert!(!Path::new(&path).parent().unwrap().exists());

    for (name, bytes, message) in [
        ("out", zip_file(&["../cat/1.png", "dog/2.png"]), "empty name or .."),
        (
            "text",
            b"no zip file".to_vec(),
            "the uploaded file is not a zip file; upload a zip file with a folder",
        ),
        ("cut", b"PK no end".to_vec(), "the zip file is damaged or not complete; pack it again"),
    ] {
        assert_eq!(upload_piece(name, 0, &bytes).await.0, 204);
        assert_refused(register(name).await, 422, message);
    }
    assert_eq!(register("never-sent").await.0, 422);
    // Only the owner and admins are told that a dataset can be removed.
    agent.register(&server).await;
    let (_, refused) = upload_piece("pictures", 0, first).await;
    assert_eq!(refused["detail"], "a dataset is already called \"pictures\"; choose another name");
    server.stop().await;
}
