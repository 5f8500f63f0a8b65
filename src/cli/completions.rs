//! `lockstep completions`: shell completions of commands and options.

use super::output;
use clap::{
    Command,
    builder::{PossibleValuesParser, TypedValueParser as _},
};
use clap_complete::{Generator as _, Shell};

/// Print completions for a shell
///
/// For bash: `lockstep completions bash > ~/.local/share/bash-completion/completions/lockstep`. For zsh: write the output as
/// `_lockstep` into a folder of `$fpath`. For fish: `lockstep completions fish > ~/.config/fish/completions/lockstep.fish`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell to print completions for
    #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|name| name.parse::<Shell>()))]
    shell: Shell,
}

/// Prints the completions.
///
/// # Errors
/// Standard output is closed or full.
pub(crate) fn run(args: &Args, mut program: Command) -> anyhow::Result<()> {
    let mut text = Vec::new();
    program.set_bin_name("lockstep");
    program.build();
    args.shell.try_generate(&program, &mut text)?;
    output::line(String::from_utf8(text)?.trim_end())
}
