//! `serve --dataset-root`: the folders that callers may register.

use crate::{
    agent::{Agent, dataset_info},
    test_server::{TestServer, assert_mistake, assert_refused, client, spec},
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest, Ending},
    inspect::Samples,
    job::JobState,
};
use serde_json::{Value, json};
use std::{
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

fn detail(problem: &Value) -> &str {
    problem["detail"].as_str().unwrap_or_default()
}

/// Creates two folders, which have `weights.safetensors`, and returns the first as a root and the second as a folder outside.
fn folders_with_weights(dir: &Path) -> [PathBuf; 2] {
    ["sets", "outside"].map(|name| {
        let folder = dir.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("weights.safetensors"), "weights").unwrap();
        folder
    })
}

#[tokio::test]
async fn only_folders_below_a_root_are_registered_after_resolving_links() {
    let dir = tempfile::tempdir().unwrap();
    let (root, outside) = (dir.path().join("sets"), dir.path().join("outside"));
    for folder in [root.join("good"), outside.clone()] {
        std::fs::create_dir_all(folder).unwrap();
    }
    symlink(&outside, root.join("link")).unwrap();
    let server = TestServer::with(|c| c.dataset_roots = vec![root.clone()]).await;
    let mut agent = Agent::join(&server, 1).await;
    for (n, path) in ["sets/link", "outside", "sets/../outside", "sets-2"].into_iter().enumerate() {
        let path = dir.path().join(path);
        for (call, body) in [
            ("/datasets", json!({"name": format!("d{n}"), "path": path})),
            ("/datasets/inspect", json!({"path": path})),
        ] {
            // The error names the roots.
            assert_refused(server.post(call, &body).await, 422, root.to_str().unwrap());
        }
    }
    let page = server.http.post(server.url("/datasets")).body("name=d&path=/etc");
    let page = page.header("content-type", "application/x-www-form-urlencoded");
    let page = page.send().await.unwrap();
    assert_eq!(page.status(), 422);
    assert!(page.text().await.unwrap().contains("--dataset-root"));
    // The agent got no request for these paths: its next request is for the following path.
    let good = json!({"name": "good", "path": root.join("good")});
    agent.register_dataset(&server, &good, dataset_info()).await;

    // On the machine that has the files, the path is a link to another place.
    let far = json!({"name": "far", "path": root.join("only-there")});
    let answering = async {
        let (id, _) = agent.expect_request().await;
        let reply = AgentReply::Dataset { path: "/mnt/elsewhere".into(), info: dataset_info() };
        agent.reply(id, Ok(reply)).await;
    };
    let (refusal, ()) = tokio::join!(server.post("/datasets", &far), answering);
    assert_refused(refusal, 422, "/mnt/elsewhere");
    assert_eq!(server.get("/datasets/far").await.0, 404);
    server.stop().await;
}

#[tokio::test]
async fn weights_must_be_below_the_roots_and_refusals_reveal_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [root, outside] = folders_with_weights(dir.path());
    let server = TestServer::with(|c| c.dataset_roots = vec![root.clone(), "/some".into()]).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let member = server.submitter("member").await;
    let data = server.dir.path().to_owned();
    std::fs::write(data.join("jobs/weights.safetensors"), "weights").unwrap();
    let submit_with_weights = async |path: &std::path::Path| {
        let mut spec = spec();
        spec["model"] = json!({"arch": "resnet18", "pretrained": path});
        let request = member.post(server.url("/api/v1/jobs")).json(&spec);
        server.send(request).await
    };
    let refusal_detail = async |path: &std::path::Path| {
        let refused = submit_with_weights(path).await;
        assert_mistake(refused.clone(), "/model/pretrained", "");
        detail(&refused.1).replace(path.to_str().unwrap(), "PATH")
    };
    // The server refuses these paths without a request to the agent, which would reveal whether the file exists.
    for folder in [&outside, &data.join("jobs")] {
        let (existing, missing) = (folder.join("weights.safetensors"), folder.join("missing.safetensors"));
        let detail_of_existing = refusal_detail(&existing).await;
        assert_eq!(detail_of_existing, refusal_detail(&missing).await, "{folder:?}");
        assert!(detail_of_existing.contains("checkpoint's id"), "{detail_of_existing}");
    }
    assert!(refusal_detail(&outside.join("w.safetensors")).await.contains("--dataset-root"));
    // The agent gets a request for the name of downloaded weights, and for a path below a root.
    let good = root.join("weights.safetensors");
    for (weights, is_path) in [(Path::new("resnet18"), false), (good.as_path(), true)] {
        let fit = AgentReply::Weights { mistake: None };
        let ((status, job), request) =
            tokio::join!(submit_with_weights(weights), agent.answer_fit_weights(fit));
        assert_eq!((status, request.weights.as_str()), (201, weights.to_str().unwrap()), "{job}");
        assert_eq!(request.allowed.is_some(), is_path, "{weights:?}");
        if !is_path {
            assert_eq!(agent.expect_start().await.files.weights_in, None);
        }
    }
    server.stop().await;
}

/// Replaces a file with a link.
fn replace_with_link(path: &std::path::Path, target: &std::path::Path) {
    std::fs::remove_file(path).unwrap();
    symlink(target, path).unwrap();
}

#[tokio::test]
async fn weights_replaced_by_a_link_while_the_job_waited_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [root, outside] = folders_with_weights(dir.path());
    // The data directory is below a root, too.
    let server =
        TestServer::with(|c| c.dataset_roots = vec![root.clone(), "/some".into(), c.data_dir.clone()]).await;
    let private = server.dir.path().join("jobs/weights.safetensors");
    std::fs::write(&private, "weights").unwrap();
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let member = server.submitter("member").await;
    let weights = root.join("weights.safetensors");
    let mut spec = spec();
    spec["model"]["pretrained"] = json!(weights);
    for (target, message) in
        [(&private, "data directory"), (&outside.join("weights.safetensors"), "--dataset-root")]
    {
        server.submit(|_| {}).await;
        let running = agent.expect_start().await;
        let submit = server.send(member.post(server.url("/api/v1/jobs")).json(&spec));
        let fit = AgentReply::Weights { mistake: None };
        let ((status, job), request) = tokio::join!(submit, agent.answer_fit_weights(fit));
        assert_eq!(status, 201, "{job}");
        let id = job["id"].as_str().unwrap();
        let allowed = request.allowed.unwrap();
        assert_eq!(allowed.below[0], root.to_str().unwrap());
        assert_eq!(allowed.except, [server.dir.path().to_str().unwrap()]);
        replace_with_link(&weights, target);
        let ending = Ending::Failed { reason: "over".into(), retriable: false };
        agent.end(&running.attempt, ending.clone()).await;
        let failed = server.wait_for_state(id, JobState::Failed).await;
        let reason = failed.reason.unwrap();
        assert!(reason.starts_with("model.pretrained: ") && reason.contains(message), "{reason}");
        assert_eq!(failed.attempt, 0, "no attempt was started");

        // The agent gets the roots with the start, and checks the path on its machine.
        std::fs::remove_file(&weights).unwrap();
        std::fs::write(&weights, "weights").unwrap();
        server.order(id, "retry").await;
        let start = agent.expect_start().await;
        assert_eq!(start.files.weights_in, Some(allowed.clone()));
        assert_eq!(start.files.dataset_in.unwrap().below, allowed.below);
        agent.end(&start.attempt, ending).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn a_registered_folder_replaced_by_a_link_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let (root, outside) = (dir.join("sets"), dir.join("outside"));
    for folder in [root.join("good"), root.join("other"), outside.clone()] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let server = TestServer::with(|c| c.dataset_roots = vec![root.clone()]).await;
    let mut agent = Agent::join(&server, 2).await;
    let good = json!({"name": "pictures", "path": root.join("good")});
    agent.register_dataset(&server, &good, dataset_info()).await;
    let read_samples = async |agent: &mut Agent| {
        let answering = async {
            let (id, request) = agent.expect_request().await;
            let AgentRequest::Samples { allowed, .. } = request else { panic!("{request:?}") };
            assert_eq!(allowed.unwrap().below, [root.to_str().unwrap()]);
            let no_samples = Samples { total: 0, classes: Vec::new(), samples: Vec::new() };
            agent.reply(id, Ok(AgentReply::Samples(no_samples))).await;
        };
        let ((status, _), ()) = tokio::join!(server.get("/datasets/pictures/samples"), answering);
        status
    };
    assert_eq!(read_samples(&mut agent).await, 200);
    std::fs::remove_dir(root.join("good")).unwrap();
    symlink(root.join("other"), root.join("good")).unwrap();
    assert_eq!(read_samples(&mut agent).await, 200, "the link leads to another folder below the root");
    replace_with_link(&root.join("good"), &outside);
    let (status, problem) = server.get("/datasets/pictures/samples").await;
    assert_eq!(status, 422, "{problem}");
    assert!(detail(&problem).contains("--dataset-root"), "{problem}");
    assert!(
        !detail(&problem).contains(outside.to_str().unwrap()),
        "the error does not reveal the target: {problem}"
    );
    let job = server.submit(|_| {}).await;
    let failed = server.wait_for_state(job.id.as_str(), JobState::Failed).await;
    let reason = failed.reason.unwrap();
    assert!(reason.starts_with("data.dataset: ") && reason.contains("--dataset-root"), "{reason}");
    server.stop().await;
}

#[tokio::test]
async fn without_a_root_members_cannot_register_datasets_on_loopback() {
    let dir = tempfile::tempdir().unwrap();
    symlink(dir.path().join("missing"), dir.path().join("dangling")).unwrap();
    let server = TestServer::new().await;
    let member = server.submitter("member").await;
    let mut responses = Vec::new();
    for name in ["", "missing", "dangling"] {
        let path = dir.path().join(name);
        for (call, body) in
            [("datasets", json!({"name": "d", "path": path})), ("datasets/inspect", json!({"path": path}))]
        {
            let request = member.post(server.url(&format!("/api/v1/{call}"))).json(&body);
            let (status, problem) = server.send(request).await;
            assert_eq!(status, 422, "{path:?}: {problem}");
            responses.push(detail(&problem).to_owned());
        }
    }
    assert!(responses[0].contains("--dataset-root"), "{responses:?}");
    assert!(
        responses.iter().all(|response| *response == responses[0]),
        "the error is the same for every path: {responses:?}"
    );
    // A request of an admin passes this check, and then fails because no agent has the files.
    let (status, problem) = server.post("/datasets", &json!({"name": "d", "path": dir.path()})).await;
    assert_eq!(status, 503, "{problem}");
    server.stop().await;
}

#[tokio::test]
async fn without_a_root_only_admins_register_datasets_on_a_reachable_server() {
    let server = TestServer::with(|c| {
        c.listen = "0.0.0.0:0".parse().unwrap();
        c.insecure_http = true;
    })
    .await;
    let url = format!("http://127.0.0.1:{}/api/v1", server.address.port());
    let made = server.http.post(format!("{url}/tokens")).json(&json!({"name": "t", "scope": "submit"}));
    let (status, made) = server.send(made).await;
    assert_eq!(status, 201, "{made}");
    let member = client(made["secret"].as_str().unwrap());
    let body = json!({"name": "d", "path": "/x"});
    let refusal = server.send(member.post(format!("{url}/datasets")).json(&body)).await;
    assert_refused(refusal, 422, "--dataset-root");
    // A request of an admin passes this check, and then fails because no agent has the files.
    let (status, problem) = server.send(server.http.post(format!("{url}/datasets")).json(&body)).await;
    assert_eq!(status, 503, "{problem}");
    server.stop().await;
}
