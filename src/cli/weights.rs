//! `lockstep weights`: downloads trained weights for `model.pretrained` to the cache directory.

use super::{
    block_on,
    dataset::{
        download::{Failure, download},
        get::{new_bar, new_client},
        known::RemoteFile,
    },
    output, usage_error, with_causes,
};
use anyhow::anyhow;
use lockstep_host::cache;
use lockstep_protocol::spec::KNOWN_WEIGHTS;
use lockstep_worker::checkpoint;
use reqwest::{Client, StatusCode};
use std::{fs, path::Path};

/// Default hub, on which timm's authors publish weights.
const HUB: &str = "https://huggingface.co";
/// Environment variable with the hub's URL, as in Hugging Face's own programs.
const HUB_VARIABLE: &str = "HF_ENDPOINT";
/// Name of the file in a repository. The file's tensors have torchvision's names.
const FILE: &str = "model.safetensors";
/// Maximum size of a Git LFS pointer, from its specification.
const POINTER_BYTES: usize = 1024;

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Download a network's weights, trained on ImageNet, and check them; jobs then use them by name, as in model.pretrained = "resnet18"
    Get {
        /// The network
        #[arg(value_name = "NAME", value_parser = KNOWN_WEIGHTS)]
        name: String,
        /// URL of a mirror of the Hugging Face hub
        #[arg(long, value_name = "URL", env = HUB_VARIABLE, default_value = HUB)]
        from: String,
    },
}

/// Downloads the weights unless they exist already.
///
/// # Errors
/// Exit status 1 if the URL cannot be reached, 2 if the content does not match its checksum.
pub(crate) fn run(action: &Action) -> anyhow::Result<()> {
    let Action::Get { name, from } = action;
    let target = cache::weights(name).ok_or_else(|| {
        usage_error("there is no cache directory for the weights: set HOME, or LOCKSTEP_CACHE to a folder")
    })?;
    fetch(name, from, &target)?;
    output::line(format_args!("{name}: {}; jobs use it with model.pretrained = \"{name}\"", target.display()))
}

/// Downloads a network's weights from a hub to `target`.
fn fetch(name: &str, hub: &str, target: &Path) -> anyhow::Result<()> {
    if target.is_file() {
        return check(target);
    }
    let base = format!("{}/timm/{name}.a1_in1k", hub.trim_end_matches('/'));
    if reqwest::Url::parse(&base).is_err() {
        return Err(usage_error(format!("--from {hub} is not a URL; write a URL such as {HUB}")));
    }
    let url = format!("{base}/resolve/main/{FILE}");
    let advice = format!(
        "Without a network: download {url} on another machine and put it here as {}. Or name a mirror with --from URL.",
        target.display()
    );
    let explain = |failure: Failure| failure.explain(target, &advice);
    let folder = target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| anyhow!("{}: {e}", folder.display()))?;
    let client = new_client()?;
    block_on(async {
        let remote = read_pointer(&client, &format!("{base}/raw/main/{FILE}")).await.map_err(explain)?;
        let bar = new_bar(remote.bytes);
        let result = download(&client, &url, &remote, target, &|bytes| bar.set_position(bytes)).await;
        bar.finish_and_clear();
        result.map_err(explain)
    })?;
    check(target)
}

/// Checks that a file contains tensors: the user may have put another file there.
fn check(target: &Path) -> anyhow::Result<()> {
    checkpoint::shapes(target)
        .map(drop)
        .map_err(|why| usage_error(format!("{why}; remove {} and run the command again", target.display())))
}

/// Returns the size and the checksum of the file, from the repository's Git LFS pointer.
///
/// # Errors
/// The URL cannot be reached, or its content is not a pointer.
async fn read_pointer(client: &Client, url: &str) -> Result<RemoteFile, Failure> {
    let lost = |error: reqwest::Error| Failure::Unreachable(with_causes(&error));
    let mut response = client.get(url).send().await.map_err(lost)?;
    if response.status() != StatusCode::OK {
        return Err(Failure::from_status(url, response.status()));
    }
    let mut content = Vec::new();
    while let Some(bytes) = response.chunk().await.map_err(lost)? {
        content.extend_from_slice(&bytes);
        if content.len() > POINTER_BYTES {
            break;
        }
    }
    parse_pointer(&content)
        .ok_or_else(|| Failure::Refused(format!("{url} is not a Git LFS pointer with the checksum")))
}

/// Parses a Git LFS pointer.
fn parse_pointer(content: &[u8]) -> Option<RemoteFile> {
    let text = str::from_utf8(content).ok().filter(|text| text.len() <= POINTER_BYTES)?;
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let sha256 = value("oid sha256:")?;
    let is_checksum = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
    let bytes = value("size ")?.parse().ok()?;
    // Leaks at most one text per command.
    is_checksum.then(|| RemoteFile { name: FILE, bytes, sha256: sha256.to_lowercase().leak(), members: &[] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{
        WrongRequest,
        dataset::get::tests::{Behaviour, Mirror, serve_files},
    };
    use sha2::{Digest as _, Sha256};

    const WEIGHTS_PATH: &str = "timm/resnet18.a1_in1k/resolve/main/model.safetensors";
    const POINTER_PATH: &str = "timm/resnet18.a1_in1k/raw/main/model.safetensors";

    /// A safetensors file with one tensor.
    fn weights() -> Vec<u8> {
        const VALUES: usize = 50_000;
        let header = format!(
            r#"{{"fc.bias":{{"dtype":"F32","shape":[{VALUES}],"data_offsets":[0,{}]}}}}"#,
            4 * VALUES
        );
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(std::iter::repeat_n(0, 4 * VALUES));
        file
    }

    fn pointer_to(content: &[u8]) -> Vec<u8> {
        let sum = hex::encode(Sha256::digest(content));
        let size = content.len();
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sum}\nsize {size}\n").into_bytes()
    }

    fn serving(pointer: Vec<u8>, content: Vec<u8>) -> Behaviour {
        serve_files(vec![(POINTER_PATH, pointer), (WEIGHTS_PATH, content)])
    }

    #[test]
    fn downloads_of_weights_are_continued_checked_and_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("weights/resnet18.safetensors");
        let content = weights();
        let cuts = vec![usize::MAX, 60_000, 20_000];
        let mirror = Mirror::start(Behaviour { cuts, ..serving(pointer_to(&content), content.clone()) });
        fetch("resnet18", &mirror.base, &target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), content);
        assert_eq!(mirror.requested_starts(), [None, None, Some(60_000), Some(80_000)]);
        // No temporary file is left, and the second call sends no request.
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
        fetch("resnet18", &mirror.base, &target).unwrap();
        assert_eq!(mirror.requested_starts().len(), 4);
        // A file that the user has put there is checked, too.
        fs::write(&target, "<html>").unwrap();
        let message = fetch("resnet18", "http://nobody.invalid", &target).unwrap_err().to_string();
        assert!(message.contains("remove ") && message.contains("run the command again"), "{message}");
    }

    #[test]
    fn wrong_content_is_refused_with_advice() {
        let content = weights();
        let changed: Vec<u8> = content.iter().map(|byte| byte ^ 1).collect();
        let gone = Behaviour { status: Some("404 Not Found"), ..serve_files(Vec::new()) };
        let busy = Behaviour { status: Some("503 Service Unavailable"), ..serve_files(Vec::new()) };
        for (behaviour, is_wrong, words) in [
            (serving(pointer_to(&content), changed), true, "its SHA-256 is"),
            (serving(pointer_to(&content), content[1..].to_vec()), true, "bytes, but model.safetensors has"),
            (serving(content.clone(), content.clone()), true, "is not a Git LFS pointer"),
            (serving(b"oid sha256:12\nsize 3\n".to_vec(), content.clone()), true, "is not a Git LFS pointer"),
            (gone, true, "404 Not Found"),
            (busy, false, "503 Service Unavailable"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("resnet18.safetensors");
            let mirror = Mirror::start(behaviour);
            let error = fetch("resnet18", &mirror.base, &target).unwrap_err();
            let message = format!("{error:#}");
            let file = format!("{}/{WEIGHTS_PATH}", mirror.base);
            for words in [words, &file, target.to_str().unwrap(), "Without a network", "--from URL"] {
                assert!(message.contains(words), "{words:?} in {message}");
            }
            assert_eq!(error.is::<WrongRequest>(), is_wrong, "{message}");
            assert!(!target.exists());
        }
        let error = fetch("resnet18", "nowhere", Path::new("/nowhere/x")).unwrap_err().to_string();
        assert!(error.contains("--from nowhere is not a URL"), "{error}");
    }
}
