//! `lockstep doctor`: what this machine has, and a real all-gather over rank processes.

use super::{init_tracing, output, wrong};
use lockstep_worker::{
    doctor::{Finding, GatherRank, Gathered, Grade, examine, gather},
    launch::own_program,
    rendezvous::free_port,
};
use serde::Serialize;
use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
};

/// What this machine has, and whether ranks can talk to each other
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ranks of the all-gather, a process each
    #[arg(long, value_name = "N", default_value_t = 2)]
    ranks: u32,
    /// Where data would lie
    #[arg(long, value_name = "DIR", default_value = ".")]
    data_dir: PathBuf,
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// Carries a rank's part to the process that is one; not an argument, because others can read those.
const RANK_VARIABLE: &str = "LOCKSTEP_DOCTOR_RANK";

#[derive(Serialize)]
struct Report {
    findings: Vec<Finding>,
    all_gather: Option<Gathered>,
}

/// Looks, gathers, and prints what to do.
///
/// # Errors
/// Exit status 1 when something would keep a job from training.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    init_tracing("warn");
    if let Ok(part) = std::env::var(RANK_VARIABLE) {
        return be_a_rank(&part);
    }
    if !(1..=1024).contains(&args.ranks) {
        return Err(wrong("--ranks: 1 to 1024"));
    }
    let mut findings = examine(&args.data_dir);
    let gathered = all_gather(args.ranks);
    let all_gather = match gathered {
        Ok(gathered) => Some(gathered),
        Err(error) => {
            findings.push(Finding {
                what: "all-gather".into(),
                grade: Grade::Problem,
                found: format!("{error:#}"),
                advice: Some("Ranks of this machine cannot work together; see loopback above.".into()),
            });
            None
        }
    };
    let problems = findings.iter().filter(|f| f.grade == Grade::Problem).count();
    if args.json {
        output::json(&Report { findings, all_gather })?;
    } else {
        for Finding { what, grade, found, advice } in &findings {
            let mark = match grade {
                Grade::Ok => "ok",
                Grade::Note => "note",
                Grade::Problem => "PROBLEM",
            };
            output::line(format_args!("{mark:<8} {what:<11} {found}"))?;
            if let Some(advice) = advice {
                output::line(format_args!("{:<8} {:<11} -> {advice}", "", ""))?;
            }
        }
        if let Some(gathered) = &all_gather {
            let rows: Vec<_> = gathered.values.iter().map(|v| format!("[{v:.0}.]")).collect();
            output::line(format_args!(
                "ok       all-gather  over {} ranks: [{}]",
                rows.len(),
                rows.join(", ")
            ))?;
            if rows.len() > 1 {
                output::line(format_args!(
                    "ok       all-reduce  1 KiB in {:.0} us, 16 MiB at {:.2} GB/s",
                    gathered.short_us,
                    gathered.bytes_per_second / 1e9
                ))?;
            }
        }
    }
    match problems {
        0 => Ok(()),
        1 => anyhow::bail!("a problem would keep jobs from training"),
        n => anyhow::bail!("{n} problems would keep jobs from training"),
    }
}

fn be_a_rank(part: &str) -> anyhow::Result<()> {
    let part: GatherRank = serde_json::from_str(part)?;
    let gathered = gather(&part)?;
    if part.rank == 0 { output::json(&gathered) } else { Ok(()) }
}

/// Starts the ranks and gives what rank 0 found.
fn all_gather(world_size: u32) -> anyhow::Result<Gathered> {
    let program = own_program()?;
    let port = free_port("127.0.0.1")?;
    let secret = uuid::Uuid::new_v4().simple().to_string();
    let mut ranks: Vec<Child> = Vec::new();
    let start = |rank| -> anyhow::Result<Child> {
        let part = GatherRank { rank, world_size, port, secret: secret.clone() };
        let child = Command::new(&program)
            .arg("doctor")
            .env(RANK_VARIABLE, serde_json::to_string(&part)?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(child)
    };
    let mut failure = None;
    for rank in 0..world_size {
        match start(rank) {
            Ok(child) => ranks.push(child),
            Err(error) => {
                failure = Some(error.context(format!("rank {rank} cannot be started")));
                break;
            }
        }
    }
    let mut printed = None;
    for (rank, mut child) in ranks.into_iter().enumerate() {
        if failure.is_some() {
            // It may have ended already.
            let _ = child.kill();
        }
        let output = child.wait_with_output()?;
        if !output.status.success() && failure.is_none() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            failure = Some(anyhow::anyhow!("rank {rank}: {said}"));
        }
        if rank == 0 {
            printed = Some(output.stdout);
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(serde_json::from_slice(&printed.unwrap_or_default())?),
    }
}
