//! The commands, each a module with `Args` (clap) and `run`, which returns `anyhow::Result<()>`, and code that commands share.

pub(crate) mod access;
mod age;
pub(crate) mod agent;
pub(crate) mod api;
pub(crate) mod bench;
mod browser;
mod bundled;
pub(crate) mod ca;
pub(crate) mod checkpoint_choice;
pub(crate) mod checkpoints;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod confirm;
pub(crate) mod database;
pub(crate) mod dataset;
pub(crate) mod delete;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod download;
pub(crate) mod edit;
pub(crate) mod evaluate;
mod event_files;
pub(crate) mod export;
pub(crate) mod file;
pub(crate) mod fork;
pub(crate) mod help;
mod history;
pub(crate) mod import;
pub(crate) mod init;
pub(crate) mod job_actions;
mod job_file;
mod job_loss;
pub(crate) mod kernels;
pub(crate) mod launch;
pub(crate) mod list;
pub(crate) mod local_agent;
pub(crate) mod logs;
pub(crate) mod machine;
pub(crate) mod man;
pub(crate) mod metrics;
pub(crate) mod mistyped;
pub(crate) mod model;
pub(crate) mod oidc;
pub(crate) mod output;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod queue;
pub(crate) mod rank;
mod rank_table;
pub(crate) mod reference;
pub(crate) mod serve;
pub(crate) mod show;
mod size;
pub(crate) mod submit;
mod sweep;
pub(crate) mod sweeps;
pub(crate) mod token;
pub(crate) mod train;
mod training_bar;
pub(crate) mod user;
pub(crate) mod validate;
pub(crate) mod watch;
pub(crate) mod webhook;
mod weight_files;
pub(crate) mod weights;

pub(crate) use lockstep_server::with_causes;

use lockstep_protocol::spec::nearest;
use std::io::IsTerminal;

/// Text at the end of `lockstep --help`.
pub(crate) const EXIT_STATUS_HELP: &str = "Exit status: 0 success, 1 failure while running, 2 invalid request (the message lists every \
    mistake), 130 stopped by Ctrl-C.";

/// A mistake in the request (a file, an argument or a name), which leads to exit status 2. Any other error leads to 1.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct WrongRequest(pub(crate) String);

/// Returns an error with exit status 2, for a mistake in the request.
pub(crate) fn usage_error(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(WrongRequest(message.into()))
}

/// Returns the only object of the kind `noun` that has the name or the id `name`. `describe` names an object if several match.
///
/// # Errors
/// Exit status 2 if no object or several objects match.
pub(crate) fn find_only<T>(
    noun: &str,
    name: &str,
    mut matching: Vec<T>,
    describe: impl Fn(&T) -> String,
) -> anyhow::Result<T> {
    match matching.len() {
        0 => Err(usage_error(unknown_name_message(noun, std::iter::empty(), name))),
        1 => Ok(matching.swap_remove(0)),
        count => Err(usage_error(output::one_line(&format!(
            "{count} {noun}s have the name or the id {name}: {}; give another name or id of the {noun}",
            matching.iter().map(describe).collect::<Vec<_>>().join(", ")
        )))),
    }
}

/// Returns the message for a name that no object of the kind `noun` has. Suggests the most similar of `names`.
pub(crate) fn unknown_name_message<'a>(
    noun: &str,
    names: impl Iterator<Item = &'a str>,
    name: &str,
) -> String {
    let list_command =
        if noun == "job" { "lockstep list".to_owned() } else { format!("lockstep {noun} list") };
    let near = nearest(name, names).map(|near| format!("did you mean {near:?}? ")).unwrap_or_default();
    format!("no {noun} is called {name}; {near}`{list_command}` shows all {noun}s")
}

/// The error of a command that its user has stopped. It leads to the exit status that shells report after Ctrl-C, 130, and its message has
/// no prefix `error:`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Stopped(pub(crate) String);

/// Prints an error to standard error, and returns the exit status of a command.
pub(crate) fn exit_status(result: anyhow::Result<()>) -> i32 {
    let Err(error) = result else { return 0 };
    if output::is_closed_pipe(&error) {
        return 0;
    }
    let (label, status) = match &error {
        _ if error.is::<Stopped>() => ("", 130),
        _ if error.is::<WrongRequest>() => ("error: ", 2),
        _ => ("error: ", 1),
    };
    output::warn(format_args!("{label}{}", describe_error(&error)));
    status
}

/// Formats an error and its causes, as in [`with_causes`].
pub(crate) fn describe_error(error: &anyhow::Error) -> String {
    with_causes(&**error)
}

/// Runs a client command on one thread.
pub(crate) fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Writes diagnostics of long-running programs to standard error, filtered by `default`, or by `LOCKSTEP_LOG` if it is set (for example to
/// `debug`).
pub(crate) fn init_tracing(default: &str) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("LOCKSTEP_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    // If a command runs another command, the second call keeps the first subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // By default, the subscriber would print its own failures and panic. A full disk must not end the process.
        .log_internal_errors(false)
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::describe_error;
    use lockstep_server::ServeError;
    use std::io;

    #[test]
    fn a_cause_is_named_once() {
        let missing = || io::Error::from_raw_os_error(2);
        let with_cause = ServeError::DataDir { path: "/data".into(), source: missing() };
        let text = describe_error(&anyhow::Error::new(with_cause).context("serve"));
        assert!(text.starts_with("serve: the data directory /data cannot be used: No such file"), "{text}");
        assert_eq!(text.matches("os error 2").count(), 1, "{text}");
        let text = describe_error(&anyhow::Error::new(missing()).context("/data/agent.log"));
        assert_eq!(text, "/data/agent.log: No such file or directory (os error 2)");
    }
}
