//! What Kubernetes refuses, loses and forgets, and what a launch says of it.

use super::{
    pods::{Following, cancel, endless, trains_past},
    server, submit, valid_agent_tokens,
};
use crate::{
    cluster::{Kubernetes, kubernetes_rules},
    server::{Finished, Server, number, turn},
};
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs};

/// After which the API server ends a watch.
const WATCH_SECS: f64 = 2.0;

#[tokio::test]
async fn a_launch_follows_an_api_server_that_was_away_and_forgot() {
    let _turn = turn().await;
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("away", 2)).await;
    // The answers to the first two requests that make something are lost on the way.
    cluster.act("state", json!({"lost": 2, "watch_secs": WATCH_SECS})).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &["--nodes", "2"]));
    trains_past(&server, &id, 1, 0).await;
    assert_eq!(cluster.objects("Job").await.len(), 1);
    following.says(&server, "2 of 2 pods are running").await;
    // Twice before, when answers were lost; more often on a machine so busy that answers came late.
    let times = |words: &str| following.said().matches(words).count();
    let (away, back) = ("API server does not answer", "API server answers again");
    server.until("its answers come", async |_: &Server| times(back) >= 2 && times(back) == times(away)).await;
    // Where nothing happens it watches all the time, and sees what happens then.
    let watches = async || {
        let all = cluster.act("objects", json!({})).await;
        all["watches"].as_array().expect("times").iter().filter_map(Value::as_f64).collect::<Vec<_>>()
    };
    let first = watches().await.len();
    server.until("Jobs are watched six times", async |_: &Server| watches().await.len() >= first + 6).await;
    let mut gaps: Vec<_> = watches().await[first..].windows(2).map(|two| two[1] - two[0]).collect();
    gaps.sort_by(f64::total_cmp);
    assert!(gaps[gaps.len() - 2] < WATCH_SECS + 4.0, "no pause that grows: {gaps:?}");
    let before = times(away);
    cluster.act("away", json!({"secs": 5, "forget": true})).await;
    server.until("it is away", async |_: &Server| times(away) > before).await;
    server.until("it is back", async |_: &Server| times(back) == times(away)).await;
    // A node has too little memory; another pod continues, and the Job does not count it as failed.
    let at = number(&trains_past(&server, &id, 1, 0).await["attempt"]);
    cluster.act("evict", json!({})).await;
    following.says(&server, "was evicted from its node: The node was low on resource: memory.").await;
    trains_past(&server, &id, at + 1, 0).await;
    let attempt = number(&server.job(&id).await["attempt"]);
    cluster.act("oom", json!({})).await;
    following.says(&server, "was killed because its memory was used up (OOMKilled)").await;
    let job = trains_past(&server, &id, attempt + 1, 0).await;
    assert_eq!(job["state"], "running");
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["status"]["failed"], 1, "one that was killed, and none that was evicted: {job:#}");
    cancel(&server, &cluster, &id, following).await;
    drop(cluster);
    server.stop().await;
}

#[tokio::test]
async fn an_api_server_that_forgets_immediately_is_queried_ever_less_often() {
    let _turn = turn().await;
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("expired", 1)).await;
    cluster.act("state", json!({"expired": true})).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &[]));
    let lists = async || {
        let all = cluster.act("objects", json!({})).await;
        all["lists"].as_array().expect("times").iter().filter_map(Value::as_f64).collect::<Vec<_>>()
    };
    server.until("Jobs are listed four times", async |_: &Server| lists().await.len() >= 4).await;
    let times = lists().await;
    // Half a second, one second, two.
    assert!(times[3] - times[0] > 3.0, "{times:?}");
    cluster.act("state", json!({"expired": false})).await;
    following.says(&server, "1 of 1 pods are running").await;
    cancel(&server, &cluster, &id, following).await;
    drop(cluster);
    server.stop().await;
}

#[tokio::test]
async fn kueue_starts_queued_jobs_and_launches_say_why_pods_wait() {
    let _turn = turn().await;
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
    following.says(&server, "waits in Kueue's queue team-a").await;
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "team-a");
    assert_eq!(job["spec"]["suspend"], true, "{job:#}");
    assert!(cluster.objects("Pod").await.is_empty());
    cluster.act("suspend", json!({"suspend": false})).await;
    trains_past(&server, &id, 1, 0).await;
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
        following.says(&server, words).await;
        cancel(&server, &cluster, &id, following).await;
    }
    drop(cluster);
    server.stop().await;
}

#[tokio::test]
async fn errors_of_kubernetes_are_reported_and_nothing_is_left() {
    let _turn = turn().await;
    let server = server().await;
    let mut rules = kubernetes_rules();
    let without = |rules: &mut Value, resource: &str| {
        for rule in rules.as_array_mut().expect("rules") {
            rule["resources"].as_array_mut().expect("resources").retain(|one| one != resource);
        }
    };
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("refused", 1)).await;
    let fails = |cluster: &Kubernetes, args: &[&str], words: &[&str]| {
        let done = Finished::of(&mut cluster.launch(&server, &id, args));
        assert_ne!(done.status, 0, "{}", done.stdout);
        for words in words {
            assert!(done.stderr.contains(words), "{words:?} is not said: {}", done.stderr);
        }
    };
    // Somebody else's Job has the name.
    Finished::of(&mut cluster.launch(&server, &id, &["--detach"])).ok();
    let name = cluster.objects("Job").await.remove(0)["metadata"]["name"].take();
    cluster.act("suspend", json!({"suspend": true})).await;
    let other = json!({
        "kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": name, "namespace": "theirs"},
        "spec": {"suspend": true, "completions": 1},
    });
    cluster.act("put", other).await;
    fails(&cluster, &["--namespace", "theirs"], &["that does not belong to this job", "--namespace"]);
    fails(&cluster, &["--namespace", "Not_One"], &["--namespace"]);
    fails(&cluster, &["--context", "none-such"], &["none-such"]);
    drop(cluster);
    // Rights that are missing: the Job that was made already does not stay.
    without(&mut rules, "secrets");
    let cluster = Kubernetes::start_with(&server, &rules).await;
    let before = valid_agent_tokens(&server).await;
    fails(&cluster, &[], &["does not let you", "cannot create resource \"secrets\"", "launch-role.yaml"]);
    cluster.until("all of it is gone", |all| all.is_empty()).await;
    assert_eq!(valid_agent_tokens(&server).await, before, "the token for its pod is revoked");
    drop(cluster);
    without(&mut rules, "jobs");
    let cluster = Kubernetes::start_with(&server, &rules).await;
    fails(&cluster, &[], &["does not let you", "launch-role.yaml"]);
    assert_eq!(valid_agent_tokens(&server).await, before, "no token was made");
    drop(cluster);
    server.stop().await;
}

/// Other than by a pod that is evicted, Kubernetes learns of this one's end from nobody.
#[tokio::test]
async fn pods_of_a_dead_node_are_replaced_once_kubernetes_is_told() {
    let _turn = turn().await;
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("node-died", 2)).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &["--nodes", "2"]));
    let at = number(&trains_past(&server, &id, 1, 60).await["step"]);
    let names = async || {
        let pods = cluster.objects("Pod").await;
        pods.iter().map(|pod| pod["metadata"]["name"].to_string()).collect::<BTreeSet<_>>()
    };
    let first = names().await;
    cluster.act("node-dies", json!({"node": "node-1"})).await;
    following.says(&server, "never happens on a lost node: if node-1 is").await;
    following.says(&server, "kubectl taint nodes node-1 node.kubernetes.io/out-of-service").await;
    let attempts = format!("/jobs/{id}/attempts");
    server
        .until("its attempt is over", async |server: &Server| {
            server.get(&attempts).await["attempts"][0]["ended_at"].is_string()
        })
        .await;
    server
        .until("it waits for slots", async |server: &Server| {
            server.get("/queue").await["jobs"][0]["reason"]["words"].to_string().contains("2 slots")
        })
        .await;
    assert_eq!(names().await, first, "nothing replaces it");
    cluster.act("out-of-service", json!({"node": "node-1"})).await;
    let job = trains_past(&server, &id, 2, at).await;
    assert_eq!(job["attempt"], 2, "{job:#}");
    let all = server.get(&attempts).await;
    assert!(all["attempts"][1]["checkpoint"].is_string(), "it does not begin from the start: {all:#}");
    assert_eq!(names().await.difference(&first).count(), 1, "one other pod");
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["status"]["failed"], 0, "{job:#}");
    cancel(&server, &cluster, &id, following).await;
    drop(cluster);
    server.stop().await;
}
