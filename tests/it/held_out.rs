//! Validation pictures that are held out of the training set, and a dataset that changes.

use crate::{
    pictures,
    server::{Server, training_permit},
    specs,
};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// Moves the files of each class from `from` to `to`.
fn move_pictures(from: &Path, to: &Path) {
    for class in ["boot", "trouser"] {
        fs::create_dir_all(to.join(class)).expect("a folder");
        for file in fs::read_dir(from.join(class)).expect("a folder") {
            let file = file.expect("a file");
            fs::rename(file.path(), to.join(class).join(file.file_name())).expect("moves");
        }
    }
}

#[tokio::test]
async fn an_evaluation_reports_its_pictures_and_how_many_were_trained_on() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let images = pictures::image_folder(server.folder().path(), 60);
    let later = server.folder().path().join("later");
    fs::rename(images.join("val"), &later).expect("moves");
    server.register("folder", &images).await;
    let spec = specs::with(specs::short("one", "folder", 1, 6), json!({"data": {"validation": 0.2}}));
    let id = server.train(&spec).await;
    let checkpoints = server.get(&format!("/jobs/{id}/checkpoints")).await;
    let checkpoint = &checkpoints["checkpoints"][0];
    let held_out = checkpoint["validation"]["pictures"].as_u64().expect("a count");
    assert!((10..40).contains(&held_out), "{checkpoint:#}");

    let evaluation = server.evaluation(&id, "").await;
    let facts = |result: &Value| (result["accuracy"].clone(), result["validation"].clone());
    assert_eq!(facts(&evaluation), (checkpoint["val_accuracy"].clone(), checkpoint["validation"].clone()));
    assert_eq!((&evaluation["trained_on"], &evaluation["note"]), (&json!(0), &Value::Null), "{evaluation:#}");

    // With twice as many pictures, the validation set still contains no training picture.
    let added: Vec<_> = ["boot", "trouser"]
        .into_iter()
        .flat_map(|class| {
            fs::read_dir(later.join(class))
                .expect("a folder")
                .map(move |file| (class, file.expect("a file").file_name()))
        })
        .collect();
    move_pictures(&later, &images.join("train"));
    let grown = server.evaluation(&id, "").await;
    let pictures = grown["validation"]["pictures"].as_u64().expect("a count");
    assert!(pictures > held_out && grown["samples"] == pictures, "{grown:#}");
    assert_eq!(grown["trained_on"], 0);
    let note = format!("the checkpoint's run was validated with another set of {held_out} pictures");
    assert_eq!(grown["note"], note);
    let output = server.cli(&["evaluate", &id]);
    output.assert_prints(&[&format!(" of {pictures} pictures, loss "), &note]);
    let is_certain = grown["accuracy"] == 0.0 || grown["accuracy"] == 1.0;
    assert!(is_certain || output.stdout.contains(" ± "), "{}", output.stdout);

    // Without the added pictures, the result is the first one again.
    for (class, name) in added {
        fs::remove_file(images.join("train").join(class).join(name)).expect("removes");
    }
    assert_eq!(facts(&server.evaluation(&id, "").await), facts(&evaluation));

    // A fork that holds out other pictures is evaluated on pictures that its parent trained on, and says so.
    let set = json!({"set": {"data.validation_seed": 1, "train.steps": 8}});
    let fork = server.post(&format!("/jobs/{id}/fork"), &set).await.json();
    assert!(fork["warnings"][0].as_str().is_some_and(|w| w.contains("the parent trained on")), "{fork:#}");
    let fork = fork["id"].as_str().expect("an id");
    // So does the check of a new job that begins with such weights.
    let mut spec = server.job(&id).await["spec"].clone();
    spec["model"]["pretrained"] = server.checkpoints(&id).await[0]["id"].clone();
    spec["data"]["validation_seed"] = json!(1);
    let checked = server.post("/jobs/validate", &spec).await.json();
    assert!(checked["warnings"].to_string().contains("the run of the weights trained on"), "{checked:#}");
    server.wait_for_success(fork).await;
    let foreign = server.evaluation(fork, "?checkpoint=latest").await;
    let trained_on = foreign["trained_on"].as_u64().expect("a count");
    assert!(trained_on > 0 && trained_on <= foreign["samples"].as_u64().expect("a count"), "{foreign:#}");
    assert!(
        foreign["note"]
            .as_str()
            .is_some_and(|note| note.starts_with(&format!("{trained_on} of these were trained on")))
    );
    let log = server.cli(&["logs", fork]);
    let words =
        format!("{trained_on} of the {} validation pictures were training pictures", foreign["samples"]);
    log.assert_prints(&[&words]);
    let job = server.get(&format!("/jobs/{fork}")).await;
    for field in ["diagnosis", "trained_validation"] {
        assert!(job[field].as_str().is_some_and(|text| text.starts_with(&words)), "{job:#}");
    }
    // The list and the pages of models mark the accuracy, too.
    let jobs = server.get("/jobs?fields=id,trained_validation").await;
    let marked =
        jobs["jobs"].as_array().expect("a list").iter().filter(|job| !job["trained_validation"].is_null());
    let marked: Vec<_> = marked.collect();
    assert!(matches!(marked[..], [marked] if marked["id"] == fork), "{jobs:#}");
    assert_eq!(marked[0]["trained_validation"], job["trained_validation"], "{jobs:#}");
    server.post("/models", &json!({"name": "leaked", "job": fork})).await;
    let mark = format!("{trained_on} trained on</span>");
    for (page, mark) in [("/jobs", " *</small>"), ("/models", &*mark), ("/models/leaked", &*mark)] {
        let response = server.http.get(format!("{}{page}", server.url)).send().await.expect("a page");
        let html = response.text().await.expect("a body");
        assert!(html.contains(mark) && html.contains(&words), "{page}: {html}");
    }
    server.stop().await;
}
