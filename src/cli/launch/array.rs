//! A sweep as a Slurm job array: each task of the array runs the agents of one trial's job.

use super::{
    super::{
        api::{Api, SERVER_TIMEOUT, parse_elements},
        job_file, output, sweep, sweeps, usage_error, watch,
    },
    Args, Launch, create_private_folder, format_command,
    hosts::Host,
    machines, node, slurm,
    uploads::{AgentsEnd, EndWait},
};
use lockstep_protocol::{
    Job, JobState,
    spec::{Device, read},
    sweep::Sweep,
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};
use tokio::signal::unix::{SignalKind, signal};

/// Maximum number of agents in a sweep. Each agent has a token, and a server stores at most 5000 tokens.
const MAX_AGENTS: usize = 500;
/// The exit status of a program that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// Submits the sweep and the array, and follows the trials.
///
/// # Errors
/// Exit status 2 for mistakes, 1 unless every job succeeds.
pub(super) async fn run(
    args: &Arc<Args>,
    api: &Api,
    hosts: Vec<Host>,
    mut document: Value,
) -> anyhow::Result<()> {
    let path = Path::new(&args.job);
    sweep::write_grid(path, &mut document, &args.sweeps, None)?;
    sweep::check(path, &document)?;
    let trials = sweep::trial_documents(&document);
    let (hosts, device) = hosts_for_largest(args, hosts, &trials)?;
    if args.dry_run {
        return print_dry_run(args, &hosts, device, &trials);
    }
    let ca = machines::read_ca(args)?;
    let post = async |document: &Value| api.post_once("/sweeps?launched=true", document).await;
    let sweep: Sweep = job_file::submit(api, &mut document, post).await?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    sweeps::announce(api, &sweep, args.server.json)?;
    let launch = |job| Launch::new(args, api, job, hosts.clone(), ca.clone());
    let mut array = Array {
        batch: slurm::Batch::for_sweep(&sweep.id, trials.len(), args.at_once),
        launches: Vec::new(),
        tag: sweep.id.clone(),
        folder: PathBuf::new(),
    };
    let start = async {
        array.launches = wait_for_trials(api, &sweep).await?.into_iter().map(launch).collect();
        array.start(args, device).await
    };
    let started = tokio::select! {
        started = start => started,
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted before the sweep was submitted to Slurm")),
    };
    let id = match started {
        Ok(id) => id,
        Err(error) => {
            let clean_up = async {
                let path = format!("/sweeps/{}/cancel", sweep.id);
                let cancelled: anyhow::Result<Value> = api.post(&path, &json!({})).await;
                if cancelled.is_ok() {
                    output::warn(format_args!("{} is cancelled, as its agents were not started", sweep.id));
                }
                for (task, launch) in array.launches.iter().enumerate() {
                    array.remove_bundle(task);
                    // Cancels the job if it is not over, and revokes the tokens of its agents.
                    let _ = launch.finish(Err(anyhow::anyhow!("not started"))).await;
                }
            };
            tokio::select! {
                () = clean_up => return Err(error),
                _ = interrupt.recv() => std::process::exit(INTERRUPTED),
            }
        }
    };
    output::warn(format_args!(
        "Slurm's array is {id}; its logs will be {}/slurm-{id}_N.log",
        array.folder.display()
    ));
    if args.detach {
        return Ok(());
    }
    tokio::select! {
        result = array.follow(args, api, &id) => result,
        _ = interrupt.recv() => std::process::exit(INTERRUPTED),
    }
}

/// Returns the machines with slots for the job with the most ranks, and the device: the CPU if any job trains on CPU cores, otherwise
/// [`Device::Auto`].
fn hosts_for_largest(
    args: &Args,
    mut hosts: Vec<Host>,
    documents: &[Value],
) -> anyhow::Result<(Vec<Host>, Device)> {
    if documents.len() * hosts.len() > MAX_AGENTS {
        return Err(usage_error(format!(
            "{} jobs on {} machines each are more than {MAX_AGENTS} agents: split the sweep, or give fewer --nodes",
            documents.len(),
            hosts.len()
        )));
    }
    // All trials have been checked.
    let specs: Vec<_> = documents.iter().filter_map(|document| read(document).0).collect();
    if let Some(largest) = specs.iter().max_by_key(|spec| spec.parallel.ranks) {
        machines::fill_in_slots(&mut hosts, args.slots, largest)?;
    }
    let on_cores = specs.iter().map(|spec| spec.parallel.device).find(|device| device.is_cpu());
    Ok((hosts, on_cores.unwrap_or(Device::Auto)))
}

/// Waits until the sweep has started all trials. Returns their jobs, in order.
///
/// # Errors
/// The sweep does not start all trials within a minute.
async fn wait_for_trials(api: &Api, sweep: &Sweep) -> anyhow::Result<Vec<Job>> {
    let began = Instant::now();
    loop {
        let found = api.read_pages("/jobs", &[("tag", sweep.id.clone())], None).await;
        let mut jobs: Vec<Job> = parse_elements(&found.unwrap_or_default(), "jobs");
        if jobs.len() == sweep.trial_count as usize {
            jobs.sort_by_key(|job| job.trial.as_ref().map(|trial| trial.number));
            return Ok(jobs);
        }
        if began.elapsed() > SERVER_TIMEOUT {
            anyhow::bail!("{} does not start its trials; `lockstep sweep show {0}` says why", sweep.id);
        }
        tokio::time::sleep(slurm::POLL_INTERVAL).await;
    }
}

/// Prints the output of `--dry-run`.
fn print_dry_run(args: &Args, hosts: &[Host], device: Device, documents: &[Value]) -> anyhow::Result<()> {
    for (task, document) in documents.iter().enumerate() {
        let name = document.get("name").and_then(Value::as_str).unwrap_or_default();
        output::line(format_args!("# task {task}: {name}"))?;
    }
    let folder = node::home_dir().join(&args.dir).join("SWEEP");
    output::line(format_command(&slurm::command(args)))?;
    let batch = slurm::Batch::for_sweep("SWEEP", documents.len(), args.at_once);
    output::line(batch.script(args, hosts, device, &folder)?)
}

/// A job array in Slurm. The task with the index `i` runs the agents of the job of `launches[i]`.
struct Array {
    launches: Vec<Launch>,
    /// Tag of the jobs: the sweep's id.
    tag: String,
    batch: slurm::Batch,
    folder: PathBuf,
}

impl Array {
    /// Creates the agents' tokens and submits the array to Slurm. Returns the array's job ID in Slurm.
    async fn start(&mut self, args: &Args, device: Device) -> anyhow::Result<String> {
        self.folder = create_private_folder(args, &self.tag)?;
        for (task, launch) in self.launches.iter_mut().enumerate() {
            launch.create_tokens().await?;
            slurm::write_bundle(&self.batch.bundle_path(&self.folder, task), &launch.bundle)?;
        }
        let hosts = self.launches.first().map_or(&[][..], |launch| &launch.hosts);
        slurm::submit(args, &self.batch.script(args, hosts, device, &self.folder)?)
    }

    fn remove_bundle(&self, task: usize) {
        let _ = fs::remove_file(self.batch.bundle_path(&self.folder, task));
    }

    /// Waits until every job is over and its task has ended.
    async fn follow(&self, args: &Args, api: &Api, id: &str) -> anyhow::Result<()> {
        output::warn("Ctrl-C ends this display and not the jobs");
        let mut remaining: BTreeMap<usize, &Launch> = self.launches.iter().enumerate().collect();
        let (mut reported, mut missing_tasks) = (HashMap::new(), HashSet::new());
        // The waits for the agents of jobs that are over.
        let mut waits = HashMap::new();
        let mut succeeded = 0;
        while !remaining.is_empty() {
            tokio::time::sleep(slurm::POLL_INTERVAL).await;
            // Tasks are listed before jobs. Otherwise the job of a task that ends between the two requests would seem to have no agents.
            let (Some(tasks), Some(jobs)) = (slurm::unfinished_tasks(id), self.read_jobs(api).await) else {
                continue;
            };
            for (task, launch) in remaining.clone() {
                let task_id = format!("{id}_{task}");
                let job = match jobs.get(launch.job.id.as_str()) {
                    Some(job) => job.clone(),
                    // The job's tags may have been changed.
                    None => match api.find::<Job>(&format!("/jobs/{}", launch.job.id)).await {
                        Ok(Some(job)) => job,
                        Ok(None) => {
                            output::warn(format_args!("job {} is deleted", launch.job.id));
                            slurm::cancel(&task_id);
                            self.remove_bundle(task);
                            launch.revoke_tokens().await;
                            remaining.remove(&task);
                            continue;
                        }
                        Err(_) => continue,
                    },
                };
                if !job.state.is_final() {
                    // The job may have been retried after it was over.
                    waits.remove(&task);
                }
                if reported.insert(task, job.state) != Some(job.state) {
                    print_state(args, &job)?;
                    succeeded += usize::from(job.state == JobState::Succeeded);
                }
                match tasks.get(&task) {
                    // Agents exit after their job, when its checkpoints are on the server. Then a task that has not started, or that runs
                    // for some more time, is cancelled.
                    Some(state) if job.state.is_final() => {
                        let wait = waits.entry(task).or_insert_with(EndWait::new);
                        match wait.poll(launch, slurm::agents_in(state)).await {
                            Some(AgentsEnd::Unneeded) => slurm::cancel(&task_id),
                            Some(AgentsEnd::NotUploaded) => {
                                output::warn(format_args!(
                                    "the last checkpoint of job {} is not known to be on the server: Slurm's task {task_id} continues, \
                                     and `scancel {task_id}` ends it",
                                    job.id
                                ));
                                remaining.remove(&task);
                            }
                            _ => {}
                        }
                    }
                    Some(_) => drop(missing_tasks.remove(&task)),
                    None if job.state.is_final() => {
                        self.remove_bundle(task);
                        launch.finish(Ok(())).await?;
                        remaining.remove(&task);
                    }
                    // When the task is first missing, the last report of its agent may not have arrived yet.
                    None if missing_tasks.insert(task) => {}
                    None => {
                        let how = slurm::describe_end(&task_id);
                        let how = format!("Slurm's task {task_id} is over ({how})");
                        output::warn(launch.describe_early_end(&how, &job));
                        self.remove_bundle(task);
                        remaining.remove(&task);
                    }
                }
            }
        }
        let total = self.launches.len();
        anyhow::ensure!(succeeded == total, "{succeeded} of {total} jobs succeeded");
        Ok(())
    }

    /// Returns the sweep's jobs by id, or `None` if the server does not respond.
    async fn read_jobs(&self, api: &Api) -> Option<HashMap<String, Job>> {
        let found = api.read_pages("/jobs", &[("tag", self.tag.clone())], None).await.ok()?;
        let job = |value| serde_json::from_value::<Job>(value).ok().map(|job| (job.id.to_string(), job));
        Some(found.into_iter().filter_map(job).collect())
    }
}

/// Prints a job's state as a line, or as JSON the job itself when it has ended.
fn print_state(args: &Args, job: &Job) -> anyhow::Result<()> {
    if !args.server.json {
        let outcome = watch::describe_outcome(job, &[]);
        return output::line(format_args!("{}  {}: {outcome}", job.id, job.spec.name));
    }
    if job.state.is_final() { output::json(job) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::parse, *};

    #[test]
    fn a_sweep_with_more_than_500_agents_is_refused() {
        let args = parse(&["job.toml", "--with", "slurm"]);
        let hosts_for = |jobs: usize, machines: usize| {
            let job = json!({"data": {"dataset": "d"}, "parallel": {"ranks": machines}});
            hosts_for_largest(&args, vec![Host::default(); machines], &vec![job; jobs])
        };
        let (hosts, _) = hosts_for(100, 5).expect("500 agents");
        assert!(hosts.len() == 5 && hosts.iter().all(|host| host.slots == Some(1)));
        let message = hosts_for(167, 3).expect_err("501 agents").to_string();
        assert_eq!(
            message,
            "167 jobs on 3 machines each are more than 500 agents: split the sweep, or give fewer --nodes"
        );
    }
}
