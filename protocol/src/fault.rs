//! Fault injection, to test that jobs survive crashes at certain points: `LOCKSTEP_FAULT` names points of the program
//! and an action for each. Without the variable nothing happens.
//!
//! The value has faults of the form `POINT:ACTION[@N][:FILE]`, separated by commas. A fault takes effect when the program reaches
//! its point for the N-th time (the first time without `@N`). `ACTION` is `kill` (SIGKILL to this process), `abort` (like a failed
//! assertion), `error` (the disk is full), `error*` (the same, also every later time), `hold` (waits until something is written to
//! `FILE`) or `slow` (waits 20 ms, also every later time). With `FILE`, a fault takes effect only once, in the process that reaches
//! the point first: it creates the file.

use std::{
    fs::File,
    io,
    path::PathBuf,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Points in the writing of a checkpoint, in order.
pub const CHECKPOINT_POINTS: [&str; 9] = [
    "checkpoint.begin",
    "checkpoint.model",
    "checkpoint.optimizer",
    "checkpoint.state",
    "checkpoint.manifest",
    "checkpoint.synced",
    "checkpoint.renamed",
    "checkpoint.written",
    "checkpoint.remove",
];
/// Points inside a transaction that stores ranks' reports, and right after it.
pub const INGEST_POINTS: [&str; 4] = ["ingest.begin", "ingest.event", "ingest.commit", "ingest.committed"];
/// Points inside transactions that make and change jobs.
pub const JOB_POINTS: [&str; 6] =
    ["create.begin", "create.commit", "create.committed", "claim.begin", "claim.commit", "claim.committed"];
/// The point before a rank begins an optimizer step.
pub const STEP_POINT: &str = "step";

#[derive(Debug)]
struct Fault {
    point: String,
    action: String,
    /// The number of the visit, from 1, at which the fault takes effect.
    at_visit: u64,
    file: Option<PathBuf>,
    /// Number of times that the point was reached.
    visits: AtomicU64,
}

fn parse(text: &str) -> Vec<Fault> {
    text.split(',')
        .filter_map(|fault| {
            let mut parts = fault.trim().splitn(3, ':');
            let (point, action) = (parts.next()?, parts.next()?);
            let (action, at_visit) = action.split_once('@').unwrap_or((action, "1"));
            Some(Fault {
                point: point.into(),
                action: action.into(),
                at_visit: at_visit.parse().ok()?,
                file: parts.next().map(PathBuf::from),
                visits: AtomicU64::new(0),
            })
        })
        .collect()
}

static FAULTS: LazyLock<Vec<Fault>> =
    LazyLock::new(|| std::env::var("LOCKSTEP_FAULT").map(|text| parse(&text)).unwrap_or_default());

/// Marks that the program has reached `point`.
///
/// # Errors
/// A fault reports a full disk at this point.
pub fn point(point: &str) -> io::Result<()> {
    for fault in FAULTS.iter().filter(|f| f.point == point) {
        let visit = fault.visits.fetch_add(1, Ordering::Relaxed) + 1;
        if fault.action == "slow" {
            if visit >= fault.at_visit {
                std::thread::sleep(Duration::from_millis(20));
            }
            continue;
        }
        let is_repeated = fault.action == "error*" && visit > fault.at_visit;
        if visit != fault.at_visit && !is_repeated {
            continue;
        }
        if let Some(path) = &fault.file
            && !is_repeated
            && File::create_new(path).is_err()
        {
            continue;
        }
        match fault.action.as_str() {
            "kill" => {
                // Sends SIGKILL with the program `kill`: no handler or destructor runs, and no unsafe code is needed.
                let pid = std::process::id().to_string();
                let _ = std::process::Command::new("kill").args(["-KILL", &pid]).status();
            }
            "abort" => std::process::abort(),
            "hold" => {
                while fault.file.as_ref().and_then(|file| file.metadata().ok()).is_some_and(|m| m.len() == 0)
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            _ => {
                let error = format!("no space left on device (LOCKSTEP_FAULT {point})");
                return Err(io::Error::new(io::ErrorKind::StorageFull, error));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_has_a_point_an_action_and_perhaps_a_visit_and_a_file() {
        let faults = parse("a.b:kill@3:/tmp/x, c:error");
        assert_eq!(
            (faults[0].point.as_str(), faults[0].action.as_str(), faults[0].at_visit),
            ("a.b", "kill", 3)
        );
        assert_eq!(faults[0].file.as_deref(), Some(std::path::Path::new("/tmp/x")));
        assert_eq!((faults[1].point.as_str(), faults[1].at_visit, faults[1].file.is_none()), ("c", 1, true));
        assert!(point("nothing.is.set").is_ok());
    }
}
