//! The commands that join another machine, ready to copy.

/// The properties of the server that decide how a machine joins it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Join {
    /// The server's URL for other machines; `None` if it listens only on loopback.
    pub server_url: Option<String>,
    /// The server's URL for commands on the server's own machine, where commands find the token.
    pub own_url: String,
    /// The port on which the server listens.
    pub port: u16,
    /// An unused machine name, which the reader replaces.
    pub name: String,
    /// Whether agents need a token.
    pub needs_token: bool,
    /// Whether the server's certificate is signed by the server's own authority, which other machines do not trust yet.
    pub has_own_ca: bool,
    /// The server's data directory, if the user may know it.
    pub data_dir: Option<String>,
}

const CA: &str = "lockstep-ca.crt";

impl Join {
    /// Returns the commands for the server's machine.
    pub(super) fn server_commands(&self) -> Vec<String> {
        let quoted = self.data_dir.iter().filter_map(|dir| shlex::try_quote(dir).ok());
        let data_dir: String = quoted.map(|dir| format!(" --data-dir {dir}")).collect();
        let mut commands = Vec::new();
        if self.has_own_ca {
            commands.push(format!("lockstep ca show{data_dir} > {CA}"));
        }
        if self.needs_token {
            let ca = if self.has_own_ca { format!(" --ca-file {CA}") } else { String::new() };
            let (server, name) = (&self.own_url, &self.name);
            commands.push(format!(
                "lockstep token create --scope agent --agent {name} --server {server}{ca}{data_dir} --out {name}.token"
            ));
        }
        commands
    }

    /// Lists the files that the commands on the other machine need.
    pub(super) fn files(&self) -> String {
        let token = format!("{}.token", self.name);
        let files = [(self.has_own_ca, CA), (self.needs_token, token.as_str())];
        let files: Vec<_> = files.into_iter().filter(|(needed, _)| *needed).map(|(_, name)| name).collect();
        files.join(" and ")
    }

    /// Returns the command for the other machine.
    pub(super) fn agent_command(&self) -> String {
        let mut command =
            format!("lockstep agent --server {}", self.server_url.as_ref().unwrap_or(&self.own_url));
        // If the server listens for other machines without TLS, the agent must allow this, too.
        if self.server_url.as_ref().is_some_and(|url| url.starts_with("http://")) {
            command.push_str(" --insecure-http");
        }
        if self.has_own_ca {
            command.push_str(&format!(" --ca-file {CA}"));
        }
        if self.needs_token {
            command.push_str(&format!(" --token-file {}.token", self.name));
        }
        command.push_str(&format!(" --name {}", self.name));
        // The default folder belongs to the server's own agent.
        if self.server_url.is_none() {
            command.push_str(&format!(" --data-dir {}", self.name));
        }
        command
    }

    /// Returns the command that starts the server for other machines.
    pub(super) fn serve_command(&self) -> String {
        format!("lockstep serve --listen 0.0.0.0:{} --tls-own-ca", self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_only_the_options_that_the_server_needs() {
        let name = "node-1".to_owned();
        let open =
            Join { server_url: Some("http://10.0.0.1:7070".into()), name: name.clone(), ..Join::default() };
        assert_eq!(open.server_commands(), [""; 0]);
        assert_eq!(
            open.agent_command(),
            "lockstep agent --server http://10.0.0.1:7070 --insecure-http --name node-1"
        );
        let closed = Join {
            server_url: Some("https://gpu:7070".into()),
            own_url: "https://127.0.0.1:7070".into(),
            port: 7070,
            name,
            needs_token: true,
            has_own_ca: true,
            data_dir: Some("/a b/it's".into()),
        };
        assert_eq!(
            closed.server_commands(),
            [
                r#"lockstep ca show --data-dir "/a b/it's" > lockstep-ca.crt"#,
                r#"lockstep token create --scope agent --agent node-1 --server https://127.0.0.1:7070 --ca-file lockstep-ca.crt --data-dir "/a b/it's" --out node-1.token"#,
            ]
        );
        assert_eq!(closed.files(), "lockstep-ca.crt and node-1.token");
        assert_eq!(
            closed.agent_command(),
            "lockstep agent --server https://gpu:7070 --ca-file lockstep-ca.crt --token-file node-1.token --name node-1"
        );
        let alone = Join { server_url: None, has_own_ca: false, needs_token: false, ..closed };
        assert_eq!(
            alone.agent_command(),
            "lockstep agent --server https://127.0.0.1:7070 --name node-1 --data-dir node-1"
        );
    }
}
