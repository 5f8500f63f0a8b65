//! `lockstep token`: access tokens. `lockstep login-link`: a link that signs a browser in.

use super::{
    api::{Api, ServerArgs, parse_elements, text},
    block_on,
    confirm::confirm,
    file, find_only, output, usage_error,
};
use lockstep_protocol::access::{LOCAL_AGENT_TOKEN, SERVER_TOKEN, Scope, Token};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Create a token, which is printed only once, or written to a file
    Create {
        /// Rights of the token: read, submit (includes read), admin (includes both), or agent (join as one agent)
        #[arg(long, value_name = "SCOPE", default_value = "submit")]
        scope: Scope,
        /// Name in lists and in the audit log [default: the scope, or the agent]
        #[arg(long)]
        name: Option<String>,
        /// Lifetime of the token, such as 12h, 30d or 1y [default: until it is revoked]
        #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
        expires: Option<u64>,
        /// Agent that may use the token (scope agent): its name, or its id
        #[arg(long, value_name = "NAME")]
        agent: Option<String>,
        /// Write the token to this new file, which only your account can read, instead of printing it
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// List tokens
    List(ServerArgs),
    /// Revoke a token; connections that use it are closed at once
    Revoke {
        /// The token's id, or its name if only one valid token has this name
        token: String,
        /// Do not ask for confirmation, which is needed for a token that this command or the server's own agent uses
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Parses `90s`, `15m`, `12h`, `30d`, `8w`, `1y` as seconds.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400), ("w", 604_800), ("y", 31_536_000)];
    let found = units.iter().find_map(|(unit, secs)| Some((text.strip_suffix(unit)?, secs)));
    let time = found.and_then(|(number, secs)| number.parse::<u64>().ok()?.checked_mul(*secs));
    time.filter(|secs| *secs > 0).ok_or_else(|| "give a number and a unit, such as 12h, 30d or 1y".into())
}

/// Runs the action.
///
/// # Errors
/// The server refuses the request.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    block_on(async {
        match action {
            Action::Create { scope, name, expires, agent, out, server } => {
                let name = name.or_else(|| agent.clone()).unwrap_or_else(|| scope.to_string());
                let body =
                    json!({ "name": name, "scope": scope, "agent": agent, "expires_in_secs": expires });
                let api = server.api()?;
                if let Some(path) = out {
                    return write_new(&api, &body, &path, server.json).await;
                }
                let created: Value = api.post("/tokens", &body).await?;
                if server.json {
                    return output::json(&created);
                }
                // Standard output contains only the token, so that it can be redirected to a file.
                let advice = match scope {
                    Scope::Agent => "",
                    _ => ". People make tokens of their own on the page Account (/account)",
                };
                output::warn(format_args!(
                    "this token is shown once; store it where only its user can read it{advice}"
                ));
                output::line(text(&created, "secret"))
            }
            Action::List(server) => {
                let tokens = server.api()?.read_all("/tokens").await?;
                if server.json {
                    return output::json(&tokens);
                }
                let tokens: Vec<Token> = parse_elements(&tokens, "tokens");
                let header = ["TOKEN", "SCOPE", "NAME", "AGENT", "OWNER", "VALIDITY", "USE"];
                output::table(header, tokens.iter().map(row))
            }
            Action::Revoke { token, yes, server } => {
                let api = server.api()?;
                let mut tokens: Vec<Token> = api.list("/tokens").await?;
                // The request for this list was the last use of a token.
                let last_use = tokens.iter().filter_map(|token| token.last_used_at).max();
                let has_id = tokens.iter().any(|t| t.id == token);
                tokens.retain(|t| t.id == token || !has_id && t.name == token && t.revoked_at.is_none());
                let Token { id, name, scope, last_used_at, .. } =
                    find_only("token", &token, tokens, |t| format!("{} (id {})", t.name, t.id))?;
                let effect = match &*id {
                    SERVER_TOKEN => {
                        "Commands on the server's machine are refused until the server is restarted"
                    }
                    LOCAL_AGENT_TOKEN => "The server's own agent gets no work until the server is restarted",
                    _ if last_used_at.is_some() && last_used_at == last_use => {
                        "It was used just now, probably by this command, and is refused from now on"
                    }
                    _ => "",
                };
                if !effect.is_empty() {
                    let question = format!("Revoke {}? {effect}.", output::one_line(&name));
                    confirm(yes, question, format_args!("token {id}"))?;
                }
                api.delete(&format!("/tokens/{id}")).await?;
                let text = output::one_line(&format!("{name} revoked: token {id}, scope {scope}"));
                output::print(server.json, &json!({ "revoked": id }), text)
            }
        }
    })
}

/// Creates a token and writes it to a new file.
async fn write_new(api: &Api, body: &Value, path: &Path, as_json: bool) -> anyhow::Result<()> {
    file::check_output(path)?;
    let failed = |error: io::Error| usage_error(format!("{}: {error}", path.display()));
    // The file is created first. If creating it failed after the request, the new token would be lost.
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    let created = api.post::<Value>("/tokens", body).await.inspect_err(|_| drop(fs::remove_file(path)));
    let mut created = created?;
    if let Err(error) = writeln!(file, "{}", text(&created, "secret")).and_then(|()| file.sync_all()) {
        let _ = fs::remove_file(path);
        // The token could not be written, so it is revoked.
        api.delete(&format!("/tokens/{}", text(&created, "id"))).await?;
        return Err(failed(error));
    }
    if as_json {
        // The file contains the secret, so the output does not.
        created.as_object_mut().and_then(|fields| fields.remove("secret"));
        return output::json(&created);
    }
    let words = format!("{}: the token {}", path.display(), text(&created, "name"));
    output::line(output::one_line(&words))
}

fn row(token: &Token) -> [String; 7] {
    let validity = match (token.revoked_at, token.expires_at) {
        (Some(at), _) => format!("revoked {at}"),
        (None, Some(at)) => format!("expires {at}"),
        (None, None) => String::new(),
    };
    [
        token.id.clone(),
        token.scope.to_string(),
        token.name.clone(),
        token.agent.clone().unwrap_or_default(),
        token.owner.clone().unwrap_or_default(),
        validity,
        token.last_used_at.map_or("never used".into(), |at| format!("last used {at}")),
    ]
}

/// Prints a link for signing in.
///
/// # Errors
/// The server refuses the request.
pub(crate) fn print_login_link(server: ServerArgs) -> anyhow::Result<()> {
    block_on(async {
        let response: Value = server.api()?.post("/login-links", &json!({})).await?;
        output::print(server.json, &response, response["url"].as_str().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_number_and_a_unit() {
        for (text, secs) in
            [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000), ("1y", 31_536_000)]
        {
            assert_eq!(parse_seconds(text), Ok(secs));
        }
        for text in ["", "30", "d", "0d", "-1d", "1.5h", "99999999999999999999d", "1 d"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
