//! `lockstep dataset get`: downloads, checks, unpacks and registers a public dataset.

use super::{
    describe,
    download::download,
    known::{KNOWN, KnownDataset, RemoteFile},
    register_as,
};
use crate::cli::{api::ServerArgs, block_on, file::partial_path, output, usage_error};
use anyhow::{Context as _, anyhow};
use flate2::read::GzDecoder;
use indicatif::ProgressBar;
use lockstep_worker::tls;
use reqwest::Client;
use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

/// Maximum size of an unpacked file. The largest file of a known dataset, CIFAR-100's training pictures, has 154 MB.
const MAX_MEMBER_BYTES: u64 = 1 << 30;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The dataset to download
    #[arg(value_name = "NAME", value_parser = KNOWN.map(|known| known.name))]
    name: String,
    /// Folder for the files [default: datasets/NAME]
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// URL of a mirror: a folder with the publisher's files under their original names
    #[arg(long, value_name = "URL")]
    from: Option<String>,
    /// Do not register the dataset with a server
    #[arg(long)]
    no_register: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Downloads the dataset unless it exists already, and registers it under its name if a server runs.
///
/// # Errors
/// Exit status 1 if the URL cannot be reached, 2 if a file has wrong content.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let known =
        KNOWN.into_iter().find(|known| known.name == args.name).context("clap accepts only known names")?;
    let folder = args.to.clone().unwrap_or_else(|| Path::new("datasets").join(known.name));
    // Removes a trailing slash.
    let folder: PathBuf = folder.components().collect();
    let base = args.from.as_deref().unwrap_or(known.base);
    fetch(&known, base, &folder)?;
    let path = lockstep_data::canonical(&folder)?;
    let say = |text: String| if args.server.json { Ok(()) } else { output::line(text) };
    say(format!("{} is in {}", known.name, path.display()))?;
    let api = args.server.api()?;
    if args.no_register || !block_on(async { Ok(api.is_reachable().await) })? {
        let value = serde_json::json!({ "name": known.name, "path": path, "registered": false });
        let text = format!(
            "register it with `lockstep dataset add {} {}`, or train from the folder with `lockstep train`",
            known.name,
            path.display()
        );
        return output::print(args.server.json, &value, text);
    }
    let is_private = false;
    let dataset = block_on(register_as(&api, known.name, &path, is_private))?;
    let text = format!("{}: {}", dataset.name, describe(&dataset.info));
    output::print(args.server.json, &dataset, text)
}

/// Puts all of the dataset's files into the new folder `target`, or none. Until all files are complete, they are in a folder next to
/// `target`.
fn fetch(known: &KnownDataset, base: &str, target: &Path) -> anyhow::Result<()> {
    if target.exists() {
        let missing: Vec<_> =
            known.unpacked_file_names().filter(|name| !target.join(name).is_file()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        return Err(usage_error(format!(
            "{} exists already but has no {}: move it away, or give another folder with --to",
            target.display(),
            missing.join(", ")
        )));
    }
    let partial_dir = partial_path(target);
    let failed = |path: &Path, e: io::Error| anyhow!("{}: {e}", path.display());
    fs::create_dir_all(&partial_dir).map_err(|e| failed(&partial_dir, e))?;
    let base = if base.ends_with('/') { base.to_owned() } else { format!("{base}/") };
    if reqwest::Url::parse(&base).is_err() {
        return Err(usage_error(format!("--from {base} is not a URL; write a URL such as {}", known.base)));
    }
    let client = new_client()?;
    let bar = new_bar(known.files.iter().map(|file| file.bytes).sum());
    let mut finished_bytes = 0;
    for file in known.files {
        let url = format!("{base}{}", file.name);
        let path = partial_dir.join(file.name);
        block_on(async {
            let progress = |bytes: u64| bar.set_position(finished_bytes + bytes);
            let result = download(&client, &url, file, &path, &progress).await;
            result.map_err(|failure| {
                failure.explain(target, &describe_manual_download(known, &base, &partial_dir))
            })
        })?;
        finished_bytes += file.bytes;
    }
    bar.finish_and_clear();
    let staging = partial_dir.join("staging");
    // An earlier run may have ended while it unpacked files.
    if staging.exists() {
        fs::remove_dir_all(&staging).map_err(|e| failed(&staging, e))?;
    }
    fs::create_dir(&staging).map_err(|e| failed(&staging, e))?;
    for file in known.files {
        copy_or_unpack(file, &partial_dir.join(file.name), &staging).map_err(|e| failed(&staging, e))?;
    }
    if !known.classes.is_empty() {
        let names = known.classes.join("\n") + "\n";
        fs::write(staging.join("classes.txt"), names).map_err(|e| failed(&staging, e))?;
    }
    File::open(&staging).and_then(|folder| folder.sync_all()).map_err(|e| failed(&staging, e))?;
    fs::rename(&staging, target).map_err(|e| failed(target, e))?;
    fs::remove_dir_all(&partial_dir).map_err(|e| failed(&partial_dir, e))
}

/// Copies the checked file at `path`, or its members if it is an archive, into `folder`.
fn copy_or_unpack(file: &RemoteFile, path: &Path, folder: &Path) -> io::Result<()> {
    if file.members.is_empty() {
        return fs::hard_link(path, folder.join(file.name))
            .or_else(|_| fs::copy(path, folder.join(file.name)).map(drop));
    }
    let mut archive = tar::Archive::new(GzDecoder::new(File::open(path)?));
    let mut missing = file.members.to_vec();
    for entry in archive.entries()? {
        let entry = entry?;
        let path = entry.path()?.into_owned();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // Only known names are used, so an archive cannot choose the path of a file.
        let Some(index) = missing.iter().position(|member| *member == name) else { continue };
        let name = missing.remove(index);
        if !entry.header().entry_type().is_file() || entry.size() > MAX_MEMBER_BYTES {
            let max = MAX_MEMBER_BYTES >> 30;
            let text = format!("{name} in {} is not a regular file of at most {max} GiB", file.name);
            return Err(io::Error::other(text));
        }
        let mut out = File::create_new(folder.join(name))?;
        io::copy(&mut entry.take(MAX_MEMBER_BYTES), &mut out)?;
        out.sync_all()?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(io::Error::other(format!("{} has no {}", file.name, missing.join(", "))))
}

/// Returns an HTTP client that uses proxies from the environment (`https_proxy`), because the files are on the internet.
pub(crate) fn new_client() -> anyhow::Result<Client> {
    let tls = tls::client_config(None).map_err(usage_error)?;
    Ok(Client::builder()
        .connect_timeout(Duration::from_secs(15))
        .read_timeout(Duration::from_secs(60))
        .tls_backend_preconfigured((*tls).clone())
        .build()?)
}

/// Returns a progress bar, which is hidden if standard error is not a terminal.
pub(crate) fn new_bar(bytes: u64) -> ProgressBar {
    let template = "{bytes} of {total_bytes} [{bar:30}] {bytes_per_sec}, {eta} left";
    ProgressBar::new(bytes).with_style(output::bar_style(template))
}

/// Returns the advice for a machine without a network.
fn describe_manual_download(known: &KnownDataset, base: &str, partial_dir: &Path) -> String {
    let addresses: Vec<_> = known.files.iter().map(|file| format!("  {base}{}", file.name)).collect();
    format!(
        "Without a network: download on another machine\n{}\nput the files into {} under these names, and run the command again: \
         the command checks the files and continues. Or name a mirror with --from URL.",
        addresses.join("\n"),
        partial_dir.display()
    )
}

#[cfg(test)]
pub(crate) mod tests;
