//! Links between slots and machines. Jobs get the fastest links.

use crate::{
    agent::Agent,
    gangs::{hello_at, register_dataset},
    test_server::TestServer,
};
use lockstep_protocol::agent::FromAgent;
use serde_json::json;

#[tokio::test]
async fn a_job_over_several_machines_gets_the_fastest_links() {
    let server = TestServer::new().await;
    register_dataset(&server).await;
    let hello_with_link = |name: &str, address: &str, mbits: Option<u32>| {
        let mut hello = hello_at(name, 2, Vec::new(), address);
        if let FromAgent::Hello { machine, .. } = &mut hello {
            machine.interface_mbits = mbits;
            // One group repeats a slot and has a slot that does not exist. The other group has only one slot.
            machine.nvlink_groups = if name == "b" { vec![vec![0, 1, 1, 7], vec![0]] } else { Vec::new() };
        }
        hello
    };
    let _slow = Agent::connect(&server, hello_with_link("a", "10.0.0.1", Some(1000))).await.unwrap();
    let mut fast = Agent::connect(&server, hello_with_link("b", "10.0.0.2", Some(100_000))).await.unwrap();
    let _unknown = Agent::connect(&server, hello_with_link("c", "10.0.0.3", None)).await.unwrap();
    let mut also_fast =
        Agent::connect(&server, hello_with_link("d", "10.0.0.4", Some(25_000))).await.unwrap();
    let (_, machines) = server.get("/agents").await;
    let links = |name: &str| {
        let mut machines = machines["agents"].as_array().unwrap().iter();
        machines.find(|machine| machine["name"] == name).unwrap()["links"].clone()
    };
    assert_eq!(links("a"), "network 1 Gbit/s");
    assert_eq!(links("b"), "network 100 Gbit/s · NVLink joins slots 0 1");
    assert!(links("c").is_null(), "{machines:#}");
    let job = server.submit(|s| s["parallel"]["ranks"] = json!(4)).await;
    let (first_start, second_start) = (fast.expect_start().await, also_fast.expect_start().await);
    assert_eq!((first_start.attempt.job, second_start.attempt.job), (job.id.clone(), job.id.clone()));
    let (_, job) = server.get(&format!("/jobs/{}", job.id)).await;
    assert_eq!(job["agents"], json!(["b", "d"]), "{job:#}");
}
