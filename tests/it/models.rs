//! Registered models: a job's checkpoint is registered and used by its alias, as docs/models.md shows it.

use crate::{
    pages, pictures,
    server::{Finished, Server, training_permit},
    specs,
};
use reqwest::Method;
use serde_json::{Value, json};
use std::fs;

#[tokio::test]
async fn a_registered_checkpoint_is_used_by_its_alias() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let folder = server.folder().path();
    server.register("clothes", &pictures::idx_dataset(folder, 64, 16)).await;
    let job = |name: &str| specs::short(name, "clothes", 1, 4);
    let first = server.train(&job("fashion")).await;
    let boot = pictures::boot(&pictures::image_folder(folder, 1));
    image::open(&boot).expect("a picture").save(folder.join("shoe.png")).expect("a picture");
    let run_line = |line: &str| {
        let mut shell = pages::shell(line);
        Finished::of(
            shell.current_dir(folder).envs(server.client_variables()).env("HOME", folder.join("home")),
        )
    };

    // The command lines of the page.
    let registered = run_line(&pages::line("docs/models.md", "lockstep model register "));
    assert!(registered.ok().starts_with("models:/shoes/1: checkpoint 1-4 of fashion"), "{registered:?}");
    let moved = run_line(&pages::line("docs/models.md", "lockstep model alias "));
    assert_eq!(moved.ok(), "models:/shoes@champion is version 1\n");
    let shown = run_line(&pages::line("docs/models.md", "lockstep model show "));
    assert!(shown.ok().contains("champion") && shown.stdout.contains("clothes"), "{shown:?}");
    let listed = run_line(&pages::line("docs/models.md", "lockstep model list"));
    assert!(listed.ok().contains("shoes") && listed.stdout.contains("champion: 1"), "{listed:?}");
    let predicted = run_line(&pages::line("docs/models.md", "lockstep predict "));
    assert!(predicted.ok().starts_with("shoe.png: "), "{predicted:?}");
    assert!(predicted.stderr.contains(&format!("fashion ({first}), checkpoint 1-4")), "{predicted:?}");
    let evaluated = run_line(&pages::line("docs/models.md", "lockstep evaluate "));
    assert!(evaluated.ok().starts_with("checkpoint 1-4: accuracy "), "{evaluated:?}");
    run_line(&pages::line("docs/models.md", "lockstep download ")).ok();
    assert_eq!(fs::read(folder.join("shoes.safetensors")).expect("weights"), server.last_model(&first).await);

    // The version records its dataset and program.
    let version = server.get("/models/shoes/versions/1").await;
    let dataset = server.get("/datasets/clothes").await;
    assert_eq!(
        version["dataset_fingerprint"]["sha256"], dataset["info"]["fingerprint"]["sha256"],
        "{version}"
    );
    assert!(
        version["dataset_fingerprint"]["sha256"].is_string() && version["programs"]["lockstep"].is_string()
    );

    // Another job starts from these weights. When the alias moves, the job's specification does not change.
    let tuned = specs::with(job("tuned"), json!({"model": {"pretrained": "models:/shoes@champion"}}));
    let second = server.train(&tuned).await;
    server.cli(&["model", "register", "shoes", "tuned"]).ok();
    server.cli(&["model", "alias", "shoes", "champion", "2"]).ok();
    assert_eq!(server.job(&second).await["spec"]["model"]["pretrained"], version["checkpoint"]);
    let response = server.cli(&["predict", "models:/shoes@champion", "shoe.png", "--json"]).json();
    assert_eq!(response[0]["job"], "tuned", "{response}");

    // Unknown names, and a job whose checkpoint is registered.
    server.cli(&["evaluate", "models:/shoes@nobody"]).assert_usage_error(&[
        "has no alias \"nobody\"; `lockstep model show shoes` shows its versions and aliases",
    ]);
    server
        .cli(&["evaluate", "models:/shoos@champion"])
        .assert_usage_error(&["no model is called shoos; did you mean \"shoes\"?"]);
    server.cli(&["evaluate", "shoes@champion"]).assert_usage_error(&[
        "no job is called shoes@champion",
        "write models:/shoes@champion for its version",
    ]);
    server.cli(&["evaluate", "shoes"]).assert_usage_error(&[
        "no job is called shoes",
        "shoes is a model",
        "as in models:/shoes/2; ",
    ]);
    server.cli(&["download", "models:/shoes", "-o", "x"]).assert_usage_error(&[
        "shoes is a model: the name of a version also has its number or an alias, as in models:/shoes/2; ",
    ]);
    server
        .cli(&["download", "models:/shoos", "-o", "x"])
        .assert_usage_error(&["\"models:/shoos\" is not the name of a model's version"]);
    server
        .cli(&["evaluate", "models:/shoes/1", "--checkpoint", "latest"])
        .assert_usage_error(&["leave --checkpoint out"]);
    server.cli(&["model", "show", "../jobs"]).assert_usage_error(&["the model's name has '/': use 1 to 100"]);
    for command in [&["model", "show", "shoos"][..], &["model", "alias", "shoos", "champion", "1"]] {
        server.cli(command).assert_usage_error(&["no model is called shoos; did you mean \"shoes\"?"]);
    }
    server
        .cli(&["model", "remove", "shoes", "2", "--yes"])
        .assert_usage_error(&["the version has the alias champion"]);
    let path = format!("/jobs/{first}");
    let refused: Value = server.request(Method::DELETE, &path, None).await.problem(409);
    assert!(refused["detail"].as_str().is_some_and(|why| why.contains("models:/shoes/1")), "{refused}");
    server
        .cli(&["model", "remove", "shoes", "1"])
        .assert_usage_error(&["models:/shoes/1 stays as it is", "--yes"]);
    server.cli(&["model", "remove", "shoes", "1", "--yes"]).ok();
    assert_eq!(server.request(Method::DELETE, &path, None).await.status, 204);
    server.stop().await;
}
