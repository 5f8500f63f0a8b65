//! Looking at models and data for people: an agent answers each of these questions with a process of its own
//! (`lockstep look`), so that whatever a picture or a model does to it, the agent and its ranks go on, and what it
//! held in memory is gone when it has answered. Models run on the CPU engine: GPUs are for training.

mod evaluate;
mod model;
mod predict;
mod pretrained;
mod samples;

pub use predict::predict;

use crate::{data, host::SECRETS};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    inspect::{CONCURRENT_REQUESTS, PROCESS_ENDED},
};
use std::{
    io::{Read, Write},
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    process::Command,
    sync::{Semaphore, SemaphorePermit},
};

/// Long questions and short ones wait for their own kind alone.
static LONG: Semaphore = Semaphore::const_new(CONCURRENT_REQUESTS);
static SHORT: Semaphore = Semaphore::const_new(CONCURRENT_REQUESTS);
/// A dataset of a million pictures takes all cores for minutes.
static DATASETS: Semaphore = Semaphore::const_new(CONCURRENT_REQUESTS);
/// Looks at paths; a file system that hangs holds one up for ever.
static PATHS: Semaphore = Semaphore::const_new(8);
/// How far a look is, is asked again and again, of the very paths whose file system may hang.
static PROGRESS: Semaphore = Semaphore::const_new(1);
/// Training comes first: what people look at waits for idle cores.
const NICENESS: i32 = 10;
/// How often it is looked whether a process has answered.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// Has a process of its own answer. It ends when this is dropped.
///
/// # Errors
/// A sentence: what is wrong with the question, or with the process.
pub async fn ask(program: &Path, question: &AgentRequest) -> Result<AgentReply, String> {
    let room = match question {
        AgentRequest::HasFiles { .. } => {
            let turn = PATHS.acquire().await.map_err(|e| e.to_string())?;
            return at_once(question.clone(), turn).await;
        }
        AgentRequest::InspectProgress { .. } => {
            let Ok(turn) = PROGRESS.try_acquire() else { return Ok(AgentReply::Progress { looked: None }) };
            return at_once(question.clone(), turn).await;
        }
        AgentRequest::InspectDataset { .. } => &DATASETS,
        _ if question.is_long() => &LONG,
        _ => &SHORT,
    };
    let _turn = room.acquire().await.map_err(|e| e.to_string())?;
    let words = serde_json::to_vec(question).map_err(|e| e.to_string())?;
    let failed = |what: &str, e: std::io::Error| format!("the process that looks at files {what}: {e}");
    let mut command = Command::new(program);
    for name in SECRETS {
        command.env_remove(name);
    }
    let mut child = command
        .arg("look")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| failed("cannot be started", e))?;
    if let Some(mut to) = child.stdin.take() {
        // One that ended before it read everything says why below.
        let _ = to.write_all(&words).await;
    }
    let done = child.wait_with_output().await.map_err(|e| failed("is lost", e))?;
    match serde_json::from_slice(&done.stdout) {
        Ok(answer) => answer,
        Err(_) => {
            let said = String::from_utf8_lossy(&done.stderr);
            let last = said.lines().next_back().map(|last| format!(": {last}")).unwrap_or_default();
            Err(format!("{PROCESS_ENDED}{}{last}", done.status))
        }
    }
}

/// Without a process of its own: nothing is read of what somebody brings.
async fn at_once(question: AgentRequest, turn: SemaphorePermit<'static>) -> Result<AgentReply, String> {
    let looked = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        answer(question)
    });
    looked.await.map_err(|e| e.to_string())?
}

/// Has a process of its own answer while the caller waits, until `cancelled`. The answer itself may be what is wrong with
/// the question or the files.
///
/// # Errors
/// A sentence: what is wrong with the process.
pub(crate) fn ask_and_wait(
    program: &Path,
    question: &AgentRequest,
    cancelled: &AtomicBool,
) -> Result<Result<AgentReply, String>, String> {
    let failed = |e: std::io::Error| format!("the process that looks at files failed: {e}");
    let words = serde_json::to_vec(question).map_err(|e| e.to_string())?;
    let mut command = std::process::Command::new(program);
    for name in SECRETS {
        command.env_remove(name);
    }
    let mut child = command
        .arg("look")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    if let Some(mut to) = child.stdin.take() {
        // One that ended before it read everything is told of below.
        let _ = to.write_all(&words);
    }
    // An answer may be longer than what a pipe holds.
    let mut from = child.stdout.take();
    let reading = std::thread::spawn(move || {
        let mut said = Vec::new();
        from.as_mut().map_or(Ok(0), |from| from.read_to_end(&mut said)).map(|_| said)
    });
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if cancelled.load(Ordering::Relaxed) {
            let _ = child.kill();
            let _ = child.wait();
            return Err("cancelled".into());
        }
        std::thread::sleep(ASK_EVERY);
    };
    let ended = || format!("{PROCESS_ENDED}{status}");
    let said = reading.join().map_err(|_| ended())?.map_err(failed)?;
    serde_json::from_slice(&said).map_err(|_| ended())
}

/// The process itself: a question on standard input, the answer on standard output, both JSON.
///
/// # Errors
/// Those pipes.
pub fn run() -> std::io::Result<()> {
    let mut words = Vec::new();
    std::io::stdin().read_to_end(&mut words)?;
    let question = serde_json::from_slice(&words).map_err(|e| format!("a question that is none: {e}"));
    // A job waits for this one.
    if !matches!(question, Ok(AgentRequest::Fingerprint { .. })) {
        // Without the right to, it is as urgent as the rest.
        let _ = rustix::process::nice(NICENESS);
    }
    let answer = question.and_then(answer);
    let words = serde_json::to_vec(&answer).map_err(std::io::Error::other)?;
    std::io::stdout().write_all(&words)
}

/// Answers a question here and now.
///
/// # Errors
/// A sentence: what is wrong with the question or with the files.
pub fn answer(question: AgentRequest) -> Result<AgentReply, String> {
    match question {
        AgentRequest::HasFiles { paths } => {
            Ok(AgentReply::Files { there: paths.iter().map(|path| data::exists(Path::new(path))).collect() })
        }
        AgentRequest::InspectProgress { path } => {
            let path = data::canonical(Path::new(&path)).map_err(|e| format!("{path}: {e}"))?;
            let looked = data::index_progress(&path).map(|progress| (progress.done, progress.total));
            Ok(AgentReply::Progress { looked })
        }
        AgentRequest::Fingerprint { path, known } => {
            let look = if known { data::Look::Folders } else { data::Look::Files };
            let found = data::fingerprint::of_pictures(Path::new(&path), look).map_err(|e| e.to_string())?;
            Ok(AgentReply::Fingerprint { found })
        }
        AgentRequest::InspectDataset { path } => {
            let resolved = data::canonical(Path::new(&path)).map_err(|e| format!("{path}: {e}"))?;
            let info = data::inspect(&resolved).map_err(|e| e.to_string())?;
            let Some(resolved) = resolved.to_str() else {
                return Err(format!("{path} leads to a folder whose name is not UTF-8; rename it"));
            };
            Ok(AgentReply::Dataset { path: resolved.into(), info })
        }
        AgentRequest::Samples { path, pick } => {
            samples::pick(Path::new(&path), pick).map(AgentReply::Samples).map_err(|e| e.to_string())
        }
        AgentRequest::FitWeights(question) => {
            Ok(AgentReply::Weights { mistake: pretrained::mistake(&question) })
        }
        AgentRequest::Evaluate(question) => {
            evaluate::evaluate(&question).map(|found| AgentReply::Evaluation(Box::new(found)))
        }
        AgentRequest::Predict { model, pictures } => {
            let predictions = predict::named(Path::new(&model), pictures)?;
            Ok(AgentReply::Predictions { predictions })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::inspect::{Pick, was_killed};

    #[tokio::test]
    async fn short_questions_do_not_wait_for_long_ones() {
        let _evaluations = LONG.acquire_many(CONCURRENT_REQUESTS as u32).await.unwrap();
        let here = env!("CARGO_MANIFEST_DIR");
        let paths = vec![here.to_owned(), format!("{here}/nothing"), format!("{here}/Cargo.toml")];
        let looked = ask(Path::new("/bin/false"), &AgentRequest::HasFiles { paths }).await;
        assert_eq!(looked, Ok(AgentReply::Files { there: vec![true, false, true] }));
        let pick = Pick::Stored { split: "train".into(), class: None, offset: 0, limit: 1 };
        let question = AgentRequest::Samples { path: here.into(), pick };
        let answering = ask(Path::new("/bin/false"), &question);
        let answer = tokio::time::timeout(Duration::from_secs(30), answering).await.expect("it is its turn");
        assert!(answer.unwrap_err().contains("ended with"), "the program only fails");
    }

    #[tokio::test]
    async fn who_asks_how_far_a_look_is_never_waits_for_another() {
        let _hanging = PROGRESS.acquire().await.unwrap();
        let question = AgentRequest::InspectProgress { path: "/nothing there".into() };
        let answering = ask(Path::new("/bin/false"), &question);
        let answer = tokio::time::timeout(Duration::from_secs(30), answering).await.expect("at once");
        assert_eq!(answer, Ok(AgentReply::Progress { looked: None }));
    }

    #[test]
    fn an_answer_may_be_longer_than_a_pipe_holds_and_a_process_that_dies_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let answering = |body: &str| {
            let program = dir.path().join("program");
            // Written by another process: nobody here holds it open for writing when it is started.
            let text = format!("#!/bin/sh\n{body}\n");
            let made = std::process::Command::new("sh")
                .args(["-c", "rm -f \"$1\"; printf %s \"$0\" > \"$1\"; chmod +x \"$1\"", &text])
                .arg(&program)
                .status();
            assert!(made.unwrap().success());
            let (tell, told) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let question = AgentRequest::Fingerprint { path: "/data".into(), known: false };
                let _ = tell.send(ask_and_wait(&program, &question, &AtomicBool::new(false)));
            });
            told.recv_timeout(Duration::from_secs(60)).expect("it does not hang")
        };
        let long = answering("printf '{\"Err\":\"%0200000d\"}' 0").unwrap();
        assert_eq!(long.unwrap_err().len(), 200_000);
        let died = answering("kill -9 $$").unwrap_err();
        assert!(died.contains("ended with signal: 9") && was_killed(&died), "{died}");
        assert!(!was_killed(&answering("exit 1").unwrap_err()), "it has ended by itself");
    }
}
