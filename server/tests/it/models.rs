//! Registered models: versions never change, aliases move, and checkpoints of versions are kept.

use crate::{
    agent::{Agent, checkpoint, running, start_job},
    document::create_failed_job,
    test_server::{TestServer, column, on_two_databases, spec},
    uploads::{AttemptApi, manifest},
};
use lockstep_protocol::agent::{AgentReply, AttemptEvent, CheckpointInfo, Ending, Source};
use serde_json::{Value, json};

/// Asserts that a request was refused with this status, and that the error contains `parts`.
fn assert_refused((status, problem): (u16, Value), expected: u16, parts: &[&str]) {
    let text = problem.to_string();
    assert!(
        status == expected && parts.iter().all(|part| text.contains(part)),
        "{parts:?}: {status} {problem}"
    );
}

async fn test_models(server: TestServer) {
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (job, checkpoint) =
        create_failed_job(&server, &mut agent, |spec| spec["name"] = json!("trained")).await;
    let folder = server.job_dir(&job);
    let state = json!({"versions": {"lockstep": "0.1.0"}}).to_string();
    std::fs::write(folder.join("checkpoints/1-5/state.json"), state).unwrap();
    let fingerprint = json!({"pictures": 4, "picture_bytes": 100, "sha256": "ab"});
    std::fs::write(folder.join("dataset.json"), fingerprint.to_string()).unwrap();

    // The first version creates the model.
    assert_eq!(server.get("/models").await.1["models"], json!([]));
    let first = json!({"name": "shoes", "job": job, "description": "a first one"});
    let version = server.create("/models", &first).await;
    for (key, expected) in [
        ("model", json!("shoes")),
        ("version", json!(1)),
        ("aliases", json!([])),
        ("checkpoint", json!(checkpoint)),
        ("job", json!(job)),
        ("job_name", json!("trained")),
        ("project", json!("default")),
        ("val_accuracy", json!(0.5)),
        ("dataset", json!("pictures")),
        ("dataset_fingerprint", fingerprint),
        ("programs", json!({"lockstep": "0.1.0"})),
        ("description", json!("a first one")),
        ("registered_by", json!("this machine")),
    ] {
        assert_eq!(version[key], expected, "{key}");
    }
    let second = server.post("/models", &json!({"name": "shoes", "checkpoint": checkpoint})).await;
    assert_eq!((second.0, &second.1["version"]), (201, &json!(2)), "{}", second.1);
    for (body, pointer) in [
        (json!({"name": ".shoes", "job": job}), "/name"),
        (json!({"name": "a b", "job": job}), "/name"),
        (json!({"name": "shoes"}), "either checkpoint or job"),
        (json!({"name": "shoes", "job": job, "checkpoint": checkpoint}), "either checkpoint or job"),
        (json!({"name": "shoes", "job": job, "description": "x".repeat(20_001)}), "/description"),
    ] {
        assert_refused(server.post("/models", &body).await, 422, &[pointer]);
    }
    let other_case = json!({"name": "Shoes", "checkpoint": checkpoint});
    assert_refused(server.post("/models", &other_case).await, 409, &["shoes"]);
    for (key, value) in [("checkpoint", format!("{job}-1-6")), ("job", "x".into())] {
        assert_refused(server.post("/models", &json!({"name": "shoes", key: value})).await, 404, &[key]);
    }

    // An alias can move to another version. A version without an alias can be removed, and its number is not used again.
    let champion = "/models/shoes/aliases/champion";
    let set_alias = async |alias: &str, version: u32| {
        server.put(&format!("/models/shoes/aliases/{alias}"), &json!({"version": version})).await
    };
    assert_refused(set_alias("7", 1).await, 422, &["/alias", "number"]);
    assert_refused(set_alias("champion", 9).await, 404, &["no version 9"]);
    assert_refused(server.get(champion).await, 404, &["no alias"]);
    for version in [1, 2] {
        let (status, found) = set_alias("champion", version).await;
        assert_eq!((status, &found["version"]), (200, &json!(version)));
        assert_eq!(found["aliases"], json!(["champion"]));
        assert_eq!(server.get(champion).await, (200, found));
    }
    let (_, log) = server.get("/audit?q=aliases/champion").await;
    assert_eq!(log["entries"][0]["object"], format!("/api/v1{champion}: version: 2 (was 1)"));
    assert_eq!(server.get("/models/shoes/versions/1").await.1["aliases"], json!([]));
    let (_, list) = server.get("/models?count=true&fields=name,aliases,version_count").await;
    let expected = json!([{"name": "shoes", "aliases": {"champion": 2}, "version_count": 2}]);
    assert_eq!((&list["models"], &list["total"]), (&expected, &json!(1)));
    assert_refused(server.delete("/models/shoes/versions/2").await, 409, &["champion"]);
    assert_eq!(server.delete(champion).await.0, 204);
    assert_eq!(server.delete(champion).await.0, 404);
    assert_eq!(server.delete("/models/shoes/versions/2").await.0, 204);
    assert_eq!(server.delete("/models/shoes/versions/2").await.0, 404);
    assert_eq!(server.post("/models", &first).await.1["version"], 3);
    let (_, shown) = server.get("/models/shoes").await;
    assert_eq!(column(&shown["versions"], "version"), [3, 1], "newest first");

    // Pages.
    assert!(server.get_text("/models").await.1.contains("href=\"/models/shoes\""));
    let (status, page) = server.get_text("/models/shoes").await;
    assert!(status == 200 && page.contains("models:/shoes/3") && page.contains("a first one"), "{page}");
    assert_eq!(server.get_text("/models/boots").await.0, 404);

    // An active job may still remove and replace its checkpoints, so they cannot be registered.
    let (active_job, attempt) = agent.start_job(&server, |_| {}).await;
    let info = CheckpointInfo { epoch: 1, step: 5, size_bytes: 1, ..CheckpointInfo::default() };
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), AttemptEvent::Checkpoint(info)]).await;
    std::fs::create_dir_all(server.job_dir(&active_job).join("checkpoints/1-5")).unwrap();
    assert_refused(
        server.post("/models", &json!({"name": "shoes", "job": active_job})).await,
        409,
        &["after the job's end"],
    );

    // A job stores the checkpoint of the alias at submission.
    assert_eq!(set_alias("champion", 1).await.0, 200);
    for (pretrained, message) in [
        ("models:/shoes@nobody", "no version is called models:/shoes@nobody"),
        ("models:/shoes/2", "no version is called models:/shoes/2"),
        ("models:/shoes", "; did you mean \"models:/shoes/3\"?"),
    ] {
        let mut document = spec();
        document["model"]["pretrained"] = json!(pretrained);
        let (status, problem) = server.post("/jobs", &document).await;
        let errors = problem["errors"].as_array().unwrap();
        assert_eq!((status, errors.len(), &errors[0]["pointer"]), (422, 1, &json!("/model/pretrained")));
        assert!(errors[0]["detail"].as_str().unwrap().contains(message), "{problem}");
    }
    let mut document = spec();
    document["model"] = json!({"arch": "resnet18", "pretrained": checkpoint});
    let (_, refused) = server.post("/jobs", &document).await;
    assert!(refused.to_string().contains("has the weights of a resnet20, not of a resnet18"), "{refused}");
    document["model"] = json!({"arch": "resnet20", "pretrained": "shoes"});
    let no_file = AgentReply::Weights { mistake: Some("shoes: no such file".into()) };
    let ((_, problem), _) = tokio::join!(server.post("/jobs", &document), agent.answer_fit_weights(no_file));
    let detail = "shoes: no such file; did you mean \"models:/shoes/3\"?";
    assert_eq!(problem["errors"][0]["detail"], detail, "{problem}");
    document["model"]["pretrained"] = json!("models:/shoes@champion");
    let fit = AgentReply::Weights { mistake: None };
    let ((status, submitted), _) =
        tokio::join!(server.post("/jobs", &document), agent.answer_fit_weights(fit));
    assert_eq!((status, &submitted["spec"]["model"]["pretrained"]), (201, &json!(checkpoint)), "{submitted}");
    assert_eq!(server.delete(champion).await.0, 204);

    // A job with registered checkpoints can be neither deleted nor retried.
    let versions = ["models:/shoes/1", "models:/shoes/3"];
    let refused = server.delete(&format!("/jobs/{job}")).await;
    assert_refused(refused, 409, &versions);
    let retried = server.post(&format!("/jobs/{job}/retry"), &Value::Null).await;
    assert_refused(retried, 409, &versions);
    for version in [1, 3] {
        assert_eq!(server.delete(&format!("/models/shoes/versions/{version}")).await.0, 204);
    }
    assert_eq!(server.get("/models/shoes").await.0, 404);
    assert_eq!(server.delete(&format!("/jobs/{job}")).await.0, 204);
    server.stop().await;
}

on_two_databases!(versions_stay_and_aliases_move, versions_stay_and_aliases_move_in_postgres, test_models);

#[tokio::test]
async fn a_registered_checkpoint_is_kept_when_newer_ones_replace_others() {
    let (server, mut agent, id, attempt) = start_job(|spec| spec["checkpoint"] = json!({"keep": 2})).await;
    let api = AttemptApi::new(&server, &server.agent_token("a").await, "id-a", &attempt);
    api.report_own_disk().await;
    let mut events = vec![running(100, 0)];
    events.extend([10, 20, 30, 40].map(checkpoint));
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // The checkpoints are uploaded after the job's end.
    let register = async |step: u64| {
        server.post("/models", &json!({"name": "shoes", "checkpoint": format!("{id}-1-{step}")})).await
    };
    assert_refused(register(10).await, 409, &["still being uploaded from a"]);
    for step in [10, 20, 30, 40] {
        assert_eq!(api.upload(&format!("1-{step}"), manifest(1, step)).await.0, 204);
        if step == 10 {
            assert_eq!(register(step).await.0, 201);
        }
    }
    let steps = server.checkpoint_steps(&id).await;
    assert_eq!(steps, [40, 30, 10], "the newest two checkpoints and the registered checkpoint");
    assert_eq!(server.get(&format!("/checkpoints/{id}-1-10/state.json")).await.0, 200);
    server.stop().await;
}
