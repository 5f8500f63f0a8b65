//! `lockstep completions`: shell completions of commands and options.

use super::output;
use clap::{Command, ValueEnum};
use clap_complete::{Generator as _, Shell};

/// Print completions for a shell
///
/// For bash: `lockstep completions bash > ~/.local/share/bash-completion/completions/lockstep`. For zsh: write the output as
/// `_lockstep` into a folder of `$fpath`. For fish: `lockstep completions fish > ~/.config/fish/completions/lockstep.fish`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell to print completions for
    #[arg(value_enum)]
    shell: ShellName,
}

/// Supported shells.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ShellName {
    Bash,
    Zsh,
    Fish,
}

/// Prints the completions.
///
/// # Errors
/// Standard output is closed or full.
pub(crate) fn run(args: &Args, mut program: Command) -> anyhow::Result<()> {
    let shell = match args.shell {
        ShellName::Bash => Shell::Bash,
        ShellName::Zsh => Shell::Zsh,
        ShellName::Fish => Shell::Fish,
    };
    let mut text = Vec::new();
    program.set_bin_name("lockstep");
    program.build();
    shell.try_generate(&program, &mut text)?;
    output::line(String::from_utf8(text)?.trim_end())
}
