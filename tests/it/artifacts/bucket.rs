//! A real S3 server (moto, a Python package that `tests/run` installs), and a proxy before it that can stop or cut connections.

use crate::{
    exports::python,
    server::{TIMEOUT, cryptography, free_port},
};
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A shell script that runs a program until standard input is closed, as it is when the test process ends for any reason.
const KEEPER: &str = r#""$@" >"$LOG" 2>&1 & P=$!; read -r _; kill -KILL $P"#;

/// An S3 server.
pub(super) struct S3Server {
    port: u16,
    _keeper: Child,
}

impl S3Server {
    /// Starts a server. After the first `unchecked` requests, it accepts only keys that it has created (`None`: it always accepts any key).
    fn start(unchecked: Option<u32>) -> Self {
        let port = free_port();
        let log = std::env::temp_dir().join(format!("lockstep-moto-{port}.log"));
        let with_packages = python("moto");
        let mut command = Command::new("sh");
        for (name, value) in with_packages.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        if let Some(count) = unchecked {
            command.env("INITIAL_NO_AUTH_ACTION_COUNT", count.to_string());
        }
        command.args(["-c", KEEPER, "sh", "python3", "-m", "moto.server", "-H", "127.0.0.1", "-p"]);
        let keeper = command.arg(port.to_string()).env("LOG", &log).stdin(Stdio::piped()).spawn();
        let server = Self { port, _keeper: keeper.expect("sh") };
        let deadline = Instant::now() + TIMEOUT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let output = std::fs::read_to_string(&log).unwrap_or_default();
            assert!(Instant::now() < deadline, "moto does not start: {output}");
            thread::sleep(Duration::from_millis(50));
        }
        let _ = std::fs::remove_file(log);
        server
    }

    /// The server that most tests share.
    fn shared() -> &'static Self {
        static SHARED: OnceLock<S3Server> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(None))
    }

    /// Starts a server that accepts only keys that it has created. Returns the server, a key and the key's secret.
    pub(super) fn strict(bucket: &str) -> (Self, String, String) {
        let server = Self::start(Some(4)); // the script below sends four requests that need no valid key
        let script = "import boto3, sys\n\
            client = lambda service: boto3.client(service, endpoint_url=sys.argv[1], region_name='us-east-1', aws_access_key_id='x', aws_secret_access_key='x')\n\
            client('s3').create_bucket(Bucket=sys.argv[2])\n\
            iam = client('iam')\n\
            iam.create_user(UserName='u')\n\
            iam.put_user_policy(UserName='u', PolicyName='p', PolicyDocument='{\"Version\":\"2012-10-17\",\"Statement\":[{\"Effect\":\"Allow\",\"Action\":\"s3:*\",\"Resource\":\"*\"}]}')\n\
            key = iam.create_access_key(UserName='u')['AccessKey']\n\
            print(key['AccessKeyId'], key['SecretAccessKey'])";
        let created = python("moto").args(["-c", script, &server.url(), bucket]).output().expect("python3");
        let output = String::from_utf8_lossy(&created.stdout).into_owned();
        let (key, secret) = output
            .trim()
            .split_once(' ')
            .unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&created.stderr)));
        (server, key.to_owned(), secret.to_owned())
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

/// A test's own bucket, behind a [`Gate`].
pub(crate) struct Bucket {
    name: String,
    pub(super) gate: Gate,
    http: reqwest::Client,
}

/// An object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Object {
    pub(super) key: String,
    pub(super) size: u64,
    /// The time of the last write.
    pub(super) modified_at: String,
}

impl Bucket {
    pub(crate) async fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("bucket-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        cryptography();
        let http = reqwest::Client::builder().timeout(TIMEOUT).build().expect("a client");
        let bucket = Self { name, gate: Gate::before(S3Server::shared().port), http };
        assert!(bucket.request("PUT", "", Vec::new()).await.0, "a bucket");
        bucket
    }

    /// Environment variables with which `serve` uses the bucket.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        environment(&format!("s3://{}/team/runs", self.name), &self.gate.url(), "key", "secret")
    }

    /// Sends a request that bypasses the gate. Returns whether it succeeded, and the body.
    async fn request(&self, method: &str, path: &str, body: Vec<u8>) -> (bool, Vec<u8>) {
        let url = format!("{}/{}{path}", S3Server::shared().url(), self.name);
        // Moto needs a signature but does not check it.
        let signed = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=b";
        let request =
            self.http.request(method.parse().expect("a method"), url).header("authorization", signed);
        let response = request.body(body).send().await.expect("a response");
        (response.status().is_success(), response.bytes().await.expect("a body").to_vec())
    }

    /// All objects except the marker that identifies the store.
    pub(super) async fn objects(&self) -> Vec<Object> {
        let (_, text) = self.request("GET", "?list-type=2", Vec::new()).await;
        let text = String::from_utf8(text).expect("UTF-8");
        let field = |entry: &str, tag: &str| {
            let (_, rest) =
                entry.split_once(&format!("<{tag}>")).unwrap_or_else(|| panic!("{tag} in {entry}"));
            rest.split_once("</").expect("an end").0.to_owned()
        };
        let entries = text.split("<Contents>").skip(1);
        let mut all: Vec<_> = entries
            .map(|entry| Object {
                key: field(entry, "Key"),
                size: field(entry, "Size").parse().expect("a size"),
                modified_at: field(entry, "LastModified"),
            })
            .collect();
        all.retain(|object| !object.key.ends_with("/LOCKSTEP.json"));
        all.sort();
        all
    }

    /// Number of unfinished multipart uploads.
    pub(super) async fn open_uploads(&self) -> usize {
        let (done, text) = self.request("GET", "?uploads", Vec::new()).await;
        assert!(done);
        String::from_utf8_lossy(&text).matches("<UploadId>").count()
    }

    pub(super) async fn read(&self, key: &str) -> Vec<u8> {
        let (done, bytes) = self.request("GET", &format!("/{key}"), Vec::new()).await;
        assert!(done, "{key}");
        bytes
    }

    pub(super) async fn write(&self, key: &str, bytes: Vec<u8>) {
        assert!(self.request("PUT", &format!("/{key}"), bytes).await.0, "{key}");
    }
}

/// Environment variables of a server with an object store.
pub(super) fn environment(artifacts: &str, endpoint: &str, key: &str, secret: &str) -> Vec<(String, String)> {
    [
        ("LOCKSTEP_ARTIFACTS", artifacts),
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", key),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

/// A proxy that can be shut, cut connections, and hold bytes back.
pub(super) struct Gate {
    port: u16,
    is_open: Arc<AtomicBool>,
    /// Number of times that all connections were cut.
    cuts: Arc<AtomicU32>,
    /// Bytes that may still pass to the server; at 0 or below, further bytes wait.
    left: Arc<AtomicI64>,
}

const UNLIMITED: i64 = i64::MAX / 2;

impl Gate {
    fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let (is_open, left) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicI64::new(UNLIMITED)));
        let gate = Self { port, is_open, cuts: Arc::default(), left };
        let (is_open, cuts, left) = (gate.is_open.clone(), gate.cuts.clone(), gate.left.clone());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if !is_open.load(Ordering::SeqCst) {
                    continue;
                }
                let server = TcpStream::connect(("127.0.0.1", server)).expect("moto");
                let cuts_before = cuts.load(Ordering::SeqCst);
                for (from, to, is_counted) in [(&client, &server, true), (&server, &client, false)] {
                    let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                    let (is_open, cuts, left) = (is_open.clone(), cuts.clone(), left.clone());
                    let is_connected =
                        move || is_open.load(Ordering::SeqCst) && cuts.load(Ordering::SeqCst) == cuts_before;
                    thread::spawn(move || pass(&from, &to, is_connected, is_counted.then_some(&*left)));
                }
            }
        });
        gate
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Ends all connections and accepts no new ones.
    pub(super) fn close(&self) {
        self.is_open.store(false, Ordering::SeqCst);
    }

    pub(super) fn open(&self) {
        self.left.store(UNLIMITED, Ordering::SeqCst);
        self.is_open.store(true, Ordering::SeqCst);
    }

    /// Cuts existing connections. New connections pass without a limit.
    pub(super) fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
        self.open();
    }

    /// Bytes that have passed to the server since the gate was last opened.
    pub(super) fn passed(&self) -> u64 {
        (UNLIMITED - self.left.load(Ordering::SeqCst)).unsigned_abs()
    }

    /// Holds everything back after this number of bytes.
    pub(super) fn pass_only(&self, bytes: u64) {
        self.left.store(bytes as i64, Ordering::SeqCst);
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.left.load(Ordering::SeqCst) <= 0
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, is_connected: impl Fn() -> bool, left: Option<&AtomicI64>) {
    let mut block = vec![0; 1 << 16];
    from.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
    while is_connected() {
        if left.is_some_and(|left| left.load(Ordering::SeqCst) <= 0) {
            thread::sleep(Duration::from_millis(5));
            continue;
        }
        match from.read(&mut block) {
            Ok(0) => break,
            Ok(n) => {
                if let Some(left) = left {
                    left.fetch_sub(n as i64, Ordering::SeqCst);
                }
                if to.write_all(&block[..n]).is_err() {
                    break;
                }
            }
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Paths of all files below a directory.
pub(crate) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => files.extend(files_below(&path)),
            path => files.push(path),
        }
    }
    files
}
