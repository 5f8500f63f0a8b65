//! Errors and lost responses of Kubernetes, and the reports of a launch.

use super::{
    batch::until_past_step,
    endless,
    pods::{Following, cancel},
    server, stop, submit, valid_agent_tokens,
};
use crate::{
    cluster::{Kubernetes, kubernetes_rules},
    server::{Finished, Server, number},
};
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs};

#[tokio::test]
async fn a_launch_continues_after_the_api_server_was_down() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("away", 2)).await;
    // The responses to the first two requests that create objects are lost.
    cluster.act("state", json!({"lost": 2})).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &["--nodes", "2"]));
    until_past_step(&server, &id, 1, 0).await;
    assert_eq!(cluster.objects("Job").await.len(), 1);
    following.wait_for_output(&server, "2 of 2 pods are running").await;
    // The messages appear twice for the lost responses, and more often if a busy machine responds late.
    let count = |words: &str| following.output().matches(words).count();
    let (down, up) = ("API server does not answer", "API server answers again");
    server
        .until("the API server responds", async |_: &Server| count(up) >= 2 && count(up) == count(down))
        .await;
    let before = count(down);
    cluster.act("away", json!({"secs": 5})).await;
    server.until("the API server is down", async |_: &Server| count(down) > before).await;
    server.until("the API server responds again", async |_: &Server| count(up) == count(down)).await;
    // A pod is evicted for lack of memory: another pod continues, and the Job counts no failure.
    let attempt = number(&until_past_step(&server, &id, 1, 0).await["attempt"]);
    cluster.act("evict", json!({})).await;
    following
        .wait_for_output(&server, "was evicted from its node: The node was low on resource: memory.")
        .await;
    until_past_step(&server, &id, attempt + 1, 0).await;
    let attempt = number(&server.job(&id).await["attempt"]);
    cluster.act("oom", json!({})).await;
    following.wait_for_output(&server, "was killed because its memory was used up (OOMKilled)").await;
    let job = until_past_step(&server, &id, attempt + 1, 0).await;
    assert_eq!(job["state"], "running");
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(
        job["status"]["failed"], 1,
        "the killed pod counts as failed, the evicted pod does not: {job:#}"
    );
    cancel(&server, &cluster, &id, following).await;
    stop(cluster, server).await;
}

#[tokio::test]
async fn kueue_starts_queued_jobs_and_launches_say_why_pods_wait() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let template = |name: &str, text: &str| {
        let path = server.folder().path().join(name);
        fs::write(&path, text).expect("a template");
        path.to_str().expect("a path").to_owned()
    };
    let pod = crate::cluster::POD;
    let queued = template("queued.yaml", &pod.replace("team: vision", "kueue.x-k8s.io/queue-name: team-a"));
    let id = submit(&server, &endless("queued", 1)).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &["--template", &queued]));
    following.wait_for_output(&server, "waits in Kueue's queue team-a").await;
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "team-a");
    assert_eq!(job["spec"]["suspend"], true, "{job:#}");
    assert!(cluster.objects("Pod").await.is_empty());
    cluster.act("suspend", json!({"suspend": false})).await;
    until_past_step(&server, &id, 1, 0).await;
    cancel(&server, &cluster, &id, following).await;

    for (name, text, words) in [
        (
            "no-image",
            pod.replace("lockstep:latest", "missing:latest"),
            "cannot start: ImagePullBackOff: Back-off pulling image",
        ),
        (
            "no-node",
            format!("{pod}  nodeSelector: {{nowhere: here}}\n"),
            "waits for a node: Unschedulable: 0/3 nodes are available",
        ),
    ] {
        let path = template("wrong.yaml", &text);
        let id = submit(&server, &endless(name, 1)).await;
        let following = Following::start(&server, cluster.launch(&server, &id, &["--template", &path]));
        following.wait_for_output(&server, words).await;
        cancel(&server, &cluster, &id, following).await;
    }
    stop(cluster, server).await;
}

#[tokio::test]
async fn errors_of_kubernetes_are_reported_and_nothing_is_left() {
    let server = server().await;
    let mut rules = kubernetes_rules();
    let remove_rights = |rules: &mut Value, resource: &str| {
        for rule in rules.as_array_mut().expect("rules") {
            rule["resources"].as_array_mut().expect("resources").retain(|one| one != resource);
        }
    };
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("refused", 1)).await;
    let assert_fails = |cluster: &Kubernetes, args: &[&str], words: &[&str]| {
        let done = Finished::of(&mut cluster.launch(&server, &id, args));
        assert_ne!(done.status, 0, "{}", done.stdout);
        for words in words {
            assert!(done.stderr.contains(words), "no {words:?}: {}", done.stderr);
        }
    };
    // Another user's Job has the name.
    Finished::of(&mut cluster.launch(&server, &id, &["--detach"])).ok();
    let name = cluster.objects("Job").await.remove(0)["metadata"]["name"].take();
    cluster.act("suspend", json!({"suspend": true})).await;
    let others_job = json!({
        "kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": name, "namespace": "theirs"},
        "spec": {"suspend": true, "completions": 1},
    });
    cluster.act("put", others_job).await;
    assert_fails(&cluster, &["--namespace", "theirs"], &["that does not belong to this job", "--namespace"]);
    assert_fails(&cluster, &["--namespace", "Not_One"], &["--namespace"]);
    assert_fails(&cluster, &["--context", "none-such"], &["none-such"]);
    drop(cluster);
    // Rights are missing: the Job that was already created is deleted.
    remove_rights(&mut rules, "secrets");
    let cluster = Kubernetes::start_with(&server, &rules).await;
    let before = valid_agent_tokens(&server).await;
    assert_fails(
        &cluster,
        &[],
        &["does not let you", "cannot create resource \"secrets\"", "launch-role.yaml"],
    );
    cluster.until("all objects are gone", |all| all.is_empty()).await;
    assert_eq!(valid_agent_tokens(&server).await, before, "the token for the pod is revoked");
    drop(cluster);
    remove_rights(&mut rules, "jobs");
    let cluster = Kubernetes::start_with(&server, &rules).await;
    assert_fails(&cluster, &[], &["does not let you", "launch-role.yaml"]);
    assert_eq!(valid_agent_tokens(&server).await, before, "no token was created");
    stop(cluster, server).await;
}

/// Nothing reports the end of a dead node's pod to Kubernetes, unlike the end of an evicted pod.
#[tokio::test]
async fn pods_of_a_dead_node_are_replaced_once_kubernetes_is_told() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("node-died", 2)).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &["--nodes", "2"]));
    let step = number(&until_past_step(&server, &id, 1, 60).await["step"]);
    let names = async || {
        let pods = cluster.objects("Pod").await;
        pods.iter().map(|pod| pod["metadata"]["name"].to_string()).collect::<BTreeSet<_>>()
    };
    let first_names = names().await;
    cluster.act("node-dies", json!({"node": "node-1"})).await;
    following.wait_for_output(&server, "never happens on a lost node: if node-1 is").await;
    following.wait_for_output(&server, "kubectl taint nodes node-1 node.kubernetes.io/out-of-service").await;
    let has_ended = async |server: &Server| server.attempts(&id).await[0]["ended_at"].is_string();
    server.until("the attempt has ended", has_ended).await;
    server
        .until("the job waits for slots", async |server: &Server| {
            server.get("/queue").await["jobs"][0]["reason"]["words"].to_string().contains("2 slots")
        })
        .await;
    assert_eq!(names().await, first_names, "no pod replaces the lost pod");
    cluster.act("out-of-service", json!({"node": "node-1"})).await;
    let job = until_past_step(&server, &id, 2, step).await;
    assert_eq!(job["attempt"], 2, "{job:#}");
    let attempts = server.attempts(&id).await;
    assert!(attempts[1]["checkpoint"].is_string(), "the job continues from a checkpoint: {attempts:#?}");
    assert_eq!(names().await.difference(&first_names).count(), 1, "one new pod");
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["status"]["failed"], 0, "{job:#}");
    cancel(&server, &cluster, &id, following).await;
    stop(cluster, server).await;
}
