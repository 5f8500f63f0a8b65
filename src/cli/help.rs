//! `lockstep help`: prints the usage of a command, or the keys of a job file.

use super::{mistyped, output, reference::job_file, usage_error};
use clap::Command;
use lockstep_protocol::spec::nearest;

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
    match &args.topic[..] {
        [job, key @ ..] if job == "job" && key.len() < 2 => {
            let key = key.first().map(String::as_str);
            output::line(job_file::help_text(key).map_err(usage_error)?.trim_end())
        }
        names => {
            let mut command = &program;
            for name in names {
                let known: Vec<_> = command.get_subcommands().filter(|c| !c.is_hide_set()).collect();
                command = match known.iter().find(|c| c.get_name() == name) {
                    Some(found) => *found,
                    None => return Err(usage_error(unknown_command_message(name, &known))),
                };
            }
            // clap returns the output of `COMMAND --help` as an error.
            let line = ["lockstep"].into_iter().chain(names.iter().map(String::as_str)).chain(["--help"]);
            program.try_get_matches_from(line).map_or_else(|help| Ok(help.print()?), |_| Ok(()))
        }
    }
}

fn unknown_command_message(name: &str, known: &[&Command]) -> String {
    let meant = mistyped::equivalent(name).filter(|meant| known.iter().any(|c| c.get_name() == *meant));
    if meant.is_none() && job_file::help_text(Some(name)).is_ok() {
        return format!(
            "{name} is part of a job file and not a command: `lockstep help job {name}` explains it"
        );
    }
    let near = meant.or_else(|| nearest(name, known.iter().map(|c| c.get_name()).chain(["job"])));
    let advice = near.map(|near| format!("did you mean {near:?}?"));
    let advice = advice.unwrap_or_else(|| "`lockstep help` lists all commands".to_owned());
    format!("there is no command {name:?} to help with; {advice}")
}
