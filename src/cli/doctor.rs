//! `lockstep doctor`: checks this machine, and runs an all-gather over rank processes.

mod assessment;
mod examined;
mod hosts;
mod peer;
mod remote;

use super::{init_tracing, launch::quote, output, usage_error};
use lockstep_host::{
    cores,
    gpu::{
        devices::{self, Gpu},
        libraries::{Libraries, links_dir},
    },
};
use lockstep_server::tls::{ca, examine as examine_certificate};
use lockstep_worker::{
    doctor::{AllGatherResult, Finding, Grade, examine, finding, gather},
    local_group::{self, Member},
};
use serde::Serialize;
use std::{path::PathBuf, time::Duration};

/// Check this machine: GPUs, libraries, memory, disk, and communication between ranks
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of ranks in the all-gather, one process each; on GPUs if there are enough [default: one per GPU, or 2 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Data directory whose disk is checked
    #[arg(long, value_name = "DIR", env = "LOCKSTEP_DATA_DIR", default_value = ".")]
    data_dir: PathBuf,
    /// Certificate to check (may be repeated), as in `serve --tls-cert`, `serve --agent-ca` or `agent --cert-file`. The certificate of
    /// `--tls-own-ca` is found in the data directory
    #[arg(long, value_name = "FILE")]
    tls_cert: Vec<PathBuf>,
    /// Print only the environment variables for GPU ranks, which a shell can evaluate
    #[arg(long)]
    environment: bool,
    /// Only read information: do not open GPUs, which jobs may be using, and start no ranks
    #[arg(long, conflicts_with = "ranks")]
    quick: bool,
    /// Instead of this machine, check these machines and the network between them, over SSH: node1,node2,node3. Each machine needs lockstep
    #[arg(long, value_name = "HOST,...", conflicts_with_all = ["ranks", "tls_cert", "environment", "quick"])]
    hosts: Option<String>,
    /// Like --hosts, for the machines in a hostfile in the format of `lockstep launch`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hosts", "ranks", "tls_cert", "environment", "quick"])]
    hostfile: Option<PathBuf>,
    /// The lockstep program on these machines: a path, or a name on their PATH
    #[arg(long, value_name = "PATH", default_value = "lockstep")]
    program: String,
    /// Answer checks of another machine (`--hosts` starts this on each machine)
    #[arg(long, hide = true)]
    peer: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Options for ssh, after --
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// Time limit of the all-gather: NCCL's first start on a large machine may take a minute or more.
const ALL_GATHER_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Serialize)]
struct Report {
    findings: Vec<Finding>,
    all_gather: Option<AllGatherResult>,
}

/// Checks the machine, runs the all-gather, and prints findings with advice.
///
/// # Errors
/// Exit status 1 if a finding would prevent training.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    init_tracing("warn");
    // This process is a rank of the all-gather, which `run_all_gather` or `peer` has started.
    if let Some(member) = Member::of_this_process().map_err(usage_error)? {
        let gathered = gather(&member).map_err(anyhow::Error::msg)?;
        return if member.rank == 0 { output::json(&gathered) } else { Ok(()) };
    }
    if args.peer {
        return peer::run();
    }
    if args.hosts.is_some() || args.hostfile.is_some() {
        return hosts::run(&args);
    }
    if !args.options.is_empty() {
        return Err(usage_error("options after -- are for ssh: give --hosts or --hostfile as well"));
    }
    if args.environment {
        for (name, value) in Libraries::find().environment(&links_dir()?)? {
            let (name, value) = (name.to_string_lossy(), quote(&value.to_string_lossy()));
            output::line(format_args!("export {name}={value}"))?;
        }
        return Ok(());
    }
    let mut findings = examine(&args.data_dir, args.quick);
    findings.extend(check_certificates(&args));
    let all_gather = if args.quick { None } else { check_all_gather(&args, &mut findings) };
    let problems = findings.iter().filter(|f| f.grade == Grade::Problem).count();
    if args.json {
        output::json(&Report { findings, all_gather })?;
    } else {
        let measured = all_gather.as_ref().map(all_gather_findings).unwrap_or_default();
        for Finding { what, grade, found, advice } in findings.iter().chain(&measured) {
            output::line(format_args!("{:<8} {what:<11} {found}", grade_label(*grade)))?;
            if let Some(advice) = advice {
                output::line(format_args!("{:<8} {:<11} -> {advice}", "", ""))?;
            }
        }
    }
    fail_if_any(problems, "")
}

/// Returns the result of the all-gather in the form in which it is printed.
fn all_gather_findings(gathered: &AllGatherResult) -> Vec<Finding> {
    let ok = |what: &str, found: String| Finding { what: what.into(), grade: Grade::Ok, found, advice: None };
    let rows: Vec<_> = gathered.values.iter().map(|v| format!("[{v:.0}.]")).collect();
    let members = if gathered.device == "GPU" { "GPUs by NCCL" } else { "ranks" };
    let mut findings =
        vec![ok("all-gather", format!("over {} {members}: [{}]", rows.len(), rows.join(", ")))];
    if rows.len() > 1 {
        findings.push(ok("all-reduce", describe_all_reduces(gathered)));
    }
    if let Some(why) = &gathered.no_peer_memory {
        let advice = "short all-reduces (sync_batch_norm) use NCCL, which is slower";
        findings.push(finding("peer memory", Grade::Note, format!("not shared: {why}"), advice));
    } else if gathered.device == "GPU" {
        findings.push(ok("peer memory", "shared between ranks".into()));
    }
    findings
}

/// Formats the measured time of a short all-reduce, and the speed of long all-reduces.
fn describe_all_reduces(gathered: &AllGatherResult) -> String {
    format!("1 KiB in {:.0} us, long ones at {:.2} GB/s", gathered.short_us, gathered.bytes_per_second / 1e9)
}

/// Returns an error if there are problems. `suffix` is appended to the error's sentence.
fn fail_if_any(problems: usize, suffix: &str) -> anyhow::Result<()> {
    match problems {
        0 => Ok(()),
        1 => anyhow::bail!("a problem would prevent jobs from training{suffix}"),
        count => anyhow::bail!("{count} problems would prevent jobs from training{suffix}"),
    }
}

fn grade_label(grade: Grade) -> &'static str {
    match grade {
        Grade::Ok => "ok",
        Grade::Note => "note",
        Grade::Problem => "PROBLEM",
    }
}

/// Starts ranks that run the all-gather. Adds findings if they fail.
fn check_all_gather(args: &Args, findings: &mut Vec<Finding>) -> Option<AllGatherResult> {
    // The findings already say why ranks cannot use GPUs.
    let mut gpus = devices::usable(None).map(|usable| usable.gpus).unwrap_or_default();
    let ranks = args.ranks.unwrap_or(gpus.len().max(2) as u32);
    if ranks as usize > gpus.len() || ranks < 2 {
        gpus.clear();
    }
    match run_all_gather(ranks, &gpus) {
        Ok(gathered) => Some(gathered),
        Err(error) => {
            let cores = cores();
            let advice = if gpus.is_empty() && ranks > 2 * cores {
                format!("{ranks} ranks may be too many for {cores} cores; try --ranks {cores}.")
            } else if gpus.is_empty() {
                "Ranks on this machine cannot communicate; see loopback above.".into()
            } else {
                "GPUs of this machine cannot communicate. NCCL_DEBUG=INFO lockstep doctor prints details; \
                 see links and /dev/shm above."
                    .into()
            };
            findings.push(finding("all-gather", Grade::Problem, error, advice));
            None
        }
    }
}

/// Checks the certificates in the data directory and in `--tls-cert`.
fn check_certificates(args: &Args) -> Vec<Finding> {
    let ca = ca::folder(&args.data_dir);
    let files = [ca.join("ca.crt"), ca.join("server.pem")].into_iter().filter(|path| path.exists());
    let check = |path: PathBuf| {
        let name = path.display();
        let (grade, found, advice) = match examine_certificate(&path) {
            Ok(facts) => {
                let now = jiff::Timestamp::now();
                let days_left = facts.days_left(now);
                let (grade, advice) = match days_left {
                    _ if !facts.expires_soon(now) => (Grade::Ok, None),
                    0 => (Grade::Problem, Some("Renew it.")),
                    _ => (Grade::Note, Some("Renew it. The server renews only certificates that it made.")),
                };
                (grade, format!("{name}: {days_left} days left"), advice.map(str::to_owned))
            }
            Err(error) => (Grade::Problem, error, None),
        };
        Finding { what: "certificate".into(), grade, found, advice }
    };
    files.chain(args.tls_cert.clone()).map(check).collect()
}

/// Starts the ranks of the all-gather and returns rank 0's result.
fn run_all_gather(world_size: u32, gpus: &[Gpu]) -> Result<AllGatherResult, String> {
    let devices: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let members = local_group::members(world_size, &devices).map_err(|e| e.to_string())?;
    parse_result(&local_group::run(&["doctor".into()], &members, ALL_GATHER_TIMEOUT)?)
}

/// Parses the output of rank 0 of an all-gather.
fn parse_result(stdout: &[u8]) -> Result<AllGatherResult, String> {
    serde_json::from_slice(stdout).map_err(|e| format!("rank 0 printed an unexpected result: {e}"))
}
