//! Suggests commands for names that other tools use, and adds the usage line to error messages.

use clap::{
    Command, Error,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::ffi::OsString;

/// Names of commands in other tools, each with the equivalent command of this program.
const EQUIVALENTS: [(&str, &str); 10] = [
    ("stop", "cancel"),
    ("kill", "cancel"),
    ("status", "list"),
    ("ps", "list"),
    ("ls", "list"),
    ("jobs", "list"),
    ("log", "logs"),
    ("rm", "delete"),
    ("remove", "delete"),
    ("run", "submit"),
];

/// Returns the command of this program that does what `typed` does in other tools.
pub(crate) fn equivalent(typed: &str) -> Option<&'static str> {
    EQUIVALENTS.iter().find(|(name, _)| *name == typed).map(|(_, command)| *command)
}

/// Adds to clap's error a suggestion for an unknown command, and the usage line of the command's help; removes the suggestion for an
/// unknown option. clap's own usage line would show options that environment variables set as required.
pub(crate) fn explain(mut error: Error, mut program: Command, arguments: &[OsString]) -> Error {
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(command) = equivalent(typed)
        && program.find_subcommand(typed).is_none()
        // Only the first argument: the names in the list do not fit subcommands, such as the subcommands of `dataset`.
        && arguments.get(1).is_some_and(|first| first.to_str() == Some(typed))
    {
        let command = ContextValue::Strings(vec![command.to_owned()]);
        error.insert(ContextKind::SuggestedSubcommand, command);
    }
    if error.kind() == ErrorKind::UnknownArgument {
        // clap proposes `-- --option`, but no argument begins with a dash.
        error.remove(ContextKind::Suggested);
    }
    if error.get(ContextKind::Usage).is_some() {
        program.build();
        let names: Vec<_> = arguments.iter().skip(1).map_while(|argument| argument.to_str()).collect();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage(&mut program, &names)));
    }
    error
}

/// Returns the usage line of the command whose name is at the start of `names`.
fn usage(command: &mut Command, names: &[&str]) -> StyledStr {
    if let [name, rest @ ..] = names
        && let Some(subcommand) = command.find_subcommand_mut(name)
    {
        return usage(subcommand, rest);
    }
    command.render_usage()
}
