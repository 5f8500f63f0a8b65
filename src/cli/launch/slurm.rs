//! Starts agents in a batch job of Slurm, in which `srun` starts an agent on each machine. At Slurm's time limit, the agents write a
//! checkpoint and the batch job is requeued.

use super::{
    super::{output, usage_error},
    Args, Launch, MAX_SLOTS,
    bundle::{BUNDLE_BYTES, Bundle},
    follow::{follow_until_over, read_job},
    format_command,
    hosts::Host,
    quote,
    uploads::Agents,
};
use lockstep_host::write_private;
use lockstep_protocol::{JobState, spec::Device};
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Returns the command `sbatch`, which reads the script from standard input.
pub(super) fn command(args: &Args) -> Command {
    let mut command = Command::new("sbatch");
    command.arg("--parsable").args(&args.options);
    command
}

/// A batch job, or a job array.
pub(super) struct Batch {
    /// Name in Slurm, after the prefix `lockstep-`.
    name: String,
    /// Number of tasks in the array, and the maximum number that run at the same time. `None` for a batch job.
    array: Option<(usize, Option<u32>)>,
}

impl Batch {
    pub(super) fn for_job(job: &str) -> Self {
        Self { name: job.to_owned(), array: None }
    }

    pub(super) fn for_sweep(tag: &str, jobs: usize, at_once: Option<u32>) -> Self {
        Self { name: tag.to_owned(), array: Some((jobs, at_once)) }
    }

    /// Returns the path of the agents' bundle. In an array, each task has its own bundle.
    pub(super) fn bundle_path(&self, folder: &Path, task: usize) -> PathBuf {
        folder.join(if self.array.is_some() { format!("bundle-{task}.json") } else { "bundle.json".into() })
    }

    /// Returns the batch script. Options on sbatch's command line have precedence over options in the script.
    ///
    /// # Errors
    /// The folder's name has characters that a script's line cannot contain.
    pub(super) fn script(
        &self,
        args: &Args,
        hosts: &[Host],
        device: Device,
        folder: &Path,
    ) -> anyhow::Result<String> {
        let shown = folder.display().to_string();
        if shown.contains(['\n', '%', '"', '\\']) {
            return Err(usage_error(format!(
                "--dir: Slurm cannot write logs to {shown:?}: choose a folder with a plain name"
            )));
        }
        let slots = hosts.iter().filter_map(|host| host.slots).max().unwrap_or(1).min(MAX_SLOTS);
        let mut text = String::from("#!/bin/bash\n");
        let mut option = |option: String| {
            let _ = writeln!(text, "#SBATCH {option}");
        };
        option(format!("--job-name=lockstep-{}", self.name));
        if let Some((jobs, at_once)) = self.array {
            let at_once = at_once.map_or_else(String::new, |max| format!("%{max}"));
            option(format!("--array=0-{}{at_once}", jobs - 1));
        }
        option(format!("--nodes={}", hosts.len()));
        option("--ntasks-per-node=1".into());
        if device.is_cpu() {
            option(format!("--cpus-per-task={slots}"));
        }
        let names: Vec<_> =
            hosts.iter().map(|host| host.name.as_str()).filter(|name| !name.is_empty()).collect();
        if !names.is_empty() {
            option(format!("--nodelist={}", names.join(",")));
        }
        // Sends the signal two minutes before the time limit, so that the agents can write a checkpoint.
        option("--signal=B:USR1@120".into());
        option("--requeue".into());
        option("--open-mode=append".into());
        let (log, bundle) = match self.array {
            Some(_) => ("%A_%a", "bundle-\"$SLURM_ARRAY_TASK_ID\".json"),
            None => ("%j", "bundle.json"),
        };
        option(format!("--output=\"{shown}/slurm-{log}.log\""));
        let bundle = format!("{}/{bundle}", quote(&shown));
        let program = quote(&args.program);
        let _ = write!(
            text,
            r#"
# Before the time limit the agents are asked to end: their ranks write a checkpoint, the job goes back to Lockstep's queue, and this
# batch job goes back to Slurm's queue.
limit=0
ask() {{
    limit=1
    echo "Slurm's time limit is near: the agents are asked to write a checkpoint and to end, and this job is requeued"
    scancel --signal=TERM "$SLURM_JOB_ID.0"
}}
trap ask USR1

srun --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} {program} launched {bundle} &
step=$!
wait "$step"
status=$?
# A signal ends the command wait, but not the step.
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    status=$?
done
[ "$limit" = 1 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"#
        );
        Ok(text)
    }
}

/// Submits the batch job and follows it.
///
/// # Errors
/// Slurm refuses the batch job, the batch job ends before Lockstep's job, or Lockstep's job does not succeed.
pub(super) async fn start(launch: &Launch) -> anyhow::Result<()> {
    let folder = launch.create_folder()?;
    let batch = Batch::for_job(launch.job.id.as_str());
    let bundle = batch.bundle_path(&folder, 0);
    write_bundle(&bundle, &launch.bundle)?;
    let script = batch.script(&launch.args, &launch.hosts, launch.job.spec.parallel.device, &folder)?;
    let id = submit(&launch.args, &script).inspect_err(|_| drop(fs::remove_file(&bundle)))?;
    output::warn(format_args!("Slurm's job is {id}; its log will be {}/slurm-{id}.log", folder.display()));
    if launch.args.detach {
        return Ok(());
    }
    let agents = async |_: Option<JobState>| {
        anyhow::Ok(unfinished_state(&id).map_or(Agents::Ended, |state| agents_in(&state)))
    };
    let how_to_end = format!("Slurm's job {id} continues, and `scancel {id}` ends it");
    let (result, may_be_ended) =
        follow_until_over(launch, wait_for_early_end(launch, &id), agents, &how_to_end).await?;
    if may_be_ended {
        cancel(&id);
    }
    let _ = fs::remove_file(&bundle);
    result
}

/// Returns the state of the agents from `state`, the unfinished state of Slurm's job. Slurm's job is pending while it waits for machines,
/// at first or after it was requeued.
pub(super) fn agents_in(state: &str) -> Agents {
    if state.starts_with("PENDING") { Agents::Idle } else { Agents::Running }
}

/// Writes the agents' bundle to a file that only this account can read (0600).
///
/// # Errors
/// Exit status 2 if the file cannot be written.
pub(super) fn write_bundle(path: &Path, bundle: &Bundle) -> anyhow::Result<()> {
    write_private(path, bundle.to_json(BUNDLE_BYTES)?.as_bytes())
        .map_err(|e| usage_error(format!("--dir: {}: {e}", path.display())))
}

/// Submits a script to Slurm. Returns the ID of Slurm's job.
///
/// # Errors
/// Slurm refuses the script.
pub(super) fn submit(args: &Args, script: &str) -> anyhow::Result<String> {
    let mut command = command(args);
    // The batch job inherits this environment, which must not contain this user's token.
    command.env_remove("LOCKSTEP_TOKEN").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C must not end sbatch. Otherwise it would be unknown whether Slurm has accepted the job.
    command.process_group(0);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(script.as_bytes());
    }
    let printed = child.wait_with_output()?;
    if !printed.status.success() {
        let why = String::from_utf8_lossy(&printed.stderr).trim().to_owned();
        return Err(usage_error(format!("Slurm refuses the job: {why} ({})", format_command(&command))));
    }
    // sbatch prints `12` or `12;cluster`.
    let text = String::from_utf8_lossy(&printed.stdout).into_owned();
    let id = text.trim().split(';').next().unwrap_or_default().to_owned();
    if id.is_empty() || !id.bytes().all(|b| b.is_ascii_digit()) {
        anyhow::bail!("sbatch printed {text:?} instead of a job ID");
    }
    Ok(id)
}

/// Cancels Slurm's job, or a task of an array. Does nothing if Slurm has already ended it.
pub(super) fn cancel(id: &str) {
    let _ = Command::new("scancel").arg(id).status();
}

/// Returns the output of `squeue` about Slurm's job, which is empty if the job has ended. `None` if the controller does not respond.
fn squeue(id: &str, options: &[&str]) -> Option<String> {
    // By default, squeue lists only jobs that have not ended.
    let mut command = Command::new("squeue");
    command.args(["-h", "-j", id]).args(options).env_remove("SQUEUE_STATES");
    let printed = command.output().ok()?;
    if !printed.status.success() {
        return String::from_utf8_lossy(&printed.stderr).contains("Invalid job id").then(String::new);
    }
    Some(String::from_utf8_lossy(&printed.stdout).trim().to_owned())
}

/// Returns the state and reason of Slurm's job, or `None` if Slurm's job has ended. Without a response of the controller, the job counts as
/// existing.
fn unfinished_state(id: &str) -> Option<String> {
    let text = squeue(id, &["-o", "%T (%r)"]).unwrap_or_else(|| "UNKNOWN".into());
    Some(text).filter(|text| !text.is_empty())
}

/// Returns the states and reasons of an array's unfinished tasks, by index, or `None` if the controller does not respond.
pub(super) fn unfinished_tasks(id: &str) -> Option<BTreeMap<usize, String>> {
    let text = squeue(id, &["-r", "-o", "%K %T (%r)"])?;
    let task = |line: &str| {
        let (index, state) = line.trim().split_once(' ')?;
        Some((index.parse().ok()?, state.to_owned()))
    };
    Some(text.lines().filter_map(task).collect())
}

/// Prints the states of Slurm's job. Returns an error when Slurm's job has ended and Lockstep's job is not over.
async fn wait_for_early_end(launch: &Launch, id: &str) -> anyhow::Error {
    let mut printed_state = String::new();
    loop {
        let state = unfinished_state(id);
        if let Some(state) = &state
            && *state != printed_state
        {
            output::warn(format_args!("Slurm's job {id}: {state}"));
            printed_state.clone_from(state);
        }
        if state.is_none() {
            // Lockstep's job may end at the same time, which the display of the job reports.
            tokio::time::sleep(POLL_INTERVAL).await;
            if let Ok(job) = read_job(launch).await
                && !job.state.is_final()
            {
                let how = format!("Slurm's job {id} is over ({})", describe_end(id));
                return anyhow::Error::msg(launch.describe_early_end(&how, &job));
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Describes how Slurm's job ended, from Slurm's accounting, or from the controller if there is no accounting.
pub(super) fn describe_end(id: &str) -> String {
    let sacct = Command::new("sacct").args(["-n", "-X", "-P", "-o", "State,ExitCode", "-j", id]).output();
    if let Ok(printed) = sacct
        && printed.status.success()
        && let Some(line) = String::from_utf8_lossy(&printed.stdout).lines().last()
    {
        return line.replace('|', ", exit code ");
    }
    let printed = Command::new("scontrol").args(["-o", "show", "job", id]).output();
    let text =
        printed.map(|printed| String::from_utf8_lossy(&printed.stdout).into_owned()).unwrap_or_default();
    let field = |name: &str| text.split_whitespace().find_map(|word| word.strip_prefix(name));
    match (field("JobState="), field("Reason=")) {
        (Some(state), Some(reason)) => format!("{state}, {reason}"),
        _ => "Slurm no longer knows how the job ended".into(),
    }
}
