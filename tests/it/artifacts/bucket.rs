//! A real S3 server (moto, of the Python registry; `tests/run` installs it), and a gate on the way to it that can be shut.

use crate::server::{SOON, cryptography, free_port};
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

/// Runs a program until standard input ends, which it does with the tests however they end.
const KEEPER: &str = r#""$@" >"$LOG" 2>&1 & P=$!; read -r _; kill -KILL $P"#;

/// A server of buckets.
pub(super) struct Buckets {
    port: u16,
    _keeper: Child,
}

fn python() -> Command {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/moto");
    assert!(packages.join("moto").exists(), "these tests need moto in target/moto: tests/run installs it");
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

impl Buckets {
    /// `checks_keys`: after so many requests the server wants keys that it has made.
    fn start(checks_keys: Option<u32>) -> Self {
        let port = free_port();
        let log = std::env::temp_dir().join(format!("lockstep-moto-{port}.log"));
        let with_packages = python();
        let mut command = Command::new("sh");
        for (name, value) in with_packages.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        if let Some(count) = checks_keys {
            command.env("INITIAL_NO_AUTH_ACTION_COUNT", count.to_string());
        }
        command.args(["-c", KEEPER, "sh", "python3", "-m", "moto.server", "-H", "127.0.0.1", "-p"]);
        let keeper = command.arg(port.to_string()).env("LOG", &log).stdin(Stdio::piped()).spawn();
        let buckets = Self { port, _keeper: keeper.expect("sh") };
        let deadline = Instant::now() + SOON;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let output = std::fs::read_to_string(&log).unwrap_or_default();
            assert!(Instant::now() < deadline, "moto does not start: {output}");
            thread::sleep(Duration::from_millis(50));
        }
        let _ = std::fs::remove_file(log);
        buckets
    }

    /// The one that all tests share.
    fn shared() -> &'static Self {
        static SHARED: OnceLock<Buckets> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(None))
    }

    /// One that knows the keys that it has made and no others; with a key and its secret.
    pub(super) fn strict(bucket: &str) -> (Self, String, String) {
        let buckets = Self::start(Some(4));
        let script = "import boto3, sys\n\
            of = lambda s: boto3.client(s, endpoint_url=sys.argv[1], region_name='us-east-1', aws_access_key_id='x', aws_secret_access_key='x')\n\
            of('s3').create_bucket(Bucket=sys.argv[2])\n\
            iam = of('iam')\n\
            iam.create_user(UserName='u')\n\
            iam.put_user_policy(UserName='u', PolicyName='p', PolicyDocument='{\"Version\":\"2012-10-17\",\"Statement\":[{\"Effect\":\"Allow\",\"Action\":\"s3:*\",\"Resource\":\"*\"}]}')\n\
            key = iam.create_access_key(UserName='u')['AccessKey']\n\
            print(key['AccessKeyId'], key['SecretAccessKey'])";
        let made = python().args(["-c", script, &buckets.url(), bucket]).output().expect("python3");
        let output = String::from_utf8_lossy(&made.stdout).into_owned();
        let (key, secret) = output
            .trim()
            .split_once(' ')
            .unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&made.stderr)));
        (buckets, key.to_owned(), secret.to_owned())
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

/// A bucket of a test's own, behind a gate.
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
    /// When it was written.
    pub(super) at: String,
}

impl Bucket {
    pub(crate) async fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("bucket-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        cryptography();
        let http = reqwest::Client::builder().timeout(SOON).build().expect("a client");
        let bucket = Self { name, gate: Gate::before(Buckets::shared().port), http };
        assert!(bucket.ask("PUT", "", Vec::new()).await.0, "a bucket");
        bucket
    }

    /// What a server is started with.
    /// What leads `serve` to it; `LOCKSTEP_ARTIFACTS` among it.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        environment(&format!("s3://{}/team/runs", self.name), &self.gate.url(), "key", "secret")
    }

    /// Not through the gate; whether it was done, and the answer.
    async fn ask(&self, method: &str, path: &str, body: Vec<u8>) -> (bool, Vec<u8>) {
        let url = format!("{}/{}{path}", Buckets::shared().url(), self.name);
        // Moto believes everybody, but asks for a signature.
        let signed = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=b";
        let request =
            self.http.request(method.parse().expect("a method"), url).header("authorization", signed);
        let answer = request.body(body).send().await.expect("an answer");
        (answer.status().is_success(), answer.bytes().await.expect("a body").to_vec())
    }

    /// All objects but the one that the store is known by.
    pub(super) async fn objects(&self) -> Vec<Object> {
        let (_, text) = self.ask("GET", "?list-type=2", Vec::new()).await;
        let text = String::from_utf8(text).expect("UTF-8");
        let of = |entry: &str, tag: &str| {
            let (_, rest) =
                entry.split_once(&format!("<{tag}>")).unwrap_or_else(|| panic!("{tag} in {entry}"));
            rest.split_once("</").expect("an end").0.to_owned()
        };
        let entries = text.split("<Contents>").skip(1);
        let mut all: Vec<_> = entries
            .map(|entry| Object {
                key: of(entry, "Key"),
                size: of(entry, "Size").parse().expect("a size"),
                at: of(entry, "LastModified"),
            })
            .collect();
        all.retain(|object| !object.key.ends_with("/LOCKSTEP.json"));
        all.sort();
        all
    }

    /// How many uploads in parts were begun and are not over.
    pub(super) async fn open_uploads(&self) -> usize {
        let (done, text) = self.ask("GET", "?uploads", Vec::new()).await;
        assert!(done);
        String::from_utf8_lossy(&text).matches("<UploadId>").count()
    }

    pub(super) async fn read(&self, key: &str) -> Vec<u8> {
        let (done, bytes) = self.ask("GET", &format!("/{key}"), Vec::new()).await;
        assert!(done, "{key}");
        bytes
    }

    pub(super) async fn write(&self, key: &str, bytes: Vec<u8>) {
        assert!(self.ask("PUT", &format!("/{key}"), bytes).await.0, "{key}");
    }
}

/// What a server with a bucket is started with.
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

/// Passes connections on, as long as it is open.
pub(super) struct Gate {
    port: u16,
    is_open: Arc<AtomicBool>,
    /// How often all connections were cut.
    cuts: Arc<AtomicU32>,
    /// Bytes that may still pass towards the server; below 0 they wait.
    left: Arc<AtomicI64>,
}

const ALL: i64 = i64::MAX / 2;

impl Gate {
    fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let (is_open, left) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicI64::new(ALL)));
        let gate = Self { port, is_open, cuts: Arc::default(), left };
        let (is_open, cuts, left) = (gate.is_open.clone(), gate.cuts.clone(), gate.left.clone());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if !is_open.load(Ordering::SeqCst) {
                    continue;
                }
                let server = TcpStream::connect(("127.0.0.1", server)).expect("moto");
                let so_far = cuts.load(Ordering::SeqCst);
                for (from, to, counts) in [(&client, &server, true), (&server, &client, false)] {
                    let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                    let (is_open, cuts, left) = (is_open.clone(), cuts.clone(), left.clone());
                    let is_on =
                        move || is_open.load(Ordering::SeqCst) && cuts.load(Ordering::SeqCst) == so_far;
                    thread::spawn(move || pass(&from, &to, is_on, counts.then_some(&*left)));
                }
            }
        });
        gate
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Nobody comes through any more.
    pub(super) fn shut(&self) {
        self.is_open.store(false, Ordering::SeqCst);
    }

    pub(super) fn open(&self) {
        self.left.store(ALL, Ordering::SeqCst);
        self.is_open.store(true, Ordering::SeqCst);
    }

    /// Cuts the connections that there are; new ones are let through, with all that they bring.
    pub(super) fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
        self.open();
    }

    /// Bytes that have passed towards the server since it was opened last.
    pub(super) fn passed(&self) -> u64 {
        (ALL - self.left.load(Ordering::SeqCst)).unsigned_abs()
    }

    /// What comes after so many bytes waits.
    pub(super) fn pass_only(&self, bytes: u64) {
        self.left.store(bytes as i64, Ordering::SeqCst);
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.left.load(Ordering::SeqCst) <= 0
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, is_on: impl Fn() -> bool, left: Option<&AtomicI64>) {
    let mut block = vec![0; 1 << 16];
    from.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
    while is_on() {
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

/// Where a directory of artifacts has its files.
pub(super) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files_below(&path)),
            path => found.push(path),
        }
    }
    found
}
