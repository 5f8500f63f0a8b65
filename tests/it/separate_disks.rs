//! Machines without the server's disk: agents in their own mount namespaces, where an empty file system hides the server's data
//! directory. Checkpoints are uploaded to the server, and other machines fetch them.

use crate::{
    pictures,
    server::{Agents, Folder, LOCKSTEP, Server, number, signal, training_permit},
    specs,
};
use reqwest::StatusCode;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
};

const STEPS: u64 = 160;

/// An agent without the server's disk.
pub(crate) struct Machine {
    name: &'static str,
    slots: u32,
    options: Vec<String>,
    /// Folders that are hidden from the agent in addition to the server's data directory.
    hidden: Vec<PathBuf>,
    /// `LOCKSTEP_FAULT` of the agent's ranks.
    fault: &'static str,
    agent: Option<Child>,
}

impl Machine {
    /// Starts a machine with slow steps, so that a job lasts until its machine is killed.
    fn start(server: &Server, name: &'static str, options: &[&str]) -> Self {
        Self::start_with(server, name, 2, &[], options, "step:slow")
    }

    /// Starts a machine with steps of normal speed. The folders `hidden` are hidden from it in addition to the server's data directory.
    pub(crate) fn start_without(
        server: &Server,
        name: &'static str,
        slots: u32,
        hidden: &[&Path],
        options: &[&str],
    ) -> Self {
        Self::start_with(server, name, slots, hidden, options, "")
    }

    fn start_with(
        server: &Server,
        name: &'static str,
        slots: u32,
        hidden: &[&Path],
        options: &[&str],
        fault: &'static str,
    ) -> Self {
        let options = options.iter().map(ToString::to_string).collect();
        let hidden = hidden.iter().map(|path| path.to_path_buf()).collect();
        let mut machine = Self { name, slots, options, hidden, fault, agent: None };
        machine.start_agent(server);
        machine
    }

    pub(crate) fn start_agent(&mut self, server: &Server) {
        // Only root may create a mount namespace without a user namespace.
        let namespaces: &[&str] =
            if rustix::process::getuid().is_root() { &["-m"] } else { &["-U", "-r", "-m"] };
        let mut command = Command::new("unshare");
        let hide = "while [ \"$1\" != -- ]; do mount -t tmpfs none \"$1\" || exit 1; shift; done; shift; exec \"$@\"";
        command.args(namespaces).args(["sh", "-c", hide, "sh"]).arg(server.data_dir()).args(&self.hidden);
        command.arg("--").arg(LOCKSTEP);
        let mut command = server.agent_command(command, &server.url, self.name, self.slots);
        command.args(&self.options).env("LOCKSTEP_FAULT", self.fault);
        self.agent = Some(command.spawn().expect("unshare (util-linux)"));
    }

    pub(crate) fn dir(&self, server: &Server) -> PathBuf {
        server.folder().path().join(self.name)
    }

    pub(crate) fn kill(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        agent.kill().expect("SIGKILL");
        agent.wait().expect("its status");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            signal(agent.id() as i32, Signal::KILL);
            let _ = agent.wait();
        }
    }
}

/// A server whose own machine has one slot, so that jobs of two ranks run on other machines.
pub(crate) async fn server() -> Server {
    Server::start_training_with(Agents::Local { cpu_slots: 1 }, 640, 64).await
}

/// Waits until this number of slots is online.
pub(crate) async fn until_online(server: &Server, slots: usize) {
    server.until("the agents are online", async |s: &Server| s.slots().await == slots).await;
}

pub(crate) fn spec(name: &str, steps: u64) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, steps),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 20, "keep": 3}}),
    )
}

/// The step of the newest checkpoint on the server.
pub(crate) async fn uploaded_step(server: &Server, id: &str) -> u64 {
    let checkpoints = server.checkpoints(id).await;
    let on_server = checkpoints.iter().filter(|c| c.get("uploading_from").is_none());
    on_server.map(|c| number(&c["step"])).max().unwrap_or(0)
}

/// Waits until the checkpoint of a job's last step is on the server, which may be after the job's end, and returns its weights.
pub(crate) async fn uploaded_weights(server: &Server, id: &str, steps: u64) -> Vec<u8> {
    server.wait_for_success(id).await;
    server.until("the checkpoint is uploaded", async |s: &Server| uploaded_step(s, id).await == steps).await;
    server.last_model(id).await
}

pub(crate) async fn log(server: &Server, id: &str) -> String {
    server.get(&format!("/jobs/{id}/logs")).await.to_string()
}

fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).map(|all| all.flatten().collect::<Vec<_>>()).unwrap_or_default();
    entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[tokio::test]
async fn a_job_continues_on_another_machine_to_the_same_weights() {
    let server = server().await;
    let mut a = Machine::start(&server, "machine-a", &[]);
    until_online(&server, 3).await;
    let undisturbed = server.submit(&spec("undisturbed", STEPS)).await;
    let expected = uploaded_weights(&server, &undisturbed, STEPS).await;
    assert!(
        !server.attempt_dir(&undisturbed, 1).join("rank.0.events").exists(),
        "the ranks ran on the other machine"
    );
    // The machine deletes the folder of a finished, uploaded job.
    let folder = a.dir(&server).join("jobs").join(&undisturbed);
    server.until("the job's folder is deleted", async |_: &Server| !folder.exists()).await;

    let id = server.submit(&spec("continued", STEPS)).await;
    server.until("a checkpoint is uploaded", async |s: &Server| uploaded_step(s, &id).await >= 40).await;
    a.kill();
    server.ranks(&id).iter().for_each(|(_, process)| signal(process.pid, Signal::KILL));
    let _b = Machine::start(&server, "machine-b", &[]);
    server.wait_for_job(&id, "a second attempt", |job| number(&job["attempt"]) == 2).await;
    assert_eq!(uploaded_weights(&server, &id, STEPS).await, expected, "the same weights");
    let from = server.attempts(&id).await[1]["checkpoint"].as_str().expect("a checkpoint").to_owned();
    let log = log(&server, &id).await;
    assert!(log.contains(&format!("machine-b fetches checkpoint {from}")), "{log}");
    // The newest three checkpoints of both machines are kept. Older checkpoints are deleted after the last upload.
    let three_here = async |s: &Server| {
        let listed = s.checkpoints(&id).await;
        listed.len() == 3 && listed.iter().all(|c| c.get("uploading_from").is_none())
    };
    server.until("the newest three are uploaded and the others deleted", three_here).await;
    let listed = server.checkpoints(&id).await;
    let folder = server.job_dir(&id).join("checkpoints");
    server.until("three folders are left", async |_: &Server| file_names(&folder).len() == 3).await;

    // The server's machine can use the uploaded checkpoints: to evaluate and to continue.
    let evaluated = server.http.get(server.api(&format!("/jobs/{id}/evaluation?checkpoint=latest")));
    let evaluated = evaluated.send().await.expect("a response");
    assert!([StatusCode::OK, StatusCode::ACCEPTED].contains(&evaluated.status()), "{evaluated:?}");
    let set = json!({"set": {"parallel.ranks": 1, "train.steps": 2 * STEPS + 5}});
    let fork = server.create(&format!("/jobs/{id}/fork"), &set).await;
    server.wait_for_success(&fork).await;
    // A fork for two ranks runs on the other machine, which fetches the checkpoint, and so does a job that starts from its weights.
    let set = json!({"set": {"train.steps": STEPS + 5}});
    let fork = server.create(&format!("/jobs/{id}/fork"), &set).await;
    server.wait_for_success(&fork).await;
    let pretrained = json!({"model": {"pretrained": listed[0]["id"]}});
    server.train(&specs::with(spec("tuned", 5), pretrained)).await;
}

#[tokio::test]
async fn machines_may_have_different_paths_for_the_same_dataset() {
    let _permit = training_permit().await;
    let server = Server::start_with(Agents::Local { cpu_slots: 1 }).await;
    let here = server.folder().path().join("here");
    let dataset = pictures::idx_dataset(&here, 640, 64);
    server.register("fashion", &dataset).await;
    // Machine A has the same pictures at another path; machine B has other pictures under the name.
    let (there, others) = (Folder::new(), Folder::new());
    let same_pictures = pictures::idx_dataset(there.path(), 640, 64);
    let other_pictures = pictures::idx_dataset(others.path(), 600, 64);
    let prefix = format!("{}={}", here.display(), there.path().display());
    assert_eq!(same_pictures.strip_prefix(there.path()).ok(), dataset.strip_prefix(&here).ok());
    let mut a = Machine::start(&server, "machine-a", &["--path-map", &prefix]);
    until_online(&server, 3).await;
    // Only the mapped path exists from now on.
    fs::rename(&here, server.folder().path().join("hidden")).expect("a rename");
    // More steps than any machine trains before the agent is killed.
    let id = server.submit(&specs::with(spec("mapped", STEPS), json!({"train": {"steps": 1_000_000}}))).await;
    server.until("a checkpoint is uploaded", async |s: &Server| uploaded_step(s, &id).await >= 20).await;
    a.kill();
    server.ranks(&id).iter().for_each(|(_, process)| signal(process.pid, Signal::KILL));
    let named = format!("fashion={}", other_pictures.display());
    let mut b = Machine::start(&server, "machine-b", &["--dataset", &named]);
    let why = server.wait_for_failure(&id).await;
    assert!(
        why.contains("machine-b") && why.contains("differs from the dataset with which the job began"),
        "{why}"
    );
    b.kill();
    // A machine without the dataset.
    let _c = Machine::start(&server, "machine-c", &[]);
    until_online(&server, 3).await;
    let why = server.wait_for_failure(&server.submit(&spec("missing", STEPS)).await).await;
    assert!(why.contains("machine-c") && why.contains("--dataset NAME=PATH"), "{why}");
}

/// Only `tests/run full` runs this test, because it takes minutes.
mod full {
    use super::*;

    #[tokio::test]
    async fn uploads_continue_after_kills_and_a_full_disk() {
        let mut server = server().await;
        let mut a = Machine::start(&server, "machine-a", &[]);
        until_online(&server, 3).await;
        let undisturbed = server.submit(&spec("undisturbed", STEPS)).await;
        let expected = uploaded_weights(&server, &undisturbed, STEPS).await;

        let id = server.submit(&spec("disturbed", STEPS)).await;
        // A file in place of the folder for uploads: the server cannot store uploads, as with a full disk.
        let uploads = server.job_dir(&id).join("uploads");
        fs::write(&uploads, "").expect("a file");
        server.wait_for_job(&id, "the job trains", |job| number(&job["step"]) > 30).await;
        // The server and the agent are killed; the ranks continue.
        server.kill_serve();
        server.start_serve().await;
        a.kill();
        a.start_agent(&server);
        server.wait_for_success(&id).await;
        server
            .until("the log has the error", async |s: &Server| {
                log(s, &id).await.contains("cannot be stored on the server")
            })
            .await;
        assert_eq!(uploaded_step(&server, &id).await, 0);
        let count = log(&server, &id).await.matches("cannot be stored on the server").count();
        assert!((1..=2).contains(&count), "once by each of two servers, not for every checkpoint: {count}");
        let all = server.checkpoints(&id).await;
        let last = all.iter().find(|c| number(&c["step"]) == STEPS).expect("the last");
        assert_eq!(last["uploading_from"], "machine-a", "{last}");
        let checkpoint = last["id"].as_str().expect("an id");
        let response =
            server.http.get(server.api(&format!("/checkpoints/{checkpoint}/model.safetensors"))).send().await;
        let response = response.expect("a response");
        assert_eq!(response.status(), StatusCode::CONFLICT);
        assert!(response.text().await.expect("a body").contains("still being uploaded from machine-a"));
        let fork =
            server.post(&format!("/jobs/{id}/fork"), &json!({"set": {"train.steps": STEPS + 5}})).await;
        assert_eq!(fork.status, StatusCode::CONFLICT, "{}", fork.text);

        // The server has half of one file and a damaged part of another when the agent is killed.
        a.kill();
        let name = file_names(&a.dir(&server).join("jobs").join(&id).join("checkpoints"))
            .into_iter()
            .find(|name| name.ends_with(&format!("-{STEPS}")))
            .expect("the last");
        let whole = a.dir(&server).join("jobs").join(&id).join("checkpoints").join(&name);
        fs::remove_file(&uploads).expect("the file");
        let part = uploads.join(&name);
        fs::create_dir_all(&part).expect("a folder");
        fs::copy(whole.join("MANIFEST.json"), part.join("MANIFEST.json")).expect("a copy");
        let weights = fs::read(whole.join("model.safetensors")).expect("the weights");
        fs::write(part.join("model.safetensors"), &weights[..weights.len() / 2]).expect("half a file");
        let mut damaged = fs::read(whole.join("optimizer.safetensors")).expect("the optimizer's");
        damaged.truncate(100_000);
        damaged[99_999] ^= 1;
        fs::write(part.join("optimizer.safetensors"), &damaged).expect("a damaged file");
        a.start_agent(&server);
        server.until("the upload is done", async |s: &Server| uploaded_step(s, &id).await == STEPS).await;
        assert_eq!(server.last_model(&id).await, expected, "the same weights");
        let log = log(&server, &id).await;
        assert!(log.contains("was damaged during the upload to the server"), "{log}");
        let folder = a.dir(&server).join("jobs").join(&id);
        server.until("the job's folder is deleted", async |_: &Server| !folder.exists()).await;
    }
}
