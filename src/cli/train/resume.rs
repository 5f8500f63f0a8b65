//! Finds the checkpoint from which a run continues.

use super::super::{output, usage_error};
use lockstep_protocol::pickle;
use lockstep_worker::checkpoint;
use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

const LATEST_ADVICE: &str = "--resume latest with the run's own --out continues from its newest checkpoint";

/// Returns the folder of the checkpoint that `--resume PATH` names.
///
/// # Errors
/// Exit status 2 if `path` is not the folder of a checkpoint.
pub(super) fn checkpoint_folder(path: &str) -> anyhow::Result<PathBuf> {
    let problem = |e: String| usage_error(format!("--resume {path}: {e}"));
    if pickle::has_pickle_extension(path) && !Path::new(path).is_dir() {
        let advice = format!("{}; then begin a run with model.pretrained", pickle::conversion_advice(path));
        return Err(problem(advice));
    }
    let folder = Path::new(path).canonicalize().map_err(|e| {
        let is_missing = e.kind() == ErrorKind::NotFound;
        let detail = if is_missing { "does not exist".to_owned() } else { e.to_string() };
        problem(format!("{detail}{}; {LATEST_ADVICE}", checkpoint::name_others(Path::new(path))))
    })?;
    if !folder.join(checkpoint::MANIFEST).exists() {
        return Err(problem(format!(
            "is no checkpoint, as it has no {}; {LATEST_ADVICE}",
            checkpoint::MANIFEST
        )));
    }
    Ok(folder)
}

/// Returns the name of the checkpoint to continue from, under `out/checkpoints`.
pub(super) fn find_resume_checkpoint(out: &Path, resume: Option<&str>) -> anyhow::Result<Option<String>> {
    let directory = out.join("checkpoints");
    let name_of = |folder: &Path| folder.file_name().map(|n| n.to_string_lossy().into_owned());
    match resume {
        None if checkpoint::list(&directory)?.is_empty() => Ok(None),
        None => Err(usage_error(format!(
            "{} has a run already: give --resume latest to continue it, or another --out",
            out.display()
        ))),
        Some("latest") => {
            let (newest, problems) = checkpoint::newest(&directory)?;
            problems.iter().for_each(|problem| output::warn(format_args!("{problem}: left out")));
            let newest = newest.ok_or_else(|| {
                usage_error(format!(
                    "--resume latest: no complete checkpoint in {}; leave out --resume to begin the run",
                    directory.display()
                ))
            })?;
            Ok(name_of(&newest))
        }
        Some(path) => {
            let problem = |e: String| usage_error(format!("--resume {path}: {e}"));
            let folder = checkpoint_folder(path)?;
            let manifest = checkpoint::validate(&folder)
                .map_err(|e| problem(format!("{e}{}; {LATEST_ADVICE}", checkpoint::name_others(&folder))))?;
            let name = checkpoint::folder_name(manifest.epoch, manifest.step);
            let target = directory.join(&name);
            // The run would take later checkpoints in this folder for checkpoints of its own steps.
            let later =
                checkpoint::list(&directory)?.into_iter().rev().find(|(_, step)| *step > manifest.step);
            if let Some((epoch, step)) = later {
                let later = checkpoint::folder_name(epoch, step);
                return Err(problem(format!(
                    "{} has a later checkpoint, {later}, from another continuation of this run: give another --out, or --resume latest",
                    out.display()
                )));
            }
            let read_manifest = |folder: &Path| fs::read(folder.join(checkpoint::MANIFEST));
            if target.exists() && read_manifest(&target)? != read_manifest(&folder)? {
                return Err(problem(format!(
                    "{} has another checkpoint {name}: give another --out",
                    out.display()
                )));
            }
            if !target.exists() {
                // Copied to a temporary folder first, so that a checkpoint is either complete or absent.
                let temporary = directory.join(format!(".tmp-{name}"));
                fs::create_dir_all(&temporary)?;
                for file in manifest.files.keys().map(String::as_str).chain([checkpoint::MANIFEST]) {
                    fs::copy(folder.join(file), temporary.join(file))?;
                }
                fs::rename(&temporary, &target)?;
            }
            Ok(Some(name))
        }
    }
}
