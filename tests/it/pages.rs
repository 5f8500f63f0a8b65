//! README.md and the pages of docs/: their code blocks, and the command lines that tests run.

use crate::server::LOCKSTEP;
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The paths of README.md and of the hand-written pages, relative to the root.
pub(crate) fn all() -> Vec<String> {
    let docs = fs::read_dir(root().join("docs")).expect("docs").flatten().map(|entry| entry.path());
    let docs = docs.filter(|path| path.extension().is_some_and(|e| e == "md"));
    let mut pages: Vec<_> =
        docs.map(|path| format!("docs/{}", path.file_name().expect("a name").display())).collect();
    pages.sort();
    pages.insert(0, "README.md".to_owned());
    pages
}

pub(crate) fn text(page: &str) -> String {
    fs::read_to_string(root().join(page)).expect("a page")
}

/// The code blocks of a page in a language.
pub(crate) fn blocks(page: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    let text = text(page);
    let parts = text.split(&begin).skip(1);
    parts.map(|rest| rest.split("```").next().expect("the end of a block").to_owned()).collect()
}

/// The files on a page, as (name, text): TOML blocks whose first line is a comment with the file's name.
pub(crate) fn files(page: &str) -> Vec<(String, String)> {
    let named = |block: String| {
        let name = block.lines().next()?.strip_prefix("# ")?.to_owned();
        name.ends_with(".toml").then_some((name, block))
    };
    blocks(page, "toml").into_iter().filter_map(named).collect()
}

/// The only command line of a page that starts with `begins`, for a test that runs the line. `examples.rs` finds such calls in the tests'
/// sources and skips their lines, so both arguments must be literals.
pub(crate) fn line(page: &str, begins: &str) -> String {
    let blocks = blocks(page, "sh").concat();
    let found: Vec<_> = blocks.lines().filter(|line| line.starts_with(begins)).collect();
    assert_eq!(found.len(), 1, "{page} must have exactly one line that starts with {begins:?}: {found:#?}");
    found[0].to_owned()
}

/// The arguments of all calls of [`line`]: pages and starts of lines.
pub(crate) fn lines_run_by_tests() -> Vec<(String, String)> {
    let mut arguments = Vec::new();
    let mut folders = vec![root().join("tests/it")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).expect("tests").flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let source = fs::read_to_string(&path).expect("a test");
                let calls = source.split(concat!("pages::", "line(")).skip(1);
                arguments.extend(calls.map(|call| {
                    let mut words = call.split('"').skip(1).step_by(2).map(str::to_owned);
                    (words.next().expect("a page"), words.next().expect("a beginning"))
                }));
            }
        }
    }
    arguments
}

/// A shell that runs commands of a page; `lockstep` is the program under test.
pub(crate) fn shell(commands: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["--norc", "-c", commands]).stdin(Stdio::null()).env("PATH", path());
    command
}

/// A PATH that begins with the program under test.
pub(crate) fn path() -> String {
    let bin = Path::new(LOCKSTEP).parent().expect("a folder").display();
    format!("{bin}:{}", std::env::var("PATH").unwrap_or_default())
}
