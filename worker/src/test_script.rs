//! Shell scripts that take the place of programs in tests.

use std::path::Path;

/// Writes a shell script that is started next. Another process does: nobody here holds the file open for writing then, as a process that was
/// forked meanwhile by another test would.
pub(crate) fn write_script(path: &Path, body: &str) {
    let text = format!("#!/bin/sh\n{body}\n");
    let written = std::process::Command::new("sh")
        .args(["-c", "rm -f \"$1\"; printf %s \"$0\" > \"$1\"; chmod +x \"$1\"", &text])
        .arg(path)
        .status();
    assert!(written.unwrap().success());
}
