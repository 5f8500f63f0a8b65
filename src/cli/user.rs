//! `lockstep user`: people who sign in with a name and a password.

use super::{
    api::{self, Api, ServerArgs},
    block_on,
    confirm::{ask_new_password, confirm},
    output, unknown_name_message, usage_error,
};
use anyhow::Context;
use lockstep_protocol::{
    limits::PASSWORD_CHARS,
    people::{Person, Role, password_mistake, subject_mistake},
};
use serde_json::{Value, json};
use std::io::{self, BufRead, IsTerminal};

/// Maximum length in bytes of a line on standard input that is read as a password.
const LINE_BYTES: u64 = 8192;

#[derive(clap::Args)]
pub(crate) struct PersonArgs {
    /// The person's name
    name: String,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Add a person. The command asks for the password, or reads the first line of standard input; with --subject, the person has no
    /// password
    Add {
        /// Name for signing in: a to z, digits, '.', '-', '_' and '@'
        name: String,
        /// Role: viewer (can only look), member (can also submit jobs and change their own jobs) or admin (can do everything)
        #[arg(long, value_name = "ROLE", default_value = "member")]
        role: Role,
        /// Claim `sub` of the account at the OpenID provider that signs in as this person; the sign-in page shows the claim
        #[arg(long, value_name = "SUB")]
        subject: Option<String>,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Let another account at the OpenID provider sign in as a person; the person's sessions end
    Link {
        /// The person's name
        name: String,
        /// Claim `sub` of the account; the sign-in page shows the claim
        #[arg(long, value_name = "SUB")]
        subject: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Remove the link to an account at the OpenID provider; the person's sessions end
    Unlink(PersonArgs),
    /// List people
    List(ServerArgs),
    /// Remove a person; sessions end, tokens are revoked, and jobs keep the person's name
    Remove {
        #[command(flatten)]
        args: PersonArgs,
        /// Do not ask for confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
    },
    /// Set a person's password. The command asks for it, or reads the first line of standard input; the person's sessions end
    Password(PersonArgs),
    /// Change a person's role; the person's sessions end
    Role {
        /// The person's name
        name: String,
        /// viewer, member or admin
        role: Role,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Forbid a person to sign in; the person's sessions end, and the person's tokens are refused
    Disable(PersonArgs),
    /// Let a person sign in again
    Enable(PersonArgs),
}

/// Runs the action.
///
/// # Errors
/// The server refuses the request, or the password is invalid.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    block_on(async {
        match action {
            Action::Add { name, role, subject, server } => {
                let body = match subject {
                    Some(subject) => json!({ "name": name, "role": role, "subject": subject }),
                    None => json!({ "name": name, "role": role, "password": read_password()? }),
                };
                let person: Value = server.api()?.post("/people", &body).await?;
                print_person(&server, &person)
            }
            Action::Link { name, subject, server } => {
                if let Some(detail) = subject_mistake(&subject) {
                    return Err(usage_error(format!("a subject {detail}")));
                }
                PersonArgs { name, server }.change(json!({ "subject": subject })).await
            }
            Action::Unlink(args) => args.change(json!({ "subject": "" })).await,
            Action::List(server) => {
                let response: Value = server.api()?.get("/people").await?;
                if server.json {
                    return output::json(&response["people"]);
                }
                let people = api::parse_list::<Person>(&response, "people")?;
                if people.is_empty() {
                    return output::line("no users; add one with `lockstep user add NAME`");
                }
                output::table(["USER", "ROLE", "ADDED", "ACCESS"], people.iter().map(row))
            }
            Action::Remove { args: PersonArgs { name, server }, yes } => {
                let api = server.api()?;
                let path = find(&api, &name).await?;
                let question =
                    format!("Remove {name}? Then {name}'s sessions end, and {name}'s tokens are revoked.");
                confirm(yes, question, format_args!("user {name}"))?;
                api.delete(&path).await?;
                output::print(server.json, &json!({ "removed": name }), &name)
            }
            Action::Password(args) => args.change(json!({ "password": read_password()? })).await,
            Action::Role { name, role, server } => {
                PersonArgs { name, server }.change(json!({ "role": role })).await
            }
            Action::Disable(args) => args.change(json!({ "disabled": true })).await,
            Action::Enable(args) => args.change(json!({ "disabled": false })).await,
        }
    })
}

impl PersonArgs {
    async fn change(&self, body: Value) -> anyhow::Result<()> {
        let api = self.server.api()?;
        let person: Value = api.patch(&find(&api, &self.name).await?, &body).await?;
        print_person(&self.server, &person)
    }
}

/// Returns the URL path of a person whom the server knows.
///
/// # Errors
/// Exit status 2 if nobody has the name.
async fn find(api: &Api, name: &str) -> anyhow::Result<String> {
    let path = path(name)?;
    let response: Value = api.get("/people").await?;
    let people = api::parse_list::<Person>(&response, "people")?;
    if people.iter().any(|person| person.name == name) {
        return Ok(path);
    }
    let names = people.iter().map(|person| person.name.as_str());
    Err(usage_error(unknown_name_message("user", names, name)))
}

/// Returns the URL path of a person. An invalid name must not lead to another path.
fn path(name: &str) -> anyhow::Result<String> {
    match lockstep_protocol::people::name_mistake(name) {
        None => Ok(format!("/people/{name}")),
        Some(detail) => Err(usage_error(format!("a name {detail}"))),
    }
}

fn print_person(server: &ServerArgs, response: &Value) -> anyhow::Result<()> {
    if server.json {
        return output::json(response);
    }
    let person: Person = serde_json::from_value(response.clone()).context("the server's answer")?;
    let [name, role, added, access] = row(&person);
    output::line(format!("{name}  {role}  added {added}  {access}").trim_end())
}

fn row(person: &Person) -> [String; 4] {
    let identity = person.identity.as_ref().map(|identity| format!("OpenID {}", identity.subject));
    let disabled = person.disabled_at.map(|at| format!("disabled {at}"));
    let access = identity.into_iter().chain(disabled).collect::<Vec<_>>().join(", ");
    [person.name.clone(), person.role.to_string(), person.created_at.to_string(), access]
}

/// Reads a password: asks for it twice on a terminal, otherwise reads the first line of standard input. A password is never an argument,
/// because other accounts can see a process's arguments.
fn read_password() -> anyhow::Result<String> {
    let password = if io::stdin().is_terminal() {
        ask_new_password("password")?
    } else {
        first_line(io::stdin().lock())?
    };
    match password_mistake(&password) {
        None => Ok(password),
        Some(detail) => Err(usage_error(format!("a password {detail}"))),
    }
}

fn first_line(input: impl BufRead) -> anyhow::Result<String> {
    let mut line = Vec::new();
    let mut input = input.take(LINE_BYTES + 1);
    input.read_until(b'\n', &mut line).context("the password on standard input")?;
    if line.len() as u64 > LINE_BYTES {
        return Err(usage_error(format!(
            "the line on standard input has more than {LINE_BYTES} bytes; a password has {} to {} characters",
            PASSWORD_CHARS.start(),
            PASSWORD_CHARS.end()
        )));
    }
    if line.is_empty() {
        return Err(usage_error(
            "standard input is empty; give the password on standard input, or use a terminal",
        ));
    }
    let line = String::from_utf8(line)
        .map_err(|_| usage_error("the password on standard input is not text (UTF-8)"))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_the_first_line_without_its_end() {
        for (input, password) in
            [("secret\n", "secret"), ("a b \r\nmore\n", "a b "), ("no end", "no end"), ("\n", "")]
        {
            assert_eq!(first_line(input.as_bytes()).unwrap(), password);
        }
        let longest = "x".repeat(LINE_BYTES as usize);
        assert_eq!(first_line(longest.as_bytes()).unwrap(), longest);
        let refused = |line: &[u8]| first_line(line).unwrap_err().to_string();
        let message = refused(format!("{longest}x").as_bytes());
        assert!(message.contains("more than 8192 bytes; a password has 10 to 1024 characters"), "{message}");
        assert!(refused(b"\xff\n").contains("not text (UTF-8)"));
        assert!(refused(b"").contains("give the password on standard input"));
    }

    #[test]
    fn a_name_cannot_lead_to_another_path() {
        assert_eq!(path("ada").unwrap(), "/people/ada");
        for name in ["", "../tokens", "a/b", "a?b", "Ada"] {
            assert!(path(name).is_err(), "{name}");
        }
    }
}
