//! `serve` and `demo` open a browser if they are started on a terminal. The tests use a pseudo-terminal and an `xdg-open` that records its
//! arguments.

use crate::{
    cluster::command_lines,
    server::{
        Folder, LOCKSTEP, client_without_redirects, free_port, lockstep, processes_of, signal,
        training_permit, wait_until,
    },
};
use rustix::process::Signal;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

const ON_TERMINAL: bool = true;

/// A running command, with a terminal (by `script`) or without.
struct Started {
    folder: Folder,
    process: Child,
}

/// A script that records its argument, and content and mode of the file that the argument names. It then keeps running, as a browser does.
const XDG_OPEN: &str = "#!/bin/sh\ncd \"$(dirname \"$0\")/..\" || exit 1\ncp \"$1\" page.html\nstat -c %a \"$1\" > mode\necho $$ > pid\n\
                        printf '%s\\n' \"$@\" > part && mv part opened\nexec sleep 300\n";

fn install_xdg_open(folder: &Folder, script: &str) {
    let path = folder.write("bin/xdg-open", script);
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
}

impl Started {
    fn new(on_terminal: bool, screen: Option<&str>, args: &[&str]) -> Self {
        let folder = Folder::new();
        install_xdg_open(&folder, XDG_OPEN);
        Self::start(folder, on_terminal, screen, args)
    }

    /// Starts a command with the folder's `bin` first in PATH. If `bin` has no `xdg-open`, PATH is only `bin`, so that the system's
    /// `xdg-open` is not found. `screen`: the environment variable that names a display.
    fn start(folder: Folder, on_terminal: bool, screen: Option<&str>, args: &[&str]) -> Self {
        let data = folder.path().join("data");
        let mut words = vec![LOCKSTEP, args[0], "--data-dir", data.to_str().expect("UTF-8")];
        words.extend(&args[1..]);
        let mut command = lockstep();
        command.args(&words[1..]);
        if on_terminal {
            command = Command::new("/usr/bin/script");
            command.args(["-qefc", &words.join(" "), "/dev/null"]);
        }
        let bin = folder.path().join("bin");
        let system_path = std::env::var("PATH").unwrap_or_default();
        let path = if bin.join("xdg-open").exists() { system_path } else { String::new() };
        command.env("PATH", format!("{}:{path}", bin.display()).trim_end_matches(':'));
        command.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY").current_dir(folder.path());
        if let Some(screen) = screen {
            command.env(screen, ":0");
        }
        let log = fs::File::create(folder.path().join("output.log")).expect("a log");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        Self { process: command.spawn().expect("script, of util-linux"), folder }
    }

    fn serve(on_terminal: bool, screen: Option<&str>, more: &[&str]) -> Self {
        let listen = format!("127.0.0.1:{}", free_port());
        Self::new(
            on_terminal,
            screen,
            &[&["serve", "--no-local-agent", "--listen", &listen][..], more].concat(),
        )
    }

    fn output(&self) -> String {
        fs::read_to_string(self.folder.path().join("output.log")).unwrap_or_default()
    }

    fn page(&self) -> PathBuf {
        self.folder.path().join("data/sign-in.html")
    }

    async fn until(&self, what: &str, holds: impl Fn() -> bool) {
        wait_until(what, holds, || self.output()).await;
    }

    /// Waits until a browser is opened and returns the URL to which the opened file redirects.
    async fn opened_url(&self) -> String {
        let file = |name: &str| self.folder.path().join(name);
        self.until("a browser is opened", || file("opened").exists()).await;
        let given = fs::read_to_string(file("opened")).expect("its arguments");
        assert_eq!(
            given.trim(),
            self.page().to_str().expect("UTF-8"),
            "the only argument is a file, no link"
        );
        assert_eq!(fs::read_to_string(file("mode")).expect("a mode").trim(), "600");
        let page = fs::read_to_string(file("page.html")).expect("the page");
        let (_, rest) = page.split_once("content=\"0; url=").expect("a redirect");
        let link = rest.split('"').next().expect("its end").replace("&amp;", "&");
        let (_, code) = link.split_once("/login?code=").expect("a link that signs in");
        let code = code.split('&').next().expect("its end");
        assert!(code.len() > 20, "{link}");
        // The script executes `sleep` a moment after it has recorded the arguments.
        let pid = fs::read_to_string(file("pid")).expect("the browser");
        let command_line = format!("/proc/{}/cmdline", pid.trim());
        self.until("the browser runs", || {
            fs::read(&command_line).is_ok_and(|line| line.starts_with(b"sleep\x00300\x00"))
        })
        .await;
        let lines = command_lines();
        assert!(lines.iter().all(|line| !line.contains(code)), "a code on a command line: {lines:#?}");
        link
    }

    /// Sends SIGINT to the server and waits for its end.
    async fn end(&mut self) {
        let is_server = |command: &str| command == "serve" || command == "demo";
        let server = processes_of(self.folder.path()).into_iter().find(|p| is_server(p.command()));
        signal(server.expect("the server").pid, Signal::INT);
        self.until("the server has ended", || {
            !processes_of(self.folder.path()).iter().any(|p| is_server(p.command()))
        })
        .await;
        self.process.wait().expect("its status");
    }

    fn close_browser(&self) {
        let pid = fs::read_to_string(self.folder.path().join("pid")).expect("the browser");
        let pid: i32 = pid.trim().parse().expect("a number");
        assert!(
            fs::exists(format!("/proc/{pid}")).expect("/proc"),
            "the browser still runs after the server"
        );
        signal(pid, Signal::KILL);
    }
}

#[tokio::test]
async fn the_opened_file_signs_a_browser_in_once() {
    let mut serve = Started::serve(ON_TERMINAL, Some("DISPLAY"), &[]);
    let link = serve.opened_url().await;
    // The output arrives through the terminal, perhaps later.
    serve
        .until("a link is printed", || {
            serve.output().split_once("sign in: ").is_some_and(|(_, rest)| rest.contains('\n'))
        })
        .await;
    assert!(!serve.output().contains(&link), "the printed link differs");
    let client = client_without_redirects();
    let signed_in = client.get(&link).send().await.expect("a response");
    assert_eq!(signed_in.status(), 303, "{link}");
    assert!(signed_in.headers().contains_key("set-cookie"));
    assert_eq!(client.get(&link).send().await.expect("a response").status(), 401, "the link was used");
    let output = serve.output();
    let printed = output.lines().find_map(|line| line.trim().strip_prefix("sign in: ")).expect("a link");
    assert_eq!(
        client.get(printed).send().await.expect("a response").status(),
        303,
        "the printed link is still valid"
    );
    serve.end().await;
    serve.close_browser();
}

#[tokio::test]
async fn sign_in_files_are_removed_at_the_end_or_the_next_start() {
    let mut serve = Started::serve(ON_TERMINAL, Some("WAYLAND_DISPLAY"), &[]);
    serve.opened_url().await;
    assert!(serve.page().exists());
    serve.end().await;
    assert!(!serve.page().exists(), "the file is deleted");
    serve.close_browser();
    // A file is left, as after SIGKILL.
    serve.folder.write("data/sign-in.html", "of a server that was killed");
    let listen = format!("127.0.0.1:{}", free_port());
    let mut second = lockstep();
    second.args(["serve", "--no-local-agent", "--listen", &listen, "--data-dir"]);
    second.arg(serve.folder.path().join("data")).stdout(Stdio::null()).stderr(Stdio::null());
    let mut second = second.spawn().expect("lockstep serve");
    serve.until("the file is deleted", || !serve.page().exists()).await;
    signal(second.id() as i32, Signal::TERM);
    second.wait().expect("its status");
}

#[tokio::test]
async fn no_browser_is_opened_without_a_terminal_without_a_screen_or_with_no_open() {
    let cases: [(bool, Option<&str>, &[&str]); 3] = [
        (!ON_TERMINAL, Some("DISPLAY"), &[]),
        (ON_TERMINAL, None, &[]),
        (ON_TERMINAL, Some("DISPLAY"), &["--no-open"]),
    ];
    for (on_terminal, screen, more) in cases {
        let mut serve = Started::serve(on_terminal, screen, more);
        serve.until("the server is ready", || serve.output().contains("sign in: ")).await;
        serve.end().await;
        let is_opened = ["opened", "part", "pid"].iter().any(|name| serve.folder.path().join(name).exists());
        assert!(
            !is_opened && !serve.page().exists(),
            "terminal: {on_terminal}, screen: {screen:?}, {more:?}"
        );
    }
}

#[tokio::test]
async fn a_server_runs_if_no_browser_can_be_opened() {
    for script in [None, Some("#!/bin/sh\nexit 3\n")] {
        let folder = Folder::new();
        if let Some(script) = script {
            install_xdg_open(&folder, script);
        }
        let listen = format!("127.0.0.1:{}", free_port());
        let args = ["serve", "--no-local-agent", "--listen", &listen];
        let mut serve = Started::start(folder, ON_TERMINAL, Some("DISPLAY"), &args);
        serve.until("the error is reported", || serve.output().contains("xdg-open")).await;
        let ready = reqwest::get(format!("http://{listen}/readyz")).await.expect("a response");
        assert_eq!(ready.status(), 200, "{}", serve.output());
        serve.end().await;
    }
}

#[tokio::test]
async fn the_demo_opens_a_browser() {
    let _permit = training_permit().await;
    let mut demo = Started::new(ON_TERMINAL, Some("DISPLAY"), &["demo", "--ranks", "1"]);
    let link = demo.opened_url().await;
    let response = client_without_redirects().get(&link).send().await.expect("a response");
    let page = response.headers().get("location").and_then(|page| page.to_str().ok()).unwrap_or_default();
    assert!(response.status() == 303 && page.starts_with("/jobs/j"), "the link opens the job: {page}");
    demo.end().await;
    demo.close_browser();
}
