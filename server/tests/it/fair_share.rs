//! Fair share between owners, and a queue of more than a thousand jobs, all of which the scheduler considers. `queue.rs` tests fair share
//! between projects.

use crate::{
    agent::{Agent, server_with_agent},
    test_server::{TestServer, spec, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptRef, Ending},
    job::{Job, JobId},
};
use lockstep_server::FairShare;
use serde_json::json;

/// Waits until these jobs are first in the queue, in this order.
async fn wait_for_order(server: &TestServer, jobs: &[&Job]) {
    wait_until("the jobs are first in the queue", async || {
        for (job, place) in jobs.iter().zip(1..) {
            let (_, history) = server.get(&format!("/jobs/{}/history", job.id)).await;
            if history["queue"]["place"] != place {
                return false;
            }
        }
        true
    })
    .await;
}

/// Ends an attempt, and returns the attempt that starts next.
async fn end_and_start_next(agent: &mut Agent, attempt: &AttemptRef) -> AttemptRef {
    agent.end(attempt, Ending::Succeeded { step: 1 }).await;
    agent.expect_start().await.attempt
}

#[tokio::test]
async fn fair_share_alternates_owners_and_without_it_the_oldest_job_is_first() {
    // The setting, and the owner whose waiting job is first. Owner 0 has two running jobs and the older waiting job.
    for (fair_share, first) in [(FairShare::Owner, 1), (FairShare::Off, 0)] {
        let server = TestServer::with(|c| c.fair_share = fair_share).await;
        let mut agent = Agent::join_with_dataset(&server, 2).await;
        let mut clients = Vec::new();
        for name in ["nightly", "weekly"] {
            clients.push(server.submitter(name).await);
        }
        let submit_as = async |owner: usize, ranks: u32| {
            let mut spec = spec();
            spec["parallel"]["ranks"] = json!(ranks);
            let request = clients[owner].post(server.url("/api/v1/jobs")).json(&spec);
            let (status, body) = server.send(request).await;
            assert_eq!(status, 201, "{body}");
            serde_json::from_value::<Job>(body).unwrap()
        };
        // Jobs of both slots: between two of them, no owner uses a slot.
        submit_as(0, 2).await;
        let mut attempt = agent.expect_start().await.attempt;
        let waiting = [submit_as(0, 2).await, submit_as(1, 2).await];
        wait_for_order(&server, &[&waiting[first], &waiting[1 - first]]).await;
        for job in [first, 1 - first] {
            attempt = end_and_start_next(&mut agent, &attempt).await;
            assert_eq!(attempt.job, waiting[job].id);
        }
        submit_as(0, 1).await;
        attempt = end_and_start_next(&mut agent, &attempt).await;
        submit_as(0, 1).await;
        agent.expect_start().await;
        let waiting = [submit_as(0, 1).await, submit_as(1, 1).await];
        wait_for_order(&server, &[&waiting[first], &waiting[1 - first]]).await;
        assert_eq!(end_and_start_next(&mut agent, &attempt).await.job, waiting[first].id);
        server.stop().await;
    }
}

#[tokio::test]
async fn a_job_behind_more_than_a_thousand_others_is_considered() {
    let (server, mut agent) = server_with_agent(2).await;
    let mut large = spec();
    large["parallel"]["ranks"] = json!(4);
    // Without `launched=true`, the server would refuse a job that has more ranks than any machine has slots.
    let body = server.create("/jobs?launched=true", &large).await;
    let id = body["id"].as_str().unwrap();
    server.wait_for_reason(id, "needs 4 slots").await;
    let ids: Vec<_> = (0..1200).map(|_| format!("('{}')", JobId::generate())).collect();
    let columns = "name, state, cause, reason, priority, spec, ranks, created_at, last_seq, owner";
    let copies = format!(
        "WITH copies (copy) AS (VALUES {}) INSERT INTO jobs (id, {columns}) SELECT copy, {columns} FROM copies, jobs \
         WHERE id = '{id}'",
        ids.join(", ")
    );
    assert_eq!(server.execute(&copies).await, 1200);
    let small = server.submit(|s| s["parallel"]["ranks"] = json!(1)).await;
    assert_eq!(agent.expect_start().await.attempt.job, small.id);
    server.stop().await;
}
