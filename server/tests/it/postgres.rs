//! A Postgres cluster for tests, in a temporary folder, on a free port of 127.0.0.1. The cluster is stopped and removed
//! when the process that started it ends in any way.
#![allow(dead_code)] // Each test binary uses some of the items.

use std::{
    fs,
    io::Write,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

/// Runs `postgres` until it reads a line or standard input is closed. Without a line, it also removes the folder.
const KEEPER: &str = r#"
trap '' INT TERM HUP
"$@" >>"$DIR/log" 2>&1 & P=$!
read -r mode
case "$mode" in
    fast) kill -INT $P ;;
    kill) kill -KILL $P ;;
    *) kill -QUIT $P; wait $P; rm -rf "$DIR"; exit ;;
esac
wait $P
"#;

pub struct Cluster {
    dir: PathBuf,
    port: u16,
    bin: PathBuf,
    /// Whether commits are synced to disk, for tests of a machine's crash.
    durable: bool,
    keeper: Option<Child>,
}

/// Returns the folder of Postgres' programs in Debian's packages, which is not on the path.
fn find_programs() -> PathBuf {
    let mut folders: Vec<_> = fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.flatten().map(|e| e.path().join("bin")).collect())
        .unwrap_or_default();
    folders.retain(|bin: &PathBuf| bin.join("postgres").exists());
    folders.sort();
    folders.pop().unwrap_or_else(|| {
        panic!("these tests need Postgres: `apt-get install postgresql` (tests/run does)");
    })
}

/// A command that does not run as root, because Postgres refuses to run as root.
fn unprivileged(program: &Path) -> Command {
    let is_root = fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    if !is_root {
        return Command::new(program);
    }
    let mut command = Command::new("runuser");
    command.args(["-u", "nobody", "--"]).arg(program);
    command
}

impl Cluster {
    pub fn new(durable: bool) -> Self {
        let bin = find_programs();
        let output = unprivileged(Path::new("mktemp"))
            .args(["-d", "/tmp/lockstep-pg-XXXXXXXX"])
            .output()
            .expect("mktemp runs");
        let dir = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        let output = unprivileged(&bin.join("initdb"))
            .args(["-U", "lockstep", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D"])
            .arg(dir.join("data"))
            .current_dir("/tmp")
            .output()
            .expect("initdb runs");
        assert!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let mut cluster = Self { dir, port, bin, durable, keeper: None };
        cluster.start();
        cluster
    }

    /// Starts Postgres again, with the same port and data.
    pub fn start(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let old_length = self.log().len();
            let mut keeper = unprivileged(Path::new("sh"));
            keeper.args(["-c", KEEPER, "sh"]).arg(self.bin.join("postgres"));
            keeper.arg("-D").arg(self.dir.join("data")).arg("-k").arg(&self.dir);
            keeper.args(["-p", &self.port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
            keeper.args(["-c", "max_connections=200"]);
            if !self.durable {
                keeper.args(["-c", "fsync=off"]);
            }
            keeper.env("DIR", &self.dir).current_dir("/tmp").stdin(Stdio::piped());
            let keeper = keeper.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("sh runs");
            loop {
                if self.is_ready() {
                    self.keeper = Some(keeper);
                    return;
                }
                assert!(Instant::now() < deadline, "postgres does not start: {}", self.log());
                std::thread::sleep(Duration::from_millis(20));
                // Postgres refuses to start while processes of a killed cluster still use the shared memory. Messages to clients that connect too
                // early, and of processes that end, are ignored.
                let is_ignored = |line: &str| {
                    ["database system is", "terminating connection"].iter().any(|text| line.contains(text))
                };
                let new_lines = self.log().split_off(old_length);
                if new_lines.lines().any(|l| l.contains("FATAL") && !is_ignored(l)) {
                    break;
                }
            }
            self.keeper = Some(keeper);
            // If the process still runs, it may not handle milder signals yet.
            self.kill();
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    fn is_ready(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.port)).is_ok()
            && Command::new(self.bin.join("pg_isready"))
                .args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()])
                .status()
                .is_ok_and(|s| s.success())
    }

    /// Stops Postgres by a fast shutdown: sessions end, and all data is written.
    pub fn stop(&mut self) {
        self.end("fast\n");
    }

    /// Sends SIGKILL to the main process. The other processes end by themselves.
    pub fn kill(&mut self) {
        self.end("kill\n");
    }

    fn end(&mut self, mode: &str) {
        if let Some(mut keeper) = self.keeper.take() {
            if let Some(stdin) = &mut keeper.stdin {
                let _ = stdin.write_all(mode.as_bytes());
            }
            let _ = keeper.wait();
        }
    }

    /// Creates an empty database, and returns its URL.
    pub fn database(&self, name: &str) -> String {
        let output = Command::new(self.bin.join("createdb"))
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "lockstep", name])
            .output()
            .expect("createdb runs");
        assert!(output.status.success(), "createdb: {}", String::from_utf8_lossy(&output.stderr));
        self.url(name)
    }

    pub fn url(&self, name: &str) -> String {
        format!("postgres://lockstep@127.0.0.1:{}/{name}", self.port)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Closes standard input, so that the keeper stops Postgres and removes the folder.
        if let Some(mut keeper) = self.keeper.take() {
            drop(keeper.stdin.take());
            let _ = keeper.wait();
        }
    }
}

/// The cluster that all tests of this process share.
pub fn shared() -> &'static Cluster {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    SHARED.get_or_init(|| Cluster::new(false))
}

/// Creates a database in the shared cluster, and returns its URL.
pub fn database() -> String {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    shared().database(&format!("test{number}"))
}

/// Whether the tests use Postgres: `LOCKSTEP_TEST_DATABASE=postgres`.
pub fn wanted() -> bool {
    match std::env::var("LOCKSTEP_TEST_DATABASE").as_deref() {
        Ok("postgres") => true,
        Ok("sqlite" | "") | Err(_) => false,
        Ok(other) => panic!("LOCKSTEP_TEST_DATABASE={other}: must be sqlite or postgres"),
    }
}
