//! Downloads from a real HTTP server that cuts connections, has no ranges, or serves another file.

use super::*;
use sha2::{Digest as _, Sha256};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};
use tempfile::TempDir;

/// The behaviour of a [`Mirror`].
#[derive(Clone)]
pub(crate) struct Behaviour {
    /// Whether the server supports `Range`.
    pub(crate) supports_ranges: bool,
    /// For each of the first connections, the count of body bytes after which the connection is cut.
    pub(crate) cuts: Vec<usize>,
    /// A status instead of 200.
    pub(crate) status: Option<&'static str>,
    /// The file for each name.
    pub(crate) files: Vec<(&'static str, Vec<u8>)>,
}

/// A server on a free port, and its requests: path, and the start of the range.
pub(crate) struct Mirror {
    pub(crate) base: String,
    requests: Arc<Mutex<Vec<(String, Option<usize>)>>>,
}

impl Mirror {
    pub(crate) fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}/data", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let requests_of_thread = Arc::clone(&requests);
        // The thread runs until the test process ends.
        thread::spawn(move || {
            for connection in listener.incoming() {
                respond(&mut connection.unwrap(), &behaviour, &requests_of_thread);
            }
        });
        Self { base, requests }
    }

    pub(crate) fn requested_starts(&self) -> Vec<Option<usize>> {
        self.requests.lock().unwrap().iter().map(|(_, range)| *range).collect()
    }
}

fn respond(
    connection: &mut TcpStream,
    behaviour: &Behaviour,
    requests: &Mutex<Vec<(String, Option<usize>)>>,
) {
    let mut request = Vec::new();
    let mut byte = [0];
    while !request.ends_with(b"\r\n\r\n") && connection.read(&mut byte).unwrap() == 1 {
        request.push(byte[0]);
    }
    let request = String::from_utf8(request).unwrap();
    let path = request.split(' ').nth(1).unwrap().to_owned();
    let range = request.lines().find_map(|line| {
        line.to_lowercase().strip_prefix("range: bytes=")?.strip_suffix('-')?.parse::<usize>().ok()
    });
    let index = {
        let mut requests = requests.lock().unwrap();
        requests.push((path.clone(), range));
        requests.len() - 1
    };
    let found = behaviour.files.iter().find(|(name, _)| path == format!("/data/{name}"));
    let (Some((_, body)), None) = (found, behaviour.status) else {
        let status = behaviour.status.unwrap_or("404 Not Found");
        let _ = write!(connection, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        return;
    };
    let begin = range.filter(|_| behaviour.supports_ranges).unwrap_or(0);
    let rest = &body[begin.min(body.len())..];
    let (status, range_header) = match begin {
        0 => ("200 OK", String::new()),
        begin => (
            "206 Partial Content",
            format!("content-range: bytes {begin}-{}/{}\r\n", body.len() - 1, body.len()),
        ),
    };
    let sent = behaviour.cuts.get(index).map_or(rest.len(), |cut| (*cut).min(rest.len()));
    let _ = write!(
        connection,
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\n{range_header}connection: close\r\n\r\n",
        rest.len()
    );
    let _ = connection.write_all(&rest[..sent]);
}

fn bytes(count: usize, seed: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 31 + i / 251 + seed) as u8).collect()
}

fn remote(name: &'static str, content: &[u8], members: &'static [&'static str]) -> RemoteFile {
    let sum = hex::encode(Sha256::digest(content));
    RemoteFile { name, bytes: content.len() as u64, sha256: sum.leak(), members }
}

fn known(files: Vec<RemoteFile>) -> KnownDataset {
    KnownDataset { name: "small", base: "http://nobody.invalid/", files: files.leak(), classes: &[] }
}

pub(crate) fn serve_files(files: Vec<(&'static str, Vec<u8>)>) -> Behaviour {
    Behaviour { supports_ranges: true, cuts: Vec::new(), status: None, files }
}

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("sets/small");
    (folder, target)
}

const SIZE: usize = 300_000;

#[test]
fn a_broken_download_is_continued() {
    let content = bytes(SIZE, 1);
    let set = known(vec![remote("a.bin", &content, &[])]);
    let (_folder, target) = folder();
    let mirror = Mirror::start(Behaviour {
        cuts: vec![100_000, 50_000, 0],
        ..serve_files(vec![("a.bin", content.clone())])
    });
    fetch(&set, &mirror.base, &target).unwrap();
    assert_eq!(fs::read(target.join("a.bin")).unwrap(), content);
    assert_eq!(mirror.requested_starts(), [None, Some(100_000), Some(150_000), Some(150_000)]);
    // No temporary file is left, and a second call downloads nothing.
    assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
    fetch(&set, &mirror.base, &target).unwrap();
    assert_eq!(mirror.requested_starts().len(), 4);
}

#[test]
fn a_server_without_ranges_sends_the_whole_file_again() {
    let content = bytes(SIZE, 2);
    let set = known(vec![remote("a.bin", &content, &[])]);
    let (_folder, target) = folder();
    let files = vec![("a.bin", content.clone())];
    let mirror =
        Mirror::start(Behaviour { supports_ranges: false, cuts: vec![200_000, 100], ..serve_files(files) });
    fetch(&set, &mirror.base, &target).unwrap();
    assert_eq!(fs::read(target.join("a.bin")).unwrap(), content);
    // The response to `Range: bytes=200000-` is the whole file, so it replaces the 200,000 bytes. It is cut after 100 bytes, so the third
    // request starts at 100.
    assert_eq!(mirror.requested_starts(), [None, Some(200_000), Some(100)]);
}

#[test]
fn an_abandoned_download_is_continued_by_the_next() {
    let content = bytes(SIZE, 3);
    let set = known(vec![remote("a.bin", &content, &[])]);
    let (_folder, target) = folder();
    let mirror = Mirror::start(Behaviour {
        cuts: vec![120_000, 0, 0, 0, 0],
        ..serve_files(vec![("a.bin", content.clone())])
    });
    let message = format!("{:#}", fetch(&set, &mirror.base, &target).unwrap_err());
    assert!(message.contains("the same command continues") && message.contains("small.part"), "{message}");
    assert!(!target.exists());
    fetch(&set, &mirror.base, &target).unwrap();
    assert_eq!(fs::read(target.join("a.bin")).unwrap(), content);
    assert_eq!(mirror.requested_starts().last(), Some(&Some(120_000)));
}

#[test]
fn bytes_of_another_file_are_not_kept() {
    let content = bytes(SIZE, 4);
    let set = known(vec![remote("a.bin", &content, &[])]);
    let (_folder, target) = folder();
    let part = partial_path(&target).join("a.bin.part");
    for (served, words) in [
        (bytes(SIZE, 5), "its SHA-256 is"),
        (bytes(SIZE - 1, 4), "has 299999 bytes, but a.bin has 300000"),
        (bytes(SIZE + 1, 4), "has 300001 bytes, but a.bin has 300000"),
    ] {
        let mirror = Mirror::start(serve_files(vec![("a.bin", served)]));
        let error = fetch(&set, &mirror.base, &target).unwrap_err();
        let message = format!("{error:#}");
        assert!(message.contains(words) && message.contains("--from"), "{message}");
        assert!(error.is::<crate::cli::WrongRequest>() && !target.exists(), "{message}");
        assert!(fs::metadata(&part).map_or(0, |part| part.len()) == 0, "{message}");
    }
    // An earlier run may have left bytes of another file: then the whole file is downloaded again.
    fs::write(&part, bytes(1000, 9)).unwrap();
    let mirror = Mirror::start(serve_files(vec![("a.bin", content.clone())]));
    fetch(&set, &mirror.base, &target).unwrap();
    assert_eq!(mirror.requested_starts(), [Some(1000), None]);
    assert_eq!(fs::read(target.join("a.bin")).unwrap(), content);
}

#[test]
fn unreachable_urls_are_named_with_advice() {
    let content = bytes(1000, 6);
    let set = known(vec![remote("a.bin", &content, &[])]);
    let (_folder, target) = folder();
    // A port on which no server listens.
    let unused_address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = fetch(&set, &format!("http://{unused_address}/data"), &target).unwrap_err();
    let message = format!("{error:#}");
    let partial_dir = partial_path(&target);
    for words in [
        &format!("http://{unused_address}/data/a.bin"),
        "Without a network",
        partial_dir.to_str().unwrap(),
        "--from URL",
    ] {
        assert!(message.contains(words), "{words:?} in {message}");
    }
    assert!(
        !error.is::<crate::cli::WrongRequest>(),
        "an unreachable server is no wrong request: a later download may succeed"
    );
    // The user puts the file into the folder of the partial download, as the message advises.
    fs::write(partial_dir.join("a.bin"), &content).unwrap();
    fetch(&set, &format!("http://{unused_address}/data"), &target).unwrap();
    assert_eq!(fs::read(target.join("a.bin")).unwrap(), content);

    let (_folder, target) = folder();
    for (status, is_wrong) in [("404 Not Found", true), ("503 Service Unavailable", false)] {
        let mirror = Mirror::start(Behaviour { status: Some(status), ..serve_files(Vec::new()) });
        let error = fetch(&set, &mirror.base, &target).unwrap_err();
        assert!(format!("{error:#}").contains(status), "{error:#}");
        assert_eq!(error.is::<crate::cli::WrongRequest>(), is_wrong, "{status}");
    }
    let error = fetch(&set, "no address", &target).unwrap_err();
    assert!(error.to_string().contains("no address"), "{error}");
}

fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    for (name, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, *content).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap()
}

#[test]
fn an_archive_is_unpacked_completely_or_not_at_all() {
    let (_folder, target) = folder();
    let whole =
        archive(&[("set/train.bin", b"train"), ("set/readme.html", b"hello"), ("set/test.bin", b"test")]);
    let set = known(vec![remote("a.tar.gz", &whole, &["train.bin", "test.bin"])]);
    let mirror = Mirror::start(serve_files(vec![("a.tar.gz", whole)]));
    fetch(&set, &mirror.base, &target).unwrap();
    let mut names: Vec<_> = fs::read_dir(&target).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["test.bin", "train.bin"], "only the files in `members` are unpacked");
    assert_eq!(fs::read(target.join("train.bin")).unwrap(), b"train");
    assert!(!partial_path(&target).exists());

    // A folder that lacks a file of the dataset is not changed.
    fs::remove_file(target.join("test.bin")).unwrap();
    let message = fetch(&set, &mirror.base, &target).unwrap_err().to_string();
    assert!(message.contains("has no test.bin") && message.contains("--to"), "{message}");

    let (_folder, target) = folder();
    let part = archive(&[("set/train.bin", b"train")]);
    let set = known(vec![remote("a.tar.gz", &part, &["train.bin", "test.bin"])]);
    let mirror = Mirror::start(serve_files(vec![("a.tar.gz", part)]));
    let message = format!("{:#}", fetch(&set, &mirror.base, &target).unwrap_err());
    assert!(message.contains("a.tar.gz has no test.bin") && !target.exists(), "{message}");
}

#[test]
fn a_download_is_refused_while_another_holds_the_lock() {
    let content = bytes(1000, 7);
    let set = known(vec![remote("a.bin", &content, &[])]);
    let (_folder, target) = folder();
    fs::create_dir_all(partial_path(&target)).unwrap();
    let lock_of_other = File::create(partial_path(&target).join("a.bin.part")).unwrap();
    lock_of_other.lock().unwrap();
    let mirror = Mirror::start(serve_files(vec![("a.bin", content)]));
    let message = format!("{:#}", fetch(&set, &mirror.base, &target).unwrap_err());
    assert!(message.contains("another download"), "{message}");
    drop(lock_of_other);
    fetch(&set, &mirror.base, &target).unwrap();
}
