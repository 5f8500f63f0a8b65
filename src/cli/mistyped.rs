//! Commands that there are not, under names that other tools have for ours, and how a command is used where it was called wrongly.

use clap::{
    Command, Error,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::ffi::OsString;

/// What people type and which command does it.
const MEANT: [(&str, &str); 11] = [
    ("stop", "cancel"),
    ("kill", "cancel"),
    ("status", "list"),
    ("ps", "list"),
    ("ls", "list"),
    ("jobs", "list"),
    ("compare", "list"),
    ("log", "logs"),
    ("rm", "delete"),
    ("remove", "delete"),
    ("run", "submit"),
];

/// The command that does what another tool calls so.
pub(crate) fn meant(typed: &str) -> Option<&'static str> {
    MEANT.iter().find(|(name, _)| *name == typed).map(|(_, command)| *command)
}

/// clap's error with the command that was meant, if it names none of ours, and with the usage line of the command's help: clap takes
/// options that are set by environment variables for such that were given, and its own line calls them required.
pub(crate) fn explain(mut error: Error, mut program: Command, arguments: &[OsString]) -> Error {
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(command) = meant(typed)
        && program.find_subcommand(typed).is_none()
        // Of the program itself: a command's own commands, such as those of `dataset`, are called otherwise.
        && arguments.get(1).is_some_and(|first| first.to_str() == Some(typed))
    {
        let command = ContextValue::Strings(vec![command.to_owned()]);
        error.insert(ContextKind::SuggestedSubcommand, command);
    }
    if error.get(ContextKind::Usage).is_some() {
        program.build();
        let names: Vec<_> = arguments.iter().skip(1).map_while(|argument| argument.to_str()).collect();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage(&mut program, &names)));
    }
    error
}

/// The usage line of the command that `names` begins with.
fn usage(command: &mut Command, names: &[&str]) -> StyledStr {
    if let [name, rest @ ..] = names
        && let Some(below) = command.find_subcommand_mut(name)
    {
        return usage(below, rest);
    }
    command.render_usage()
}
