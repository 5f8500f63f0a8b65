//! The commands that join another machine, as they are to be typed.

/// What a machine needs to join this server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Join {
    /// The server's address as another machine reaches it; none: it listens on its own machine alone.
    pub server_url: Option<String>,
    /// The server's address on its own machine, where commands find its token.
    pub own_url: String,
    /// The port that it listens on.
    pub port: u16,
    /// A name that no machine has yet, to be replaced by the machine's.
    pub name: String,
    /// Agents need a token.
    pub with_token: bool,
    /// The server's certificate is of its own authority, which others do not know yet.
    pub with_ca: bool,
    /// The server's data directory, for those who may know it.
    pub data_dir: Option<String>,
}

const CA: &str = "lockstep-ca.crt";

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/_.-:".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Join {
    /// To be typed on the server's machine.
    pub(super) fn here(&self) -> Vec<String> {
        let data_dir =
            || self.data_dir.iter().map(|dir| format!(" --data-dir {}", quoted(dir))).collect::<String>();
        let mut commands = Vec::new();
        if self.with_ca {
            commands.push(format!("lockstep ca show{} > {CA}", data_dir()));
        }
        if self.with_token {
            let ca = if self.with_ca { format!(" --ca-file {CA}") } else { String::new() };
            let (server, name) = (&self.own_url, &self.name);
            commands.push(format!(
                "lockstep token create --scope agent --agent {name} --server {server}{ca}{} --out {name}.token",
                data_dir()
            ));
        }
        commands
    }

    /// Files that the commands there need.
    pub(super) fn files(&self) -> String {
        let token = format!("{}.token", self.name);
        let files = [(self.with_ca, CA), (self.with_token, token.as_str())];
        let files: Vec<_> = files.into_iter().filter(|(needed, _)| *needed).map(|(_, name)| name).collect();
        files.join(" and ")
    }

    /// To be typed on the other machine.
    pub(super) fn there(&self) -> String {
        let mut command = match &self.server_url {
            Some(url) => format!("lockstep agent --server {url}"),
            None => format!("lockstep agent --server {}", self.own_url),
        };
        // A server that others reach in clear was configured so; an agent has to be, too.
        if self.server_url.as_ref().is_some_and(|url| url.starts_with("http://")) {
            command.push_str(" --insecure-http");
        }
        if self.with_ca {
            command.push_str(&format!(" --ca-file {CA}"));
        }
        if self.with_token {
            command.push_str(&format!(" --token-file {}.token", self.name));
        }
        command.push_str(&format!(" --name {}", self.name));
        // The usual folder is that of the server's own agent.
        if self.server_url.is_none() {
            command.push_str(&format!(" --data-dir {}", self.name));
        }
        command
    }

    /// Starts the server so that others reach it.
    pub(super) fn open(&self) -> String {
        format!("lockstep serve --listen 0.0.0.0:{} --tls-own-ca", self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_what_the_server_asks_for_and_no_more() {
        let name = "node-1".to_owned();
        let open =
            Join { server_url: Some("http://10.0.0.1:7070".into()), name: name.clone(), ..Join::default() };
        assert_eq!(open.here(), [""; 0]);
        assert_eq!(
            open.there(),
            "lockstep agent --server http://10.0.0.1:7070 --insecure-http --name node-1"
        );
        let closed = Join {
            server_url: Some("https://gpu:7070".into()),
            own_url: "https://127.0.0.1:7070".into(),
            port: 7070,
            name,
            with_token: true,
            with_ca: true,
            data_dir: Some("/a b/it's".into()),
        };
        assert_eq!(
            closed.here(),
            [
                r"lockstep ca show --data-dir '/a b/it'\''s' > lockstep-ca.crt",
                r"lockstep token create --scope agent --agent node-1 --server https://127.0.0.1:7070 --ca-file lockstep-ca.crt --data-dir '/a b/it'\''s' --out node-1.token",
            ]
        );
        assert_eq!(closed.files(), "lockstep-ca.crt and node-1.token");
        assert_eq!(
            closed.there(),
            "lockstep agent --server https://gpu:7070 --ca-file lockstep-ca.crt --token-file node-1.token --name node-1"
        );
        let alone = Join { server_url: None, with_ca: false, with_token: false, ..closed };
        assert_eq!(
            alone.there(),
            "lockstep agent --server https://127.0.0.1:7070 --name node-1 --data-dir node-1"
        );
    }
}
