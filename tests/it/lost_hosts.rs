//! Hosts that are lost with all that runs on them, one and two at a time, and one that is cut off for longer than its lease.

use crate::{
    hosts::{MENDED, Site},
    server::turn,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// More than a lease, which is 15 s.
const BEYOND_LEASE: Duration = Duration::from_secs(20);

fn host(name: &Value) -> u32 {
    name.as_str().expect("an agent").trim_start_matches('h').parse().expect("a number")
}

/// A job loses these of its machines while it trains, and continues on others. Returns those that were lost.
async fn loses(site: &Site, ranks: &[usize], model: &[u8]) -> Vec<u32> {
    let id = site.submit().await;
    site.at_step(&id, 45).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    let lost: Vec<_> = ranks.iter().map(|rank| job["agents"][*rank].clone()).collect();
    let killed = Instant::now();
    lost.iter().for_each(|name| site.network.kill(host(name)));
    let (stepped, from) = site.next_step(&id, 2).await;
    let mended = stepped - killed;
    eprintln!(
        "{} of 4 machines killed: the next step is stored {mended:.2?} later, from step {from}",
        ranks.len()
    );
    assert!(mended < MENDED, "{mended:?}: {}", site.logs());
    assert!(site.last_step(&id, 1).await <= from + 1, "at most one step is done twice");
    let (job, same) = site.succeeded(&id).await;
    assert!(same == model, "the same weights after {} machines were killed", ranks.len());
    assert_eq!(job["attempt"], json!(2));
    let agents = job["agents"].as_array().expect("agents");
    assert!(agents.len() == 4 && !agents.iter().any(|agent| lost.contains(agent)), "{agents:?}");
    lost.iter().map(host).collect()
}

#[tokio::test]
async fn a_job_continues_from_the_last_step_when_hosts_are_killed_or_cut_off_for_longer_than_their_lease() {
    let _turn = turn().await;
    let (mut site, model) = Site::measured(7).await;
    let mut hosts: Vec<u32> = Vec::new();
    for (joining, ranks) in [(1..=5, vec![2]), (6..=7, vec![1, 3])] {
        for host in joining {
            site.join(host, &format!("h{host}"), 1);
            hosts.push(host);
        }
        let names: Vec<_> = hosts.iter().map(|host| format!("h{host}")).collect();
        site.online(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let lost = loses(&site, &ranks, &model).await;
        hosts.retain(|host| !lost.contains(host));
    }

    // Four are left, and there is no spare.
    let id = site.submit().await;
    site.at_step(&id, 25).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    let cut_off = host(&job["agents"][1]);
    site.network.plug(cut_off, false);
    tokio::time::sleep(BEYOND_LEASE).await;
    let job = site.get(&format!("/jobs/{id}")).await;
    assert_eq!(job["attempt"], json!(1), "it waits for a fourth machine: {job:#}");
    site.network.plug(cut_off, true);
    let (_, from) = site.next_step(&id, 2).await;
    assert!(site.last_step(&id, 1).await <= from + 1, "at most one step is done twice");
    let (job, same) = site.succeeded(&id).await;
    assert_eq!((&job["attempt"], job["agents"].as_array().map(Vec::len)), (&json!(2), Some(4)));
    assert!(same == model, "the same weights after it was cut off for longer than its lease");
}
