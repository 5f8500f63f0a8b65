//! `lockstep bench`: training throughput of named cases.

use super::{output, wrong};
use lockstep_worker::engine::bench::{self, Case};

/// Measure training throughput on made-up pictures
#[derive(clap::Args)]
pub(crate) struct Args {
    /// ARCH:IMAGE_SIZE:BATCH_SIZE (over all ranks; may be repeated); resnet18c has the CIFAR stem
    #[arg(long = "case", value_name = "CASE",
        default_values = ["resnet20:32:64", "resnet18c:32:64", "resnet50:32:32"])]
    cases: Vec<Case>,
    /// Ranks, connected over loopback
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Threads of a rank [default: the cores, divided over the ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print a line of JSON a case
    #[arg(long)]
    json: bool,
}

/// Runs the cases one after the other.
///
/// # Errors
/// A case that cannot be divided over the ranks or does not fit its network.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let threads = args.threads.unwrap_or((cores / args.ranks).max(1)) as usize;
    for case in &args.cases {
        let measured =
            bench::run(case, threads, args.ranks).map_err(|e| wrong(format!("{}: {e}", case.name)))?;
        if args.json {
            output::line(serde_json::to_string(&measured)?)?;
        } else {
            output::line(format_args!(
                "{:<18}{:>9.0} images/s  {:>8.2} ms a step (fastest {:.2}, waiting for others {:.2})  {} x {}",
                measured.case,
                measured.images_per_second,
                measured.step_ms,
                measured.fastest_step_ms,
                measured.all_reduce_ms,
                measured.ranks,
                measured.device
            ))?;
        }
    }
    Ok(())
}
