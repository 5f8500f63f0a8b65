//! `lockstep ca`: the certificate authority of a server that makes its own certificates.

use super::{output, wrong};
use lockstep_server::tls::ca::{Authority, DAYS, MOST_DAYS};
use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Certificates of a server's own authority (CA): make it, show it, issue more
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Make the authority; `serve --tls-own-ca` does so by itself at its first start
    Init(Which),
    /// Print the authority's certificate, which browsers and clients have to trust
    Show(Which),
    /// Issue a certificate for another server or a proxy: NAME.crt and NAME.key
    Issue {
        /// DNS names and addresses that it is for; files have the first's name
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Days that it is valid
        #[arg(long, default_value_t = DAYS, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_DAYS)))]
        days: u32,
        /// Folder for the two files
        #[arg(long, short, value_name = "DIR", default_value = ".")]
        output: PathBuf,
        #[command(flatten)]
        which: Which,
    },
}

#[derive(clap::Args)]
struct Which {
    /// The server's data directory, in whose folder `ca` the authority lies
    #[arg(long, value_name = "DIR", default_value = "lockstep-data")]
    data_dir: PathBuf,
}

/// Does what is asked.
///
/// # Errors
/// Exit status 2: there is an authority already, or none, or a name is none.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    match args.action {
        Action::Init(which) => {
            let authority = Authority::init(&which.data_dir).map_err(wrong)?;
            about(&authority);
            output::line(format_args!("{}", authority.pem().trim_end()))
        }
        Action::Show(which) => {
            let authority = Authority::open(&which.data_dir).map_err(wrong)?;
            about(&authority);
            output::line(format_args!("{}", authority.pem().trim_end()))
        }
        Action::Issue { names, days, output, which } => {
            let authority = Authority::open(&which.data_dir).map_err(wrong)?;
            let issued = authority.issue(&names, days).map_err(wrong)?;
            // A star is part of no file's name that one likes to type.
            let stem = names.first().map(|name| name.replace('*', "_").replace(':', "-")).unwrap_or_default();
            let files = [("crt", 0o644, issued.chain), ("key", 0o600, issued.key)];
            let paths = files.each_ref().map(|(ending, ..)| output.join(format!("{stem}.{ending}")));
            if let Some(path) = paths.iter().find(|path| path.exists()) {
                return Err(wrong(format!(
                    "{} is there already; move it away, or choose another --output",
                    path.display()
                )));
            }
            for ((_, mode, content), path) in files.iter().zip(&paths) {
                write(path, *mode, content).map_err(|error| wrong(format!("{}: {error}", path.display())))?;
                output::line(path.display())?;
            }
            Ok(())
        }
    }
}

/// For people, beside the certificate on standard output.
fn about(authority: &Authority) {
    let until = authority.facts().not_after.to_string();
    output::warn(format_args!(
        "SHA-256 {}\nvalid until {}\nsave the certificate below on each client, and name the file with --ca-file or LOCKSTEP_CA_FILE; \
         browsers import it as an authority for web sites",
        authority.fingerprint(),
        until.get(..10).unwrap_or(&until)
    ));
}

fn write(path: &Path, mode: u32, content: &str) -> std::io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content.as_bytes())?;
    // Whatever umask says: a certificate is for everybody.
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}
