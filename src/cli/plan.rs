//! `lockstep plan`: predicts, without training, how a job's network is divided over its ranks and what a step costs.

use super::{age::age, init_tracing, job_file, output, usage_error};
use jiff::Timestamp;
use lockstep_data::loader::DataSource;
use lockstep_engine::{
    Sample,
    net::Network,
    plan::{Candidate, Cost, Machine, Plan, lower},
    registry,
};
use lockstep_host::{cores, gpu::RankGpu};
use lockstep_protocol::{
    JobSpec,
    network::LayerDescription,
    numbers::{plural, rate},
    spec::{Device, ImageSize, Validation, apply_set},
};
use lockstep_worker::{
    local_group::{self, JoinedGroup, Member},
    planning::{self, Planned, gigabytes},
    train::check_sample,
};
use serde::Serialize;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// Time limit for measurements from the start of the processes: cuDNN may tune plans first.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(600);
/// Time limit for ranks to connect and to respond.
const RANK_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum number of alternative plans that are shown.
const MAX_ALTERNATIVES: usize = 5;

/// Print how a job's network is divided over its ranks and what a step costs, without training
///
/// Prints the plan of the job file, or with parallel.mode = "auto" the fastest plan that fits into memory. Times are predicted from
/// measured speeds of operators and links.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's specification, a TOML file in which data.dataset is a path
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Change a key of the specification, such as parallel.mode=auto (may be repeated)
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// Numbers of ranks to plan for instead of parallel.ranks, such as 8,64,1024
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Vec<u32>,
    /// Number of classes, for a dataset that is not on this machine; requires data.image_size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    classes: Option<u32>,
    /// File with measurements of a machine: the output of --json on that machine [default: measure this machine once]
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// Measure this machine again
    #[arg(long, conflicts_with = "machine")]
    measure: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Measurement that a rank on this machine runs
    #[arg(long, hide = true, value_name = "JSON")]
    sample: Option<String>,
}

/// The JSON output.
#[derive(Serialize)]
struct Report<'a> {
    machine: &'a Machine,
    plans: Vec<PlanReport>,
}

#[derive(Serialize)]
struct PlanReport {
    ranks: u32,
    plan: Value,
    layers: Vec<LayerDescription>,
    considered: Vec<Considered>,
}

#[derive(Serialize)]
struct Considered {
    words: String,
    step_ms: f64,
    images_per_second: f64,
    memory_bytes: u64,
    fits: bool,
}

/// Predicts and prints the plans.
///
/// # Errors
/// Exit status 2 for mistakes in the job or the arguments, or if no plan can run; 1 if this machine cannot be measured.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    init_tracing("warn");
    if let Some(member) = Member::of_this_process().map_err(usage_error)? {
        return run_rank(&args, &member);
    }
    let document = job_file::read_document(&args.job, &args.sets)?;
    let spec = job_file::check(&args.job, &document)?;
    let network = build_network(&args, &spec)?;
    let rank_counts = if args.ranks.is_empty() { vec![spec.parallel.ranks] } else { args.ranks.clone() };
    // Each plan is checked before the machine is measured.
    let mut specs = Vec::new();
    for ranks in &rank_counts {
        let mut document = document.clone();
        apply_set(&mut document, &format!("parallel.ranks={ranks}")).map_err(usage_error)?;
        let spec = job_file::check(&args.job, &document)?;
        lower(&network, &Plan::of(&spec.parallel), 0).map_err(usage_error)?;
        specs.push(spec);
    }
    let machine = match &args.machine {
        Some(path) => read_machine(path)?,
        None => {
            let max_ranks = rank_counts.iter().copied().max().unwrap_or(1);
            measure_here(&args, &spec, &network, max_ranks)?
        }
    };
    let mut plans = Vec::new();
    for spec in specs {
        let planned = Planned::of(&spec, &network, &machine).map_err(usage_error)?;
        plans.push((spec, planned));
    }
    if args.json {
        return print_json(&plans, &network, &machine);
    }
    output::line(format_args!(
        "{} of {} parameters, {}, {side} x {side} pixels; {}, {} a machine",
        network.arch,
        network.parameter_count(),
        plural(network.classes as u64, "class"),
        machine.device,
        plural(machine.ranks as u64, "rank"),
        side = network.image_size
    ))?;
    if machine.backend == "cpu"
        && plans.iter().any(|(spec, _)| (spec.parallel.ranks as usize) < machine.ranks)
    {
        output::line(format_args!(
            "The figures were measured with {} ranks on one machine. With fewer ranks, each rank has more cores and is faster than \
             predicted.",
            machine.ranks
        ))?;
    }
    if machine.between.is_none() && plans.iter().any(|(spec, _)| spec.parallel.ranks as usize > machine.ranks)
    {
        output::line(
            "The network between machines is predicted to be as fast as the connection within a machine, because it was not measured.",
        )?;
    }
    match &plans[..] {
        [(spec, planned)] => print_plan(spec, planned, &network, &machine),
        _ => {
            let row = |(spec, planned): &(JobSpec, Planned)| {
                let [step, images, memory] = format_figures(&planned.chosen, &machine);
                [
                    spec.parallel.ranks.to_string(),
                    spec.global_batch_size().to_string(),
                    (spec.parallel.ranks as usize).div_ceil(machine.ranks).to_string(),
                    step,
                    images,
                    memory,
                    planned.limited_by.into(),
                    planned.chosen.plan.to_string(),
                ]
            };
            let header =
                ["RANKS", "PICTURES", "MACHINES", "STEP", "IMAGES/S", "MEMORY", "LIMITED BY", "PLAN"];
            output::table(header, plans.iter().map(row))
        }
    }
}

/// Prints a plan: its operators, its totals, and alternatives.
fn print_plan(spec: &JobSpec, planned: &Planned, network: &Network, machine: &Machine) -> anyhow::Result<()> {
    let layers = planned.describe(network).layers;
    // Operators that strategies may name have rows of their own. All other operators share one row.
    let (named, rest): (Vec<_>, Vec<_>) =
        layers.iter().partition(|layer| layer.kind.starts_with("conv") || layer.kind == "linear");
    let row = |name: String, kind: String, output: String, operators: &[&LayerDescription]| {
        let plans = || operators.iter().filter_map(|layer| layer.plan.as_ref());
        let placement = match operators {
            [layer] => layer.plan.as_ref().map(|plan| plan.placement.clone()).unwrap_or_default(),
            _ => String::new(),
        };
        [
            name,
            kind,
            output,
            placement,
            format_megabytes(plans().map(|plan| plan.memory_bytes).sum()),
            format_megabytes(plans().map(|plan| plan.sent_bytes).sum()),
            format!("{:.3} ms", plans().map(|plan| f64::from(plan.time_us)).sum::<f64>() / 1e3),
        ]
    };
    let shape = |layer: &LayerDescription| {
        layer.output_shape.iter().map(u32::to_string).collect::<Vec<_>>().join(" x ")
    };
    let mut rows: Vec<_> = named
        .iter()
        .map(|layer| row(layer.name.clone(), layer.kind.clone(), shape(layer), &[*layer]))
        .collect();
    rows.push(row(format!("{} others", rest.len()), String::new(), String::new(), &rest));
    output::table(["OPERATOR", "KIND", "OUTPUT", "PLACEMENT", "MEMORY", "SENT", "PREDICTED"], rows)?;
    let Candidate { plan, cost } = &planned.chosen;
    let Cost { step_ms, compute_ms, exchange_ms, bubble_ms, gradients_ms, update_ms, .. } = cost;
    let [_, images, memory] = format_figures(&planned.chosen, machine);
    let bubble = if plan.mesh.stage > 1 {
        format!(", waiting for other stages {bubble_ms:.2}")
    } else {
        String::new()
    };
    output::line("")?;
    let ranks = spec.parallel.ranks;
    let machines = (ranks as usize).div_ceil(machine.ranks);
    if machines > 1 {
        let sharing = match machine.backend.as_str() {
            "cpu" => " If all ranks share one machine, a step takes longer.",
            _ => "",
        };
        output::line(format_args!(
            "{ranks} ranks need {machines} machines like the measured machine. The times are for {machines} machines.{sharing}"
        ))?;
    }
    for (key, value) in [
        ("plan", plan.to_string()),
        ("why", planned.why.clone()),
        ("pictures a step", spec.global_batch_size().to_string()),
        (
            "step",
            format!(
                "{step_ms:.2} ms: computing {compute_ms:.2}, exchanging {exchange_ms:.2}, waiting for gradients {gradients_ms:.2}, \
                 updating {update_ms:.2}{bubble}"
            ),
        ),
        ("images a second", images),
        ("memory of a rank", format!("{memory} of {}", gigabytes(machine.memory_bytes as f64))),
        ("limited by", planned.limited_by.into()),
    ] {
        output::line(format_args!("{key:<20}{value}"))?;
    }
    let alternatives = planned
        .considered
        .iter()
        .filter(|candidate| !candidate.plan.is_equivalent(plan, network))
        .take(MAX_ALTERNATIVES);
    let rows: Vec<_> = alternatives
        .map(|candidate| {
            let [step, images, memory] = format_figures(candidate, machine);
            [step, images, memory, candidate.plan.to_string()]
        })
        .collect();
    if rows.is_empty() {
        return Ok(());
    }
    output::line("")?;
    output::table(["STEP", "IMAGES/S", "MEMORY", "OTHER PLAN"], rows)
}

/// Formats a plan's time per step, images per second, and memory per rank.
fn format_figures(candidate: &Candidate, machine: &Machine) -> [String; 3] {
    let cost = &candidate.cost;
    let memory_note = if candidate.fits(machine) { "" } else { " (too much)" };
    [
        format!("{:.2} ms", cost.step_ms),
        rate(cost.images_per_second),
        format!("{}{memory_note}", gigabytes(cost.memory_bytes)),
    ]
}

fn format_megabytes(bytes: u64) -> String {
    if bytes == 0 { "-".into() } else { format!("{:.1} MB", bytes as f64 / 1e6) }
}

fn print_json(plans: &[(JobSpec, Planned)], network: &Network, machine: &Machine) -> anyhow::Result<()> {
    let report = |(spec, planned): &(JobSpec, Planned)| -> anyhow::Result<PlanReport> {
        let description = planned.describe(network);
        let considered = planned.considered.iter().map(|candidate| Considered {
            words: candidate.plan.to_string(),
            step_ms: candidate.cost.step_ms,
            images_per_second: candidate.cost.images_per_second,
            memory_bytes: candidate.cost.memory_bytes as u64,
            fits: candidate.fits(machine),
        });
        Ok(PlanReport {
            ranks: spec.parallel.ranks,
            plan: serde_json::to_value(description.plan)?,
            layers: description.layers,
            considered: considered.collect(),
        })
    };
    let plans = plans.iter().map(report).collect::<anyhow::Result<_>>()?;
    output::json(&Report { machine, plans })
}

/// Returns the job's network for the largest size of its training pictures.
fn build_network(args: &Args, spec: &JobSpec) -> anyhow::Result<Network> {
    let (sides, channels, classes) = match args.classes {
        Some(classes) => {
            let evaluation = spec.data.effective_validation_size().ok_or_else(|| {
                usage_error(
                    "--classes: the dataset is not read, so the side of pictures is also needed: --set data.image_size=SIDE, such as 32 or \
                     224",
                )
            })?;
            let side = spec.data.image_size.as_ref().map_or(evaluation, ImageSize::last);
            ((evaluation as usize, side as usize), 3, classes as usize)
        }
        None => {
            let dataset = job_file::find_dataset(spec, &args.job).ok_or_else(|| {
                let given = &spec.data.dataset;
                usage_error(format!(
                    "data.dataset: {given} does not exist on this machine: give the dataset's folder with --set data.dataset=DIR \
                     (`lockstep dataset list` shows the folders of registered datasets), or --classes N and data.image_size"
                ))
            })?;
            let mut data = spec.data.clone();
            data.validation = Validation::Split("none".into());
            let data = DataSource::open(&dataset, &data, spec.train.seed)?;
            let shape = &data.shape;
            let side = shape.training_sizes.last().map_or(shape.image_size, |(_, side)| *side);
            ((shape.image_size, side), shape.channels, shape.classes.len())
        }
    };
    planning::build_network(&spec.model, sides, channels, classes).map_err(usage_error)
}

/// Reads measurements from a file: the output of `--json`, or only its key `machine`.
fn read_machine(path: &Path) -> anyhow::Result<Machine> {
    let failed = |detail: String| usage_error(format!("--machine {}: {detail}", path.display()));
    let bytes = fs::read(path).map_err(|e| failed(e.to_string()))?;
    let mut document: Value = serde_json::from_slice(&bytes).map_err(|e| {
        failed(format!("is not JSON ({e}): give the output of `lockstep plan --json` on the machine"))
    })?;
    let machine = document.get_mut("machine").map(Value::take).unwrap_or(document);
    let machine: Machine = serde_json::from_value(machine).map_err(|e| {
        failed(format!(
            "has no figures of a machine ({e}): give the output of `lockstep plan --measure --json` on the machine"
        ))
    })?;
    machine.check().map_err(failed)?;
    Ok(machine)
}

/// Returns this machine's measurements, cached or measured now, with `max_ranks` ranks or with one rank for each GPU or core, whichever are
/// fewer.
fn measure_here(args: &Args, spec: &JobSpec, network: &Network, max_ranks: u32) -> anyhow::Result<Machine> {
    let requested = spec.parallel.device;
    let (devices, _) = registry::gpus(requested).map_err(|why| {
        usage_error(format!(
            "parallel.device = {:?}: {why}. To plan for another machine, give its figures with --machine FILE",
            requested.as_str()
        ))
    })?;
    let ranks = match devices.len() as u32 {
        0 => max_ranks.min(cores().max(2)),
        gpus => max_ranks.min(gpus),
    };
    let first_gpu = (!devices.is_empty()).then(|| RankGpu { ordinal: 0, visible: devices.clone() });
    let device = registry::device_of(first_gpu.as_ref(), requested);
    let sample = planning::sample_to_measure(spec, network, device, (cores() / ranks).max(1) as usize);
    let stored = planning::stored_figures(&sample, device, ranks);
    if let Some((machine, measured_at)) = stored.filter(|_| !args.measure) {
        let age = Timestamp::try_from(measured_at).map(age).unwrap_or_default();
        output::warn(format_args!("this machine was measured {age} ago; `--measure` measures it again"));
        return Ok(machine);
    }
    check_sample(spec, &sample, device.backend.needs(), ranks)
        .map_err(|error| usage_error(format!("this machine cannot be measured: {error}")))?;
    output::warn(format_args!("measuring this machine with {}", plural(ranks.into(), "rank")));
    let members = local_group::members(ranks, &devices)?;
    let sample_option = format!("--sample={}", serde_json::to_string(&sample)?);
    let arguments = ["plan".into(), args.job.clone().into_os_string(), sample_option.into()];
    let stdout = local_group::run(&arguments, &members, MEASURE_TIMEOUT).map_err(|e| anyhow::anyhow!(e))?;
    let machine: Machine = serde_json::from_slice(&stdout)?;
    planning::store_figures(&machine, &sample, device, ranks);
    Ok(machine)
}

/// Measures this machine as one of the ranks.
fn run_rank(args: &Args, member: &Member) -> anyhow::Result<()> {
    let sample: Sample = serde_json::from_str(args.sample.as_deref().unwrap_or_default())?;
    let device = registry::device_of(member.gpu.as_ref(), Device::Auto);
    device.backend.preflight(member.world_size).map_err(|e| anyhow::anyhow!(e))?;
    let JoinedGroup { comm, store } = member.meet(RANK_TIMEOUT)?;
    let machine = planning::measure(&sample, device, member.world_size, comm.as_ref(), store.as_deref())?;
    if member.rank == 0 { output::json(&machine) } else { Ok(()) }
}
