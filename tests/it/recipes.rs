//! Recipes by name: the stored, shown and trained job is the resolved job, however it was submitted.

use crate::{
    pictures,
    server::{Finished, Server, lockstep, training_permit},
};
use serde_json::{Value, json};

const JOB: &str = r#"
name = "by-recipe"
[model]
arch = "resnet20"
[data]
dataset = "fashion"
crop_padding = 2
[train]
recipe = "cifar"
steps = 2
batch_size = 8
[parallel]
ranks = 2
device = "cpu"
"#;

#[tokio::test]
async fn recipes_are_resolved_equally_for_rest_forms_shells_and_train() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let dataset = pictures::idx_dataset(server.folder().path(), 64, 16);
    server.register("fashion", &dataset).await;
    let document: Value = json!({
        "name": "by-recipe", "model": {"arch": "resnet20"},
        "data": {"dataset": "fashion", "crop_padding": 2}, "train": {"recipe": "cifar", "steps": 2, "batch_size": 8},
        "parallel": {"ranks": 2, "device": "cpu"},
    });
    let resolved = server.post("/jobs/validate", &document).await.json()["spec"].clone();
    // The recipe's 0.1 for 128 pictures, scaled to the batch of 16.
    assert_eq!((&resolved["train"]["lr"], &resolved["train"]["recipe"]), (&json!(0.0125), &json!("cifar")));
    assert_eq!(
        (&resolved["train"]["milestones"], &resolved["data"]["crop_padding"]),
        (&json!([82, 123]), &json!(2))
    );
    assert_eq!(resolved["train"]["epochs"], Value::Null, "the job gives steps");

    let by_rest = server.submit(&document).await;
    assert_eq!(server.job(&by_rest).await["spec"], resolved);
    let response = server
        .http
        .post(server.api("/jobs"))
        .header("content-type", "application/toml")
        .body(JOB)
        .send()
        .await
        .expect("a response");
    assert_eq!(response.status(), 201);
    assert_eq!(response.json::<Value>().await.expect("a job")["spec"], resolved);
    let form = [
        ("name", "by-recipe"),
        ("train.recipe", "cifar"),
        ("filled", ""),
        ("model.arch", "resnet20"),
        ("data.dataset", "fashion"),
        ("data.crop_padding", "2"),
        // The defaults of an untouched form.
        ("data.horizontal_flip", "true"),
        ("train.lr", "0.01"),
        ("train.schedule", "constant"),
        ("train.steps", "2"),
        ("train.batch_size", "8"),
        ("parallel.ranks", "2"),
        ("parallel.device", "cpu"),
    ];
    let form: Vec<String> = form.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let page = server
        .http
        .post(format!("{}/jobs/new", server.url))
        .header("content-type", "application/x-www-form-urlencoded")
        .body(form.join("&"))
        .send()
        .await
        .expect("a page");
    let id = page.url().path().trim_start_matches("/jobs/").to_owned();
    assert_eq!(server.job(&id).await["spec"]["train"]["milestones"], json!([82, 123]), "{}", page.url());
    assert_eq!(server.job(&id).await["spec"]["train"]["lr"], json!(0.0125));

    let file = server.folder().write("job.toml", JOB);
    let file = file.to_str().expect("UTF-8");
    let by_shell = server.cli(&["submit", file, "--json"]).json();
    assert_eq!(by_shell["spec"], resolved);
    let id = by_shell["id"].as_str().expect("an id").to_owned();
    server.wait_for_success(&id).await;
    let shown = server.cli(&["show", &id]);
    for line in ["recipe = \"cifar\"", "lr = 0.0125", "schedule = \"step\"", "crop_padding = 2"] {
        assert!(shown.ok().lines().any(|l| l == line), "{line} in {}", shown.stdout);
    }
    // `show` prints a job file of the same job.
    let (_, shown_file) = shown.stdout.split_once("\n\n").expect("a blank line before the job file");
    let copy = server.folder().write("copy.toml", shown_file);
    let copy = server.cli(&["submit", copy.to_str().expect("UTF-8"), "--json"]).json();
    assert_eq!(copy["spec"], resolved);

    let out = server.folder().path().join("out");
    let set = format!("data.dataset={}", dataset.display());
    let trained = Finished::of(lockstep().args(["train", file, "--set", &set, "--out"]).arg(&out));
    trained.ok();
    let model = std::fs::read(out.join("checkpoints/1-2/model.safetensors")).expect("a model");
    for model in [model, server.last_model(&id).await] {
        let header = String::from_utf8_lossy(&model[..8192]).replace('\\', "");
        assert!(
            header.contains("\"recipe\":\"cifar\"") && header.contains("\"milestones\":[82,123]"),
            "{header}"
        );
    }

    for (recipe, words) in [("cifer", "did you mean \"cifar\""), ("best", "imagenet, imagenet-2021")] {
        let set = format!("train.recipe={recipe}");
        server.cli(&["submit", file, "--set", &set]).assert_usage_error(&["train.recipe", words]);
        Finished::of(lockstep().args(["train", file, "--set", &set]))
            .assert_usage_error(&["train.recipe", words]);
    }
    let fork = server.post(&format!("/jobs/{id}/fork"), &json!({"set": {"train.recipe": "imagenet"}})).await;
    fork.problem(422);
    assert!(fork.text.contains("/train/recipe"), "{}", fork.text);
    let fork =
        server.post(&format!("/jobs/{id}/fork"), &json!({"set": {"train.steps": 3, "train.lr": null}})).await;
    assert_eq!(fork.status, 201, "{}", fork.text);
    assert_eq!(fork.json()["spec"]["train"]["lr"], json!(0.0125), "the recipe's value again");
    server.stop().await;
}
