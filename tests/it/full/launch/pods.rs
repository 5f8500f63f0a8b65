//! Agents in the pods of a Kubernetes Job, with a simulated API server.

use super::{agents_of, batch::until_past_step, endless, server, short, stop, submit, valid_agent_tokens};
use crate::{
    cluster::{Kubernetes, command_lines, find_program},
    pages,
    separate_disks::uploaded_step,
    server::{Finished, Server, lockstep, number},
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, ExitStatus},
};

/// A running `lockstep launch` that follows its job.
pub(super) struct Following {
    child: Child,
    log: PathBuf,
}

impl Following {
    pub(super) fn start(server: &Server, mut command: Command) -> Self {
        let log = server.folder().path().join("launch.log");
        let file = File::create(&log).expect("a log");
        let child = command.stdout(file.try_clone().expect("a log")).stderr(file).spawn().expect("lockstep");
        Self { child, log }
    }

    pub(super) fn output(&self) -> String {
        fs::read_to_string(&self.log).expect("its log")
    }

    /// Waits until the launch has printed these words.
    pub(super) async fn wait_for_output(&self, server: &Server, words: &str) {
        server
            .until(&format!("the launch says {words:?}"), async |_: &Server| self.output().contains(words))
            .await;
    }

    pub(super) fn end(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().expect("its end");
        (status, self.output())
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Cancels a followed job, and waits until its Job is deleted or complete.
pub(super) async fn cancel(server: &Server, cluster: &Kubernetes, id: &str, following: Following) {
    server.cli(&["cancel", id]).ok();
    // If the pods end before the launch deletes the Job, the completed Job stays for a while.
    let is_complete = |job: &Value| {
        let conditions = job["status"]["conditions"].as_array();
        conditions
            .is_some_and(|all| all.iter().any(|one| one["type"] == "Complete" && one["status"] == "True"))
    };
    cluster
        .until("the Job is gone or complete", |all| of_kind(all, "Job").into_iter().all(is_complete))
        .await;
    following.end();
}

/// The objects of a kind.
pub(super) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// Whether any process has these words on its command line or in its environment.
fn is_in_any_process(words: &str) -> bool {
    let entries = fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let environments = entries.filter_map(|entry| fs::read(entry.path().join("environ")).ok());
    let mut environments = environments.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    environments.any(|text| text.contains(words)) || command_lines().iter().any(|line| line.contains(words))
}

#[tokio::test]
async fn two_pods_train_a_job_and_end_after_it() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &short("Over two pods")).await;
    let done = Finished::of(&mut cluster.launch(&server, &id, &["--nodes", "2"]));
    done.ok();
    server.wait_for_success(&id).await;
    let agents = agents_of(&server, &id);
    for index in [0, 1] {
        let name = format!("launch-{}-{index}", &id[id.len() - 6..]);
        assert!(agents.contains(&name), "both pods ran it: {agents}");
    }
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agents' tokens are revoked");
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["status"]["conditions"][0]["type"], "Complete", "{job:#}");
    assert_eq!(job["status"]["failed"], 0, "{job:#}");
    assert_eq!((&job["spec"]["completions"], &job["spec"]["parallelism"]), (&json!(2), &json!(2)));
    let name = job["metadata"]["name"].as_str().expect("a name");
    assert!(name.starts_with("lockstep-over-two-pods-"), "{name}");
    for kind in ["Service", "Secret"] {
        let owner = &cluster.objects(kind).await.remove(0)["metadata"]["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Job"), &job["metadata"]["uid"]), "{kind}");
    }
    assert_eq!(cluster.act("objects", json!({})).await["refused"], json!([]), "the role allows all requests");
    stop(cluster, server).await;
}

/// Without the role, a launch is refused.
#[tokio::test]
async fn the_role_for_launches_is_sufficient() {
    if find_program("kubectl").is_none() {
        eprintln!("skipped: kubectl is missing (kubernetes-client in Debian)");
        return;
    }
    let server = server().await;
    let cluster = Kubernetes::start_with(&server, &json!([])).await;
    let id = submit(&server, &short("By a role")).await;
    let launch = || Finished::of(&mut cluster.launch(&server, &id, &["--namespace", "lockstep"]));
    launch().assert_fails(2, &["Kubernetes does not let you"]);
    cluster
        .run_line(&pages::line("docs/launchers.md", "kubectl "))
        .assert_prints(&["role.rbac.authorization.k8s.io/lockstep-launch created"]);
    launch().ok();
    server.wait_for_success(&id).await;
    stop(cluster, server).await;
}

#[tokio::test]
async fn pods_of_a_paused_job_end_with_a_checkpoint_and_return() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("paused", 2)).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &["--nodes", "2"]));
    let step = number(&until_past_step(&server, &id, 1, 10).await["step"]);
    let secret = cluster.objects("Secret").await.remove(0)["secret"]["bundle.json"].take();
    let bundle: Value = serde_json::from_str(secret.as_str().expect("a description")).expect("JSON");
    for node in bundle["nodes"].as_array().expect("agents") {
        assert!(!is_in_any_process(node["token"].as_str().expect("a token")), "a token is visible");
    }
    cluster.act("annotate", json!({"somebody": "else"})).await;
    server.cli(&["pause", &id]).ok();
    cluster
        .until("the Job is suspended and its pods have ended", |all| {
            of_kind(all, "Job")[0]["spec"]["suspend"] == true && of_kind(all, "Pod").is_empty()
        })
        .await;
    let job = cluster.objects("Job").await.remove(0);
    assert_eq!(job["metadata"]["annotations"]["somebody"], "else", "other clients' annotations are kept");
    assert_eq!(job["status"]["failed"], 0, "{job:#}");
    let saved_step = uploaded_step(&server, &id).await;
    assert!(saved_step >= step, "{saved_step} and {step}");
    server.cli(&["resume", &id]).ok();
    let step = number(&until_past_step(&server, &id, 2, saved_step).await["step"]);
    // A Job that another client suspends stays suspended, with a checkpoint.
    cluster.act("suspend", json!({"suspend": true})).await;
    server.wait_for_job(&id, "the job is queued again", |job| job["state"] == "queued").await;
    // The agent uploads the checkpoint before it ends, as its disk is deleted with the pod.
    server
        .until("the checkpoint is uploaded", async |server: &Server| uploaded_step(server, &id).await >= step)
        .await;
    let saved_step = uploaded_step(&server, &id).await;
    following.wait_for_output(&server, ": suspended").await;
    cluster.act("suspend", json!({"suspend": false})).await;
    until_past_step(&server, &id, 3, saved_step).await;
    server.cli(&["cancel", &id]).ok();
    cluster.until("all objects are gone", |all| all.is_empty()).await;
    let (status, output) = following.end();
    assert!(!status.success() && output.contains("the job is paused: Kubernetes' Job"), "{output}");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agents' tokens are revoked");
    stop(cluster, server).await;
}

#[tokio::test]
async fn a_second_launch_takes_over_the_pods_of_the_first() {
    let server = server().await;
    let cluster = Kubernetes::start(&server).await;
    let id = submit(&server, &endless("twice", 1)).await;
    Finished::of(&mut cluster.launch(&server, &id, &["--detach"])).ok();
    until_past_step(&server, &id, 1, 0).await;
    let uid = cluster.objects("Job").await.remove(0)["metadata"]["uid"].take();
    let tokens = valid_agent_tokens(&server).await;
    let following = Following::start(&server, cluster.launch(&server, &id, &[]));
    following.wait_for_output(&server, "of an earlier launch exists").await;
    following.wait_for_output(&server, "1 of 1 pods are running").await;
    assert_eq!(cluster.objects("Job").await.remove(0)["metadata"]["uid"], uid);
    assert_eq!(valid_agent_tokens(&server).await, tokens, "no additional tokens");
    server.cli(&["cancel", &id]).ok();
    cluster.until("all objects are gone", |all| all.is_empty()).await;
    following.end();
    assert_eq!(valid_agent_tokens(&server).await, 0, "the first launch's token is revoked");
    stop(cluster, server).await;
}

#[test]
fn a_dry_run_shows_the_objects_and_templates_have_a_maximum_size() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = folder.path().join("job.toml");
    fs::write(&job, "[data]\ndataset = \"fashion\"\n[parallel]\nranks = 8\n").expect("a job");
    let template = folder.path().join("pod.yaml");
    let pod = "spec:\n  containers:\n  - {name: a, image: b, resources: {limits: {nvidia.com/gpu: 4}}}\n";
    let dry_run = |text: &str, more: &[&str]| {
        fs::write(&template, text).expect("a template");
        let mut command = lockstep();
        command.arg("launch").arg(&job).args(["--with", "kubernetes", "--dry-run", "--template"]);
        Finished::of(command.arg(&template).args(more))
    };
    let done = dry_run(pod, &[]);
    let shown: Value = serde_json::from_str(done.ok()).expect("JSON");
    assert_eq!(shown["items"][0]["spec"]["completions"], 2, "8 ranks on pods of 4 GPUs");
    assert_eq!(shown["items"][2]["stringData"], json!({}), "no secret is shown");
    let largest = format!("{pod}#{}", "x".repeat((256 << 10) - pod.len() - 1));
    dry_run(&largest, &[]).ok();
    let assert_refused = |text: &str, more: &[&str], words: &str| {
        let done = dry_run(text, more);
        assert_eq!(done.status, 2, "{}", done.stdout);
        assert!(done.stderr.contains(words), "{more:?}: {}", done.stderr);
    };
    assert_refused(&format!("{largest}x"), &[], "is larger than 256 KiB");
    let wrong = pod.replace("{limits: {nvidia.com/gpu: 4}}", "x");
    assert_refused(
        &wrong,
        &[],
        "spec.containers[0].resources is not a mapping: write a mapping below `resources:`",
    );
    assert_refused(pod, &["--slots", "2"], "the template's container has 4 GPUs");
    assert_refused(pod, &["-H", "node1:4"], "Kubernetes chooses the machines");
    assert_refused(pod, &["--dir", "relative"], "an absolute path");
    assert_refused(pod, &["--nodes", "1"], "8 ranks");
    assert_refused(pod, &["--", "--now"], "no options after --");
    let mut command = lockstep();
    let done = Finished::of(command.arg("launch").arg(&job).args(["--with", "kubernetes", "--dry-run"]));
    assert!(done.stderr.contains("--template pod.yaml"), "{}", done.stderr);
}
