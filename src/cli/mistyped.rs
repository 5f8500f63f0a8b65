//! Suggests commands and options for names that other tools use, states invalid numbers in words, and adds the usage line to error
//! messages.

use clap::{
    Command, Error,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::{error::Error as _, ffi::OsString};

/// Names of commands in other tools, each with the equivalent command of this program.
const EQUIVALENTS: &[(&str, &str)] = &[
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

/// Arguments that commands do not have: the commands, the starts of the arguments, and the advice.
const RIGHT_FORMS: &[(&[&str], &[&str], &str)] = &[
    (&["token create"], &[""], "give the token's name with --name, as in `lockstep token create --name ci`"),
    (
        &["evaluate"],
        &["--model"],
        "name a job, or a version of a model, without an option, as in `lockstep evaluate models:/shoes@champion`",
    ),
    (&["metrics"], &["--metric"], "name the metric after the job, as in `lockstep metrics JOB loss`"),
    (
        &["submit", "fork"],
        &["--name", "--priority", "--ranks"],
        "set the job's key with --set, as in `--set name=NAME`, `--set priority=5` or `--set parallel.ranks=2`",
    ),
    (&["edit"], &["--name"], "a job keeps its name; `lockstep fork JOB --set name=NAME` starts a new job"),
    (&["serve"], &["--port"], "give the port with --listen, as in `lockstep serve --listen 127.0.0.1:8080`"),
    (&["logs"], &["--tail"], "print the last lines with `lockstep logs JOB | tail`"),
];

/// Returns the advice for an argument that a command does not have.
fn right_form(argument: &str, arguments: &[OsString]) -> Option<&'static str> {
    let is_command = |command: &str| {
        let mut names = command.split(' ').enumerate();
        names.all(|(index, name)| arguments.get(index + 1).is_some_and(|given| given == name))
    };
    // An empty start stands for every argument that is not an option.
    let begins = |start: &str| {
        if start.is_empty() { !argument.starts_with('-') } else { argument.starts_with(start) }
    };
    let found = RIGHT_FORMS.iter().find(|(commands, starts, _)| {
        starts.iter().any(|start| begins(start)) && commands.iter().any(|command| is_command(command))
    });
    found.map(|(_, _, advice)| *advice)
}

/// Returns a library's message about an invalid number in words; `None` for any other message.
fn number_mistake(message: &str) -> Option<String> {
    if let Some((min, max)) = message.split_once(" is not in ").and_then(|(_, range)| range.split_once("..="))
    {
        let has_limit = max.parse::<u64>().is_ok_and(|max| max < u32::MAX.into());
        let limit = if has_limit { format!("from {min} to {max}") } else { format!("of at least {min}") };
        return Some(format!("give a whole number {limit}"));
    }
    match message {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            Some("give a whole number".into())
        }
        "number too large to fit in target type" => Some("the number is too large".into()),
        "number too small to fit in target type" => Some("the number is too small".into()),
        "invalid float literal" | "cannot parse float from empty string" => Some("give a number".into()),
        _ => None,
    }
}

/// Returns the command of this program that does what `typed` does in other tools.
pub(crate) fn equivalent(typed: &str) -> Option<&'static str> {
    EQUIVALENTS.iter().find(|(name, _)| *name == typed).map(|(_, command)| *command)
}

/// Adds to clap's error a suggestion for an unknown command or argument, and the usage line of the command's help, and states invalid
/// numbers in words. clap's own usage line would show options that environment variables set as required.
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
        if let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
            && let Some(advice) = right_form(argument, arguments)
        {
            // An option with a similar spelling has another meaning.
            error.remove(ContextKind::SuggestedArg);
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.into()]));
        }
    }
    if error.kind() == ErrorKind::ValueValidation
        && let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
        && let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue)
        && let Some(mistake) = error.source().and_then(|source| number_mistake(&source.to_string()))
    {
        let message = format!(
            "invalid value '{value}' for '{argument}': {mistake}\n\nFor more information, try '--help'.\n"
        );
        return Error::raw(ErrorKind::ValueValidation, message);
    }
    if error.get(ContextKind::Usage).is_some() {
        program.build();
        let names: Vec<_> = arguments.iter().skip(1).map_while(|argument| argument.to_str()).collect();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage(&mut program, &names)));
    }
    error
}

/// Returns the usage line of the command or subcommand whose names are at the start of `names`.
fn usage(command: &mut Command, names: &[&str]) -> StyledStr {
    if let [name, rest @ ..] = names
        && let Some(subcommand) = command.find_subcommand_mut(name)
    {
        return usage(subcommand, rest);
    }
    command.render_usage()
}
