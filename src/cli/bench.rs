//! `lockstep bench`: measures the training throughput of named cases, or the preparation speed of pictures.

mod pictures;

use super::{output, usage_error};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use lockstep_engine::{
    bench::{self, Case, DeviceSetup, Division},
    plan::Plan,
    registry,
};
use lockstep_host::{cores, gpu::RankGpu};
use lockstep_protocol::spec::{Device, ParallelSpec, Precision, ShardSpec, Split};
use lockstep_worker::local_group::{self, JoinedGroup, Member};
use serde_json::Value;
use std::{ffi::OsString, path::PathBuf, time::Duration};

/// Time limit of a case from the start of its processes: cuDNN may tune plans first, and millions of classes may have to be initialised.
const CASE_TIMEOUT: Duration = Duration::from_secs(600);
/// Time limit for ranks to connect, and for responses during a step.
const RANK_TIMEOUT: Duration = Duration::from_secs(120);

/// Measure training throughput on synthetic pictures
#[derive(clap::Args)]
pub(crate) struct Args {
    /// ARCH:IMAGE_SIZE:BATCH_SIZE (may be repeated); the batch size is per rank on GPUs, and over all ranks on CPUs.
    /// resnet18c has the CIFAR stem [default on CPUs: resnet20:32:64 resnet18c:32:64 resnet50:32:32; on GPUs:
    /// resnet50:224:256 resnet50:224:32 resnet50:32:32 resnet18c:32:512]
    #[arg(long = "case", value_name = "CASE")]
    cases: Vec<Case>,
    /// Device to train on; auto: GPUs if the machine has GPUs
    #[arg(long, value_name = "DEVICE", default_value = "auto",
        value_parser = PossibleValuesParser::new(Device::NAMES).try_map(|name| name.parse::<Device>()))]
    device: Device,
    /// Precision of the convolutions; on CPUs auto is fp32, and bf16 needs AVX512-BF16
    #[arg(long, default_value = "auto",
        value_parser = PossibleValuesParser::new(Precision::NAMES).try_map(|name| name.parse::<Precision>()))]
    precision: Precision,
    /// Number of ranks: processes on one GPU each, or CPU processes that are connected over loopback
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Compute batch norm's statistics over all ranks (true), or on each rank (false; GPUs only)
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    sync_batch_norm: bool,
    /// Number of classes of the network
    #[arg(long, value_name = "N", default_value_t = bench::CLASSES as u32, value_parser = clap::value_parser!(u32).range(2..=100_000_000))]
    classes: u32,
    /// Number of ranks over which one copy of the network is split (tensor parallelism): a divisor of --ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    parallel_model: u32,
    /// Split of operators, such as layer4.*=out (may be repeated) [default: the last layer is split over its classes]
    #[arg(long = "parallel-shard", value_name = "MATCH=SPLIT", value_parser = parse_shard)]
    shards: Vec<ShardSpec>,
    /// Shard the optimizer state over the ranks (ZeRO-1)
    #[arg(long, value_name = "BOOL", default_value_t = false, action = clap::ArgAction::Set)]
    optimizer_sharding: bool,
    /// Fraction of a rank's classes that the rank samples in each step, above 0 and at most 1, like loss.sample_share
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = parse_share)]
    sample_share: f64,
    /// Number of ranks that divide the pixel rows of each picture; --parallel-model times this number must divide --ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    parallel_height: u32,
    /// Number of pipeline stages; the product with --parallel-model and --parallel-height must divide --ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    parallel_pipeline: u32,
    /// Number of micro-batches of a step, each of the case's batch size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    accumulate: u32,
    /// Compute deterministically on GPUs: the same bits in every run
    #[arg(long, value_name = "BOOL", default_value_t = false, action = clap::ArgAction::Set)]
    deterministic: bool,
    /// Threads per rank [default: the number of cores divided by the ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Instead of training, measure how many pictures of this dataset are read, decoded, randomly cropped and flipped per second
    #[arg(long, value_name = "PATH", conflicts_with_all = ["cases", "device", "precision", "ranks"])]
    pictures: Option<PathBuf>,
    /// Side length to which --pictures are cropped
    #[arg(long, value_name = "PIXELS", default_value_t = 224, requires = "pictures", value_parser = clap::value_parser!(u32).range(1..=1024))]
    image_size: u32,
    /// Print one line of JSON per case
    #[arg(long)]
    json: bool,
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "not a number above 0 and at most 1".into())
}

fn parse_shard(text: &str) -> Result<ShardSpec, String> {
    let parts = text.split_once('=');
    parts
        .and_then(|(pattern, split)| Some(ShardSpec { pattern: pattern.into(), split: split.parse().ok()? }))
        .filter(ShardSpec::has_valid_pattern)
        .ok_or_else(|| format!("not MATCH=SPLIT, where SPLIT is {}", Split::NAMES.join(" or ")))
}

/// Runs the cases one after the other.
///
/// # Errors
/// A case cannot be divided over the ranks or does not fit its network, or the device does not exist.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    if let Some(member) = Member::of_this_process().map_err(usage_error)? {
        return run_rank(&args, &member);
    }
    if let Some(path) = &args.pictures {
        let measured = pictures::run(path, args.image_size, threads(&args) as usize)?;
        if args.json {
            return output::line(measured.to_string());
        }
        let rate = measured["images_per_second"].as_f64().unwrap_or(0.0);
        return output::line(format_args!(
            "{:<26}{rate:>9.0} images/s  on {} threads",
            measured["case"].as_str().unwrap_or(""),
            measured["threads"]
        ));
    }
    let devices = find_devices(&args)?;
    let Args { ranks, parallel_model, parallel_height, parallel_pipeline, optimizer_sharding, .. } = args;
    let on_gpus = !devices.is_empty();
    if on_gpus && parallel_model > 1 && optimizer_sharding {
        return Err(usage_error(
            "--optimizer-sharding: not possible on GPUs with --parallel-model. Leave one of the two out",
        ));
    }
    if !ranks.is_multiple_of(parallel_pipeline * parallel_model * parallel_height) {
        return Err(usage_error(format!(
            "--ranks {ranks}: not divisible by pipeline x height x model = \
             {parallel_pipeline} x {parallel_height} x {parallel_model}"
        )));
    }
    if on_gpus && parallel_pipeline > 1 && (parallel_model * parallel_height > 1 || optimizer_sharding) {
        return Err(usage_error(
            "--parallel-pipeline: not possible on GPUs with --parallel-model, --parallel-height or --optimizer-sharding. Leave these out",
        ));
    }
    let cases = if args.cases.is_empty() { default_cases(on_gpus)? } else { args.cases.clone() };
    for case in &cases {
        let measured = if on_gpus {
            run_on_gpus(case, &args, &devices)?
        } else {
            let measured = bench::run(case, threads(&args) as usize, ranks, &division(&args), args.precision);
            serde_json::to_value(measured.map_err(|e| usage_error(format!("{}: {e}", case.name)))?)?
        };
        if args.json {
            output::line(measured.to_string())?;
            continue;
        }
        let number = |key: &str| measured[key].as_f64().unwrap_or(0.0);
        output::line(format_args!(
            "{:<26}{:>9.0} images/s  {:>8.2} ms a step (fastest {:.2}, waiting for other ranks {:.2})  {} x {}",
            case.name,
            number("images_per_second"),
            number("step_ms"),
            number("fastest_step_ms"),
            number("all_reduce_ms"),
            args.ranks,
            measured["device"].as_str().unwrap_or("")
        ))?;
    }
    Ok(())
}

fn default_cases(on_gpus: bool) -> anyhow::Result<Vec<Case>> {
    let names: &[&str] = if on_gpus {
        &["resnet50:224:256", "resnet50:224:32", "resnet50:32:32", "resnet18c:32:512"]
    } else {
        &["resnet20:32:64", "resnet18c:32:64", "resnet50:32:32"]
    };
    names.iter().map(|name| name.parse().map_err(|e: String| usage_error(e))).collect()
}

/// Returns one GPU per rank, or no device if ranks share the CPU's cores.
fn find_devices(args: &Args) -> anyhow::Result<Vec<String>> {
    let (mut devices, why_no_gpus) = registry::gpus(args.device).map_err(usage_error)?;
    let first_gpu = devices.first().map(|_| RankGpu { ordinal: 0, visible: devices.clone() });
    let backend = registry::device_of(first_gpu.as_ref(), args.device).backend;
    if args.precision == Precision::Fp16 && !backend.needs().half_precision {
        let precisions = Device::Cpu.kind().map_or("", |kind| kind.precisions);
        let why = match (args.device, why_no_gpus) {
            (device, _) if device.is_cpu() => format!("CPU ranks compute in {precisions}"),
            (_, Some(why)) => why,
            (_, None) => format!("there is no GPU on this machine, and CPU ranks compute in {precisions}"),
        };
        return Err(usage_error(format!("--precision: {why}")));
    }
    if let Some(why) = why_no_gpus {
        output::warn(format_args!("measuring the CPU: {why}"));
    }
    if !devices.is_empty() && devices.len() < args.ranks as usize {
        return Err(usage_error(format!("--ranks {}: this machine has {} GPUs", args.ranks, devices.len())));
    }
    devices.truncate(args.ranks as usize);
    Ok(devices)
}

fn division(args: &Args) -> Division {
    let parallel = ParallelSpec {
        ranks: args.ranks,
        mode: "hybrid".into(),
        model: args.parallel_model,
        height: args.parallel_height,
        pipeline: args.parallel_pipeline,
        shard: args.shards.clone(),
        optimizer_sharding: args.optimizer_sharding,
        ..ParallelSpec::default()
    };
    Division {
        plan: Plan::of(&parallel),
        classes: args.classes as usize,
        accumulate: args.accumulate as usize,
        sample_share: args.sample_share,
    }
}

/// Returns the number of threads per rank.
fn threads(args: &Args) -> u32 {
    args.threads.unwrap_or((cores() / args.ranks).max(1))
}

/// Measures a case with a process on each device.
fn run_on_gpus(case: &Case, args: &Args, devices: &[String]) -> anyhow::Result<Value> {
    // A rank measures the last case of its arguments.
    let case_argument = format!("--case={}", case.name).into();
    let arguments: Vec<OsString> = std::env::args_os().skip(1).chain([case_argument]).collect();
    let members = local_group::members(args.ranks, devices)?;
    let stdout = local_group::run(&arguments, &members, CASE_TIMEOUT)
        .map_err(|e| anyhow::anyhow!("{}: {e}", case.name))?;
    Ok(serde_json::from_slice(&stdout)?)
}

fn run_rank(args: &Args, member: &Member) -> anyhow::Result<()> {
    let (Some(gpu), Some(case)) = (&member.gpu, args.cases.last()) else {
        return Err(usage_error(
            "this process was started as a rank of `lockstep bench`, but without a GPU or without --case",
        ));
    };
    let device = registry::device_of(Some(gpu), args.device);
    device.backend.preflight(member.world_size).map_err(|e| anyhow::anyhow!(e))?;
    let JoinedGroup { comm, store } = member.meet(RANK_TIMEOUT)?;
    let settings = DeviceSetup {
        device,
        precision: args.precision,
        deterministic: args.deterministic,
        sync_batch_norm: args.sync_batch_norm,
        division: division(args),
        store: store.clone(),
    };
    let measured = bench::run_on_device(case, comm.clone(), settings).map_err(|e| anyhow::anyhow!(e))?;
    // The store ends with rank 0's process, so rank 0 waits for the other ranks.
    comm.barrier()?;
    if member.rank == 0 { output::json(&measured) } else { Ok(()) }
}
