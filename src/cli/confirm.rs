//! A question before something is lost. Where nobody can be asked, the command line has to say yes.

use super::{output, wrong};
use std::{
    fmt::Display,
    io::{self, BufRead, IsTerminal as _},
};

/// Continues when `yes` is given or a person says yes to `question`.
///
/// # Errors
/// Exit status 2: the answer is another (`kept` says what stays as it is), or nobody can be asked, and then with what to add.
pub(crate) fn confirmed(yes: bool, question: impl Display, kept: impl Display) -> anyhow::Result<()> {
    if yes {
        return Ok(());
    }
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(wrong(format!(
            "{kept} stays as it is: nobody can be asked, as this is no terminal; add --yes to do it"
        )));
    }
    output::warn(format_args!("{question} [y/N]"));
    if says_yes(&mut io::stdin().lock())? { Ok(()) } else { Err(wrong(format!("{kept} stays as it is"))) }
}

/// Whether a person says yes; an empty answer and no answer are none.
fn says_yes(answers: &mut impl BufRead) -> io::Result<bool> {
    let mut answer = String::new();
    answers.read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::says_yes;

    #[test]
    fn only_yes_is_yes() {
        for (answer, expected) in [
            ("y\n", true),
            ("YES\n", true),
            ("", false),
            ("\n", false),
            ("no\n", false),
            ("yesterday\n", false),
        ] {
            assert_eq!(says_yes(&mut answer.as_bytes()).unwrap(), expected, "{answer:?}");
        }
    }
}
