//! `lockstep help`: prints the usage of a command, or the keys of a job file.

use super::{mistyped, output, reference::job_file, usage_error};
use clap::Command;
use std::ffi::OsString;

/// Show the usage of a command, or the keys of a job file (`lockstep help job`)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A command, such as `dataset add`; or `job`, optionally with a section or a key (`train`, `train.lr`)
    #[arg(value_name = "COMMAND")]
    topic: Vec<String>,
}

/// Prints the requested help.
///
/// # Errors
/// Exit status 2 if the command, section or key does not exist.
pub(crate) fn run(args: &Args, program: Command) -> anyhow::Result<()> {
    let is_command =
        |name: &str| program.find_subcommand(name).is_some() || mistyped::equivalent(name).is_some();
    let is_key = |name: &str| !is_command(name) && job_file::help_text(Some(name)).is_ok();
    let key = match &args.topic[..] {
        [job] if job == "job" => None,
        [job, key] if job == "job" => Some(key.as_str()),
        [key] if is_key(key) => Some(key.as_str()),
        names => {
            let names = names.iter().map(String::as_str);
            let line: Vec<OsString> =
                ["lockstep"].into_iter().chain(names).chain(["--help"]).map(Into::into).collect();
            // clap returns the output of `COMMAND --help` as an error.
            match program.clone().try_get_matches_from(&line) {
                Ok(_) => return Ok(()),
                Err(help) => mistyped::explain(help, program, &line).exit(),
            }
        }
    };
    output::line(job_file::help_text(key).map_err(usage_error)?.trim_end())
}
