//! Zip files of pictures that are uploaded in pieces and become datasets.

use crate::{
    agent::{Agent, dataset_info},
    test_server::{TestServer, client},
};
use lockstep_protocol::agent::{AgentReply, AgentRequest, FromAgent, ToAgent};
use serde_json::json;
use std::{
    io::{Cursor, Write},
    path::Path,
};
use zip::{ZipWriter, write::SimpleFileOptions};

/// A zip file with these files, whose content is their name.
pub fn zipped(names: &[&str]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for name in names {
        zip.start_file(*name, SimpleFileOptions::default()).unwrap();
        zip.write_all(name.as_bytes()).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

#[tokio::test]
async fn an_uploaded_zip_file_becomes_its_owner_s_dataset_and_is_removed_with_it() {
    // Members may register nothing but what is below this folder.
    let server = TestServer::with(|c| c.dataset_roots = vec!["/some".into()]).await;
    let mut agent = Agent::join(&server, 1).await;
    let (_, secret) = server.make_token(&json!({"name": "mona", "scope": "submit"})).await;
    let mona = client(&secret);
    let piece = async |name: &str, offset: usize, bytes: &[u8]| {
        let url = server.url(&format!("/api/v1/datasets/uploads/{name}/archive?offset={offset}"));
        server.send(mona.put(url).body(bytes.to_vec())).await
    };
    let register = async |name: &str| {
        let url = server.url(&format!("/api/v1/datasets/uploads/{name}"));
        server.send(mona.post(url).json(&json!({"private": true}))).await
    };

    let bytes = zipped(&["photos/cat/1.png", "photos/dog/2.png"]);
    let (first, rest) = bytes.split_at(50);
    assert_eq!(piece("pets", 0, first).await.0, 204);
    let (status, problem) = piece("pets", 60, rest).await;
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("offset=50"), "{problem}");
    assert_eq!(piece("pets", 50, rest).await.0, 204);
    let inspected = async {
        let Some(ToAgent::Request { id, request: AgentRequest::InspectDataset { path, allowed } }) =
            agent.next().await
        else {
            panic!("no question")
        };
        assert_eq!(allowed, None, "the server has unpacked it itself");
        assert_eq!(std::fs::read(Path::new(&path).join("cat/1.png")).unwrap(), b"photos/cat/1.png");
        let reply = AgentReply::Dataset { path: path.clone(), info: dataset_info() };
        agent.send(FromAgent::Reply { id, reply: Ok(reply) }).await;
        path
    };
    let ((status, made), path) = tokio::join!(register("pets"), inspected);
    assert_eq!((status, &made["owner"], &made["private"]), (201, &json!("mona"), &json!(true)), "{made}");
    assert_eq!(made["path"], path);
    assert!(!Path::new(&path).with_file_name("archive.zip").exists(), "its pictures are enough");

    assert_eq!(register("pets").await, (201, made), "asked again, as after a lost response");
    assert_eq!(piece("pets", 0, first).await.0, 409, "the name is taken");
    // The pictures of a dataset with another name.
    for (from, to) in [("pets", "renamed"), ("renamed", "pets")] {
        let rename = format!("UPDATE datasets SET name = '{to}' WHERE name = '{from}'");
        assert_eq!(server.execute(&rename).await, 1);
        assert_eq!(piece("pets", 0, first).await.0, 409);
        assert!(Path::new(&path).join("cat/1.png").exists());
    }
    let other = json!({"name": "other", "path": path});
    let (status, problem) = server.send(mona.post(server.url("/api/v1/datasets")).json(&other)).await;
    assert_eq!(status, 422, "nobody names a path in the data directory: {problem}");
    assert_eq!(server.send(mona.delete(server.url("/api/v1/datasets/pets"))).await.0, 204);
    assert!(!Path::new(&path).parent().unwrap().exists());

    for (name, bytes, words) in [
        ("out", zipped(&["../cat/1.png", "dog/2.png"]), "leads out"),
        ("text", b"no zip file".to_vec(), "no zip file"),
    ] {
        assert_eq!(piece(name, 0, &bytes).await.0, 204);
        let (status, problem) = register(name).await;
        assert!(status == 422 && problem["detail"].as_str().unwrap().contains(words), "{problem}");
    }
    assert_eq!(register("never-sent").await.0, 422);
    server.stop().await;
}
