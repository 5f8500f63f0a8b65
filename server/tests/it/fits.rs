//! The server refuses datasets and settings that do not fit a checkpoint, before any rank starts.

use crate::{
    agent::{Agent, checkpoint, dataset_info, running, server_with_agent, start_job},
    test_server::{TestServer, assert_mistake, assert_refused},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Ending, Evaluation, Source, ToAgent},
    dataset::{DatasetInfo, SplitInfo},
    job::JobState,
    stream::Frame,
};
use serde_json::{Value, json};
use std::path::Path;

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

/// Writes a checkpoint without tensors, for grey pictures of 28 x 28 pixels and the classes cat and dog.
fn write_checkpoint(job_dir: &Path) {
    let folder = job_dir.join("checkpoints/1-50");
    std::fs::create_dir_all(&folder).unwrap();
    let metadata = json!({"classes": json!(["cat", "dog"]).to_string(), "channels": "1", "image_size": "28"});
    let header = json!({ "__metadata__": metadata }).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    std::fs::write(folder.join("MANIFEST.json"), "{}").unwrap();
}

/// Starts a job that has written its checkpoint of step 50. Returns the job's id and its attempt.
async fn start_job_with_checkpoint(
    server: &TestServer,
    agent: &mut Agent,
    change: impl FnOnce(&mut Value),
) -> (String, AttemptRef) {
    let (id, attempt) = agent.start_job(server, change).await;
    write_checkpoint(&server.job_dir(&id));
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(50)]).await;
    (id, attempt)
}

async fn fail_job(server: &TestServer, agent: &mut Agent, id: &str, attempt: &AttemptRef) {
    agent.end(attempt, Ending::Failed { reason: "by the test".into(), retriable: false }).await;
    server.wait_for_state(id, JobState::Failed).await;
}

/// A job that failed after its checkpoint of step 50.
async fn failed_job(server: &TestServer, agent: &mut Agent, change: impl FnOnce(&mut Value)) -> String {
    let (id, attempt) = start_job_with_checkpoint(server, agent, change).await;
    fail_job(server, agent, &id, &attempt).await;
    id
}

#[tokio::test]
async fn a_fork_that_does_not_fit_its_checkpoint_is_refused_at_submission() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = failed_job(&server, &mut agent, |_| {}).await;
    let with_classes = |classes: &[&str]| DatasetInfo { classes: strings(classes), ..dataset_info() };
    agent.register_as(&server, "more", with_classes(&["cat", "dog", "fox"])).await;
    agent.register_as(&server, "others", with_classes(&["cat", "fox"])).await;
    agent.register_as(&server, "reordered", with_classes(&["dog", "cat"])).await;
    agent.register_as(&server, "colour", DatasetInfo { channels: 3, ..dataset_info() }).await;
    agent.register_as(&server, "larger", DatasetInfo { height: 96, width: 96, ..dataset_info() }).await;
    agent.register_as(&server, "again", dataset_info()).await;

    let path = format!("/jobs/{id}/fork");
    let fork = async |set: Value| server.post(&path, &json!({ "set": set })).await;
    for (set, pointer, detail) in [
        (
            json!({"data.dataset": "more"}),
            "/data/dataset",
            "the model has 2 classes, the dataset 3; the model does not know \"fox\"",
        ),
        (json!({"data.dataset": "others"}), "/data/dataset", "the dataset lacks the model's \"dog\""),
        (
            json!({"data.dataset": "reordered"}),
            "/data/dataset",
            "class 0 is \"cat\" for the model and \"dog\" in the dataset",
        ),
        (
            json!({"data.dataset": "colour"}),
            "/data/dataset",
            "trained on pictures of 1 channel, but pictures of colour have 3",
        ),
        (
            json!({"model.arch": "resnet32"}),
            "/model/arch",
            "the checkpoint's network is resnet20, not resnet32",
        ),
        (json!({"model.stem": "imagenet"}), "/model/stem", "has the cifar stem, not the imagenet stem"),
    ] {
        let (status, body) = fork(set.clone()).await;
        assert_eq!(status, 422, "{set}: {body}");
        let errors = body["errors"].as_array().unwrap();
        assert_eq!((errors.len(), &errors[0]["pointer"]), (1, &json!(pointer)), "{set}: {body}");
        let text = errors[0]["detail"].as_str().unwrap();
        assert!(text.contains("does not fit the checkpoint") && text.contains(detail), "{set}: {text}");
        let advice = if pointer == "/model/arch" { "begin a new job" } else { "model.pretrained" };
        assert!(text.contains(advice), "the error advises: {text}");
    }
    // A fork cannot have model.pretrained, because it begins with its checkpoint.
    let refused = fork(json!({"model.pretrained": "other.safetensors"})).await;
    assert_mistake(refused, "/model/pretrained", "begins with its checkpoint's weights");
    let (_, jobs) = server.get("/jobs").await;
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 1, "no job was created");

    // Another size with the same classes fits, and so does an explicit stem that equals the checkpoint's stem.
    for set in [
        json!({"data.dataset": "again"}),
        json!({"data.dataset": "larger"}),
        json!({"data.image_size": 64, "model.stem": "cifar"}),
    ] {
        let (status, body) = fork(set.clone()).await;
        assert_eq!(status, 201, "{set}: {body}");
    }
    server.stop().await;
}

#[tokio::test]
async fn evaluating_on_an_unsuitable_dataset_is_refused_with_a_reason() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = failed_job(&server, &mut agent, |_| {}).await;
    let splits = |names: &[&str]| {
        let split = |name: &&str| SplitInfo { name: (*name).into(), samples: 9, per_class: vec![4, 5] };
        names.iter().map(split).collect()
    };
    let without_test_split = DatasetInfo { splits: splits(&["train", "extra"]), ..dataset_info() };
    agent.register_as(&server, "untested", without_test_split).await;
    let with_one_split = DatasetInfo { splits: splits(&["train"]), ..dataset_info() };
    agent.register_as(&server, "plain", with_one_split).await;
    agent
        .register_as(&server, "others", DatasetInfo { classes: strings(&["cat", "fox"]), ..dataset_info() })
        .await;
    agent.register_as(&server, "colour", DatasetInfo { channels: 3, ..dataset_info() }).await;
    for (name, messages) in [
        (
            "untested",
            &[
                "untested has no split for an evaluation: it has train, extra",
                "a split called test, val",
                "without --dataset, the held-out pictures",
            ][..],
        ),
        ("others", &["trained on other classes than others has", "lacks the model's \"dog\""]),
        ("colour", &["trained on pictures of 1 channel, but pictures of colour have 3"]),
        ("color", &["no dataset is called \"color\"; did you mean \"colour\"?"]),
        ("cifar10", &["no dataset is called \"cifar10\"", "`lockstep dataset get cifar10` fetches it"]),
    ] {
        // The server needs no agent for these errors: the agent answers no request.
        let refusal = server.get(&format!("/jobs/{id}/evaluation?dataset={name}")).await;
        for message in messages {
            assert_refused(refusal.clone(), 422, message);
        }
    }
    // An evaluation is on the only split, whose pictures cannot also be compared with themselves.
    let neighbours = server.get(&format!("/jobs/{id}/evaluation/neighbours?dataset=plain")).await;
    assert_refused(neighbours, 422, "plain has only training pictures");
    server.stop().await;
}

#[tokio::test]
async fn a_fork_on_another_dataset_uses_its_split_unless_validation_is_set() {
    let (server, mut agent) = server_with_agent(2).await;
    for (name, splits) in
        [("val", &["train", "val"][..]), ("test", &["train", "test"]), ("both", &["train", "test", "val"])]
    {
        let split =
            |name: &&str| SplitInfo { name: (*name).into(), samples: 1000, per_class: vec![500, 500] };
        let info = DatasetInfo { splits: splits.iter().map(split).collect(), ..dataset_info() };
        agent.register_as(&server, name, info).await;
    }
    let mut parent = async |dataset: &str, validation: Option<Value>| {
        failed_job(&server, &mut agent, |spec| {
            spec["data"]["dataset"] = json!(dataset);
            spec["data"]["validation"] = validation.unwrap_or_default();
        })
        .await
    };
    let (parent_with_default, parent_with_val) =
        (parent("val", None).await, parent("both", Some(json!("val"))).await);
    for (job, set, validation) in [
        (&parent_with_default, json!({"data.dataset": "test"}), json!("test")),
        (&parent_with_default, json!({"data.dataset": "both"}), json!("test")),
        (&parent_with_default, json!({"train.lr": 0.1}), json!("val")),
        (&parent_with_default, json!({"data": {"dataset": "both", "validation": "val"}}), json!("val")),
        (&parent_with_default, json!({"data.dataset": "both", "data.validation": "val"}), json!("val")),
        (&parent_with_default, json!({"data.dataset": "test", "data.validation": 0.25}), json!(0.25)),
        (&parent_with_val, json!({"data.dataset": "val"}), json!("val")),
    ] {
        let (status, body) = server.post(&format!("/jobs/{job}/fork"), &json!({ "set": set })).await;
        assert_eq!((status, &body["spec"]["data"]["validation"]), (201, &validation), "{set}: {body}");
        let id = body["id"].as_str().unwrap();
        server.post(&format!("/jobs/{id}/cancel"), &json!({})).await;
    }
    // A split that the parent set stays set, so a dataset without this split is refused.
    let set = json!({"set": {"data.dataset": "test"}});
    assert_mistake(server.post(&format!("/jobs/{parent_with_val}/fork"), &set).await, "/data/validation", "");
    server.stop().await;
}

#[tokio::test]
async fn a_fork_inherits_tags_unless_it_sets_tags_or_would_publish_private_tags() {
    let (server, mut agent) = server_with_agent(2).await;
    for private in [false, true] {
        let (id, attempt) = start_job_with_checkpoint(&server, &mut agent, |spec| {
            spec["tags"] = json!(["sweep", "seed-1"]);
            spec["private"] = json!(private);
        })
        .await;
        // The fork inherits the current tags, not the submitted tags.
        let path = format!("/jobs/{id}");
        let (status, body) = server.patch(&path, &json!({"tags": ["sweep", "seed-2"]})).await;
        assert_eq!(status, 200, "{body}");
        for (set, tags) in [
            (json!({}), json!(["seed-2", "sweep"])),
            (json!({"tags": ["other"]}), json!(["other"])),
            (json!({"tags": []}), json!([])),
            (json!({"private": false}), if private { json!([]) } else { json!(["seed-2", "sweep"]) }),
        ] {
            let (status, body) = server.post(&format!("{path}/fork"), &json!({ "set": set })).await;
            assert_eq!((status, &body["tags"]), (201, &tags), "private {private}, {set}: {body}");
            let fork = body["id"].as_str().unwrap();
            server.post(&format!("/jobs/{fork}/cancel"), &json!({})).await;
        }
        fail_job(&server, &mut agent, &id, &attempt).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn an_image_size_that_changes_the_network_is_refused_with_advice() {
    let (server, mut agent) = server_with_agent(2).await;
    let change = |spec: &mut Value| spec["model"]["arch"] = json!("resnet18");
    let (id, _) = start_job_with_checkpoint(&server, &mut agent, change).await;
    let path = format!("/jobs/{id}/fork");
    let fork = async |set: Value| server.post(&path, &json!({ "set": set })).await;
    let (status, body) = fork(json!({"data.image_size": 96})).await;
    assert_eq!((status, &body["errors"][0]["pointer"]), (422, &json!("/data/image_size")), "{body}");
    let text = body["errors"][0]["detail"].as_str().unwrap();
    assert!(text.contains("at 96 pixels") && text.contains("set model.stem, too"), "{text}");
    assert_eq!(fork(json!({"data.image_size": 95})).await.0, 201);
    assert_eq!(fork(json!({"data.image_size": 96, "model.stem": "cifar"})).await.0, 201);
    server.stop().await;
}

#[tokio::test]
async fn a_retry_on_a_changed_dataset_is_refused_until_it_fits() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = failed_job(&server, &mut agent, |_| {}).await;
    assert_eq!(server.delete("/datasets/pictures").await.0, 204);
    let changed = DatasetInfo { classes: strings(&["cat", "fox"]), ..dataset_info() };
    agent.register_as(&server, "pictures", changed).await;
    assert_mistake(server.post(&format!("/jobs/{id}/retry"), &json!({})).await, "/data/dataset", "");
    assert_eq!(server.job(&id).await.state, JobState::Failed);
    assert_eq!(server.delete("/datasets/pictures").await.0, 204);
    agent.register_as(&server, "pictures", dataset_info()).await;
    server.order(&id, "retry").await;
    assert!(matches!(agent.next().await, Some(ToAgent::Start(_))));
    server.stop().await;
}

#[tokio::test]
async fn a_non_finite_evaluation_is_never_best_and_keeps_the_stream_valid() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let evaluation = |step, accuracy, loss| {
        AttemptEvent::Evaluation(Evaluation { epoch: 1, step, samples: 200, accuracy, loss, secs: 0.1 })
    };
    let events = vec![
        running(100, 0),
        evaluation(10, 0.5, 1.0),
        evaluation(20, 0.9, f64::NAN),
        evaluation(30, 0.9, f64::INFINITY),
        evaluation(40, f64::NAN, 0.1),
    ];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    let job = server.job(&id).await;
    assert_eq!((job.best.unwrap().value, job.best.unwrap().step), (0.5, 10));
    assert_eq!((job.last.val_loss, job.last.val_accuracy), (None, None));
    agent.report(&attempt, Source::Rank(0), 5, vec![evaluation(50, 0.6, 0.9)]).await;
    assert_eq!(server.job(&id).await.best.unwrap().step, 50);
    // If accuracies are equal, the lower loss is best.
    let equal = vec![evaluation(60, 0.6, 0.8), evaluation(70, 0.6, 0.85)];
    agent.report(&attempt, Source::Rank(0), 6, equal).await;
    let job = server.job(&id).await;
    assert_eq!(
        (job.best.unwrap().step, job.best.unwrap().loss, job.last.val_pictures),
        (60, Some(0.8), Some(200))
    );
    let stored = server.stored_events(&id).await;
    let losses: Vec<_> =
        stored.iter().filter(|e| e["type"] == "evaluation").map(|e| e["loss"].clone()).collect();
    assert_eq!(losses, [1.0, 0.9, 0.8, 0.85].map(|loss| json!(loss)), "{stored:#?}");
    for frame in stored {
        serde_json::from_value::<Frame>(frame.clone()).unwrap_or_else(|error| panic!("{error}: {frame}"));
    }
    server.stop().await;
}

#[tokio::test]
async fn a_fork_reports_its_learning_rate_and_overlap_with_training_pictures() {
    let (server, mut agent) = server_with_agent(2).await;
    let job = server
        .submit(|spec| {
            spec["data"]["validation"] = json!(0.1);
            spec["train"]["schedule"] = json!("one_cycle");
            spec["train"]["epochs"] = json!(2);
        })
        .await;
    let start = agent.expect_start().await;
    write_checkpoint(Path::new(start.job_dir.as_deref().unwrap()));
    // The ranks report 37 steps per epoch, a number that does not follow from the dataset's size.
    let events = vec![
        AttemptEvent::Running { total_steps: 74, steps_per_epoch: 37, start_step: 0, train_samples: 0 },
        checkpoint(50),
    ];
    agent.report(&start.attempt, Source::Rank(0), 0, events).await;
    let path = format!("/jobs/{}/fork", job.id);
    for (set, expected) in [
        (
            json!({"train.epochs": 3}),
            &["the learning rate changes where the run continues: from", "at the last step, 111"][..],
        ),
        (
            json!({"data.validation_seed": 1}),
            &["the job is validated on pictures that the parent trained on"],
        ),
        (json!({"train.seed": 1, "train.momentum": 0.8}), &[]),
    ] {
        let (_, before) = server.get("/jobs?count=true").await;
        let (status, plan) = server.post(&format!("{path}/check"), &json!({ "set": set })).await;
        assert_eq!(status, 200, "{plan}");
        // A check creates no job.
        assert_eq!(server.get("/jobs?count=true").await.1["total"], before["total"]);
        let (status, fork) = server.post(&path, &json!({ "set": set })).await;
        let warnings = |body: &Value| body["warnings"].as_array().cloned().unwrap_or_default();
        assert_eq!((status, warnings(&fork)), (201, warnings(&plan)), "{fork}");
        assert_eq!(warnings(&plan).len(), usize::from(!expected.is_empty()), "{plan}");
        for text in expected {
            assert!(plan["warnings"][0].as_str().unwrap().contains(text), "{text} in {plan}");
        }
    }
    let refused = server.post(&format!("{path}/check"), &json!({"set": {"train.epochs": 1}})).await;
    assert_mistake(refused, "/train/epochs", "the training ends at step 37");
    server.stop().await;
}
