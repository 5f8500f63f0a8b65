//! HTTP responses and the output of commands, with assertions.

use reqwest::StatusCode;
use serde_json::Value;
use std::process::{Command, Output};

/// An HTTP response with its whole body.
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
}

impl Response {
    pub(crate) async fn read(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        Self { status, headers, text: response.text().await.expect("a body") }
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.text))
    }

    /// Asserts an RFC 9457 problem with this status and returns the problem.
    pub(crate) fn problem(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        assert!(
            self.header("content-type").starts_with("application/problem+json"),
            "{status} as {:?}: {}",
            self.header("content-type"),
            self.text
        );
        let problem = self.json();
        assert_eq!(problem["status"], status, "{problem:#}");
        assert!(problem["title"].as_str().is_some_and(|t| !t.is_empty()), "{problem:#}");
        problem
    }

    /// Asserts status 422 with exactly these `errors` in any order, each given as (JSON pointer, texts in
    /// its detail).
    pub(crate) fn assert_invalid(&self, expected: &[(&str, &[&str])]) {
        let problem = self.problem(422);
        let errors = problem["errors"].as_array().unwrap_or_else(|| panic!("no errors in {problem:#}"));
        for (pointer, words) in expected {
            let found = errors.iter().find(|e| {
                e["pointer"] == *pointer
                    && words.iter().all(|w| e["detail"].as_str().is_some_and(|d| d.contains(w)))
            });
            assert!(found.is_some(), "no error at {pointer} with {words:?} in {problem:#}");
        }
        assert_eq!(errors.len(), expected.len(), "{problem:#}");
    }
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    pub(crate) fn of(command: &mut Command) -> Self {
        let Output { status, stdout, stderr } = command.output().expect("lockstep runs");
        Self {
            status: status.code().unwrap_or(-1),
            stdout: String::from_utf8(stdout).expect("UTF-8"),
            stderr: String::from_utf8(stderr).expect("UTF-8"),
        }
    }

    /// Asserts exit status 0 and returns the standard output.
    pub(crate) fn ok(&self) -> &str {
        assert_eq!(self.status, 0, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        &self.stdout
    }

    /// Asserts exit status 0 and texts on standard output.
    pub(crate) fn assert_prints(&self, words: &[&str]) {
        let output = self.ok();
        for word in words {
            assert!(output.contains(word), "standard output lacks {word:?}:\n{output}");
        }
    }

    /// The standard output as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(self.ok()).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.stdout))
    }

    /// Asserts a usage error: exit status 2, these texts on standard error, and no Rust panic.
    pub(crate) fn assert_usage_error(&self, words: &[&str]) {
        self.assert_fails(2, words);
    }

    /// Asserts an exit status and texts on standard error.
    pub(crate) fn assert_fails(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, status, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "standard error lacks {word:?}:\n{}", self.stderr);
        }
    }
}
