//! `lockstep ca`: the certificate authority of a server that makes its own certificates.

use super::{confirm::ask_new_password, file, output, usage_error};
use lockstep_server::tls::ca::{Authority, DEFAULT_DAYS, Kind, MAX_DAYS, Record};
use lockstep_worker::tls::{self, create_pkcs12};
use std::{
    fs::{self, File},
    io::{IsTerminal, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Create the authority; `serve --tls-own-ca` does this at its first start
    Init(AuthorityArgs),
    /// Print the authority's certificate, which browsers and clients have to trust
    Show(AuthorityArgs),
    /// Issue a certificate for another server or a proxy, or with --agent for an agent: NAME.crt and NAME.key
    Issue {
        /// DNS names and addresses for which the certificate is valid, or the agent's name. The first name is also the name of the files
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Issue a certificate that identifies an agent (`lockstep agent --cert-file --key-file`)
        #[arg(long)]
        agent: bool,
        /// Write NAME.p12 instead: certificate and key in one file (PKCS#12) with a password; for agents only
        #[arg(long, requires = "agent")]
        pkcs12: bool,
        /// File whose first line is the password of NAME.p12 [default: ask at the terminal]
        #[arg(long, value_name = "FILE", requires = "pkcs12")]
        pkcs12_password_file: Option<PathBuf>,
        /// Days for which the certificate is valid
        #[arg(long, default_value_t = DEFAULT_DAYS, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DAYS)))]
        days: u32,
        /// Folder for the files
        #[arg(long, short, value_name = "DIR", default_value = ".")]
        output: PathBuf,
        #[command(flatten)]
        args: AuthorityArgs,
    },
    /// List issued certificates, the oldest first
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        args: AuthorityArgs,
    },
    /// Revoke all certificates of a name, or the certificate with a serial number; a running server refuses revoked certificates within
    /// seconds
    Revoke {
        /// Name or serial number, as `lockstep ca list` prints it
        #[arg(value_name = "NAME|SERIAL")]
        certificate: String,
        #[command(flatten)]
        args: AuthorityArgs,
    },
}

#[derive(clap::Args)]
pub(crate) struct AuthorityArgs {
    /// The server's data directory; the authority is in its folder `ca`
    #[arg(long, value_name = "DIR", env = "LOCKSTEP_DATA_DIR", default_value = "lockstep-data")]
    data_dir: PathBuf,
}

impl AuthorityArgs {
    fn open(&self) -> anyhow::Result<Authority> {
        Authority::open(&self.data_dir).map_err(usage_error)
    }
}

/// Runs the chosen command.
///
/// # Errors
/// Exit status 2 if `init` finds an authority, another command finds none, or a name is invalid.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    match action {
        Action::Init(args) => show(&Authority::init(&args.data_dir).map_err(usage_error)?),
        Action::Show(args) => show(&args.open()?),
        Action::Issue { names, agent, pkcs12, pkcs12_password_file, days, output, args } => {
            let authority = args.open()?;
            // A `*` in a file name would have to be quoted in a shell.
            let stem = names.first().map(|name| name.replace('*', "_").replace(':', "-")).unwrap_or_default();
            let endings: &[&str] = if pkcs12 { &["p12"] } else { &["crt", "key"] };
            let paths: Vec<_> =
                endings.iter().map(|ending| output.join(format!("{stem}.{ending}"))).collect();
            // Checked before the certificate is issued: a certificate that cannot be written would still be valid.
            paths.iter().try_for_each(|path| file::check_output(path))?;
            if let Some(path) = paths.iter().find(|path| path.exists()) {
                return Err(usage_error(format!(
                    "{} exists already; move it away, or choose another --output",
                    path.display()
                )));
            }
            let password = if pkcs12 { Some(read_password(pkcs12_password_file.as_deref())?) } else { None };
            let issued = match names.as_slice() {
                [name] if agent => authority.issue_agent(name, days),
                _ if agent => Err("an agent's certificate is for one name; issue one for each agent".into()),
                _ => authority.issue(&names, days),
            };
            let issued = issued.map_err(usage_error)?;
            let files = match password {
                Some(password) => {
                    let content = create_pkcs12(&stem, &issued.chain, &issued.key, &password);
                    vec![(0o600, content.map_err(usage_error)?)]
                }
                None => vec![(0o644, issued.chain.into_bytes()), (0o600, issued.key.into_bytes())],
            };
            for ((mode, content), path) in files.iter().zip(&paths) {
                write(path, *mode, content)
                    .map_err(|error| usage_error(format!("{}: {error}", path.display())))?;
                output::line(path.display())?;
            }
            Ok(())
        }
        Action::List { json, args } => list(&args.open()?.issued().map_err(usage_error)?, json),
        Action::Revoke { certificate, args } => {
            for Record { name, serial, .. } in args.open()?.revoke(&certificate).map_err(usage_error)? {
                if name.is_empty() {
                    output::line(format_args!(
                        "revoked serial {serial}, which this authority has no record of"
                    ))?;
                } else {
                    output::line(format_args!("revoked {name}, serial {serial}"))?;
                }
            }
            Ok(())
        }
    }
}

/// Reads the password for a PKCS#12 file.
fn read_password(file: Option<&Path>) -> anyhow::Result<String> {
    if let Some(path) = file {
        return tls::read_password(path).map_err(usage_error);
    }
    if !std::io::stdin().is_terminal() {
        return Err(usage_error(
            "there is no terminal to ask for the password; name a file with --pkcs12-password-file",
        ));
    }
    let password = ask_new_password("password for the PKCS#12 file")?;
    if password.is_empty() { Err(usage_error("the password is empty")) } else { Ok(password) }
}

fn list(records: &[Record], as_json: bool) -> anyhow::Result<()> {
    let now = jiff::Timestamp::now();
    if as_json {
        let rows = records.iter().map(|record| {
            let mut row = serde_json::to_value(record)?;
            row["state"] = record.state(now).into();
            Ok(row)
        });
        return output::json(&rows.collect::<Result<Vec<_>, serde_json::Error>>()?);
    }
    let row = |record: &Record| {
        let kind = match record.kind {
            Kind::Server => "server",
            Kind::Agent => "agent",
            Kind::Unknown => "?",
        };
        let until = record.not_after.strftime("%F").to_string();
        [record.name.clone(), kind.into(), record.state(now).into(), until, record.serial.clone()]
    };
    output::table(["NAME", "FOR", "STATE", "UNTIL", "SERIAL"], records.iter().map(row))
}

/// Prints the certificate to standard output, so that it can be redirected to a file, and an explanation to standard error.
fn show(authority: &Authority) -> anyhow::Result<()> {
    output::warn(format_args!(
        "SHA-256 {}\nvalid until {}\nsave the certificate below on each client, and name the file with --ca-file or LOCKSTEP_CA_FILE; \
         browsers import it as an authority for web sites",
        authority.fingerprint,
        authority.facts.not_after.strftime("%F")
    ));
    output::line(authority.pem.trim_end())
}

fn write(path: &Path, mode: u32, content: &[u8]) -> std::io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content)?;
    // Sets the mode also if the umask is stricter.
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}
