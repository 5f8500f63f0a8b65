//! Projects, tags and notes on the command line, and lists that the server filters and sorts.

use crate::{
    server::{Agents, Server},
    specs,
};
use serde_json::{Value, json};

fn names(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().filter_map(|job| job["name"].as_str()).collect()
}

#[tokio::test]
async fn jobs_have_projects_and_are_listed_by_project() {
    // One job occupies the only slot, so that the others wait.
    let server = Server::start_training_with(Agents::Local { cpu_slots: 1 }, 160, 16).await;
    let holder = server.submit(&specs::short("holder", "fashion", 1, 1_000_000)).await;
    server.wait_for_job(&holder, "the job runs", |job| job["state"] == "running").await;
    let file = server.folder().write(
        "job.toml",
        "name = \"b\"\ntags = [\"file\"]\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\n",
    );
    let file = file.to_str().expect("UTF-8");
    let labels = ["--project", "vision", "--tag", "one", "--tag", "two", "--notes", "why", "--json"];
    let submitted = server.cli(&[&["submit", file][..], &labels[..]].concat()).json();
    assert_eq!(
        (&submitted["project"], &submitted["tags"]),
        (&json!("vision"), &json!(["file", "one", "two"]))
    );
    assert_eq!(submitted["notes"], "why");
    server.cli(&["submit", file, "--set", "name=a", "--set", "project=vision", "--set", "train.lr=0.5"]).ok();
    server
        .cli(&["submit", file, "--project", "no spaces"])
        .assert_usage_error(&["project", "1 to 100 letters"]);
    server.cli(&["submit", file, "--tag", "a,b"]).assert_usage_error(&["tags", "without commas"]);

    let listed = |arguments: &[&str]| server.cli(&[&["list", "--json"][..], arguments].concat()).json();
    let cases: [(&[&str], &[&str]); 9] = [
        (&[], &["a", "b", "holder"]),
        (&["--project", "vision", "--sort", "-name"], &["b", "a"]),
        (&["--project", "default"], &["holder"]),
        (&["--tag", "file", "--tag", "one"], &["b"]),
        (&["--state", "running,queued", "--sort", "created"], &["holder", "b", "a"]),
        (&["--state", "queued", "--sort", "-created", "--limit", "1"], &["a"]),
        (&["--sort", "-spec.train.lr", "--limit", "1"], &["a"]),
        (&["--created-before", "2020-01-01T00:00:00Z"], &[]),
        (&["--name", "OLD"], &["holder"]),
    ];
    for (arguments, expected) in cases {
        assert_eq!(names(&listed(arguments)), expected, "{arguments:?}");
    }
    server.cli(&["show", "b"]).assert_prints(&["vision", "file, one, two"]);
    assert!(server.cli(&["list", "--project", "other"]).ok().contains("no job matches"));
    server.cli(&["list", "--sort", "nam"]).assert_usage_error(&["did you mean \"name\"?"]);
    server.cli(&["list", "--state", "running,done"]).assert_usage_error(&["done"]);

    // The list page shows and filters projects.
    let page = server.http.get(format!("{}/jobs?project=vision", server.url)).send().await.expect("a page");
    let page = page.text().await.expect("HTML");
    assert!(page.contains("data-state=\"queued\"") && page.contains("· vision"), "{page}");
    assert!(!page.contains(">holder<"), "{page}");
    server.stop().await;
}
