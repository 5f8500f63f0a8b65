//! Copies of a dataset that differ: before a rank starts, an error names the machine whose copy differs from the registered dataset.

use crate::{
    full::hosts::Site,
    pictures,
    separate_disks::{self, Machine},
    server::{Agents, Folder, Server, training_permit},
    specs,
};
use serde_json::json;
use std::{fs, path::Path};

/// Makes the second half of the training pictures black, with the same number and sizes of files.
fn damage(dataset: &Path) {
    let images = dataset.join("train-images-idx3-ubyte");
    let mut bytes = fs::read(&images).expect("the pictures");
    let half = bytes.len() / 2;
    bytes[half..].fill(0);
    fs::write(&images, bytes).expect("the pictures");
}

#[tokio::test]
async fn the_machine_with_a_damaged_copy_is_named_at_the_first_start() {
    let _permit = training_permit().await;
    let (mut site, _) = Site::with_reference_weights(3).await;
    let damaged = Folder::new();
    let copy = pictures::idx_dataset(damaged.path(), 160, 16);
    damage(&copy);
    let option = format!("pictures={}", copy.display());
    site.join(1, "h1", 1);
    site.join_with(2, "h2", 2, &[], &["--dataset", &option]);
    site.join(3, "h3", 1);
    site.until_online(&["h1", "h2", "h3"]).await;
    let failure = async |site: &Site, ranks: u32| {
        let id = site.submit_ranks(ranks, 20).await;
        site.until("the job has failed", async || {
            let now = site.get(&format!("/jobs/{id}")).await;
            assert_ne!(now["state"], "succeeded", "{now:#}");
            now["state"] == "failed"
        })
        .await;
        let job = site.get(&format!("/jobs/{id}")).await;
        (job["reason"].as_str().expect("a reason").to_owned(), job)
    };
    for _ in 0..3 {
        let (why, job) = failure(&site, 4).await;
        assert_eq!(job["agents"].as_array().map(Vec::len), Some(3), "{job:#}");
        assert!(why.contains("on the machine h2: the dataset"), "{why}");
        assert!(why.contains("differs from the dataset that was registered as \"pictures\""), "{why}");
        assert!(!why.contains("h1") && !why.contains("h3"), "{why}");
    }
    // Also with a single machine, when there is no other copy to compare with.
    site.leave("h1");
    site.leave("h3");
    site.until_online(&["h2"]).await;
    let (why, job) = failure(&site, 2).await;
    assert_eq!(job["agents"], json!(["h2"]));
    assert!(why.contains("on the machine h2") && why.contains("was registered"), "{why}");
}

/// The server's own files may change after their registration. Then it is unknown which of two machines has the right copy.
#[tokio::test]
async fn both_machines_are_named_if_the_right_copy_is_unknown() {
    let _permit = training_permit().await;
    let server = Server::start_with(Agents::Local { cpu_slots: 1 }).await;
    let here = server.folder().path().join("here");
    let dataset = pictures::idx_dataset(&here, 640, 64);
    let as_registered = Folder::new();
    let copy = pictures::idx_dataset(as_registered.path(), 640, 64);
    server.register("fashion", &dataset).await;
    damage(&dataset);
    let option = format!("fashion={}", copy.display());
    let _other = Machine::start_without(&server, "machine-b", 1, &[], &["--dataset", &option]);
    separate_disks::until_online(&server, 2).await;
    let agents = server.get("/agents").await;
    let agents = agents["agents"].as_array().expect("agents").clone();
    let own_agent =
        agents.iter().filter_map(|agent| agent["name"].as_str()).find(|name| *name != "machine-b");
    let own_agent = own_agent.expect("the server's own agent");
    for _ in 0..3 {
        let id = server.submit(&specs::short("both", "fashion", 2, 20)).await;
        let why = server.wait_for_failure(&id).await;
        assert!(why.contains("Lockstep cannot tell which of the two is correct"), "{why}");
        assert!(why.contains(own_agent) && why.contains("machine-b"), "{why}");
    }
    // A job on only the server's own machine uses the server's files.
    server.train(&specs::short("own", "fashion", 1, 20)).await;
}
