//! `lockstep launch`: starts an agent for one job on each of several machines, by SSH, Open MPI, Slurm or Kubernetes. The launcher starts
//! the agents, and the server assigns the job's ranks to them, as for any agent.

mod array;
mod bundle;
mod follow;
mod hosts;
mod kill_wait;
mod kubernetes;
mod machines;
mod mpirun;
pub(crate) mod node;
mod slurm;
pub(crate) mod ssh;
mod tokens;
mod uploads;

use super::{
    WrongRequest,
    api::{Api, ServerArgs},
    block_on, describe_error, job_file, output, usage_error,
};
use bundle::Bundle;
pub(crate) use hosts::{Host, parse_list as parse_host_list, read as read_hostfile};
use lockstep_protocol::{Job, JobSpec};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};
use uploads::UploadStatus;

/// Maximum number of machines in a launch.
pub(crate) const MAX_HOSTS: usize = 256;
/// Maximum number of slots on a machine, as on the server.
pub(crate) const MAX_SLOTS: u32 = 1024;
/// Default of `--dir`. Relative to the home directory.
const DEFAULT_DIR: &str = ".lockstep/launch";

/// Start agents for one job by SSH, mpirun, Slurm or Kubernetes
///
/// Each machine gets an agent that runs only this job and exits when the job ends. Each machine needs `lockstep`, and must reach the server
/// at --agent-server. The agents' tokens are sent over standard input or in files that only you can read. Creating the tokens needs the
/// scope admin. Ctrl-C ends only the display, and the job continues; a sweep is cancelled if it has not been submitted to Slurm yet.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job: its id, the start of its id, its name, or a TOML file to submit
    #[arg(value_name = "JOB")]
    job: String,
    /// The launcher that starts the agents
    #[arg(long, value_enum)]
    with: LauncherKind,
    /// Change a key of the TOML file, such as train.lr=0.1 (may be repeated); an empty value, as in train.epochs=, removes the key
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// Submit a sweep with a trial for each of these values of a key of the TOML file, as a Slurm job array (may be repeated: a trial for
    /// each combination)
    #[arg(long = "sweep", value_name = "KEY.PATH=V1,V2,...")]
    sweeps: Vec<String>,
    /// Maximum number of a sweep's trials that Slurm runs at the same time [default: as many as fit]
    #[arg(long, value_name = "N", requires = "sweeps", value_parser = clap::value_parser!(u32).range(1..))]
    at_once: Option<u32>,
    /// File that lists the machines, one per line: HOST slots=4 env:NAME=VALUE
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// The machines and their slots, such as node1:4,node2:4
    #[arg(short = 'H', long = "host", value_name = "HOST:N,...", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// Rank table of MindSpore or HCCL (JSON). Its machines and devices are used in the table's order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hostfile", "hosts"])]
    rank_table: Option<PathBuf>,
    /// Number of machines to request from Slurm, or of pods from Kubernetes [default: 1; with a template that requests GPUs, as many pods as
    /// the job's ranks need]
    #[arg(long, value_name = "N", conflicts_with_all = ["hostfile", "hosts", "rank_table"],
        value_parser = clap::value_parser!(u32).range(1..=MAX_HOSTS as i64))]
    nodes: Option<u32>,
    /// Number of slots on each machine for which no list gives slots [default: the job's remaining ranks, divided evenly]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    slots: Option<u32>,
    /// Template of the pods (YAML): a Pod, a PodTemplate, or the part of a Job under `template:`
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Namespace in Kubernetes [default: the context's namespace]
    #[arg(long, value_name = "NAME", requires = "template")]
    namespace: Option<String>,
    /// Context of the kubeconfig file [default: its current context, or the service account of the pod in which this command runs]
    #[arg(long, value_name = "NAME", requires = "template")]
    context: Option<String>,
    /// Address at which the machines reach the server [default: --server]
    #[arg(long, value_name = "URL")]
    agent_server: Option<String>,
    /// The lockstep program on the machines: a path, or a name on their PATH
    #[arg(long, value_name = "PATH", default_value = "lockstep")]
    program: String,
    /// Folder for the agents' state on the machines, relative to their home directory. With Slurm, on a file system that all machines
    /// share; with Kubernetes, a path in the pods [default with Kubernetes: /var/lib/lockstep]
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR)]
    dir: PathBuf,
    /// Print the commands and scripts that would run, without submitting or starting anything
    #[arg(long)]
    dry_run: bool,
    /// Exit when the agents are online (with Slurm and Kubernetes: when the launch is submitted), instead of showing the job's progress
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    server: ServerArgs,
    /// Options for ssh, mpirun or sbatch, after --
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// The launcher that starts the agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LauncherKind {
    /// An SSH connection to each machine
    Ssh,
    /// Open MPI's mpirun
    Mpirun,
    /// A batch job in Slurm
    Slurm,
    /// An Indexed Job in Kubernetes
    Kubernetes,
}

impl LauncherKind {
    /// Returns the programs that this machine must have.
    fn programs(self) -> &'static [&'static str] {
        match self {
            LauncherKind::Ssh => &["ssh"],
            LauncherKind::Mpirun => &["mpirun"],
            LauncherKind::Slurm => &["sbatch", "squeue", "scancel"],
            LauncherKind::Kubernetes => &[],
        }
    }

    /// Whether the launcher itself chooses the machines (Slurm, Kubernetes).
    fn chooses_machines(self) -> bool {
        matches!(self, LauncherKind::Slurm | LauncherKind::Kubernetes)
    }
}

/// The job that `lockstep launch` names.
enum Source {
    /// The document of a file that is to be submitted, and its specification.
    File(Value, Box<JobSpec>),
    /// A submitted job.
    Job(Box<Job>),
}

/// A launch of agents for one job.
struct Launch {
    args: Arc<Args>,
    api: Api,
    job: Job,
    /// Whether this command has submitted the job, and may therefore cancel it if no agent can be started.
    has_submitted_job: bool,
    hosts: Vec<Host>,
    bundle: Bundle,
    /// The ids of the agents' tokens.
    token_ids: Vec<String>,
}

/// Starts the agents and shows the job's progress.
///
/// # Errors
/// Exit status 2 for mistakes in the arguments and lists, 1 if agents cannot be started or the job does not succeed.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let template = kubernetes::read_template(&args)?;
    let mut hosts = machines::from_args(&args)?;
    let path = Path::new(&args.job);
    let is_file = path.extension().is_some_and(|extension| extension == "toml") || path.is_file();
    if !is_file && (!args.sets.is_empty() || !args.sweeps.is_empty()) {
        return Err(usage_error("--set and --sweep change a TOML file; this job is submitted already"));
    }
    if !args.sweeps.is_empty() && args.with != LauncherKind::Slurm {
        return Err(usage_error(
            "--sweep is for Slurm; submit the sweep with `lockstep submit --sweep`, and launch each trial's job",
        ));
    }
    let document = if is_file { Some(job_file::read_document(path, &args.sets)?) } else { None };
    // For a sweep, the file itself is not checked, because it may lack the swept keys. `array::run` checks each trial.
    let document_of_job = document.as_ref().filter(|_| args.sweeps.is_empty());
    let spec = document_of_job.map(|document| job_file::check(path, document)).transpose()?;
    machines::check_reachable(&args, &hosts)?;
    if !args.dry_run {
        args.with.programs().iter().try_for_each(|program| machines::check_on_path(program))?;
    }
    let api = args.server.api()?;
    let args = Arc::new(args);
    block_on(async {
        let source = match (document, spec) {
            (Some(document), Some(spec)) => Source::File(document, Box::new(spec)),
            (Some(document), None) => return array::run(&args, &api, hosts, document).await,
            (None, _) => {
                let job = api.find_job_preferring(&args.job, |state| !state.is_final()).await?;
                if job.state.is_final() {
                    let Job { id, state, .. } = job;
                    return Err(usage_error(format!(
                        "job {id} is over ({state}); `lockstep retry` queues it again"
                    )));
                }
                Source::Job(Box::new(job))
            }
        };
        let (id, spec) = match &source {
            Source::File(_, spec) => ("JOB", &**spec),
            Source::Job(job) => (job.id.as_str(), &job.spec),
        };
        if let Some(template) = &template {
            template.set_slots(&mut hosts, &args, spec)?;
        }
        machines::fill_in_slots(&mut hosts, args.slots, spec)?;
        let ca = machines::read_ca(&args)?;
        if args.dry_run {
            return print_dry_run(&args, id, &hosts, spec, template.as_ref());
        }
        let has_submitted_job = matches!(source, Source::File(..));
        let job = match source {
            Source::Job(job) => *job,
            Source::File(mut document, _) => {
                let post = async |document: &Value| api.post_once("/jobs?launched=true", document).await;
                let job: Job = job_file::submit(&api, &mut document, post).await?;
                output::warn_each(&job.warnings);
                job
            }
        };
        if !args.server.json {
            output::line(format_args!("{}  {}/jobs/{}", job.id, api.base, job.id))?;
        }
        let mut launch = Launch::new(&args, &api, job, hosts, ca);
        launch.has_submitted_job = has_submitted_job;
        let result = match &template {
            Some(template) => kubernetes::start(&mut launch, template).await,
            None => launch.start().await,
        };
        launch.finish(result).await
    })
}

/// The error of a launch that stops following its job while the agents continue. The text says how to end the agents.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct LaunchDetached(String);

impl Launch {
    /// Creates a launch. The caller sets `has_submitted_job` to false if this command has not submitted the job.
    fn new(args: &Arc<Args>, api: &Api, job: Job, hosts: Vec<Host>, ca: Option<String>) -> Self {
        let server = args.agent_server.clone().unwrap_or_else(|| args.server.address());
        let bundle = Bundle {
            server,
            ca,
            job: job.id.clone(),
            dir: args.dir.clone(),
            nodes: Vec::new(),
            in_pod: false,
        };
        let (args, api, token_ids) = (args.clone(), api.clone(), Vec::new());
        Self { args, api, job, has_submitted_job: true, hosts, bundle, token_ids }
    }

    async fn start(&mut self) -> anyhow::Result<()> {
        self.create_tokens().await?;
        match self.args.with {
            LauncherKind::Ssh => ssh::start(self).await,
            LauncherKind::Mpirun => mpirun::start(self).await,
            LauncherKind::Slurm => slurm::start(self).await,
            LauncherKind::Kubernetes => Err(usage_error("--with kubernetes needs --template FILE")),
        }
    }

    /// Cleans up after a launch: revokes the tokens when the job is over, and cancels a job that this command submitted if no agent could
    /// be started.
    async fn finish(&self, result: anyhow::Result<()>) -> anyhow::Result<()> {
        let path = format!("/jobs/{}", self.job.id);
        let job = match self.api.find::<Job>(&path).await {
            Ok(Some(job)) => job,
            Ok(None) => {
                self.revoke_tokens().await;
                return result;
            }
            Err(_) => return result,
        };
        let agents_continue = result.as_ref().is_err_and(|error| error.is::<LaunchDetached>());
        // An error does not show that the agents have ended: a connection may have broken. So the launch counts as never started only if no
        // attempt has begun.
        let never_started = result.is_err() && !agents_continue && self.never_ran(&job);
        if never_started && self.has_submitted_job {
            let cancelled: anyhow::Result<Value> = self.api.post(&format!("{path}/cancel"), &json!({})).await;
            if cancelled.is_ok() {
                output::warn(format_args!("job {} is cancelled, as its agents were not started", job.id));
            }
        }
        // If agents of another launch have taken the job, this launch's agents have nothing to do.
        let other_agents = self.agents_of_other_launch(&job).filter(|_| result.is_err() && !agents_continue);
        let has_nothing_to_do = never_started || job.state.is_final() || other_agents.is_some();
        // Tokens are not revoked while an agent, perhaps of an earlier launch, uploads a checkpoint. These tokens expire later.
        let is_uploading = has_nothing_to_do
            && job.attempt > 0
            && matches!(self.upload_status().await, Ok(UploadStatus::Uploading) | Err(_));
        if has_nothing_to_do && !is_uploading {
            self.revoke_tokens().await;
        }
        if job.state.is_final() && !job.agents.is_empty() && !self.args.server.json {
            let machines = describe_machines(&job.agents, &self.bundle.nodes);
            output::line(format_args!("{} ran on {machines}", job.id))?;
        }
        match (result, other_agents) {
            (Err(error), Some(agents)) => {
                let warning = if self.has_submitted_job {
                    "; repeating this command would train the job twice"
                } else {
                    ""
                };
                let text = format!(
                    "{}\njob {} nevertheless runs on {agents}, which this launch did not start{warning}; `lockstep watch {1}` shows it",
                    describe_error(&error),
                    job.id
                );
                Err(if error.is::<WrongRequest>() { usage_error(text) } else { anyhow::anyhow!(text) })
            }
            (result, _) => result,
        }
    }

    /// Returns the message that the job has no agents although it is not over. `how` says how the agents ended.
    fn describe_early_end(&self, how: &str, job: &Job) -> String {
        let launcher = format!("{:?}", self.args.with).to_lowercase();
        format!(
            "{how}, and the job is {}; `lockstep launch {} --with {launcher}` starts agents for it again",
            job.state, job.id
        )
    }

    /// Whether no attempt of the job has begun since the start of this launch.
    fn never_ran(&self, job: &Job) -> bool {
        job.attempt <= self.job.attempt && !job.state.is_active() && !job.state.is_final()
    }

    /// Whether the job may use fewer ranks, and its smallest number of ranks fits into `slots`.
    fn can_run_with(&self, job: &Job, slots: u32) -> bool {
        job.may_use_fewer_ranks() && job.spec.fewer_ranks().last().is_some_and(|least| slots >= *least)
    }

    /// Returns the names of the agents that run the job, if no agent of this launch runs it.
    fn agents_of_other_launch(&self, job: &Job) -> Option<String> {
        let is_own = |agent: &String| self.bundle.nodes.iter().any(|node| node.name == *agent);
        let runs_on_others =
            job.state.is_active() && !job.agents.is_empty() && !job.agents.iter().any(is_own);
        runs_on_others.then(|| job.agents.join(", "))
    }

    /// Creates and returns this launch's folder on this machine, for logs and, with Slurm, for the agents' files.
    fn create_folder(&self) -> anyhow::Result<PathBuf> {
        create_private_folder(&self.args, self.job.id.as_str())
    }
}

/// Lists the machines of agents, by their names in the list of machines, or by the agents' own names if the launcher chose the machines.
fn describe_machines(agents: &[String], nodes: &[bundle::Node]) -> String {
    let machine = |agent: &String| {
        let node = nodes.iter().find(|node| node.name == *agent && !node.host.is_empty());
        node.map_or_else(|| agent.clone(), |node| format!("{} (agent {agent})", node.host))
    };
    agents.iter().map(machine).collect::<Vec<_>>().join(", ")
}

/// Creates and returns a launch's folder on this machine.
fn create_private_folder(args: &Args, name: &str) -> anyhow::Result<PathBuf> {
    let folder = node::home_dir().join(&args.dir).join(name);
    node::make_private_dir(&folder).map_err(|e| usage_error(format!("--dir: {}: {e}", folder.display())))?;
    Ok(folder)
}

/// Prints the output of `--dry-run`, which contains no secret.
fn print_dry_run(
    args: &Args,
    job: &str,
    hosts: &[Host],
    spec: &JobSpec,
    template: Option<&kubernetes::Template>,
) -> anyhow::Result<()> {
    match args.with {
        LauncherKind::Ssh => {
            hosts.iter().try_for_each(|host| output::line(format_command(&ssh::command(args, host))))
        }
        LauncherKind::Mpirun => output::line(format_command(&mpirun::command(args, hosts))),
        LauncherKind::Slurm => {
            let folder = node::home_dir().join(&args.dir).join(job);
            output::line(format_command(&slurm::command(args)))?;
            output::line(slurm::Batch::for_job(job).script(args, hosts, spec.parallel.device, &folder)?)
        }
        LauncherKind::Kubernetes => {
            template.map_or(Ok(()), |template| kubernetes::print_objects(args, job, hosts, spec, template))
        }
    }
}

/// Formats a command, quoted for a shell.
fn format_command(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| quote(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

/// Quotes a word for a POSIX shell.
pub(crate) fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use lockstep_protocol::spec::Device;
    use std::collections::BTreeMap;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    /// Parses the arguments of `lockstep launch`.
    pub(super) fn parse(words: &[&str]) -> Args {
        Command::try_parse_from(["launch"].iter().chain(words)).unwrap().args
    }

    #[test]
    fn machines_of_a_job_are_named_as_in_the_list() {
        let node = |name: &str, host: &str| bundle::Node {
            name: name.into(),
            host: host.into(),
            agent_id: String::new(),
            token: String::new(),
            slots: 1,
            device: Device::Auto,
            gpus: Vec::new(),
            env: BTreeMap::new(),
        };
        let nodes = [node("launch-0", "gpu-a"), node("launch-1", "gpu-b"), node("launch-2", "")];
        for (agents, message) in [
            (&["launch-1"][..], "gpu-b (agent launch-1)"),
            (&["launch-0", "launch-1"], "gpu-a (agent launch-0), gpu-b (agent launch-1)"),
            (&["launch-2", "other"], "launch-2, other"),
        ] {
            let agents: Vec<String> = agents.iter().map(|agent| (*agent).to_owned()).collect();
            assert_eq!(describe_machines(&agents, &nodes), message);
        }
    }
}
