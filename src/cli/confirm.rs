//! Questions on the terminal: confirmation before data is deleted, which needs `--yes` without a terminal, and new passwords.

use super::{output, usage_error};
use std::{
    fmt::Display,
    io::{self, BufRead, IsTerminal as _},
};

/// Returns `Ok` if `yes` is given or a person answers `question` with yes.
///
/// # Errors
/// Exit status 2: the answer is not yes (the message says that `target` stays unchanged), or there is no terminal (the message names
/// `--yes`).
pub(crate) fn confirm(yes: bool, question: impl Display, target: impl Display) -> anyhow::Result<()> {
    if yes {
        return Ok(());
    }
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(usage_error(format!(
            "{target} stays as it is: there is no terminal to ask for confirmation; add --yes to confirm"
        )));
    }
    output::warn(format_args!("{question} [y/N]"));
    if says_yes(&mut io::stdin().lock())? {
        Ok(())
    } else {
        Err(usage_error(format!("{target} stays as it is")))
    }
}

/// Asks for a new password twice. `what` says what the password is for.
///
/// # Errors
/// Exit status 2 if the two passwords differ.
pub(crate) fn ask_new_password(what: &str) -> anyhow::Result<String> {
    let password = rpassword::prompt_password(format!("{what}: "))?;
    if rpassword::prompt_password("repeat the password: ")? == password {
        Ok(password)
    } else {
        Err(usage_error("the two passwords differ"))
    }
}

/// Reads whether a person answers yes. An empty or missing answer counts as no.
fn says_yes(input: &mut impl BufRead) -> io::Result<bool> {
    let mut reply = String::new();
    input.read_line(&mut reply)?;
    Ok(matches!(reply.trim().to_lowercase().as_str(), "y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::says_yes;

    #[test]
    fn only_yes_confirms() {
        for (reply, expected) in [
            ("y\n", true),
            ("YES\n", true),
            ("", false),
            ("\n", false),
            ("no\n", false),
            ("yesterday\n", false),
        ] {
            assert_eq!(says_yes(&mut reply.as_bytes()).unwrap(), expected, "{reply:?}");
        }
    }
}
