//! The end of a launch's pods: they wait until their checkpoints are on the server, even if it is down, and only the agents' tokens are revoked.

use super::{
    batch::until_past_step,
    endless,
    pods::{Following, of_kind},
    server, stop, submit, valid_agent_tokens,
};
use crate::{
    cluster::Kubernetes,
    separate_disks::uploaded_step,
    server::{Finished, Server, number},
};
use serde_json::{Value, json};
use std::{fs, time::Duration};

/// Long enough for several failed requests of a launch, which polls the server each second.
const SEVERAL_POLLS: Duration = Duration::from_secs(5);

/// The UIDs of all pods.
async fn pods(cluster: &Kubernetes) -> Vec<Value> {
    cluster.objects("Pod").await.iter().map(|pod| pod["metadata"]["uid"].clone()).collect()
}

#[tokio::test]
async fn pods_of_a_paused_job_run_until_its_checkpoint_is_on_the_server() {
    let mut server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("slow-upload", 1)).await;
    // A file in place of the folder for uploads: the server cannot store uploads, as with a full disk.
    let uploads = server.job_dir(&id).join("uploads");
    fs::write(&uploads, "").expect("a file");
    let following = Following::start(&server, cluster.launch(&server, &id, &[]));
    let step = number(&until_past_step(&server, &id, 1, 60).await["step"]);
    let first_pods = pods(&cluster).await;
    assert_eq!(first_pods.len(), 1);
    server.cli(&["pause", &id]).ok();
    following.wait_for_output(&server, "is still being uploaded to the server").await;
    server.kill_serve();
    tokio::time::sleep(SEVERAL_POLLS).await;
    server.start_serve().await;
    assert_eq!(cluster.objects("Job").await[0]["spec"]["suspend"], false, "{}", following.output());
    // A job that is resumed during the upload continues in the same pod.
    server.cli(&["resume", &id]).ok();
    until_past_step(&server, &id, 2, step).await;
    assert_eq!(pods(&cluster).await, first_pods);
    server.cli(&["pause", &id]).ok();
    fs::remove_file(&uploads).expect("the file");
    cluster.until("the Job is suspended", |all| of_kind(all, "Job")[0]["spec"]["suspend"] == true).await;
    assert!(uploaded_step(&server, &id).await >= step, "the checkpoint is on the server before the pod ends");
    server.cli(&["cancel", &id]).ok();
    cluster.until("all objects are gone", |all| all.is_empty()).await;
    following.end();
    assert_eq!(valid_agent_tokens(&server).await, 0);
    stop(cluster, server).await;
}

#[tokio::test]
async fn a_deleted_kubernetes_job_is_reported_after_the_server_returns() {
    let mut server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("ended", 1)).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &[]));
    until_past_step(&server, &id, 1, 0).await;
    following.wait_for_output(&server, "1 of 1 pods are running").await;
    server.kill_serve();
    cluster.act("drop", json!({"resource": "jobs"})).await;
    tokio::time::sleep(SEVERAL_POLLS).await;
    server.start_serve().await;
    following.wait_for_output(&server, "was deleted, and the job is").await;
    let (status, output) = following.end();
    assert!(!status.success() && output.contains("starts agents for it again"), "{output}");
    server.cli(&["cancel", &id]).ok();
    cluster.until("all objects are gone", |all| all.is_empty()).await;
    stop(cluster, server).await;
}

#[tokio::test]
async fn only_tokens_of_the_job_s_own_agents_are_revoked() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("tokens", 1)).await;
    Finished::of(&mut cluster.launch(&server, &id, &["--detach"])).ok();
    until_past_step(&server, &id, 1, 0).await;
    let job = cluster.objects("Job").await.remove(0);
    let own = job["metadata"]["annotations"]["lockstep/tokens"].as_str().expect("a token's id").to_owned();
    let create_token = async |token: Value| {
        let created = server.post("/tokens", &token).await;
        assert!(created.status.is_success(), "{}", created.text);
        created.json()["id"].as_str().expect("an id").to_owned()
    };
    let agent = create_token(json!({"name": "launch-000000-0", "scope": "agent", "agent": "node7"})).await;
    let similar = format!("launch-{}-9", &id[id.len() - 6..]);
    let program = create_token(json!({"name": similar, "scope": "submit"})).await;
    // A client that may change the Job's annotations must not be able to revoke other tokens.
    let tokens = format!("{own},{agent},{program},local,../tokens/{agent}");
    cluster.act("annotate", json!({"lockstep/tokens": tokens})).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &[]));
    following.wait_for_output(&server, "of an earlier launch exists").await;
    server.cli(&["cancel", &id]).ok();
    cluster.until("all objects are gone", |all| all.is_empty()).await;
    following.end();
    let all = server.get("/tokens?limit=200").await;
    let is_revoked = |id: &str| {
        let mut all = all["tokens"].as_array().expect("tokens").iter();
        all.find(|token| token["id"] == id).expect("the token")["revoked_at"].is_string()
    };
    assert_eq!([&own, &agent, &program].map(|id| is_revoked(id)), [true, false, false]);
    stop(cluster, server).await;
}

#[tokio::test]
async fn a_partly_created_kubernetes_job_is_deleted_with_its_token() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("half-made", 1)).await;
    Finished::of(&mut cluster.launch(&server, &id, &["--detach"])).ok();
    let first = cluster.objects("Job").await[0]["metadata"]["uid"].take();
    cluster.act("drop", json!({"resource": "secrets"})).await;
    let done = Finished::of(&mut cluster.launch(&server, &id, &["--detach"]));
    done.ok();
    assert!(done.stderr.contains("of an earlier launch is removed first"), "{}", done.stderr);
    assert_ne!(cluster.objects("Job").await[0]["metadata"]["uid"], first);
    assert_eq!(valid_agent_tokens(&server).await, 1, "the new pod's token");
    server
        .until("the new pod runs the job", async |server: &Server| {
            server.job(&id).await["state"] == "running"
        })
        .await;
    stop(cluster, server).await;
}
