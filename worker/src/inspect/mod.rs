//! Inspects models and datasets. An agent handles most requests in a separate process (`lockstep inspect`), so that an
//! invalid picture or model cannot disturb the agent and its ranks, and memory is freed after the reply. Models run on
//! the CPU engine, because GPUs are reserved for training.

mod evaluate;
mod model;
mod neighbours;
mod predict;
mod pretrained;
mod samples;

pub use model::to_onnx;
pub use predict::{embed, predict, write_embeddings};

use lockstep_host::{SECRET_VARIABLES, cache, files::allowed::is_allowed};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    inspect::{MAX_CONCURRENT_REQUESTS, PROCESS_ENDED},
};
use std::{
    io::{ErrorKind, Read, Write},
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::{io::AsyncWriteExt, process::Command, sync::Semaphore};

/// Permits for concurrent requests, by [`RequestQueue`](lockstep_protocol::agent::RequestQueue). A request waits only for requests in
/// the same queue.
static QUEUES: [Semaphore; 4] = [const { Semaphore::const_new(MAX_CONCURRENT_REQUESTS) }; 4];
/// Permits for checks of paths. On a file system that hangs, each check blocks forever.
static PATHS: Semaphore = Semaphore::const_new(8);
/// The permit for a request for progress. Such requests are repeated, and may concern a file system that hangs.
static PROGRESS: Semaphore = Semaphore::const_new(1);
/// The niceness of the separate process: inspections use only cores that training leaves idle.
const NICENESS: i32 = 10;
/// How often to check whether a request has been cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Handles a request, in a separate process if it reads the content of files. The process ends when the future is dropped.
///
/// # Errors
/// An error in the request, or a failure of the process.
pub async fn request(program: &Path, request: &AgentRequest) -> Result<AgentReply, String> {
    let permit = match request {
        AgentRequest::HasFiles { .. } => PATHS.acquire().await.map_err(|e| e.to_string())?,
        AgentRequest::InspectProgress { .. } => match PROGRESS.try_acquire() {
            Ok(permit) => permit,
            Err(_) => return Ok(AgentReply::Progress { inspected: None }),
        },
        _ => {
            let queue = &QUEUES[request.queue() as usize];
            let _permit = queue.acquire().await.map_err(|e| e.to_string())?;
            return send_to_process(program, request).await?;
        }
    };
    // This request does not read the content of files, and is handled in this process.
    let request = request.clone();
    let replying = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        answer(request)
    });
    replying.await.map_err(|e| e.to_string())?
}

/// Sends a request to a separate process, which ends when the future is dropped. The inner error concerns the request
/// or the files.
///
/// # Errors
/// A sentence that describes a failure of the process.
async fn send_to_process(
    program: &Path,
    request: &AgentRequest,
) -> Result<Result<AgentReply, String>, String> {
    let json = serde_json::to_vec(request).map_err(|e| e.to_string())?;
    let failed = |what: &str, e: std::io::Error| format!("the inspecting process {what}: {e}");
    let mut command = Command::new(program);
    for name in SECRET_VARIABLES {
        command.env_remove(name);
    }
    let mut child = command
        .arg("inspect")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| failed("cannot be started", e))?;
    if let Some(mut stdin) = child.stdin.take() {
        // If the process ends before it has read everything, its reply or exit status tells why.
        let _ = stdin.write_all(&json).await;
    }
    let output = child.wait_with_output().await.map_err(|e| failed("cannot be awaited", e))?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr.lines().next_back().map(|last| format!(": {last}")).unwrap_or_default();
        format!("{PROCESS_ENDED}{}{last}", output.status)
    })
}

/// Sends a request to a separate process, and blocks until the reply or until `cancelled` is set. The inner error
/// concerns the request or the files.
///
/// # Errors
/// A sentence that describes a failure of the process.
pub(crate) fn request_blocking(
    program: &Path,
    request: &AgentRequest,
    cancelled: &AtomicBool,
) -> Result<Result<AgentReply, String>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| e.to_string())?.block_on(async {
        let cancellation = async {
            while !cancelled.load(Ordering::Relaxed) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::select! {
            reply = send_to_process(program, request) => reply,
            () = cancellation => Err("cancelled".into()),
        }
    })
}

/// Runs the separate process: reads the request from standard input and writes the reply to standard output, both as
/// JSON.
///
/// # Errors
/// Standard input or output fails.
pub fn run() -> std::io::Result<()> {
    let mut json = Vec::new();
    std::io::stdin().read_to_end(&mut json)?;
    let request = serde_json::from_slice(&json).map_err(|e| format!("not a request: {e}"));
    // A job waits for the reply to `Fingerprint`, so this request keeps the usual priority.
    if !matches!(request, Ok(AgentRequest::Fingerprint { .. })) {
        // A failure leaves the priority unchanged.
        let _ = rustix::process::nice(NICENESS);
    }
    let reply = request.and_then(answer);
    let json = serde_json::to_vec(&reply).map_err(std::io::Error::other)?;
    std::io::stdout().write_all(&json)
}

/// Handles a request in this thread.
///
/// # Errors
/// An error in the request or in the files.
pub fn answer(request: AgentRequest) -> Result<AgentReply, String> {
    match request {
        AgentRequest::HasFiles { paths } => {
            let exists =
                |path: &String| cache::find_weights(path).is_ok_and(|path| lockstep_data::exists(&path));
            Ok(AgentReply::Files { there: paths.iter().map(exists).collect() })
        }
        AgentRequest::InspectProgress { path } => {
            let path = lockstep_data::canonical(Path::new(&path)).map_err(|e| format!("{path}: {e}"))?;
            let inspected =
                lockstep_data::index_progress(&path).map(|progress| (progress.done, progress.total));
            Ok(AgentReply::Progress { inspected })
        }
        AgentRequest::Fingerprint { path, has_begun } => {
            let detection = if has_begun {
                lockstep_data::ChangeDetection::Folders
            } else {
                lockstep_data::ChangeDetection::Files
            };
            let found = lockstep_data::fingerprint(Path::new(&path), detection).map_err(|e| e.to_string())?;
            Ok(AgentReply::Fingerprint { found })
        }
        AgentRequest::InspectDataset { path, allowed } => {
            let resolved = lockstep_data::canonical(Path::new(&path)).map_err(|e| match e.kind() {
                ErrorKind::NotFound => format!(
                    "{path} does not exist on the training machine; give the path there, or upload the pictures as a zip file"
                ),
                _ => format!("{path}: {e}"),
            })?;
            if let Some(allowed) = allowed.filter(|allowed| !is_allowed(allowed, &resolved)) {
                return Err(allowed.refusal(&path));
            }
            let info = lockstep_data::inspect(&resolved).map_err(|e| e.to_string())?;
            let Some(resolved) = resolved.to_str() else {
                return Err(format!("{path} leads to a folder whose name is not UTF-8; rename it"));
            };
            Ok(AgentReply::Dataset { path: resolved.into(), info })
        }
        AgentRequest::Samples { path, pick, allowed } => {
            let path = lockstep_data::resolve(Path::new(&path), allowed.as_ref())?;
            samples::pick(&path, pick).map(AgentReply::Samples).map_err(|e| e.to_string())
        }
        AgentRequest::FitWeights(request) => {
            Ok(AgentReply::Weights { mistake: pretrained::find_mistake(&request) })
        }
        AgentRequest::Evaluate(request) => match request.neighbours {
            Some(k) => neighbours::evaluate(&request, k).map(AgentReply::Neighbours),
            None => evaluate::evaluate(&request).map(|found| AgentReply::Evaluation(Box::new(found))),
        },
        AgentRequest::ValidationSet { path, data, allowed } => {
            let path = lockstep_data::resolve(Path::new(&path), allowed.as_ref())?;
            let found = lockstep_data::held_out::validation_set(&path, &data).map_err(|e| e.to_string())?;
            Ok(AgentReply::ValidationSet { found })
        }
        AgentRequest::Predict { model, pictures, embed } => {
            let predictions = predict::predict_named(Path::new(&model), pictures, embed)?;
            Ok(AgentReply::Predictions { predictions })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{
        agent::RequestQueue,
        inspect::{Pick, was_killed},
    };
    use tokio::sync::SemaphorePermit;

    async fn fill(queue: RequestQueue) -> SemaphorePermit<'static> {
        QUEUES[queue as usize].acquire_many(MAX_CONCURRENT_REQUESTS as u32).await.unwrap()
    }

    /// The reply to a request to a program that only fails. The request must not wait for other requests.
    async fn reply_soon(message: &AgentRequest) -> Result<AgentReply, String> {
        let responding = request(Path::new("/bin/false"), message);
        tokio::time::timeout(Duration::from_secs(30), responding).await.expect("the request is not delayed")
    }

    #[tokio::test]
    async fn short_requests_do_not_wait_for_long_ones_or_predictions() {
        let _evaluations = fill(RequestQueue::Long).await;
        let predictions = fill(RequestQueue::Predictions).await;
        let folder = env!("CARGO_MANIFEST_DIR");
        let paths = vec![folder.to_owned(), format!("{folder}/nothing"), format!("{folder}/Cargo.toml")];
        let reply = reply_soon(&AgentRequest::HasFiles { paths }).await;
        assert_eq!(reply, Ok(AgentReply::Files { there: vec![true, false, true] }));
        let pick = Pick::Stored { split: "train".into(), class: None, shuffle: None, offset: 0, limit: 1 };
        let message = AgentRequest::Samples { path: folder.into(), pick, allowed: None };
        assert!(reply_soon(&message).await.unwrap_err().contains("ended with"), "the program only fails");
        // Predictions do not wait for other requests either.
        drop(predictions);
        let _short = fill(RequestQueue::Short).await;
        let message = AgentRequest::Predict { model: folder.into(), pictures: Vec::new(), embed: false };
        assert!(reply_soon(&message).await.unwrap_err().contains("ended with"));
    }

    #[tokio::test]
    async fn concurrent_progress_requests_do_not_wait() {
        let _hanging = PROGRESS.acquire().await.unwrap();
        let message = AgentRequest::InspectProgress { path: "/nothing there".into() };
        assert_eq!(reply_soon(&message).await, Ok(AgentReply::Progress { inspected: None }));
    }

    #[test]
    fn long_replies_arrive_and_a_dead_process_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let run_script = |body: &str| {
            let program = dir.path().join("program");
            crate::testkit::write_script(&program, body);
            let (sender, receiver) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let message = AgentRequest::Fingerprint { path: "/data".into(), has_begun: false };
                let _ = sender.send(request_blocking(&program, &message, &AtomicBool::new(false)));
            });
            receiver.recv_timeout(Duration::from_secs(60)).expect("the request ends")
        };
        let long = run_script("printf '{\"Err\":\"%0200000d\"}' 0").unwrap();
        assert_eq!(long.unwrap_err().len(), 200_000);
        let died = run_script("kill -9 $$").unwrap_err();
        assert!(died.contains("ended with signal: 9") && was_killed(&died), "{died}");
        assert!(!was_killed(&run_script("exit 1").unwrap_err()), "the process has exited by itself");
    }
}
