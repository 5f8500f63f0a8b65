//! Helpers of tests.

use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Waits until `is_so` returns true. After 20 s, fails with `problem`.
pub(crate) fn wait_until(problem: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "{problem}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes a shell script that is started next in place of a program. Another process writes the file. If this process had it
/// open for writing, a process forked by another test could inherit the open file, and the script could not be executed
/// (ETXTBSY).
pub(crate) fn write_script(path: &Path, body: &str) {
    let text = format!("#!/bin/sh\n{body}\n");
    let written = std::process::Command::new("sh")
        .args(["-c", "rm -f \"$1\"; printf %s \"$0\" > \"$1\"; chmod +x \"$1\"", &text])
        .arg(path)
        .status();
    assert!(written.unwrap().success());
}
