//! Copies a dataset as shards of small pictures, for `lockstep dataset prepare` and `dataset add --prepare`.

use super::{UPDATE_INTERVAL, canonical, print_more_broken_files};
use crate::cli::{output, usage_error};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use indicatif::{ProgressBar, ProgressDrawTarget};
use lockstep_data::{PrepareSettings, Prepared, QUALITIES, SHORT_SIDES};
use lockstep_protocol::{numbers::plural, spec::BrokenFiles};
use std::path::{Path, PathBuf};

/// Maximum number of broken files that are printed. `prepared.json` lists all broken files, except files that were already broken at the
/// inspection.
const MAX_BROKEN_FILES: usize = 100;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Dataset of pictures in files or shards, in a format that `dataset add` accepts
    path: PathBuf,
    /// Folder for the copy. A repeated command continues an interrupted copy
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Short side in pixels to which larger pictures are resized
    #[arg(long, default_value_t = 256, value_parser = side_parser())]
    short_side: u32,
    #[command(flatten)]
    pictures: Pictures,
}

/// Options for the pictures of a copy.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Pictures {
    /// JPEG quality of the copy
    #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u8).range(i64::from(*QUALITIES.start())..=i64::from(*QUALITIES.end())))]
    quality: u8,
    /// How to handle a picture that cannot be decoded: fail, or skip the picture and report it
    #[arg(long, default_value = "fail",
        value_parser = PossibleValuesParser::new(BrokenFiles::NAMES).try_map(|name| name.parse::<BrokenFiles>()))]
    broken_files: BrokenFiles,
}

impl Pictures {
    pub(super) fn settings(self, short_side: u32) -> PrepareSettings {
        let Self { quality, broken_files } = self;
        PrepareSettings { short_side, quality, broken_files, ..PrepareSettings::default() }
    }
}

/// Parses the length of a short side, in pixels.
pub(super) fn side_parser() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(i64::from(*SHORT_SIDES.start())..=i64::from(*SHORT_SIDES.end()))
}

/// Writes the copy and prints what it contains.
///
/// # Errors
/// Exit status 2 if the files are not a dataset or cannot be copied.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let path = canonical(&args.path)?;
    let prepared = copy(&path, &args.to, &args.pictures.settings(args.short_side))?;
    report(&args.to, &prepared)
}

/// Returns the default folder for a copy in `dataset add --prepare`: `/data/imagenet-256` next to `/data/imagenet`. `None` if the path is
/// not a folder, such as a pattern of shards.
pub(super) fn default_target(path: &Path, short_side: u32) -> Option<PathBuf> {
    let name = path.file_name().filter(|_| path.is_dir())?;
    let mut copy = name.to_owned();
    copy.push(format!("-{short_side}"));
    Some(path.with_file_name(copy))
}

/// Writes the copy, with a progress bar.
///
/// # Errors
/// See [`run`].
pub(super) fn copy(path: &Path, target: &Path, settings: &PrepareSettings) -> anyhow::Result<Prepared> {
    let per_second = (1000 / UPDATE_INTERVAL.as_millis()) as u8;
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(per_second));
    bar.set_style(output::bar_style("{pos} of {len} pictures [{bar:30}] {per_sec}, {eta} left"));
    let prepared = lockstep_data::prepare(path, target, settings, |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    prepared.map_err(|e| usage_error(e.to_string()))
}

/// Prints what the copy in the folder `target` contains.
pub(super) fn report(target: &Path, prepared: &Prepared) -> anyhow::Result<()> {
    let splits: Vec<_> = prepared
        .splits
        .iter()
        .map(|(name, pictures)| format!("{pictures} {}", output::one_line(name)))
        .collect();
    let earlier_shards = match prepared.kept_shards {
        0 => String::new(),
        count => format!(", {count} of them from an earlier run"),
    };
    let (folder, mb) = (target.display(), prepared.bytes.div_ceil(1_000_000));
    let shards = plural(prepared.shards, "shard");
    output::line(format_args!(
        "{folder}: {} pictures in {shards}{earlier_shards}; {mb} MB",
        splits.join(", ")
    ))?;
    for broken in prepared.broken.iter().take(MAX_BROKEN_FILES) {
        let [file, detail] = [&broken.file, &broken.detail].map(|text| output::one_line(text));
        output::line(format_args!("left out: {file}: {detail}"))?;
    }
    print_more_broken_files(prepared.broken.len().saturating_sub(MAX_BROKEN_FILES) as u64)
}
