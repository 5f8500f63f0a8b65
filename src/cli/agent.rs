//! `lockstep agent`: joins a server from any machine.

use super::{
    access::{AccessArgs, read_token_file, secret_file_warning},
    init_tracing,
    size::parse_size,
    usage_error,
};
use lockstep_engine::MAX_CPU_SLOTS;
use lockstep_protocol::JobId;
use lockstep_worker::{
    agent::{self, AgentError, Datasets, Options, Warm},
    rank::KILLED_AFTER_SECS,
    tls::IdentityFiles,
};
use std::{path::PathBuf, time::Duration};

/// Join a server and run the ranks that it assigns to this machine
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address of the server [default: the address that a server on this machine has written into its data directory, or
    /// http://127.0.0.1:7070]
    #[arg(long, value_name = "URL", env = "LOCKSTEP_SERVER")]
    server: Option<String>,
    /// CA certificates to trust in addition to the system's (PEM), for a server whose URL begins with https
    #[arg(long, value_name = "FILE", env = "LOCKSTEP_CA_FILE")]
    ca_file: Option<PathBuf>,
    /// File that contains this agent's access token; see `lockstep token create --scope agent`
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Certificate that identifies this agent, instead of a token (PEM: the agent's own certificate first, then
    /// intermediate certificates); read again for each connection. See `lockstep ca issue NAME --agent`
    #[arg(long, value_name = "FILE", requires = "key_file")]
    cert_file: Option<PathBuf>,
    /// The certificate's key (PEM); only this user may be able to read the file
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// Certificate and key in one file (PKCS#12); only this user may be able to read the file
    #[arg(long, value_name = "FILE", requires = "pkcs12_password_file", conflicts_with = "cert_file")]
    pkcs12_file: Option<PathBuf>,
    /// File whose first line is the password of the PKCS#12 file; only this user may be able to read the file
    #[arg(long, value_name = "FILE", requires = "pkcs12_file")]
    pkcs12_password_file: Option<PathBuf>,
    /// Join a server on another machine without TLS. Then other machines on the network can read the token and the job's data
    #[arg(long)]
    insecure_http: bool,
    /// Name of this agent on the dashboard [default: the name in the certificate, or this machine's name]
    #[arg(long)]
    name: Option<String>,
    /// State directory of the agent, with its identity and running attempts. Each agent needs its own directory
    #[arg(long, value_name = "DIR", default_value = "lockstep-data/agent")]
    data_dir: PathBuf,
    /// Number of CPU slots: ranks that may run at once on this machine's cores [default: one per GPU, or one per core without GPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CPU_SLOTS)))]
    cpu_slots: Option<u32>,
    /// GPUs to use: their indexes among the visible GPUs (CUDA_VISIBLE_DEVICES), or their UUIDs
    #[arg(long, value_name = "LIST", conflicts_with = "cpu_slots")]
    gpus: Option<String>,
    /// Maximum disk space for the ranks' records while the server is unreachable, in MiB; when it is full, the ranks write a checkpoint and
    /// end
    #[arg(long, value_name = "MIB", default_value = "4096")]
    spool_mib: f64,
    /// Address or name by which ranks on other machines reach this machine, for jobs over several machines [default:
    /// the address of --interface, of the interface in NCCL_SOCKET_IFNAME, or of the interface with which this machine
    /// reaches the server]
    #[arg(long, value_name = "ADDRESS")]
    advertise: Option<String>,
    /// Network interface for jobs over several machines: for the ranks' own connections and, unless NCCL_SOCKET_IFNAME
    /// is set, for NCCL [default: the interface in NCCL_SOCKET_IFNAME]
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Run only this job, and exit when it ends
    #[arg(long, value_name = "ID")]
    job: Option<JobId>,
    /// Path on this machine of a dataset that has another path on the server (may be repeated)
    #[arg(long, value_name = "NAME=PATH", value_parser = parse_pair)]
    dataset: Vec<(String, PathBuf)>,
    /// Folder of datasets on the server, and the folder with the same content on this machine (may be repeated)
    #[arg(long, value_name = "SERVER=HERE", value_parser = parse_pair)]
    path_map: Vec<(String, PathBuf)>,
    /// Folder for copies of datasets that this machine lacks and downloads from the server [default: `datasets` in the
    /// data directory]
    #[arg(long, value_name = "DIR")]
    dataset_cache: Option<PathBuf>,
    /// Maximum disk space for copies of datasets, such as 500GB or 2TiB; the least recently used copies are removed first. 0: no dataset is
    /// copied
    #[arg(long, value_name = "SIZE", default_value = "100GB", value_parser = parse_size)]
    dataset_cache_limit: u64,
    /// Seconds between SIGTERM and SIGKILL when a launcher ends this agent: Slurm's KillWait, or a pod's terminationGracePeriodSeconds.
    /// Ranks have 10 s less to finish their step and write a checkpoint
    #[arg(long, value_name = "SECS", default_value_t = KILLED_AFTER_SECS, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    killed_after: u32,
    /// GPUs on which the agent keeps a spare process with an open CUDA context, so that ranks start sooner: `on` (all GPUs), `off` (none), or
    /// `auto` (GPUs with at least 40 GB of memory). The process needs about 0.5 GB of the GPU's memory
    #[arg(long, value_name = "WHICH", default_value = "auto", value_parser = WARM_VALUES)]
    warm: String,
    /// With --job: run until the job is over, even if it pauses, and exit with a status for a Kubernetes Job
    #[arg(long, hide = true, requires = "job")]
    in_pod: bool,
    /// Exit when the parent process has exited and no rank runs
    #[arg(long, hide = true)]
    follow_parent: bool,
}

/// The values of `--warm`.
pub(crate) const WARM_VALUES: [&str; 3] = ["auto", "on", "off"];

/// Exit status in a pod if a signal arrives before the job is over: the status that shells report after SIGTERM. With 0, Kubernetes would
/// count this pod's index as completed. With 143, the Job's rules (`launch/kubernetes/objects.rs`) start another pod and count no failure.
pub(crate) const IN_POD_SIGNALLED: i32 = 143;
/// Exit status in a pod if the job has failed, so that no other pod is started.
pub(crate) const IN_POD_JOB_FAILED: i32 = 3;

/// Runs the agent until a signal (SIGTERM, Ctrl-C) ends it.
///
/// # Errors
/// Exit status 2 if the folder or the address cannot be used, 1 if the server refuses the agent.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    init_tracing("info");
    if let Some(warning) = args.token_file.as_deref().and_then(secret_file_warning) {
        tracing::warn!("{warning}");
    }
    let token = args.token_file.as_deref().map(read_token_file).transpose()?;
    let identity = match (args.cert_file, args.key_file, args.pkcs12_file, args.pkcs12_password_file) {
        (Some(certificate), Some(key), ..) => Some(IdentityFiles::Pem { certificate, key }),
        (_, _, Some(file), Some(password)) => Some(IdentityFiles::Pkcs12 { file, password }),
        _ => None,
    };
    let options = Options {
        server: args.server.unwrap_or_else(|| AccessArgs::default().server(None)),
        ca_file: args.ca_file,
        token,
        identity,
        insecure_http: args.insecure_http,
        name: args.name,
        dir: args.data_dir,
        cpu_slots: args.cpu_slots,
        gpus: args.gpus,
        only_job: args.job,
        until_final: args.in_pod,
        advertise: args.advertise,
        interface: args.interface,
        program: None,
        spool_bytes: (args.spool_mib * f64::from(1 << 20)) as u64,
        follow_parent: args.follow_parent,
        datasets: Datasets {
            by_name: args.dataset,
            by_prefix: args.path_map.into_iter().map(|(server, local)| (server.into(), local)).collect(),
        },
        dataset_cache: args.dataset_cache,
        dataset_cache_bytes: args.dataset_cache_limit,
        killed_after_secs: args.killed_after,
        warm: match args.warm.as_str() {
            "on" => Warm::On,
            "off" => Warm::Off,
            _ => Warm::Auto,
        },
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(agent::run(options));
    // Ends the processes of requests that are still being handled. A read of a file system that hangs is not waited for.
    runtime.shutdown_timeout(Duration::from_secs(1));
    if args.in_pod {
        match result {
            Err(AgentError::Signalled) => std::process::exit(IN_POD_SIGNALLED),
            Err(AgentError::JobFailed) => std::process::exit(IN_POD_JOB_FAILED),
            _ => {}
        }
    }
    result.map_err(|error| match error {
        AgentError::InvalidOptions(why) => usage_error(why),
        error => error.into(),
    })
}

/// Parses `NAME=/a/path`. The path must be absolute, because readers of error messages do not know the agent's working directory.
fn parse_pair(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => Ok((name.into(), path.into())),
        _ => Err("write NAME=/absolute/path".into()),
    }
}
