//! Shell scripts that replace programs in tests.

use std::path::Path;

/// Writes a shell script that is started next. Another process writes the file. If this process had it open for
/// writing, a process forked by another test could inherit the open file, and the script could not be executed
/// (ETXTBSY).
pub(crate) fn write_script(path: &Path, body: &str) {
    let text = format!("#!/bin/sh\n{body}\n");
    let written = std::process::Command::new("sh")
        .args(["-c", "rm -f \"$1\"; printf %s \"$0\" > \"$1\"; chmod +x \"$1\"", &text])
        .arg(path)
        .status();
    assert!(written.unwrap().success());
}
