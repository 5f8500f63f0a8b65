//! Follows a launch whose agents depend on processes of this machine (ssh, mpirun), until the job ends.

use super::{
    super::{WrongRequest, api::Outage, file, output, usage_error, watch},
    Launch, LaunchDetached,
    uploads::{Agents, AgentsEnd},
};
use lockstep_protocol::{Job, JobState};
use serde_json::Value;
use std::{
    fs::File,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

/// Interval between two checks of processes and of the server.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A process on which agents depend. It has its own process group and writes into a file, so Ctrl-C ends only this command.
pub(super) struct LauncherProcess {
    /// Name of the machine, or of the program.
    label: String,
    child: Child,
    log: PathBuf,
    status: Option<ExitStatus>,
    explain: Explain,
}

/// Describes the exit of a [`LauncherProcess`] (label, status, last line) in a sentence.
type Explain = fn(&str, ExitStatus, &str) -> String;

impl LauncherProcess {
    /// Starts a process and writes `input` to it.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn start(
        label: &str,
        mut command: Command,
        input: &[u8],
        log: &Path,
        explain: Explain,
    ) -> io::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let output = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A process that has exited does not read. Its exit status explains more than the broken pipe.
            let _ = stdin.write_all(input);
        }
        Ok(Self { label: label.to_owned(), child, log: log.to_owned(), status: None, explain })
    }

    /// Returns the exit status and its explanation, once. Later calls return `None`.
    fn take_exit(&mut self) -> Option<(ExitStatus, String)> {
        if self.status.is_some() || self.is_running() {
            return None;
        }
        let last = Some(file::last_line(&self.log)).filter(|last| !last.is_empty());
        let last = last.unwrap_or_else(|| "it wrote nothing".into());
        self.status.map(|status| (status, (self.explain)(&self.label, status, &last)))
    }

    /// Whether the process has not exited. [`LauncherProcess::take_exit`] does not return an exit that this call has seen.
    fn is_running(&mut self) -> bool {
        self.status = self.status.or_else(|| self.child.try_wait().ok().flatten());
        self.status.is_none()
    }
}

/// Shows the job until it ends, or with `--detach` until the agents are online.
///
/// # Errors
/// A process exits with an error before the job has started, all processes exit before the job ends, or the job does not succeed.
pub(super) async fn follow(launch: &Launch, mut processes: Vec<LauncherProcess>) -> anyhow::Result<()> {
    let logs = launch.create_folder()?;
    output::warn(format_args!("the agents' logs are in {}", logs.display()));
    if launch.args.detach {
        return wait_until_online(launch, &mut processes).await;
    }
    let result = tokio::select! {
        result = watch::show_to_end(&launch.api, launch.job.clone(), launch.args.server.json) => result,
        failure = wait_for_failure(launch, &mut processes) => return Err(failure),
    };
    if result.is_err() && final_state(launch).await.is_none() {
        return if processes.iter_mut().any(LauncherProcess::is_running) {
            // This command gave up on the unreachable server. The agents keep trying.
            result.map_err(|error| LaunchDetached(format!("{error:#}")).into())
        } else {
            result
        };
    }
    let agents = async || {
        anyhow::Ok(if processes.iter_mut().any(LauncherProcess::is_running) {
            Agents::Running
        } else {
            Agents::Ended
        })
    };
    if !matches!(launch.wait_for_agents(agents).await?, AgentsEnd::Ended) {
        let running = processes.iter().filter(|process| process.status.is_none());
        let labels: Vec<_> = running.map(|process| process.label.as_str()).collect();
        output::warn(format_args!(
            "the agents started on {} are still running; see {}",
            labels.join(", "),
            logs.display()
        ));
    }
    result
}

/// Waits until the agents of these processes can no longer run the job, and returns the reason.
async fn wait_for_failure(launch: &Launch, processes: &mut [LauncherProcess]) -> anyhow::Error {
    loop {
        for index in 0..processes.len() {
            let Some((status, explanation)) = processes[index].take_exit() else { continue };
            // `take_exit` returns each exit once, so a failed request is retried: a network failure may have caused the exit.
            let job = match read_job_with_retries(launch).await {
                Ok(job) => job,
                Err(error) => {
                    return LaunchDetached(format!("{explanation}; the job's state is unknown: {error}"))
                        .into();
                }
            };
            if job.state.is_final() {
                continue;
            }
            let is_last = processes.iter().all(|process| process.status.is_some());
            let can_continue = launch.can_run_with(&job, running_slots(launch, processes));
            if !status.success() && launch.never_ran(&job) && !can_continue {
                return anyhow::anyhow!(explanation);
            }
            if is_last && launch.agents_of_other_launch(&job).is_some() {
                // The caller adds that agents of another launch run the job.
                return anyhow::anyhow!(explanation);
            }
            if is_last {
                let how = format!("{explanation}; no agent of this launch is left");
                return anyhow::Error::msg(launch.describe_early_end(&how, &job));
            }
            output::warn(explanation);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until all agents are online, or the job has left the queue. A short outage of the server, such as a restart, does not mean that
/// the agents have failed.
async fn wait_until_online(launch: &Launch, processes: &mut [LauncherProcess]) -> anyhow::Result<()> {
    let mut outage = Outage::default();
    loop {
        match poll_online(launch, processes).await {
            Ok(Some(outcome)) => return outcome,
            Ok(None) => outage.report_restored(|text| output::warn(text)),
            Err(error) if error.is::<WrongRequest>() => return Err(error),
            Err(error) => outage.tolerate(error, |text| output::warn(text)).map_err(|error| {
                let id = &launch.job.id;
                LaunchDetached(format!(
                    "{error}; the agents that were started continue, and `lockstep watch {id}` shows the job"
                ))
            })?,
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns the outcome of the wait for the agents, or `None` while the wait continues.
///
/// # Errors
/// The server does not respond, or refuses the request.
async fn poll_online(
    launch: &Launch,
    processes: &mut [LauncherProcess],
) -> anyhow::Result<Option<anyhow::Result<()>>> {
    let job = read_job(launch).await?;
    if !launch.never_ran(&job) {
        return Ok(Some(Ok(())));
    }
    for index in 0..processes.len() {
        let Some((_, explanation)) = processes[index].take_exit() else { continue };
        if !launch.can_run_with(&job, running_slots(launch, processes)) {
            return Ok(Some(Err(anyhow::anyhow!(explanation))));
        }
        output::warn(explanation);
    }
    let agents: Option<Value> = launch.api.find("/agents").await?;
    let agents = agents.and_then(|mut agents| agents["agents"].as_array_mut().map(std::mem::take));
    let agents = agents.unwrap_or_default();
    let is_online = |name: &str| {
        agents.iter().any(|agent| agent["name"] == name && agent["online"].as_bool().unwrap_or(true))
    };
    let has_ended =
        |index: usize| has_process_per_node(launch, processes) && processes[index].status.is_some();
    let mut nodes = launch.bundle.nodes.iter().enumerate();
    Ok(nodes.all(|(index, node)| has_ended(index) || is_online(&node.name)).then_some(Ok(())))
}

/// Whether the processes correspond to the nodes one to one, in the same order, as with SSH.
fn has_process_per_node(launch: &Launch, processes: &[LauncherProcess]) -> bool {
    processes.len() == launch.bundle.nodes.len()
}

/// Returns the number of slots of the agents whose processes still run. Returns 0 if one process starts several agents.
fn running_slots(launch: &Launch, processes: &[LauncherProcess]) -> u32 {
    let running = processes.iter().zip(&launch.bundle.nodes).filter(|(process, _)| process.status.is_none());
    if has_process_per_node(launch, processes) { running.map(|(_, node)| node.slots).sum() } else { 0 }
}

/// Shows a job whose agents another system runs, until the job is over and its agents may be ended, or until `early_end` returns because
/// that system has ended the agents. Also returns whether the agents may be ended. A long outage of the server does not end training.
///
/// `agents` returns the state of the job's agents. Its argument is the job's final state, or `None` if the job is not over. `how_to_end`
/// says that the agents continue, and how to end them.
///
/// # Errors
/// The agents continue.
pub(super) async fn follow_until_over(
    launch: &Launch,
    early_end: impl Future<Output = anyhow::Error>,
    agents: impl AsyncFn(Option<JobState>) -> anyhow::Result<Agents>,
    how_to_end: &str,
) -> anyhow::Result<(anyhow::Result<()>, bool)> {
    let result = tokio::select! {
        result = watch::show_to_end(&launch.api, launch.job.clone(), launch.args.server.json) => result,
        error = early_end => Err(error),
    };
    let why = match final_state(launch).await {
        None if matches!(agents(None).await, Ok(Agents::Ended)) => return Ok((result, false)),
        None => result.err().map_or_else(String::new, |error| format!("{error}; ")),
        state => match launch.wait_for_agents(async || agents(state).await).await {
            Ok(AgentsEnd::Ended | AgentsEnd::Unneeded) => return Ok((result, true)),
            Ok(AgentsEnd::QueuedAgain) => "the job was queued again: ".into(),
            Ok(AgentsEnd::NotUploaded) => {
                "the job's last checkpoint is not known to be on the server: ".into()
            }
            Err(error) => {
                output::warn(format_args!("{error}; {how_to_end}"));
                return Ok((result, false));
            }
        },
    };
    Err(LaunchDetached(format!("{why}{how_to_end}")).into())
}

/// Returns the state of the job if the job is known to be over.
async fn final_state(launch: &Launch) -> Option<JobState> {
    read_job(launch).await.ok().map(|job| job.state).filter(|state| state.is_final())
}

pub(super) async fn read_job(launch: &Launch) -> anyhow::Result<Job> {
    let id = &launch.job.id;
    let found = launch.api.find(&format!("/jobs/{id}")).await?;
    found.ok_or_else(|| usage_error(format!("the job {id} no longer exists")))
}

/// Reads the job, and retries while the server does not respond.
///
/// # Errors
/// The server refuses the request, or does not respond for a minute.
async fn read_job_with_retries(launch: &Launch) -> anyhow::Result<Job> {
    let mut outage = Outage::default();
    loop {
        match read_job(launch).await {
            Ok(job) => return Ok(job),
            Err(error) => outage.tolerate(error, |_| ())?,
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests;
