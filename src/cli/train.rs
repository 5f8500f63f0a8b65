//! `lockstep train`: training without a server, with the same rank processes and folders as under an agent.

mod launcher;
mod local;
mod out_lock;
mod resume;
mod show;
mod started_ranks;

use super::{Stopped, init_tracing, job_file, launch::quote, output, usage_error};
use anyhow::Context as _;
use launcher::{LaunchedRank, MachineRanks};
use local::Outcome;
use lockstep_comm::rendezvous::{free_port, taken_port};
use lockstep_engine::registry;
use lockstep_host::{
    cores,
    gpu::{
        RankGpu,
        libraries::{self, Library},
    },
};
use lockstep_protocol::{
    JobSpec,
    agent::StartAttempt,
    dataset::{default_validation, held_out_share},
    numbers::{accuracy_of, plural},
    spec::{Validation, apply_set},
};
use lockstep_worker::{
    checkpoint,
    rank::{RankConfig, STOP_WITHIN_SECS},
    supervisor::configs,
};
use out_lock::OutLock;
use resume::{checkpoint_folder, find_resume_checkpoint};
use serde_json::Value;
use started_ranks::StartedRanks;
use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

/// Train without a server
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's specification, a TOML file in which data.dataset is a path
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Number of ranks on this machine, instead of parallel.ranks
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// Folder for logs and checkpoints [default: runs/<name of the TOML file>]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Continue from a checkpoint: the newest complete checkpoint in DIR (latest), or the checkpoint at PATH
    #[arg(long, value_name = "latest|PATH")]
    resume: Option<String>,
    /// Change a key of the specification, such as train.lr=0.1 (may be repeated); an empty value, as in train.epochs=, removes the key
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// Rank table of MindSpore or HCCL (JSON), which assigns ranks to devices of machines. This process is the rank RANK_ID, or starts all
    /// ranks of the machine --node [default: the file in RANK_TABLE_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "ranks")]
    rank_table: Option<PathBuf>,
    /// This machine's index in --rank-table, counted from 0
    #[arg(long, value_name = "N")]
    node: Option<usize>,
}

/// Trains to the end. Under torchrun, Open MPI, Slurm or MindSpore's launcher, this process is one rank. Otherwise it starts all ranks.
///
/// # Errors
/// Exit status 2 for mistakes in the specification or the arguments, 1 if training fails or is stopped.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    init_tracing("warn");
    let began = Instant::now();
    if launcher::is_scheduler(|name| std::env::var(name).ok()) {
        return output::line(
            "MS_ROLE is MS_SCHED: Lockstep's ranks find each other at rank 0 and need no scheduler; nothing to do",
        );
    }
    let started_ranks = StartedRanks::find(&args)?;
    if let StartedRanks::Rank(launched) = &started_ranks {
        // Done before the job file is read, because a pipe can be read only once.
        libraries::reexec_if_needed(Library::needed(launched.world_size));
    }
    let (mut spec, gives_validation) = read_spec(&args, &started_ranks)?;
    let dataset = job_file::find_dataset(&spec, &args.job).ok_or_else(|| {
        let given = &spec.data.dataset;
        usage_error(format!(
            "data.dataset: {given} does not exist; without a server a dataset is given by its path"
        ))
    })?;
    if !gives_validation {
        choose_validation(&mut spec, &dataset);
    }
    if !matches!(started_ranks, StartedRanks::Rank(_)) {
        check_classes(&spec, &dataset)?;
    }
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| Path::new("runs").join(args.job.file_stem().unwrap_or("job".as_ref())));
    let has_rank_0 = started_ranks.has_rank_0();
    // Checked before the folder is created.
    match args.resume.as_deref().filter(|_| has_rank_0) {
        Some("latest") if !out.exists() => {
            return Err(usage_error(format!(
                "--resume latest: the folder {} does not exist; give the folder of the run with --out",
                out.display()
            )));
        }
        None | Some("latest") => {}
        Some(path) => drop(checkpoint_folder(path)?),
    }
    fs::create_dir_all(&out).map_err(|e| {
        let detail = if out.is_file() { "is a file; name a folder".to_owned() } else { e.to_string() };
        usage_error(format!("--out {}: {detail}", out.display()))
    })?;
    let out = out.canonicalize()?;
    // The ranks of a launcher share the folder, which rank 0 locks for all of them.
    let _lock = if has_rank_0 { Some(OutLock::take(&out)?) } else { None };
    let resume = if has_rank_0 {
        find_resume_checkpoint(&out, args.resume.as_deref())?
    } else {
        // Rank 0 reads the checkpoint and sends it. The other ranks only need to know that a checkpoint is used.
        args.resume.clone()
    };
    let world_size = spec.parallel.ranks;
    let start = StartAttempt {
        secret: format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple()),
        job_dir: Some(out.to_string_lossy().into_owned()),
        resume,
        ..StartAttempt::local(spec, dataset.to_string_lossy(), world_size)
    };
    if has_rank_0 {
        let path = out.join("spec.json");
        fs::write(&path, serde_json::to_vec_pretty(&start.spec)?)
            .with_context(|| path.display().to_string())?;
    }
    let outcome = match started_ranks {
        StartedRanks::Rank(launched) => run_rank_here(start, &launched, &out)?,
        StartedRanks::Machine(ranks) => run_ranks_of_machine(start, &ranks, &out)?,
        StartedRanks::All => run_all_ranks(start, &out)?,
    };
    let has_succeeded = matches!(outcome, Outcome::Succeeded { .. });
    if has_succeeded && !has_rank_0 {
        // Rank 0, in another process, prints the outcome.
        return Ok(());
    }
    report_outcome(&outcome, &out, began, &args)?;
    if has_succeeded && !checkpoint::list(&out.join("checkpoints"))?.is_empty() {
        let run = quote(&out.to_string_lossy());
        output::warn(format_args!("next: `lockstep predict --model {run} IMAGE` classifies pictures"));
    }
    Ok(())
}

/// Maximum number of attempts to start the ranks: another program may take the port before rank 0 listens.
const MAX_STARTS: u32 = 5;

fn run_all_ranks(mut start: StartAttempt, out: &Path) -> anyhow::Result<Outcome> {
    let attempts = out.join("attempts");
    let mut devices = visible_devices(&start.spec)?;
    let ranks = start.world_size;
    if !devices.is_empty() && devices.len() < ranks as usize {
        return Err(usage_error(format!(
            "parallel.ranks = {ranks}, but there {} on this machine: lower parallel.ranks, or set parallel.device = \"cpu\"",
            if devices.len() == 1 { "is 1 GPU".to_owned() } else { format!("are {} GPUs", devices.len()) }
        )));
    }
    if devices.is_empty() && ranks > cores() {
        output::warn(format_args!(
            "{ranks} ranks share {}: {} would train as fast",
            plural(cores().into(), "core"),
            plural(cores().into(), "rank")
        ));
    }
    devices.truncate(ranks as usize);
    let mut starts = 0;
    loop {
        starts += 1;
        start.attempt.attempt = (1..).find(|n| !attempts.join(n.to_string()).exists()).unwrap_or(1);
        start.master_port = free_port(&start.master_addr)?;
        let outcome = local::run(&configs(&start, &devices, None, out))?;
        let taken = taken_port(&start.master_addr, start.master_port);
        match &outcome {
            Outcome::Failed { reason, .. } if reason.contains(&taken) && starts < MAX_STARTS => {}
            _ => return Ok(outcome),
        }
    }
}

/// Runs the ranks that a rank table assigns to this machine.
fn run_ranks_of_machine(
    mut start: StartAttempt,
    ranks: &MachineRanks,
    out: &Path,
) -> anyhow::Result<Outcome> {
    ranks.rendezvous.write_into(&mut start);
    start.ranks.clone_from(&ranks.local);
    start.attempt.attempt = next_attempt(out, ranks.local[0].0);
    let visible = visible_devices(&start.spec)?;
    let device = |(rank, device): &(u32, u32)| {
        visible.get(*device as usize).cloned().ok_or_else(|| {
            let count = visible.len();
            usage_error(format!(
                "--rank-table: rank {rank} is on device {device}, and this machine has {count} visible GPUs"
            ))
        })
    };
    let chosen = if visible.is_empty() {
        Vec::new()
    } else {
        ranks.local.iter().map(device).collect::<anyhow::Result<_>>()?
    };
    local::run(&configs(&start, &chosen, None, out))
}

/// Returns the number of the next attempt: the first attempt without records of `rank`. Other machines may write into the same folder, so
/// the records of other ranks are ignored.
fn next_attempt(out: &Path, rank: u32) -> u32 {
    let events = |n: u32| {
        let dir = out.join("attempts").join(n.to_string());
        lockstep_worker::report::events_path(&dir, rank)
    };
    (1..).find(|n| !events(*n).exists()).unwrap_or(1)
}

fn run_rank_here(mut start: StartAttempt, launched: &LaunchedRank, out: &Path) -> anyhow::Result<Outcome> {
    launched.rendezvous.write_into(&mut start);
    start.attempt.attempt = next_attempt(out, launched.rank);
    let gpu = rank_device(&start.spec, launched)?;
    local::run_here(&RankConfig {
        start,
        rank: launched.rank,
        slot: launched.local_rank,
        local_ranks: launched.local_ranks,
        threads: (cores() / launched.local_ranks).max(1),
        gpu,
        lease: None,
        job_dir: out.into(),
        stop_within_secs: STOP_WITHIN_SECS,
    })
}

/// Returns the devices of this machine for a job's ranks, in order. Empty if ranks compute on CPU cores.
fn visible_devices(spec: &JobSpec) -> anyhow::Result<Vec<String>> {
    let device = spec.parallel.device;
    let (gpus, why_no_gpus) = registry::gpus(device)
        .map_err(|why| usage_error(format!("parallel.device = {:?}: {why}", device.as_str())))?;
    if let Some(why) = why_no_gpus {
        output::warn(format_args!("training on the CPU: {why}"));
    }
    Ok(gpus)
}

/// Returns the device of a rank that a launcher started: the only visible device, or the device that the launcher names, or the device with
/// the rank's index on this machine.
fn rank_device(spec: &JobSpec, launched: &LaunchedRank) -> anyhow::Result<Option<RankGpu>> {
    let visible = visible_devices(spec)?;
    if visible.is_empty() {
        return Ok(None);
    }
    let ordinal = if visible.len() == 1 { 0 } else { launched.device.unwrap_or(launched.local_rank) };
    if ordinal as usize >= visible.len() {
        let (launcher, count, ranks) = (launched.launcher, visible.len(), launched.local_ranks);
        return Err(usage_error(format!(
            "{launcher} has started {ranks} ranks on a machine that has {count} visible GPUs"
        )));
    }
    Ok(Some(RankGpu { ordinal: ordinal.cast_signed(), visible }))
}

fn report_outcome(outcome: &Outcome, out: &Path, began: Instant, args: &Args) -> anyhow::Result<()> {
    // The folder does not store these options, so a command that continues the run needs them again.
    let options = [
        ("--out", args.out.is_some()),
        ("--set", !args.sets.is_empty()),
        ("--ranks", args.ranks.is_some()),
        ("--rank-table", args.rank_table.is_some()),
        ("--node", args.node.is_some()),
    ];
    let given: Vec<_> = options.iter().filter(|(_, is_given)| *is_given).map(|(option, _)| *option).collect();
    let repeat_note =
        if given.is_empty() { String::new() } else { format!("; give {} again", given.join(", ")) };
    match outcome {
        Outcome::Succeeded { accuracy, step, best_note } => output::line(format_args!(
            "succeeded: {} in {:.0} s; checkpoints are in {}{}",
            match accuracy {
                Some((share, pictures)) =>
                    format!("validation accuracy {}", accuracy_of(*share, Some(*pictures))),
                None => plural(*step, "step"),
            },
            began.elapsed().as_secs_f64(),
            out.join("checkpoints").display(),
            best_note.as_deref().unwrap_or_default()
        )),
        Outcome::Stopped { step } => Err(anyhow::Error::new(Stopped(match newest_step(out)? {
            Some(saved) if saved >= *step => format!(
                "stopped after step {step}; its checkpoint is in {}; --resume latest continues from this step{repeat_note}",
                out.join("checkpoints").display()
            ),
            Some(saved) => format!(
                "stopped at step {step} without a checkpoint of this step: steps {} to {step} are lost; --resume \
                 latest continues from step {saved}{repeat_note}",
                saved + 1
            ),
            None if *step == 0 => "stopped before the first step".into(),
            None => format!("stopped at step {step} without a checkpoint: steps 1 to {step} are lost"),
        }))),
        Outcome::Failed { reason, is_retriable } => match newest_step(out) {
            Ok(Some(saved)) if *is_retriable => {
                anyhow::bail!("{reason}; --resume latest continues from step {saved}{repeat_note}")
            }
            _ => anyhow::bail!("{reason}"),
        },
    }
}

/// Returns the step of the newest complete checkpoint in `out`.
fn newest_step(out: &Path) -> anyhow::Result<Option<u64>> {
    let (newest, _) = checkpoint::newest(&out.join("checkpoints"))?;
    let name = newest.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    Ok(name.and_then(checkpoint::parse_folder_name).map(|(_, step)| step))
}

/// Chooses the validation split of a job that does not name the split, by the same rules as a server.
pub(super) fn choose_validation(spec: &mut JobSpec, dataset: &Path) {
    let Validation::Split(default) = &spec.data.validation else { return };
    // In these cases the default stays, and the dataset need not be read.
    if default == "none" || spec.data.folds.is_some() {
        return;
    }
    if dataset.join("train").is_dir() {
        let entries = fs::read_dir(dataset).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.path().is_dir());
        let folders: Vec<_> = folders.filter_map(|folder| folder.file_name().into_string().ok()).collect();
        if let Some(split) = default_validation(default, folders.iter().map(String::as_str)) {
            spec.data.validation = Validation::Split(split.to_owned());
            return;
        }
    }
    // If the dataset cannot be read, the ranks report the reason.
    let Ok(splits) = lockstep_data::splits(dataset) else { return };
    if let Some(split) = default_validation(default, splits.iter().map(|(name, _)| name.as_str())) {
        spec.data.validation = Validation::Split(split.to_owned());
    } else if let [(_only_split, samples)] = &splits[..] {
        spec.data.validation = Validation::Fraction(held_out_share(*samples));
    }
}

/// Checks that the ranks can divide the dataset's classes. If the dataset cannot be read, the ranks report the reason.
///
/// # Errors
/// Exit status 2 if the dataset has too few classes.
fn check_classes(spec: &JobSpec, dataset: &Path) -> anyhow::Result<()> {
    if spec.parallel.model > 1
        && let Ok(classes) = lockstep_data::classes(dataset)
        && let Some(detail) = spec.parallel.too_many_ranks(classes.len())
    {
        return Err(usage_error(format!("parallel.model: {detail}")));
    }
    Ok(())
}

/// Reads the specification. Also returns whether it gives `data.validation`. The number of ranks of a launcher, of a rank table or in
/// `--ranks` replaces `parallel.ranks`.
fn read_spec(args: &Args, started_ranks: &StartedRanks) -> anyhow::Result<(JobSpec, bool)> {
    let launcher = started_ranks.launcher_and_world_size();
    if let Some((launcher, ranks)) = launcher
        && args.ranks.is_some_and(|given| given != ranks)
    {
        return Err(usage_error(format!("--ranks: {launcher} has started {ranks} ranks; leave --ranks out")));
    }
    let mut document = job_file::read_document_as_written(&args.job, &args.sets)?;
    let given = document.pointer("/parallel/ranks").and_then(Value::as_u64);
    if let (Some((launcher, ranks)), Some(given)) = (launcher, given)
        && given != u64::from(ranks)
        && started_ranks.has_rank_0()
    {
        output::warn(format_args!("{launcher} has {ranks} ranks, which replaces parallel.ranks = {given}"));
    }
    if let Some(ranks) = launcher.map(|(_, ranks)| ranks).or(args.ranks) {
        apply_set(&mut document, &format!("parallel.ranks={ranks}")).map_err(usage_error)?;
    }
    let job = args.job.display();
    if document.get("sweep").is_some_and(|sweep| !sweep.is_null()) {
        return Err(usage_error(format!("{job} is a sweep, which needs a server: `lockstep submit {job}`")));
    }
    let spec = job_file::check(&args.job, &document)?;
    let gives_validation = document.pointer("/data/validation").is_some_and(|value| !value.is_null());
    Ok((spec, gives_validation))
}
