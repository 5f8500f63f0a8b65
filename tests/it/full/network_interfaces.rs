//! Hosts with two network interfaces: ranks connect over the interface of --interface or of NCCL_SOCKET_IFNAME.

use crate::{full::hosts::Site, server::training_permit};
use serde_json::json;

/// A lower bound of the gradients that each host sends to the other during a job.
const MIN_GRADIENT_BYTES: u64 = 1 << 20;

#[tokio::test]
async fn the_ring_uses_the_interface_of_nccl_s_variable_unless_an_option_names_another() {
    let _permit = training_permit().await;
    let (mut site, reference_weights) = Site::with_reference_weights(2).await;
    for host in [1, 2] {
        site.network.add_second(host);
    }
    // The first agent names the interface exactly, the second by the start of its name.
    site.join_with(1, "h1", 2, &[("NCCL_SOCKET_IFNAME", "=eth1")], &[]);
    site.join_with(2, "h2", 2, &[("NCCL_SOCKET_IFNAME", "wlan,eth1")], &[]);
    site.until_online(&["h1", "h2"]).await;
    let before = [1, 2].map(|host| site.network.sent_bytes(host, "eth1"));
    let id = site.submit().await;
    let (job, weights) = site.wait_for_success(&id).await;
    assert_eq!(job["agents"], json!(["h1", "h2"]));
    assert!(weights == reference_weights, "the same weights");
    for (host, before) in [1, 2].into_iter().zip(before) {
        let sent = site.network.sent_bytes(host, "eth1") - before;
        assert!(sent > MIN_GRADIENT_BYTES, "host {host} has sent {sent} bytes by eth1");
        let address = site.network.second_address(host);
        let words = format!("listen at {address} (eth1), named by NCCL_SOCKET_IFNAME");
        assert_eq!(site.logs().matches(&format!("ranks {words}")).count(), 1, "logged once: {}", site.logs());
        let ranks = ["0, 1", "2, 3"][host as usize - 1];
        assert_eq!(site.count_in_log(&id, &format!("ranks {ranks} {words}")), 1, "in the job's log");
    }
    for name in ["h1", "h2"] {
        site.leave(name);
    }

    site.join_with(1, "h3", 2, &[("NCCL_SOCKET_IFNAME", "=eth1")], &["--interface", "eth0"]);
    site.join_with(2, "h4", 2, &[("NCCL_SOCKET_IFNAME", "^eth1")], &[]);
    site.until_online(&["h3", "h4"]).await;
    for (host, named) in [(1, "named by --interface"), (2, "from the route to the server")] {
        let words = format!("ranks listen at {} (eth0), {named}", site.network.address(host));
        assert!(site.logs().contains(&words), "{words}: {}", site.logs());
    }
}

#[tokio::test]
async fn ranks_pass_the_agent_s_interface_to_nccl_unless_the_user_set_one() {
    let _permit = training_permit().await;
    let mut site = Site::new().await;
    for host in [1, 2] {
        site.network.add(host);
        site.network.add_second(host);
    }
    site.join_with(1, "h1", 2, &[], &["--interface", "eth1"]);
    // The user allows NCCL both interfaces; ranks listen at the interface of the option.
    site.join_with(2, "h2", 2, &[("NCCL_SOCKET_IFNAME", "eth")], &["--interface", "eth1"]);
    site.until_online(&["h1", "h2"]).await;
    site.register_pictures();
    let id = site.submit_ranks(4, 1_000_000).await;
    site.until_step(&id, 5).await;
    let [first, second] = [1, 2].map(|host| site.network.variable_of_ranks(host, "NCCL_SOCKET_IFNAME"));
    assert_eq!(first, ["=eth1", "=eth1"], "exactly this name, no prefix");
    assert_eq!(second, ["eth", "eth"]);
    site.cli(&["cancel", &id]).ok();
}
