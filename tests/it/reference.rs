//! The program's own documentation: reference, help, completions and man pages.

use crate::server::{Agents, Finished, Folder, Server, lockstep};
use std::{fs, path::Path, process::Command};

fn program(args: &[&str]) -> Finished {
    Finished::of(lockstep().args(args))
}

/// The names of all commands in the program's help.
fn commands() -> Vec<String> {
    let help = program(&["--help"]);
    let lines = help.ok().lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| !line.is_empty());
    // Longer descriptions continue on lines with a deeper indentation.
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<_> =
        names.map(|line| line.split_whitespace().next().expect("a name").to_owned()).collect();
    assert!(names.len() > 25, "{names:?}");
    names
}

#[test]
fn the_reference_in_the_repository_is_up_to_date() {
    let folder = Folder::new();
    program(&["reference", "--out", folder.path().to_str().expect("UTF-8")]).ok();
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference");
    for name in ["job-file.md", "command-line.md", "rest.md"] {
        let generated = fs::read_to_string(folder.path().join(name)).expect("a page");
        let committed = fs::read_to_string(tree.join(name)).unwrap_or_default();
        let line = generated
            .lines()
            .zip(committed.lines())
            .position(|(generated, committed)| generated != committed);
        assert!(
            generated == committed,
            "docs/reference/{name} differs from the generated page (first in line {:?}): run `cargo run -- reference` \
             and commit the pages",
            line.map(|line| line + 1)
        );
    }
}

#[test]
fn the_reference_has_all_commands_except_hidden_ones() {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference");
    let page = fs::read_to_string(tree.join("command-line.md")).expect("a page");
    for command in commands() {
        assert!(page.contains(&format!("\n## lockstep {command}\n")), "{command}");
    }
    for hidden in ["rank", "inspect", "reference", "kernels"] {
        assert!(!page.contains(&format!("## lockstep {hidden}\n")), "{hidden}");
    }
    for option in ["`--set <KEY.PATH=VALUE>`", "`LOCKSTEP_SERVER`", "### lockstep dataset add"] {
        assert!(page.contains(option), "{option}");
    }
    // The page contains no path of the machine that generated it.
    let home = std::env::var("HOME").unwrap_or_default();
    assert!(home.len() < 2 || !page.contains(&home), "{home}");
}

#[test]
fn help_explains_commands_and_the_job_file() {
    assert_eq!(program(&["help"]).ok(), program(&["--help"]).ok());
    assert_eq!(program(&["help", "dataset", "add"]).ok(), program(&["dataset", "add", "--help"]).ok());
    let job = program(&["help", "job"]);
    for words in
        ["train.lr = number, above 0 and at most 10,000, default 0.01", "[checkpoint]", "data.dataset = text"]
    {
        assert!(job.ok().contains(words), "{words}: {}", job.stdout);
    }
    let key = program(&["help", "job", "train.lr"]);
    assert!(key.ok().starts_with("  train.lr = ") && key.stdout.lines().count() < 6, "{}", key.stdout);
    program(&["help", "job", "train.lrr"]).assert_usage_error(&["no section or key", "train.lr"]);
    assert_eq!(program(&["help", "train.lr"]).ok(), key.ok());
    program(&["help", "submitt"]).assert_usage_error(&["unrecognized subcommand 'submitt'", "'submit'"]);
    program(&["help", "dataset", "ad"]).assert_usage_error(&["unrecognized subcommand 'ad'", "'add'"]);
}

#[tokio::test]
async fn the_documentation_is_served_without_a_network() {
    let server = Server::start_with(Agents::None).await;
    let page = async |path: &str| {
        let response = server.http.get(format!("{}{path}", server.url)).send().await.expect("a response");
        (response.status().as_u16(), response.text().await.expect("a page"))
    };
    let (status, index) = page("/docs").await;
    assert_eq!(status, 200, "{index}");
    for (path, words) in [
        ("/docs/team", "<h1 id=\"a-server-for-a-team\">"),
        ("/docs/reference/job-file", "<h2 id=\"train\">[train]</h2>"),
        ("/docs/reference/command-line", "<h3 id=\"lockstep-dataset-add\">"),
        ("/docs/reference/rest", "<h3 id=\"post-apiv1jobs\">"),
        ("/docs/reference/rest.md", "REST interface"),
    ] {
        assert!(path.ends_with(".md") || index.contains(&format!("href=\"{path}\"")), "{path}");
        let (status, text) = page(path).await;
        assert!(status == 200 && text.contains(words), "{path}: {status}: {text}");
        // Every link within the documentation leads to an existing page and heading.
        let links = text.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
        for link in links.filter(|link| link.starts_with("#") || link.starts_with("/docs/")) {
            let (to, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if to.is_empty() { text.clone() } else { page(to).await.1 };
            let id = format!("id=\"{anchor}\"");
            assert!(
                anchor.is_empty() || target.contains(&id),
                "{path} links to {link}, which does not exist"
            );
        }
    }
    assert_eq!(page("/docs/nothing").await.0, 404);
    assert_eq!(page("/docs/../../../etc/passwd").await.0, 404);
    let (_, jobs) = page("/jobs").await;
    assert!(jobs.contains("href=\"/docs\""), "the dashboard links to the documentation");
    server.stop().await;
}

/// The completions that bash offers after these words.
fn completions(script: &Path, words: &[&str]) -> Vec<String> {
    let last = words.last().expect("a word");
    let previous = words[words.len() - 2];
    let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let bash_line = format!(
        "source {} && complete -p lockstep >&2 && COMP_WORDS=({line}) && COMP_CWORD={} && \
         _lockstep lockstep '{last}' '{previous}' && printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display(),
        words.len() - 1
    );
    let ended = Finished::of(Command::new("bash").args(["--norc", "--noprofile", "-c", &bash_line]));
    ended.ok().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_options() {
    let folder = Folder::new();
    let script = folder.write("lockstep.bash", program(&["completions", "bash"]).ok());
    let offered = completions(&script, &["lockstep", ""]);
    for command in commands() {
        assert!(offered.contains(&command), "{command} is not in {offered:?}");
    }
    assert_eq!(completions(&script, &["lockstep", "subm"]), ["submit"]);
    assert_eq!(completions(&script, &["lockstep", "dataset", "ad"]), ["add"]);
    assert_eq!(completions(&script, &["lockstep", "submit", "--wa"]), ["--watch"]);
    assert_eq!(completions(&script, &["lockstep", "predict", "--weights", "e"]), ["ema"]);
    for (shell, words) in [("zsh", "#compdef lockstep"), ("fish", "complete -c lockstep")] {
        let script = program(&["completions", shell]);
        assert!(script.ok().contains(words), "{shell}: {}", script.stdout);
    }
    program(&["completions", "tcsh"]).assert_usage_error(&["tcsh", "bash, zsh, fish"]);
}

#[test]
fn there_is_a_man_page_for_each_command() {
    let folder = Folder::new();
    let out = folder.path().join("man1");
    program(&["man", "--out", out.to_str().expect("UTF-8")]).ok();
    let mut names: Vec<String> = commands().iter().map(|name| format!("lockstep-{name}.1")).collect();
    names.extend(["lockstep.1", "lockstep-dataset-add.1", "lockstep-token-create.1"].map(str::to_owned));
    for name in names {
        let page = out.join(&name);
        let text = fs::read_to_string(&page).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(text.contains(".TH ") && text.contains(".SH SYNOPSIS"), "{name}: {text}");
        // The installed readers of man pages report no warnings.
        for reader in [
            &["mandoc", "-T", "lint", "-W", "error"][..],
            &["man", "--warnings", "--encoding=utf8", "--local-file"],
        ] {
            let [reader, args @ ..] = reader else { continue };
            let ran = Command::new(reader)
                .args(args)
                .arg(&page)
                .env("MANPAGER", "cat")
                .env("MANROFFOPT", "-ww")
                .output();
            // Not every machine has both readers.
            let Ok(ran) = ran else { continue };
            assert!(ran.status.success() && ran.stderr.is_empty(), "{reader} {name}: {ran:?}");
        }
    }
    let help_pages = fs::read_dir(&out).expect("pages").filter(|page| {
        page.as_ref().is_ok_and(|page| page.file_name().to_string_lossy().ends_with("-help.1"))
    });
    assert_eq!(help_pages.count(), 1, "only a page of the program's own `help`");
    let file = folder.write("file", "");
    program(&["man", "--out", file.to_str().expect("UTF-8")]).assert_usage_error(&["--out", "file"]);
}
