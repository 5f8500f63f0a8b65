//! `lockstep demo`: a server with a bundled dataset and a job that trains on it.

use super::{
    access::{Token, demo_data_dirs},
    api::Api,
    browser::SignInFile,
    bundled::PICTURES,
    dataset, init_tracing,
    local_agent::AgentLog,
    output,
    serve::{FILE_THREADS_TIMEOUT, Server, StopSignals, resolve_address},
    usage_error, watch,
};
use lockstep_protocol::Job;
use lockstep_server::{ServeConfig, ServeError};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const DATASET: &str = PICTURES.name;
/// Time limit for the local agent to join.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between two checks of whether the agent has joined, or the server has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Train a ResNet on bundled pictures, and watch it in the browser
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Address and port to listen on; port 0 chooses a free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    listen: String,
    /// Listen without TLS even if other machines can reach the address. Then other machines on the network can read tokens and weights
    #[arg(long)]
    insecure_http: bool,
    /// Exit when the job ends, with status 0 if it succeeded
    #[arg(long)]
    exit_when_done: bool,
    /// Do not open the dashboard in a browser [default: opened, signed in, if the command runs on a terminal and a graphical
    /// display exists]
    #[arg(long)]
    no_open: bool,
    /// Data directory [default: lockstep-demo, or the first unused of lockstep-demo-2, lockstep-demo-3, ...]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// Starts the server, submits the job and shows the job's progress.
///
/// # Errors
/// The job did not succeed, or the server could not start.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    init_tracing("warn");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let mut signals = StopSignals::listen()?;
        let (mut server, data_dir) = start_server(&args).await?;
        let mut job_result = Ok(());
        let demo_result = tokio::select! {
            run_result = run_on(&mut server, &data_dir, &args, &mut job_result) => run_result.and(job_result),
            () = signals.next() => if args.exit_when_done {
                Err(anyhow::anyhow!("stopped before the job ended"))
            } else {
                job_result
            },
        };
        // A second signal ends this command at once.
        tokio::select! {
            stopped = server.stop() => demo_result.and(stopped),
            () = signals.next() => demo_result,
        }
    });
    runtime.shutdown_timeout(FILE_THREADS_TIMEOUT);
    result
}

/// Runs the demo on a running server. Sets `job_result` when the job ends. Without `--exit-when-done`, then waits until the server ends.
async fn run_on(
    server: &mut Server,
    data_dir: &Path,
    args: &Args,
    job_result: &mut anyhow::Result<()>,
) -> anyhow::Result<()> {
    let api = Api::new(&server.url(), None, Some(Token::read(&data_dir.join("token"), "")?))?;
    cancel_leftovers(&api).await?;
    let slots = lockstep_host::cores().max(args.ranks);
    server.start_agent(vec![("--cpu-slots", slots.to_string())], AgentLog::File).await?;
    register_pictures(&api, data_dir).await?;
    let job: Job = api.post("/jobs", &specification(args.ranks)).await?;
    let page = format!("/jobs/{}", job.id);
    // The link signs in one browser, once. `lockstep login-link` prints another link.
    output::line(format_args!("dashboard: {}", server.running.login_link(&page)?))?;
    let sign_in_file = SignInFile::new(data_dir);
    if !args.no_open {
        sign_in_file.open_browser(&server.running, &page);
    }
    output::line(format_args!(
        "training {} with {} on {DATASET}: {}{page}",
        job.spec.model.arch.as_str(),
        if args.ranks == 1 { "1 rank".to_owned() } else { format!("{} ranks in lockstep", args.ranks) },
        server.running.url(),
    ))?;
    let as_json = false;
    *job_result = watch::follow_to_end(&api, job, as_json).await.map(drop);
    if args.exit_when_done {
        return Ok(());
    }
    output::line(format_args!("the dashboard stays at {}; Ctrl-C stops the server", server.running.url()))?;
    // The caller waits for Ctrl-C. If the server ends by itself, `Server::stop` returns the reason.
    while !server.task.is_finished() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Starts a server in the given data directory, or in the first demo folder in the working directory that no other demo uses.
async fn start_server(args: &Args) -> anyhow::Result<(Server, PathBuf)> {
    let listen = resolve_address(&args.listen)?;
    let candidates: Vec<PathBuf> = match &args.data_dir {
        Some(dir) => vec![dir.clone()],
        None => demo_data_dirs().collect(),
    };
    for dir in candidates {
        let mut config = ServeConfig::new(&dir);
        config.listen = listen;
        config.insecure_http = args.insecure_http;
        config.bundled = Some(PICTURES);
        match Server::start(config).await {
            Ok(server) => return Ok((server, dir)),
            Err(ServeError::DataDirInUse { .. }) if args.data_dir.is_none() => {}
            Err(error) => return Err(usage_error(error.to_string())),
        }
    }
    Err(usage_error("every demo folder is in use; name another folder with --data-dir"))
}

/// Cancels jobs of an earlier, interrupted demo in this folder: they would occupy the slots of this demo's job.
async fn cancel_leftovers(api: &Api) -> anyhow::Result<()> {
    for job in api.list::<Job>("/jobs").await? {
        if !job.state.is_final() {
            let _: Value = api.post(&format!("/jobs/{}/cancel", job.id), &json!({})).await?;
        }
    }
    Ok(())
}

/// Registers the pictures after the agent has joined, because the agent inspects them.
async fn register_pictures(api: &Api, data_dir: &Path) -> anyhow::Result<()> {
    let began = Instant::now();
    loop {
        if api.list::<Value>("/agents").await?.iter().any(|agent| agent["online"] == true) {
            break;
        }
        if began.elapsed() > AGENT_TIMEOUT {
            let log = data_dir.join("agent").join("agent.log");
            return Err(usage_error(format!("the local agent did not join; see {}", log.display())));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    // An earlier demo in the same folder may have registered the pictures.
    if dataset::find_by_name(api, DATASET).await?.is_none() {
        dataset::register(api, "/datasets/bundled", None).await?;
    }
    Ok(())
}

/// Returns the specification: a ResNet for CIFAR that passes 85 % accuracy within a minute on two cores.
fn specification(ranks: u32) -> Value {
    json!({
        "name": "demo",
        "model": { "arch": "resnet20" },
        "data": { "dataset": DATASET, "validation": "test", "crop_padding": 2, "horizontal_flip": true },
        "train": {
            "epochs": 6,
            // The largest multiple of `ranks` up to 64, or `ranks` itself.
            "global_batch_size": ranks * (64 / ranks).max(1),
            "optimizer": "nesterov",
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "schedule": "one_cycle",
        },
        "parallel": { "ranks": ranks, "device": "cpu", "sync_batch_norm": true },
    })
}
