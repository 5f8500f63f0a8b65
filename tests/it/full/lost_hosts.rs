//! Lost hosts: one or two at a time are killed, and one is disconnected for longer than its lease.

use crate::{
    full::hosts::{MAX_RECOVERY, STEPS, Site},
    server::{number, signal, training_permit},
    tensors::tensors,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longer than a lease (15 s).
const BEYOND_LEASE: Duration = Duration::from_secs(20);

fn host(name: &Value) -> u32 {
    name.as_str().expect("an agent").trim_start_matches('h').parse().expect("a number")
}

/// How a host is lost.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lost {
    /// Every process on the host is killed.
    Killed,
    /// The host is disconnected.
    CutOff,
}

/// Trains a job that loses the machines of these ranks and continues on others. Returns the lost machines.
async fn lose_machines(site: &Site, ranks: &[usize], how: Lost, reference_weights: &[u8]) -> Vec<u32> {
    let id = site.submit().await;
    site.until_step(&id, 45).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    let lost: Vec<_> = ranks.iter().map(|rank| job["agents"][*rank].clone()).collect();
    let began = Instant::now();
    for host in lost.iter().map(host) {
        match how {
            Lost::CutOff => site.network.set_connected(host, false),
            Lost::Killed => {
                site.network.processes(host).into_iter().for_each(|pid| signal(pid, Signal::KILL));
            }
        }
    }
    let (stepped, from) = site.next_step(&id, 2).await;
    let recovery = stepped - began;
    eprintln!(
        "{} of 4 machines lost ({how:?}): the next step is stored {recovery:.2?} later, from step {from}",
        ranks.len()
    );
    assert!(recovery < MAX_RECOVERY, "{recovery:?}: {}", site.logs());
    assert!(site.last_step(&id, 1).await <= from + 1, "at most one step is repeated");
    let (job, weights) = site.wait_for_success(&id).await;
    assert!(weights == reference_weights, "the same weights after {} machines were lost", ranks.len());
    assert_eq!(job["attempt"], json!(2));
    let agents = job["agents"].as_array().expect("agents");
    assert!(agents.len() == 4 && !agents.iter().any(|agent| lost.contains(agent)), "{agents:?}");
    lost.iter().map(host).collect()
}

#[tokio::test]
async fn a_job_continues_from_the_last_step_after_hosts_are_killed_or_disconnected() {
    let _permit = training_permit().await;
    let (mut site, reference_weights) = Site::with_reference_weights(7).await;
    let mut hosts: Vec<u32> = Vec::new();
    // The two hosts that are cut off have the same two neighbours, which must report both.
    for (joining, ranks, how) in [(1..=5, vec![2], Lost::Killed), (6..=7, vec![1, 3], Lost::CutOff)] {
        for host in joining {
            site.join(host, &format!("h{host}"), 1);
            hosts.push(host);
        }
        let names: Vec<_> = hosts.iter().map(|host| format!("h{host}")).collect();
        site.until_online(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let lost = lose_machines(&site, &ranks, how, &reference_weights).await;
        hosts.retain(|host| !lost.contains(host));
        for host in lost.into_iter().filter(|_| how == Lost::CutOff) {
            site.network.set_connected(host, true);
            site.leave(&format!("h{host}"));
        }
    }

    // Four hosts are left, without a spare.
    let id = site.submit().await;
    site.until_step(&id, 25).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    let cut_off = host(&job["agents"][1]);
    site.network.set_connected(cut_off, false);
    tokio::time::sleep(BEYOND_LEASE).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    assert_eq!(job["attempt"], json!(1), "the job waits for a fourth machine: {job:#}");
    site.network.set_connected(cut_off, true);
    let (_, from) = site.next_step(&id, 2).await;
    assert!(site.last_step(&id, 1).await <= from + 1, "at most one step is repeated");
    let (job, weights) = site.wait_for_success(&id).await;
    assert_eq!((&job["attempt"], job["agents"].as_array().map(Vec::len)), (&json!(2), Some(4)));
    assert!(weights == reference_weights, "the same weights after an outage longer than the lease");
}

#[tokio::test]
async fn a_job_without_one_host_ends_on_fewer_ranks_with_the_same_weights() {
    let _permit = training_permit().await;
    let (mut site, reference_weights) = Site::with_reference_weights(2).await;
    site.join(1, "h1", 2);
    site.join(2, "h2", 2);
    site.until_online(&["h1", "h2"]).await;
    let recovery = json!({"recovery": {"min_ranks": 1, "wait_seconds": 3}});
    let id = site.submit_with(4, STEPS, recovery).await;
    site.until_step(&id, 45).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    assert_eq!(job["agents"], json!(["h1", "h2"]));
    site.network.kill(2);
    let (_, from) = site.next_step(&id, 2).await;
    assert!(site.last_step(&id, 1).await <= from + 1, "at most one step is repeated");
    let (job, weights) = site.wait_for_success(&id).await;
    assert_eq!((&job["attempt"], &job["agents"]), (&json!(2), &json!(["h1"])));
    let history = site.get(&format!("/jobs/{id}/history")).await;
    let entries = history["entries"].as_array().expect("entries");
    let second = entries.iter().find(|entry| entry["what"] == "started" && entry["attempt"] == 2);
    let why = &second.expect("the second attempt")["reason"];
    assert_eq!((&why["code"], number(&why["ranks"])), (&json!("fewer_ranks"), 2), "{history:#}");
    // Only the weights are compared, as the file's metadata has the number of ranks.
    assert!(tensors(&weights) == tensors(&reference_weights), "two ranks end with the weights of four");
}
