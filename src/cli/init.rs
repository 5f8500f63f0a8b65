//! `lockstep init`: writes a job file for a folder of pictures, with comments that explain the chosen values.

use super::{api::format_mistake, dataset, file, job_file, output, usage_error};
use lockstep_host::own_program;
use lockstep_protocol::{
    agent::AttemptEvent,
    dataset::DatasetInfo,
    numbers::plural,
    spec::from_toml,
    suggestion::{CommentedKeys, Suggestion},
};
use lockstep_worker::report::{Tail, events_path};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Maximum number of classes that a comment lists.
const MAX_CLASSES_NAMED: usize = 12;

/// If the largest class has at least this many times the pictures of the smallest, a comment suggests weights of the classes.
const IMBALANCED: u64 = 5;

/// Number of steps in the measurement. The first step is left out, because it includes preparations that later steps reuse.
const STEPS: u64 = 5;
/// Maximum number of pictures in a step of the measurement.
const MAX_BATCH: u64 = 32;
/// Time limit for the measurement.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two checks of whether the measurement has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Estimated ratio of the speeds of validation and training. Validation has no backward pass.
const VALIDATION_SPEED: f64 = 3.0;

/// Write a job file for a folder of pictures
///
/// Reads the pictures (no server needed) and writes a commented file with a suitable network, batch size and number of
/// epochs. `lockstep train` and `lockstep submit` accept the file unchanged. Then trains a few steps, and prints how long
/// the job takes on this machine.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The dataset: a folder or a pattern of shards, in a format that `dataset add` accepts
    #[arg(default_value = ".")]
    folder: PathBuf,
    /// File to write; an existing file is not replaced
    #[arg(short, long, value_name = "FILE", default_value = "lockstep.toml")]
    output: PathBuf,
    /// Suggest a shorter run for a first try: smaller pictures and fewer epochs
    #[arg(long)]
    quick: bool,
}

/// Inspects the folder, writes the job file and measures the job.
///
/// # Errors
/// Exit status 2 if the file exists already, or the folder is not a dataset; 1 if the job's first steps fail.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let shown = args.output.display();
    let already_exists = || {
        usage_error(format!("{shown} exists already: give another name with --output, or move the file away"))
    };
    let path = dataset::canonical(&args.folder)?;
    // Checked before the inspection, which takes minutes if there are many pictures. An empty folder is the graver mistake.
    let is_empty = fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_none());
    if !is_empty && args.output.symlink_metadata().is_ok() {
        return Err(already_exists());
    }
    file::check_output(&args.output)?;
    let info = dataset::inspect_files(&path)?;
    let suggest = if args.quick { Suggestion::quick } else { Suggestion::of };
    let choice = suggest(&info).map_err(|e| usage_error(format!("{}: {e}", path.display())))?;
    // A link to the folder has the name that its user knows.
    let name = job_file::dataset_name(args.folder.file_name().map_or(&*path, |_| &*args.folder));
    let text = format_job_file(&name, &path, &info, &choice);
    let spec = from_toml(&text).map_err(|mistakes| {
        let mistakes: Vec<_> = mistakes.iter().map(|m| format_mistake(&m.pointer, &m.detail)).collect();
        usage_error(format!("no job file can be made for {}:\n  {}", path.display(), mistakes.join("\n  ")))
    })?;
    let mut file =
        OpenOptions::new().write(true).create_new(true).open(&args.output).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => already_exists(),
            _ => usage_error(format!("{shown}: {e}")),
        })?;
    if let Err(error) = file.write_all(text.as_bytes()) {
        // A part of a job file would be in the way of the next `lockstep init`.
        let _ = fs::remove_file(&args.output);
        return Err(usage_error(format!("{shown} cannot be written: {error}")));
    }
    output::line(format_args!("{shown}: {}", dataset::describe(&info)))?;
    dataset::print_broken_files(&info)?;
    if let Some(words) = info.classes_lacking_pictures(&spec.data) {
        output::warn(format_args!("warning: {words}"));
    }
    output::warn("measuring a few steps on this machine");
    match measure_secs_per_picture(&args.output, choice.batch) {
        Ok(secs_per_picture) => {
            let quick = Suggestion::quick(&info).ok().filter(|_| !args.quick);
            output::line(format_estimate(secs_per_picture, &choice, quick.as_ref()))?;
        }
        Err(NoEstimate::TrainingFailed(why)) => {
            anyhow::bail!(
                "{shown} is written, but its first steps fail on this machine: {why}. If the cause is this machine, submit the file to a \
                 server: `lockstep submit {shown}`"
            )
        }
        Err(NoEstimate::NotMeasured(why)) => output::warn(format_args!("no estimate of the time: {why}")),
    }
    output::line(format_args!(
        "train with `lockstep train {shown}`, or `lockstep submit {shown}` where a server runs"
    ))
}

/// Formats the duration of the suggested run, and of the quick run if given.
fn format_estimate(secs_per_picture: f64, choice: &Suggestion, quick: Option<&Suggestion>) -> String {
    let run_secs = |run: &Suggestion| {
        let pixels_ratio = f64::from(run.side).powi(2) / f64::from(choice.side).powi(2);
        secs_per_picture
            * pixels_ratio
            * (run.training_pictures as f64 + run.validation_pictures as f64 / VALIDATION_SPEED)
    };
    let words = |secs: f64| match secs {
        ..100.0 => format!("{secs:.0} s"),
        ..7200.0 => format!("{:.0} min", secs / 60.0),
        _ => format!("{:.1} h", secs / 3600.0),
    };
    let mut message = format!("about {} on this machine", words(run_secs(choice)));
    if let Some(quick) = quick {
        let _ =
            write!(message, "; `lockstep init --quick` suggests a run of about {}", words(run_secs(quick)));
    }
    message
}

/// Why there is no estimate of the time, in words.
enum NoEstimate {
    TrainingFailed(String),
    NotMeasured(String),
}

impl From<String> for NoEstimate {
    fn from(why: String) -> Self {
        Self::NotMeasured(why)
    }
}

/// Trains the job in this file for a few steps and returns the training time per picture, in seconds.
///
/// # Errors
/// The job cannot be trained on this machine, takes too long, or its time cannot be measured.
fn measure_secs_per_picture(file: &Path, batch: u64) -> Result<f64, NoEstimate> {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let batch = batch.min(MAX_BATCH);
    let stderr_path = folder.path().join("stderr");
    let stderr = File::create(&stderr_path).map_err(|e| e.to_string())?;
    let out = folder.path().join("run");
    let mut command = Command::new(own_program().map_err(|e| e.to_string())?);
    command.arg("train").arg(file).arg("--out").arg(&out);
    let sets = [
        "train.epochs=".to_owned(),
        format!("train.steps={STEPS}"),
        format!("train.global_batch_size={batch}"),
        "data.validation=\"none\"".to_owned(),
    ];
    for set in sets {
        command.args(["--set", &set]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let mut child = command.spawn().map_err(|e| e.to_string())?;
    let status = wait_for_exit(&mut child).map_err(|e| e.to_string())?;
    let Some(status) = status else {
        return Err(format!("{STEPS} steps take longer than {} s", MEASURE_TIMEOUT.as_secs()).into());
    };
    if !status.success() {
        let why = file::last_line(&stderr_path);
        return Err(NoEstimate::TrainingFailed(why.strip_prefix("error: ").unwrap_or(&why).to_owned()));
    }
    let mut times = Vec::new();
    let mut tail = Tail::open(&events_path(&out.join("attempts").join("1"), 0), 0);
    loop {
        let events = tail.poll().map_err(|e| e.to_string())?;
        if events.is_empty() {
            break;
        }
        for event in events {
            let AttemptEvent::Metrics { columns, .. } = event else { continue };
            let step_times = columns.into_iter().filter(|column| column.name == "step_ms");
            times.extend(step_times.flat_map(|column| column.values).map(f64::from));
        }
    }
    let times =
        times.get(1..).filter(|times| !times.is_empty()).ok_or_else(|| "no step was measured".to_owned())?;
    Ok(times.iter().sum::<f64>() / times.len() as f64 / 1e3 / batch as f64)
}

/// Waits for the process to exit. Returns `None` if the process was ended at the time limit.
fn wait_for_exit(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    let mut is_late = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((!is_late).then_some(status));
        }
        thread::sleep(CHECK_INTERVAL);
        if began.elapsed() > MEASURE_TIMEOUT {
            is_late = true;
            // The first signal ends training after a checkpoint, and further signals end it at once. The process ends its ranks.
            if let Some(pid) = Pid::from_raw(child.id().cast_signed()) {
                let _ = kill_process(pid, Signal::TERM);
            }
            thread::sleep(10 * CHECK_INTERVAL);
        }
    }
}

/// Returns the text of the job file.
fn format_job_file(name: &str, path: &Path, info: &DatasetInfo, choice: &Suggestion) -> String {
    let mut text = String::from(
        "# A job for Lockstep, made by `lockstep init`. `lockstep help job` explains every key; keys that are not \
         listed here have their defaults.\n\n",
    );
    let _ = writeln!(text, "name = {name:?}\n\n[data]");
    write_comment(&mut text, &format!("{}.", dataset::describe(info)));
    write_comment(&mut text, &describe_classes(info));
    write_comment(
        &mut text,
        "A path, as `lockstep train` needs. `lockstep submit` registers the path under the folder's name, and also accepts that name here.",
    );
    // JSON's escapes are valid in TOML.
    let _ = writeln!(text, "dataset = {}", serde_json::Value::from(path.to_string_lossy()));
    for (section, keys) in
        [("", &choice.data), ("\n[model]\n", &choice.model), ("\n[train]\n", &choice.train)]
    {
        text += section;
        for CommentedKeys { comment: words, toml } in keys {
            write_comment(&mut text, words);
            let _ = writeln!(text, "{toml}");
        }
    }
    text += "\n[parallel]\n";
    write_comment(
        &mut text,
        "Each rank has one GPU, or a share of the CPU's cores. Ranks divide train.global_batch_size, and the result is the same for any \
         number of ranks. For the CIFAR family even the bits are the same if each rank's part of the batch is a multiple of 8.",
    );
    text += "ranks = 1\n";
    let counts = || training_counts(info).iter().copied().filter(|count| *count > 0);
    if let (Some(smallest), Some(largest)) = (counts().min(), counts().max())
        && largest / smallest >= IMBALANCED
    {
        text.push('\n');
        write_comment(
            &mut text,
            &format!(
                "The largest class has {largest} training pictures, the smallest {smallest}. To give all classes the same weight in the \
                 loss, remove the # of the next two lines."
            ),
        );
        text += "# [loss]\n# class_weights = \"balanced\"\n";
    }
    text
}

/// Returns the number of training pictures of each class.
fn training_counts(info: &DatasetInfo) -> &[u64] {
    info.split("train").map(|split| &*split.per_class).unwrap_or_default()
}

/// Lists the classes with their numbers of training pictures.
fn describe_classes(info: &DatasetInfo) -> String {
    let count = |index: usize| training_counts(info).get(index).copied().unwrap_or(0);
    let named = info.classes.iter().enumerate().take(MAX_CLASSES_NAMED);
    let named = named.map(|(index, class)| format!("{} ({})", output::one_line(class), count(index)));
    let named = named.collect::<Vec<_>>().join(", ");
    let unnamed = match info.classes.len().saturating_sub(MAX_CLASSES_NAMED) {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    format!("{}: {named}{unnamed}.", plural(info.classes.len() as u64, "class"))
}

/// Appends text as comment lines.
fn write_comment(text: &mut String, words: &str) {
    const WIDTH: usize = 110;
    // A path or a class may have characters that would end the comment line.
    *text += &output::wrap(&output::one_line(words), WIDTH, "# ", "# ");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_counts_training_validation_and_pixels() {
        let suggestion = |side: u32, training_pictures: u64, validation_pictures: u64| Suggestion {
            data: Vec::new(),
            model: Vec::new(),
            train: Vec::new(),
            side,
            batch: 32,
            training_pictures,
            validation_pictures,
        };
        for (secs, choice, quick, message) in [
            (0.01, suggestion(224, 600_000, 0), None, "about 100 min on this machine"),
            (0.1, suggestion(224, 600_000, 0), None, "about 16.7 h on this machine"),
            (0.01, suggestion(28, 2_700, 900), None, "about 30 s on this machine"),
            (
                0.1,
                suggestion(224, 60_000, 0),
                Some(suggestion(112, 12_000, 0)),
                "about 100 min on this machine; `lockstep init --quick` suggests a run of about 5 min",
            ),
        ] {
            assert_eq!(format_estimate(secs, &choice, quick.as_ref()), message);
        }
    }
}
