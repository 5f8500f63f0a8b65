//! `lockstep agent`: joins a server from any machine.

use super::{
    access::{from_file, is_open},
    init_tracing,
    size::size,
    wrong,
};
use lockstep_engine::MOST_CPU_SLOTS;
use lockstep_protocol::JobId;
use lockstep_worker::{
    agent::{self, AgentError, Datasets, Options},
    rank::KILLED_AFTER_SECS,
    tls::IdentityFiles,
};
use std::path::PathBuf;

/// Join a server: run the ranks it sends to this machine
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Address of the server
    #[arg(long, value_name = "URL", env = "LOCKSTEP_SERVER", default_value = super::api::DEFAULT_SERVER)]
    server: String,
    /// CA certificates to trust besides the system's (PEM), for a server whose address begins with https
    #[arg(long, value_name = "FILE", env = "LOCKSTEP_CA_FILE")]
    ca_file: Option<PathBuf>,
    /// File that holds this agent's access token; see `lockstep token create --scope agent`
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Certificate by which this agent shows who it is, instead of a token (PEM, the agent's first, then those between it and the
    /// CA); read again for each connection. See `lockstep ca issue NAME --agent`
    #[arg(long, value_name = "FILE", requires = "key_file")]
    cert_file: Option<PathBuf>,
    /// The certificate's key (PEM), which only this user may read
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// Certificate and key in one file (PKCS#12), which only this user may read
    #[arg(long, value_name = "FILE", requires = "pkcs12_password_file", conflicts_with = "cert_file")]
    pkcs12_file: Option<PathBuf>,
    /// File whose first line is the password of the PKCS#12 file, which only this user may read
    #[arg(long, value_name = "FILE", requires = "pkcs12_file")]
    pkcs12_password_file: Option<PathBuf>,
    /// Join a server on another machine also without TLS. The token and what is trained can be read on the way
    #[arg(long)]
    insecure_http: bool,
    /// Shown on the dashboard [default: the name in the certificate, or this machine's name]
    #[arg(long)]
    name: Option<String>,
    /// The agent's state directory: its identity and the attempts it runs. One agent per directory
    #[arg(long, value_name = "DIR", default_value = "lockstep-data/agent")]
    data_dir: PathBuf,
    /// CPU slots: ranks that run at once on this machine's cores [default: one per GPU, or one per core without GPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CPU_SLOTS)))]
    cpu_slots: Option<u32>,
    /// GPUs to use: numbers among those that are visible (CUDA_VISIBLE_DEVICES), or UUIDs
    #[arg(long, value_name = "LIST", conflicts_with = "cpu_slots")]
    gpus: Option<String>,
    /// Disk space for the ranks' records while the server is away, in MiB; when it is full they write a checkpoint
    /// and end
    #[arg(long, value_name = "MIB", default_value = "4096")]
    spool_mib: f64,
    /// Address or name by which the ranks of other machines reach this one, for jobs over several machines [default: the
    /// address of --interface, of the interface that NCCL_SOCKET_IFNAME names, or the one with which this machine reaches the
    /// server]
    #[arg(long, value_name = "ADDRESS")]
    advertise: Option<String>,
    /// Network interface for jobs over several machines: for the ranks' own connections and, unless NCCL_SOCKET_IFNAME is
    /// set, for NCCL [default: the one that NCCL_SOCKET_IFNAME names]
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Run only this job, and exit when it ends
    #[arg(long, value_name = "ID")]
    job: Option<JobId>,
    /// Where this machine has a dataset that the server has elsewhere. Once for each
    #[arg(long, value_name = "NAME=PATH", value_parser = pair)]
    dataset: Vec<(String, PathBuf)>,
    /// A folder of the server with datasets, and the folder that stands for it on this machine. Once for each
    #[arg(long, value_name = "SERVER=HERE", value_parser = pair)]
    path_map: Vec<(String, PathBuf)>,
    /// Where copies of datasets are kept that this machine does not have and pulls from the server [default: `datasets` in the
    /// data directory]
    #[arg(long, value_name = "DIR")]
    dataset_cache: Option<PathBuf>,
    /// What these copies may have together, such as 500GB or 2TiB; those that were not used for longest make room. With 0 nothing
    /// is copied
    #[arg(long, value_name = "SIZE", default_value = "100GB", value_parser = size)]
    dataset_cache_limit: u64,
    /// So many seconds after it is asked to end (SIGTERM) whoever started this agent kills it with its ranks: Slurm's KillWait, a
    /// pod's terminationGracePeriodSeconds. Ranks have 10 s less for their step and its checkpoint
    #[arg(long, value_name = "SECS", default_value_t = KILLED_AFTER_SECS, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    killed_after: u32,
    /// With --job: stay until the job is over, paused or not, and exit with a status that a Job of Kubernetes understands
    #[arg(long, hide = true, requires = "job")]
    in_pod: bool,
    /// Exit with the parent process, once no rank is alive
    #[arg(long, hide = true)]
    follow_parent: bool,
}

/// Exit status in a pod when a signal came before the job was over: that of a shell after SIGTERM. With 0 the Job would count this pod's
/// index as completed. With this one, the Job's rules (`launch/kubernetes/objects.rs`) start another pod and do not count a failure.
pub(crate) const IN_POD_SIGNALLED: i32 = 143;
/// Exit status in a pod when the job has failed: another pod would change nothing.
pub(crate) const IN_POD_JOB_FAILED: i32 = 3;

/// Runs until a signal ends it (SIGTERM, Ctrl-C).
///
/// # Errors
/// Exit status 2 when the folder or the address cannot be used, 1 when the server refuses.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    init_tracing("info");
    if let Some(remark) = args.token_file.as_deref().and_then(is_open) {
        tracing::warn!("{remark}");
    }
    let token = args.token_file.as_deref().map(from_file).transpose()?;
    let identity = match (args.cert_file, args.key_file, args.pkcs12_file, args.pkcs12_password_file) {
        (Some(certificate), Some(key), ..) => Some(IdentityFiles::Pem { certificate, key }),
        (_, _, Some(file), Some(password)) => Some(IdentityFiles::Pkcs12 { file, password }),
        _ => None,
    };
    let options = Options {
        server: args.server,
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
            by_prefix: args.path_map.into_iter().map(|(there, here)| (there.into(), here)).collect(),
        },
        dataset_cache: args.dataset_cache,
        dataset_cache_bytes: args.dataset_cache_limit,
        killed_after_secs: args.killed_after,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(agent::run(options));
    // A request that is still being handled does not delay the end.
    runtime.shutdown_background();
    if args.in_pod {
        match result {
            Err(AgentError::Signalled) => std::process::exit(IN_POD_SIGNALLED),
            Err(AgentError::JobFailed) => std::process::exit(IN_POD_JOB_FAILED),
            _ => {}
        }
    }
    result.map_err(|error| match error.is_wrong_request() {
        true => wrong(error.to_string()),
        false => error.into(),
    })
}

/// `NAME=/a/path`. The path is absolute, as the agent's working folder says nothing to whoever reads the job's reasons.
fn pair(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => Ok((name.into(), path.into())),
        _ => Err("write NAME=/absolute/path".into()),
    }
}
