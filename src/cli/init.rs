//! `lockstep init`: writes a job file for a folder of pictures, with comments that give reasons for the chosen values.

use super::{api::mistake, dataset, output, wrong};
use lockstep_protocol::numbers::plural;
use lockstep_protocol::{dataset::DatasetInfo, spec::from_toml, suggestion::Suggestion};
use std::{
    fmt::Write as _,
    fs::OpenOptions,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

/// The largest number of classes that a comment lists.
const NAMED: usize = 12;

/// Write a job file for a folder of pictures
///
/// Reads the pictures (no server needed) and writes a commented file with a suitable network, batch size and number of
/// epochs. `lockstep train` and `lockstep submit` accept the file unchanged.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The dataset: a folder or a pattern of shards, as for `dataset add`
    #[arg(default_value = ".")]
    folder: PathBuf,
    /// The file to write; an existing file is not replaced
    #[arg(short, long, value_name = "FILE", default_value = "lockstep.toml")]
    output: PathBuf,
}

/// Inspects the folder and writes the file.
///
/// # Errors
/// Exit status 2: the file exists already, or the folder is no dataset.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let shown = args.output.display();
    let there =
        || wrong(format!("{shown} is there already: give another name with --output, or move it away"));
    // The inspection takes minutes for many pictures, so this comes first.
    if args.output.symlink_metadata().is_ok() {
        return Err(there());
    }
    let path = lockstep_data::canonical(&args.folder)
        .map_err(|e| wrong(format!("{}: {e}", args.folder.display())))?;
    let info = dataset::inspect_files(&path)?;
    let text = job_file(&path, &info)?;
    if let Err(mistakes) = from_toml(&text) {
        let mistakes: Vec<_> = mistakes.iter().map(|m| mistake(&m.pointer, &m.detail)).collect();
        return Err(wrong(format!(
            "no job file can be made for {}:\n  {}",
            path.display(),
            mistakes.join("\n  ")
        )));
    }
    let mut file =
        OpenOptions::new().write(true).create_new(true).open(&args.output).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => there(),
            _ => wrong(format!("{shown}: {e}")),
        })?;
    file.write_all(text.as_bytes())?;
    output::line(format_args!("{shown}: {}", dataset::sentence(&info)))?;
    output::line(format_args!(
        "train with `lockstep train {shown}`, or `lockstep submit {shown}` where a server runs"
    ))
}

/// The text of the job file.
///
/// # Errors
/// The dataset has no pictures for training.
fn job_file(path: &Path, info: &DatasetInfo) -> anyhow::Result<String> {
    let choice = Suggestion::of(info).map_err(|e| wrong(format!("{}: {e}", path.display())))?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String = name.chars().filter(|c| c.is_ascii_graphic()).take(100).collect();
    let name = if name.is_empty() { "pictures".into() } else { name };
    let mut text = String::from(
        "# A job for Lockstep, made by `lockstep init`. `lockstep help job` explains every key; keys that are not \
         listed here have their defaults.\n\n",
    );
    let _ = writeln!(text, "name = {name:?}\n\n[data]");
    let location = toml_text(&path.to_string_lossy());
    comment(&mut text, &format!("{}.", dataset::sentence(info)));
    comment(&mut text, &classes(info));
    comment(
        &mut text,
        "A path, for `lockstep train`; `lockstep submit` registers the folder under its name, and accepts that name here, too.",
    );
    let _ = writeln!(text, "dataset = {location}");
    for (comments, lines) in &choice.data {
        comment(&mut text, comments);
        let _ = writeln!(text, "{lines}");
    }
    text += "\n[model]\n";
    for (comments, lines) in &choice.model {
        comment(&mut text, comments);
        let _ = writeln!(text, "{lines}");
    }
    text += "\n[train]\n";
    for (comments, lines) in &choice.train {
        comment(&mut text, comments);
        let _ = writeln!(text, "{lines}");
    }
    text += "\n[parallel]\n";
    comment(
        &mut text,
        "Each rank has one GPU, or a share of the CPU's cores. Ranks divide train.global_batch_size, and the result is the same for any number; \
         for the CIFAR family even the bits are the same if each rank's part is a multiple of 8.",
    );
    text += "ranks = 1\n";
    Ok(text)
}

/// Names of the classes with their numbers of training pictures.
fn classes(info: &DatasetInfo) -> String {
    let train = info.splits.iter().find(|split| split.name == "train");
    let count = |index: usize| train.and_then(|split| split.per_class.get(index)).copied().unwrap_or(0);
    let named = info.classes.iter().enumerate().take(NAMED);
    let named = named.map(|(index, class)| format!("{} ({})", output::one_line(class), count(index)));
    let named = named.collect::<Vec<_>>().join(", ");
    let more = info.classes.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}: {named}{more}.", plural(info.classes.len() as u64, "class"))
}

/// Appends text as comment lines.
fn comment(text: &mut String, words: &str) {
    const WIDTH: usize = 110;
    let mut line = String::from("#");
    // A path or a class may have characters that would end the comment line.
    for word in output::one_line(words).split_whitespace() {
        if line.len() > 1 && line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(text, "{line}");
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    let _ = writeln!(text, "{line}");
}

/// A TOML string: JSON's escapes are valid in TOML.
fn toml_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
