//! Responses to submissions: values that follow from defaults and from the dataset, and warnings.

use crate::{
    agent::{dataset_info, server_with_agent},
    test_server::{TestServer, assert_mistake, spec, with_form},
};
use lockstep_protocol::{
    agent::AgentReply,
    dataset::{BrokenFile, DatasetInfo, HeldOut, SplitInfo},
};
use serde_json::{Value, json};

fn with_splits(names: &[&str]) -> DatasetInfo {
    let split = |name: &&str| SplitInfo { name: (*name).into(), samples: 100, per_class: vec![50, 50] };
    DatasetInfo { splits: names.iter().map(split).collect(), channels: 3, ..dataset_info() }
}

#[tokio::test]
async fn batch_sizes_are_shown_with_defaults() {
    let (server, _agent) = server_with_agent(4).await;
    for (train, ranks, batch) in [
        (
            json!({}),
            2,
            json!({"batch_size": 32, "accumulate": 1, "global_batch_size": 64, "epoch_samples": 0}),
        ),
        (
            json!({"batch_size": 8, "accumulate": 3}),
            1,
            json!({"batch_size": 8, "accumulate": 3, "global_batch_size": 24, "epoch_samples": 0}),
        ),
        (
            json!({"global_batch_size": 48, "accumulate": 2}),
            3,
            json!({"batch_size": 8, "accumulate": 2, "global_batch_size": 48, "epoch_samples": 0}),
        ),
    ] {
        let mut document = spec();
        document["train"] = train;
        document["parallel"]["ranks"] = json!(ranks);
        let (status, job) = server.post("/jobs", &document).await;
        assert_eq!((status, &job["batch"]), (201, &batch), "{job}");
        let (_, shown) = server.get(&format!("/jobs/{}", job["id"].as_str().unwrap())).await;
        assert_eq!(shown["batch"], batch);
        // The specification keeps the submitted values, because a fork may set the batch size by other keys.
        assert_eq!(shown["spec"]["train"]["batch_size"], document["train"]["batch_size"]);
    }
    server.stop().await;
}

#[tokio::test]
async fn jobs_use_the_available_validation_split_by_default() {
    let (server, mut agent) = server_with_agent(2).await;
    let document_with = |validation: Option<Value>, recipe: Option<&str>| {
        let mut spec = spec();
        if let Some(validation) = validation {
            spec["data"]["validation"] = validation;
        }
        if let Some(recipe) = recipe {
            spec["train"]["recipe"] = json!(recipe);
            spec["train"]["epochs"] = json!(90);
        }
        spec
    };
    for (name, splits, without_recipe, with_recipe) in [
        ("like-cifar", &["train", "test"][..], "test", "test"),
        ("like-imagenet", &["train", "val"], "val", "val"),
        ("both", &["train", "test", "val"], "test", "val"),
        ("hub", &["train", "test", "validation"], "test", "validation"),
        ("long-word", &["train", "validation"], "validation", "validation"),
    ] {
        agent.register_as(&server, name, with_splits(splits)).await;
        for (recipe, expected) in [(None, without_recipe), (Some("imagenet"), with_recipe)] {
            for validation in [None, Some(Value::Null)] {
                let mut document = document_with(validation, recipe);
                document["data"]["dataset"] = json!(name);
                let (status, plan) = server.post("/jobs/validate", &document).await;
                let split = &plan["spec"]["data"]["validation"];
                assert_eq!((status, split), (200, &json!(expected)), "{name} {recipe:?}: {plan}");
            }
        }
    }
    // Without a split, a fifth of the 100 training pictures is held out, unless the job sets data.validation.
    agent.register_as(&server, "plain", with_splits(&["train"])).await;
    for (validation, expected) in [(None, json!(0.2)), (Some(json!("none")), json!("none"))] {
        let mut document = document_with(validation, None);
        document["data"]["dataset"] = json!("plain");
        let (status, plan) = server.post("/jobs/validate", &document).await;
        assert_eq!((status, &plan["spec"]["data"]["validation"]), (200, &expected), "{plan}");
    }
    // An explicit value is not replaced. The default is refused if the dataset has splits of other names.
    agent.register_as(&server, "odd", with_splits(&["train", "holdout"])).await;
    for (name, validation) in [("like-imagenet", Some(json!("test"))), ("odd", None)] {
        let mut document = document_with(validation, None);
        document["data"]["dataset"] = json!(name);
        assert_mistake(server.post("/jobs", &document).await, "/data/validation", "no split \"test\"");
    }
    for validation in [json!("none"), json!(0.25)] {
        let mut document = document_with(Some(validation.clone()), None);
        document["data"]["dataset"] = json!("like-imagenet");
        assert_eq!(
            server.post("/jobs/validate", &document).await.1["spec"]["data"]["validation"],
            validation
        );
    }
    // The unchanged form without scripts has the same effect as a job file.
    let fields = "name=x&data.dataset=like-imagenet&data.validation=test&model.arch=resnet20";
    let response = with_form(server.http.post(server.url("/jobs/new")), fields).send().await.unwrap();
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
    let (_, jobs) = server.get("/jobs").await;
    assert_eq!(jobs["jobs"][0]["spec"]["data"]["validation"], "val");
    server.stop().await;
}

#[tokio::test]
async fn broken_files_and_classes_without_validation_pictures_cause_a_warning() {
    let (server, mut agent) = server_with_agent(2).await;
    let with_broken_files = |n: usize| DatasetInfo {
        broken: (0..n).map(|i| BrokenFile { file: format!("{i}.jpg"), detail: "is empty".into() }).collect(),
        broken_count: n as u64,
        ..dataset_info()
    };
    agent.register_as(&server, "one", with_broken_files(1)).await;
    agent.register_as(&server, "five", with_broken_files(5)).await;
    let mut no_dogs = dataset_info();
    no_dogs.splits[1].per_class = vec![200, 0];
    agent.register_as(&server, "no-dogs", no_dogs).await;
    let train = SplitInfo { name: "train".into(), samples: 400, per_class: vec![200, 200] };
    let held_out = Some(HeldOut { validation_seed: 7, per_class: vec![42, 42] });
    let photos = DatasetInfo { splits: vec![train], held_out, ..dataset_info() };
    agent.register_as(&server, "photos", photos.clone()).await;
    let held_out = Some(HeldOut { validation_seed: 7, per_class: vec![0, 84] });
    agent.register_as(&server, "no-cats", DatasetInfo { held_out, ..photos }).await;
    let spec_on = |name: &str, broken_files: &str| {
        let mut spec = spec();
        spec["data"] = json!({"dataset": name, "broken_files": broken_files});
        spec
    };
    for (name, parts) in [
        ("one", &["1 file of one", "(0.jpg is empty)"][..]),
        ("five", &["5 files of five", "2.jpg is empty; and 2 more)"]),
    ] {
        for path in ["/jobs/validate", "/jobs"] {
            let (status, response) = server.post(path, &spec_on(name, "fail")).await;
            assert!(status == 200 || status == 201, "{response}");
            let warning = response["warnings"][0].as_str().unwrap();
            for part in parts.iter().chain(&["data.broken_files = \"skip\""]) {
                assert!(warning.contains(part), "{part} in {warning}");
            }
            assert_eq!(response["warnings"].as_array().unwrap().len(), 1);
        }
    }
    // A warning says that the best network may be lost if validations and checkpoints fall on different steps.
    for (every, validation, is_expected) in [(3, None, true), (5, None, false), (3, Some("none"), false)] {
        let mut spec = spec();
        if let Some(validation) = validation {
            spec["data"]["validation"] = json!(validation);
        }
        spec["checkpoint"] = json!({"every_steps": every});
        spec["train"] = json!({"epochs": 2, "batch_size": 100});
        let (_, response) = server.post("/jobs/validate", &spec).await;
        assert_eq!(response["steps_per_epoch"], 5, "{response}");
        let is_warned =
            response["warnings"].to_string().contains("validated every 5 steps and saved every 3");
        assert_eq!(is_warned, is_expected, "{response}");
    }
    let mut hybrid = spec();
    hybrid["parallel"] = json!({"mode": "hybrid"});
    let (_, response) = server.post("/jobs/validate", &hybrid).await;
    assert!(response["warnings"].to_string().contains("without a split is data parallel"), "{response}");
    let mut enlarged = spec();
    enlarged["data"]["image_size"] = json!(112);
    let (_, response) = server.post("/jobs/validate", &enlarged).await;
    assert!(response["warnings"].to_string().contains("shorter sides have 28 pixels"), "{response}");
    // After a random hold-out, the number of training pictures is an expected number, unless the inspection has counted them. A step that
    // may take more pictures than remain causes a warning.
    for (seed, global_batch_size, samples, warning) in
        [(7, 316, 316, None), (0, 296, 320, None), (0, 320, 320, Some("a step of at most 296 is safe"))]
    {
        let mut spec = spec();
        spec["data"] = json!({"dataset": "photos", "validation": 0.2, "validation_seed": seed});
        spec["train"] = json!({"epochs": 1, "global_batch_size": global_batch_size});
        let (status, response) = server.post("/jobs/validate", &spec).await;
        assert_eq!((status, &response["samples"]), (200, &json!(samples)), "{response}");
        assert_eq!(response["is_expected"], seed != 7, "{response}");
        let warnings = response["warnings"].to_string();
        assert_eq!(warnings != "[]", warning.is_some(), "{warnings}");
        assert!(warnings.contains(warning.unwrap_or_default()), "{warnings}");
    }
    // A class of the training split that has no validation picture is named, if the pictures were counted.
    for (name, validation, seed, lacking) in [
        ("no-dogs", json!("test"), 0, Some("dog")),
        ("no-dogs", json!("none"), 0, None),
        ("no-cats", json!(0.2), 7, Some("cat")),
        ("no-cats", json!(0.2), 8, None),
    ] {
        let mut spec = spec_on(name, "fail");
        spec["data"]["validation"] = validation;
        spec["data"]["validation_seed"] = json!(seed);
        let (_, response) = server.post("/jobs/validate", &spec).await;
        let warnings = response["warnings"].to_string();
        let words = lacking.map(|class| format!("1 class has no validation picture: \\\"{class}\\\""));
        assert_eq!(warnings.contains("no validation picture"), words.is_some(), "{response}");
        assert!(warnings.contains(&words.unwrap_or_default()), "{response}");
    }
    let mut unusual = spec();
    unusual["train"] = json!({"lr": 50, "epochs": 20_000});
    let (_, response) = server.post("/jobs/validate", &unusual).await;
    for part in ["train.lr = 50 is unusually high", "train.epochs = 20000 is unusually high"] {
        assert!(response["warnings"].to_string().contains(part), "{response}");
    }
    // Without broken files, or with "skip", there is no warning. Jobs do not store warnings.
    for (name, broken_files) in [("five", "skip"), ("pictures", "fail")] {
        let (status, response) = server.post("/jobs", &spec_on(name, broken_files)).await;
        assert_eq!((status, response.get("warnings")), (201, None), "{response}");
    }
    let (_, jobs) = server.get("/jobs").await;
    assert!(jobs["jobs"].as_array().unwrap().iter().all(|job| job.get("warnings").is_none()), "{jobs}");
    let (_, page) = server.get_text("/jobs/new").await;
    assert!(
        page.contains("2 classes, 5 unusable files") && page.contains("2 classes, 1 unusable file<"),
        "{page}"
    );
    server.stop().await;
}

#[tokio::test]
async fn weights_that_do_not_fit_are_refused_at_submission() {
    let (server, mut agent) = server_with_agent(2).await;
    let spec_with = |pretrained: &str| {
        let mut spec = spec();
        spec["model"]["pretrained"] = json!(pretrained);
        spec["data"]["image_size"] = json!(64);
        spec
    };
    // An agent reads the file. The server reports the agent's message as a mistake of model.pretrained.
    for path in ["/jobs", "/jobs/validate"] {
        let reply = AgentReply::Weights { mistake: Some("/w.safetensors does not fit a resnet20".into()) };
        let spec = spec_with("/w.safetensors");
        let ((status, response), request) =
            tokio::join!(server.post(path, &spec), agent.answer_fit_weights(reply));
        let detail = "/w.safetensors does not fit a resnet20";
        let errors = json!([{"pointer": "/model/pretrained", "detail": detail}]);
        assert_eq!((status, &response["errors"]), (422, &errors), "{response}");
        assert_eq!(
            (&*request.weights, request.image_size, request.channels, request.classes),
            ("/w.safetensors", 64, 1, 2)
        );
        assert_eq!(request.model.arch.as_str(), "resnet20");
    }
    // The server finds some mistakes without an agent, and reports them with the other mistakes.
    let id = format!("{}-1-40", lockstep_protocol::JobId::generate());
    for (pretrained, fragment) in [
        (&*id, "no checkpoint has the id"),
        ("https://host/w.safetensors", "download the file"),
        ("12-276", "lacks the job's id: write JOB-12-276"),
    ] {
        let mut spec = spec_with(pretrained);
        spec["data"]["validation"] = json!("holdout");
        let (status, response) = server.post("/jobs", &spec).await;
        let detail_at = |pointer: &str| {
            let errors = response["errors"].as_array().unwrap();
            errors.iter().find(|e| e["pointer"] == pointer).map(|e| e["detail"].as_str().unwrap().to_owned())
        };
        assert!(status == 422 && detail_at("/model/pretrained").unwrap().contains(fragment), "{response}");
        assert!(detail_at("/data/validation").is_some(), "{response}");
    }
    // The job is accepted if the weights fit, and also if an agent gives another reply. Then the job's ranks check the weights.
    let replies = [AgentReply::Weights { mistake: None }, AgentReply::Files { there: vec![true] }];
    for (number, reply) in replies.into_iter().enumerate() {
        let spec = spec_with("/w.safetensors");
        let ((status, response), _) =
            tokio::join!(server.post("/jobs", &spec), agent.answer_fit_weights(reply));
        assert_eq!(status, 201, "{response}");
        let warning = response["warnings"][0].as_str().unwrap_or_default();
        assert_eq!(
            warning.contains("was not checked (an agent gave an unexpected reply)"),
            number > 0,
            "{response}"
        );
        if server.get("/jobs").await.1["jobs"].as_array().unwrap().len() == 1 {
            agent.expect_start().await;
        }
    }
    // Without an online agent, the weights are not checked, and a warning says so.
    agent.disconnect();
    let server = TestServer::open(server.stop().await, |_| {}).await;
    for (path, expected) in [("/jobs/validate", 200), ("/jobs", 201)] {
        let (status, response) = server.post(path, &spec_with("/w.safetensors")).await;
        assert_eq!(status, expected, "{response}");
        let warning = response["warnings"][0].as_str().unwrap();
        for fragment in ["\"/w.safetensors\" was not checked (no agent is online)", "fails when it starts"] {
            assert!(warning.contains(fragment), "{fragment} in {warning}");
        }
    }
    // Names of pickles are refused without an agent.
    let (status, response) = server.post("/jobs", &spec_with("/w/resnet18.pth")).await;
    assert!(
        status == 422 && response.to_string().contains("/w/resnet18.pth: is a PyTorch pickle"),
        "{response}"
    );
    // A job without weights has no warning.
    assert_eq!(server.post("/jobs", &spec()).await.1.get("warnings"), None);
    server.stop().await;
}
