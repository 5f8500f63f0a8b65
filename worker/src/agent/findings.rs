//! Findings of `lockstep doctor`'s quick checks on this machine. The checks run in a separate process, because NVIDIA's
//! libraries should not stay loaded in the agent.

use crate::doctor::{Finding, Grade};
use lockstep_host::SECRET_VARIABLES;
use lockstep_protocol::{
    agent::MachineWarning,
    limits::{FINDING_CHARS, MAX_FINDINGS},
};
use serde::Deserialize;
use std::{path::Path, process::Stdio, time::Duration};
use tokio::process::Command;

/// Time limit of the checks. Loading a library from a network file system may take long.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);
/// Findings that concern only GPUs (NCCL uses /dev/shm between GPUs). On a machine without GPUs they are ignored.
const GPU_FINDINGS: [&str; 2] = ["GPUs", "/dev/shm"];

#[derive(Deserialize)]
struct Report {
    findings: Vec<Finding>,
}

/// The findings that need attention. Empty if the checks cannot run, which must not prevent the agent from working.
/// Unless the machine `is_idle`, findings about single GPUs are left out, because a rank would be reported as another program
/// that uses the GPU's memory.
pub(super) async fn find(program: &Path, dir: &Path, is_idle: bool) -> Vec<MachineWarning> {
    let mut command = Command::new(program);
    for name in SECRET_VARIABLES {
        command.env_remove(name);
    }
    command.args(["doctor", "--quick", "--json", "--data-dir"]).arg(dir);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let checked = async {
        let output =
            tokio::time::timeout(CHECK_TIMEOUT, command.output()).await.map_err(|e| e.to_string())?;
        let output = output.map_err(|e| e.to_string())?;
        serde_json::from_slice::<Report>(&output.stdout).map_err(|e| e.to_string())
    };
    match checked.await {
        Ok(report) => {
            to_warnings(report.findings, is_idle, Path::new("/proc/driver/nvidia/version").exists())
        }
        Err(error) => {
            tracing::debug!(error, "the machine could not be checked");
            Vec::new()
        }
    }
}

fn to_warnings(findings: Vec<Finding>, is_idle: bool, has_driver: bool) -> Vec<MachineWarning> {
    let is_relevant = |finding: &Finding| {
        finding.grade != Grade::Ok
            && (has_driver || !GPU_FINDINGS.contains(&finding.what.as_str()))
            && (is_idle || !finding.what.starts_with("GPU "))
    };
    let to_warning = |finding: Finding| {
        let advice = finding.advice.map(|advice| format!(". {advice}")).unwrap_or_default();
        let text = format!("{}, when the agent started: {}{advice}", finding.what, finding.found);
        MachineWarning {
            problem: finding.grade == Grade::Problem,
            text: text.chars().take(FINDING_CHARS).collect(),
        }
    };
    findings.into_iter().filter(is_relevant).map(to_warning).take(MAX_FINDINGS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(name: &str, grade: Grade) -> Finding {
        let advice = (grade != Grade::Ok).then(|| "Do something.".to_owned());
        Finding { what: name.into(), grade, found: "it is so".into(), advice }
    }

    #[test]
    fn relevant_findings_are_reported_with_advice() {
        let all = || -> Vec<Finding> {
            let grades = [Grade::Ok, Grade::Problem, Grade::Note, Grade::Note];
            ["CPU", "memory", "GPUs", "GPU 0"]
                .into_iter()
                .zip(grades)
                .map(|(name, grade)| finding(name, grade))
                .collect()
        };
        let found = to_warnings(all(), false, false);
        let text = "memory, when the agent started: it is so. Do something.".to_owned();
        assert_eq!(found, [MachineWarning { problem: true, text }]);
        assert_eq!(to_warnings(all(), true, true).len(), 3);
        let many = (0..=MAX_FINDINGS).map(|_| finding(&"x".repeat(FINDING_CHARS), Grade::Note)).collect();
        let many = to_warnings(many, true, true);
        assert_eq!((many.len(), many[0].text.len()), (MAX_FINDINGS, FINDING_CHARS));
    }

    #[tokio::test]
    async fn a_program_without_checks_has_no_findings() {
        assert_eq!(find(Path::new("/bin/true"), Path::new("/"), true).await, []);
        assert_eq!(find(Path::new("/nothing"), Path::new("/"), true).await, []);
    }
}
