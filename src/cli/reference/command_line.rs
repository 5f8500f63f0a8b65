//! Every command with its arguments, from clap's definitions.

use super::{escape, generated_from, table};
use clap::{Arg, Command};
use std::fmt::Write as _;

pub(super) fn markdown(mut program: Command) -> String {
    program.build();
    let mut text = generated_from("the definitions of the commands");
    text += "# Commands\n\n";
    let _ = writeln!(text, "{}\n", escape(&description(&program)));
    text += "`lockstep help COMMAND` prints the usage of a command. `lockstep completions bash|zsh|fish` prints completions for a shell, \
             and `lockstep man --out DIR` writes man pages.\n\n";
    let _ = writeln!(text, "{}\n", program.get_after_help().map(ToString::to_string).unwrap_or_default());
    let rows: Vec<_> = visible_subcommands(&program)
        .map(|command| {
            let name = command.get_name();
            [format!("[`{name}`](#lockstep-{name})"), escape(&summary(command))]
        })
        .collect();
    text += &table(["command", "does"], &rows);
    for command in visible_subcommands(&program) {
        add_section(&mut text, command, "lockstep", 2);
    }
    text
}

/// Returns the commands for people: without hidden commands, which the program itself starts, and without clap's `help` in subcommands.
pub(crate) fn visible_subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    let is_subcommand = command.get_name() != "lockstep";
    command.get_subcommands().filter(move |c| !(c.is_hide_set() || is_subcommand && c.get_name() == "help"))
}

fn add_section(text: &mut String, command: &Command, parent: &str, level: usize) {
    let name = format!("{parent} {}", command.get_name());
    let _ = write!(text, "\n{} {name}\n\n{}\n", "#".repeat(level), escape(&description(command)));
    if !command.is_subcommand_required_set() {
        let usage = command.clone().render_usage().to_string();
        let lines = usage.trim_start_matches("Usage:").lines();
        let lines: Vec<_> = lines.map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let _ = write!(text, "\n```text\n{}\n```\n", lines.join("\n"));
        let arguments = command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_id() != "help");
        let rows: Vec<_> = arguments.map(row).collect();
        if !rows.is_empty() {
            let _ = write!(text, "\n{}", table(["argument", "default", "meaning"], &rows));
        }
    }
    for inner in visible_subcommands(command) {
        add_section(text, inner, &name, level + 1);
    }
}

fn row(arg: &Arg) -> [String; 3] {
    let values: Vec<_> =
        arg.get_value_names().into_iter().flatten().map(|name| format!("<{name}>")).collect();
    let takes_value = arg.get_action().takes_values();
    let values = if takes_value { values.join(" ") } else { String::new() };
    let mut names = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    // A positional argument has no names, and a flag has no values.
    let name = [names.join(", "), values].join(" ").trim().to_owned();
    let defaults: Vec<_> =
        arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
    let default =
        if !takes_value || defaults.is_empty() { String::new() } else { format!("`{}`", defaults.join(" ")) };
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut meaning = vec![help.split_whitespace().collect::<Vec<_>>().join(" ")];
    if takes_value && !arg.is_hide_possible_values_set() {
        let possible = arg.get_possible_values();
        let named =
            possible.iter().filter(|value| !value.is_hide_set()).map(|value| match value.get_help() {
                Some(help) => format!("`{}` ({help})", value.get_name()),
                None => format!("`{}`", value.get_name()),
            });
        let named: Vec<_> = named.collect();
        if !named.is_empty() {
            meaning.push(format!("One of {}", named.join(", ")));
        }
    }
    if let Some(variable) = arg.get_env() {
        meaning.push(format!("Environment: `{}`", variable.to_string_lossy()));
    }
    let meaning =
        meaning.iter().filter(|part| !part.is_empty()).map(|part| escape(part.trim_end_matches('.')));
    [format!("`{name}`"), default, meaning.collect::<Vec<_>>().join(". ")]
}

/// Returns the first sentence of a command's description.
fn summary(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

fn description(command: &Command) -> String {
    let text = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let mut paragraphs = text.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    // clap removes the full stop of a one-sentence description.
    let first = paragraphs.next().unwrap_or_default();
    let first = if first.ends_with(['.', ':', ')']) { first } else { format!("{first}.") };
    std::iter::once(first).chain(paragraphs).collect::<Vec<_>>().join("\n\n")
}
