//! `lockstep dataset`: downloads, prepares, registers and lists datasets.

pub(super) mod download;
pub(super) mod get;
pub(super) mod known;
mod prepare;

use super::{
    api::{Api, ServerArgs},
    block_on,
    confirm::confirm,
    file::missing_path_message,
    output, unknown_name_message, usage_error,
};
use indicatif::ProgressBar;
use lockstep_data::PrepareSettings;
use lockstep_protocol::dataset::{BrokenFile, Dataset, DatasetInfo, SplitInfo};
use lockstep_protocol::numbers::plural;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

/// Interval between two updates of the progress of an inspection on this machine.
const UPDATE_INTERVAL: Duration = Duration::from_millis(200);

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Register the files under PATH as NAME; the format is detected
    Add {
        /// Name of the dataset in job files
        name: String,
        /// A folder: CIFAR binary files, IDX files, train/<class>/* or <class>/* with pictures, WebDataset shards (*.tar)
        /// or Parquet files; or a pattern of such files ('/data/train-{000..127}.tar')
        path: PathBuf,
        /// First write a copy that trains faster, as `dataset prepare` does, and register the copy. Larger pictures are resized to a
        /// short side of this many pixels
        #[arg(long, value_name = "SIDE", value_parser = prepare::side_parser())]
        prepare: Option<u32>,
        /// Folder for the copy [default: PATH-SIDE, next to PATH]
        #[arg(long, value_name = "DIR", requires = "prepare")]
        to: Option<PathBuf>,
        /// Show the dataset only to you and to admins
        #[arg(long)]
        private: bool,
        #[command(flatten)]
        pictures: prepare::Pictures,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Download, check and register a public dataset
    Get(get::Args),
    /// Write a copy that trains faster: shards of small pictures (no server needed; register the copy with `dataset add`)
    Prepare(prepare::Args),
    /// List the registered datasets
    List(ServerArgs),
    /// Show what a dataset contains: a registered dataset, or a path on this machine (a path needs no server)
    #[command(alias = "show")]
    Inspect {
        /// A registered name, or a path
        #[arg(value_name = "NAME-or-PATH")]
        dataset: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Remove a dataset's registration; only uploaded files are deleted
    Remove {
        /// Name of the dataset
        name: String,
        /// Do not ask for confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Runs the action.
///
/// # Errors
/// Exit status 2 if the files are not a dataset, no dataset has the name, or jobs need the dataset.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    match action {
        Action::Add { name, path, prepare, to, pictures, server, private } => {
            let mut path = canonical(&path)?;
            let api = server.api()?;
            if let Some(short_side) = prepare {
                path = prepare_copy(&api, &name, &path, &pictures.settings(short_side), to, server.json)?;
            }
            let dataset = block_on(register_path(&api, &name, &path, private))?;
            if server.json {
                return output::json(&dataset);
            }
            output::line(format_args!("{}: {}", dataset.name, describe(&dataset.info)))?;
            print_broken_files(&dataset.info)
        }
        Action::Get(args) => get::run(&args),
        Action::Prepare(args) => prepare::run(&args),
        Action::List(server) => {
            let api = server.api()?;
            let datasets: Vec<Dataset> = block_on(api.list("/datasets"))?;
            if server.json {
                return output::json(&datasets);
            }
            if datasets.is_empty() {
                return output::line("no datasets; register one with `lockstep dataset add NAME PATH`");
            }
            let row = |d: Dataset| [d.name, d.info.format.clone(), describe_splits(&d.info), d.path];
            output::table(["NAME", "FORMAT", "PICTURES", "PATH"], datasets.into_iter().map(row))
        }
        Action::Inspect { dataset, server } => inspect(&dataset, &server),
        Action::Remove { name, yes, server } => remove(&name, yes, &server),
    }
}

/// Returns a dataset's path without links.
///
/// # Errors
/// Exit status 2 if the path does not exist or cannot be read.
pub(super) fn canonical(path: &Path) -> anyhow::Result<PathBuf> {
    lockstep_data::canonical(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => usage_error(missing_path_message(path)),
        _ => usage_error(format!("{}: {error}", path.display())),
    })
}

/// Writes the copy that is to be registered as `name`, and returns its path.
fn prepare_copy(
    api: &Api,
    name: &str,
    path: &Path,
    settings: &PrepareSettings,
    target: Option<PathBuf>,
    is_quiet: bool,
) -> anyhow::Result<PathBuf> {
    // Writing a copy takes hours, so a name in use is reported first.
    if let Some(existing) = block_on(find_by_name(api, name))? {
        return Err(usage_error(format!(
            "a dataset is already called {name} ({}); choose another name, or remove that dataset first",
            existing.path
        )));
    }
    let target = target.or_else(|| prepare::default_target(path, settings.short_side)).ok_or_else(|| {
        usage_error(format!(
            "{} is not a folder, so the copy has no default path; name a folder with --to DIR",
            path.display()
        ))
    })?;
    let copied = prepare::copy(path, &target, settings)?;
    if !is_quiet {
        prepare::report(&target, &copied)?;
    }
    Ok(lockstep_data::canonical(&target)?)
}

/// Returns the dataset that is registered under this name.
pub(super) async fn find_by_name(api: &Api, name: &str) -> anyhow::Result<Option<Dataset>> {
    Ok(api.list::<Dataset>("/datasets").await?.into_iter().find(|d| d.name == name))
}

/// Like [`find_by_name`], for a name that must be registered.
///
/// # Errors
/// Exit status 2 if no dataset has the name. The error names the most similar name.
async fn find_registered(api: &Api, name: &str) -> anyhow::Result<Dataset> {
    let datasets: Vec<Dataset> = api.list("/datasets").await?;
    let found = datasets.iter().find(|dataset| dataset.name == name).cloned();
    let names = datasets.iter().map(|dataset| dataset.name.as_str());
    found.ok_or_else(|| usage_error(unknown_name_message("dataset", names, name)))
}

fn remove(name: &str, yes: bool, server: &ServerArgs) -> anyhow::Result<()> {
    let api = server.api()?;
    block_on(async {
        let dataset = find_registered(&api, name).await?;
        let files_note = if dataset.is_uploaded() {
            "its uploaded files are also deleted".to_owned()
        } else {
            format!("its files at {} are not deleted", dataset.path)
        };
        let question = format!(
            "Remove {name}? If so, {files_note}. Jobs that trained on {name} can neither be evaluated nor run again until a dataset is \
             registered under this name."
        );
        confirm(yes, question, format_args!("dataset {name}"))?;
        // Registered names have no characters with a special meaning in URLs.
        api.delete(&format!("/datasets/{name}")).await?;
        let value = json!({ "removed": name, "path": dataset.path });
        output::print(server.json, &value, format_args!("{name} removed; {files_note}"))
    })
}

/// Registers `path` as `name`, unless this registration exists already.
///
/// # Errors
/// Exit status 2 if another dataset has the name.
pub(super) async fn register_as(
    api: &Api,
    name: &str,
    path: &Path,
    private: bool,
) -> anyhow::Result<Dataset> {
    match find_by_name(api, name).await? {
        Some(known) if Path::new(&known.path) == path => Ok(known),
        Some(other) => Err(usage_error(name_taken_message(&other, path))),
        None => register_path(api, name, path, private).await,
    }
}

/// Returns the message of the error that `path` cannot be registered because the dataset `other` already has the requested name.
pub(super) fn name_taken_message(other: &Dataset, path: &Path) -> String {
    format!(
        "a dataset is already called {} ({}); register this dataset under another name: lockstep dataset add OTHER {}",
        other.name,
        other.path,
        path.display()
    )
}

/// Returns the registered dataset with this path.
pub(super) async fn find_by_path(api: &Api, path: &Path) -> anyhow::Result<Option<Dataset>> {
    Ok(api.list::<Dataset>("/datasets").await?.into_iter().find(|d| Path::new(&d.path) == path))
}

async fn register_path(api: &Api, name: &str, path: &Path, private: bool) -> anyhow::Result<Dataset> {
    let new = json!({ "name": name, "path": path, "private": private });
    register(api, "/datasets?wait_secs=1", Some(&new)).await
}

/// Registers a dataset with a request that is repeated until the server has inspected the files, which takes minutes if there are many.
pub(super) async fn register(api: &Api, url_path: &str, body: Option<&Value>) -> anyhow::Result<Dataset> {
    let bar = inspection_bar();
    loop {
        let response = api.request(Method::POST, url_path, body).await?;
        if response.status() != StatusCode::ACCEPTED {
            bar.finish_and_clear();
            return api.read(response).await;
        }
        let progress: Value = api.read(response).await?;
        let number = |key: &str| progress.get(key).and_then(Value::as_u64);
        show_progress(&bar, number("inspected").zip(number("total")));
    }
}

/// Returns a progress bar, which is hidden if standard error is not a terminal.
fn inspection_bar() -> ProgressBar {
    ProgressBar::new(0).with_style(output::bar_style("inspecting {pos} of {len} [{bar:30}] {eta} left"))
}

fn show_progress(bar: &ProgressBar, done_and_total: Option<(u64, u64)>) {
    if let Some((done, total)) = done_and_total {
        bar.set_length(total);
        bar.set_position(done);
    }
}

/// Inspects files on this machine, with a progress bar.
pub(super) fn inspect_files(path: &Path) -> anyhow::Result<DatasetInfo> {
    // The index is stored under the canonical path.
    let path = lockstep_data::canonical(path).unwrap_or_else(|_| path.to_owned());
    let bar = inspection_bar();
    let (sender, receiver) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let (bar, path) = (&bar, &path);
        scope.spawn(move || {
            // The loop ends when the sender is dropped.
            while receiver.recv_timeout(UPDATE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let progress = lockstep_data::index_progress(path);
                show_progress(bar, progress.map(|progress| (progress.done, progress.total)));
            }
            bar.finish_and_clear();
        });
        let found = lockstep_data::inspect(path).map_err(|e| usage_error(e.to_string()));
        drop(sender);
        found
    })
}

/// Whether an argument is a path or a pattern of shards. Names of datasets have no braces.
fn is_path(name: &str) -> bool {
    name.contains(std::path::is_separator) || lockstep_data::canonical(Path::new(name)).is_ok()
}

fn inspect(name: &str, server: &ServerArgs) -> anyhow::Result<()> {
    let info = if is_path(name) {
        inspect_files(Path::new(name))?
    } else {
        let api = server.api()?;
        block_on(find_registered(&api, name))?.info
    };
    if server.json {
        return output::json(&info);
    }
    output::line(describe(&info))?;
    let numbers = |values: &[f32]| values.iter().map(|v| format!("{v:.4}")).collect::<Vec<_>>().join(", ");
    output::line(format_args!("mean [{}], std [{}]", numbers(&info.mean), numbers(&info.std)))?;
    for (index, class) in info.classes.iter().enumerate() {
        let counts: Vec<_> = info
            .splits
            .iter()
            .map(|s| {
                format!("{} {}", s.per_class.get(index).copied().unwrap_or(0), output::one_line(&s.name))
            })
            .collect();
        output::line(format_args!("  {index:>4}  {:<24}{}", output::one_line(class), counts.join(", ")))?;
    }
    print_broken_files(&info)
}

/// Maximum number of files that are named with a reason.
const MAX_NAMES: usize = 3;

/// Prints a line for each reason why files cannot be used.
pub(super) fn print_broken_files(info: &DatasetInfo) -> anyhow::Result<()> {
    if let Some(note) = info.unlabelled_note() {
        output::line(note)?;
    }
    let mut files_by_detail = BTreeMap::<&str, Vec<String>>::new();
    for BrokenFile { file, detail } in &info.broken {
        files_by_detail.entry(detail).or_default().push(output::one_line(file));
    }
    for (detail, files) in files_by_detail {
        let named = files.iter().take(MAX_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = match files.len().saturating_sub(MAX_NAMES) {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        output::line(format_args!("unusable: {named}{more}: {}", output::one_line(detail)))?;
    }
    print_more_broken_files(info.broken_count.saturating_sub(info.broken.len() as u64))
}

fn print_more_broken_files(count: u64) -> anyhow::Result<()> {
    if count > 0 {
        output::line(format_args!("and {}", plural(count, "more unusable file")))?;
    }
    Ok(())
}

fn describe_splits(info: &DatasetInfo) -> String {
    let describe = |split: &SplitInfo| format!("{} {}", split.samples, output::one_line(&split.name));
    info.splits.iter().map(describe).collect::<Vec<_>>().join(", ")
}

pub(super) fn describe(info: &DatasetInfo) -> String {
    let size = match (info.height, info.width) {
        (0, _) | (_, 0) => "of several sizes".to_owned(),
        (height, width) => format!("of {width} x {height} pixels"),
    };
    let broken = match info.broken_count {
        0 => String::new(),
        n => format!(", {}", plural(n, "unusable file")),
    };
    format!(
        "{}, {}, pictures {size}, {}: {}{broken}",
        info.format,
        plural(info.classes.len() as u64, "class"),
        plural(info.channels.into(), "channel"),
        describe_splits(info)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_of_shards_is_a_path() {
        for path in ["/data", "data/pets", "train-{0..3}.tar", "Cargo.toml", "."] {
            assert!(is_path(path), "{path}");
        }
        assert!(!is_path("pets"));
    }
}
