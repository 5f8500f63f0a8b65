//! The plan of a job: how its network is distributed over its ranks, the predicted cost, and why the plan was chosen.
//! Used by `lockstep plan`, and by the ranks of a job with `parallel.mode = "auto"`. A machine is measured once, and
//! the figures are stored in the cache.

use crate::links;
use lockstep_comm::{ProcessGroup, rendezvous::Store};
use lockstep_engine::{
    DeviceChoice, EngineError, LossConfig, Sample, Selection, WIDE_HEADS,
    net::{self, Network, Placement},
    plan::{Candidate, Link, Machine, Mesh, OperatorCost, Plan, Workload, cost, lower, search},
    registry, slots, wide_heads,
};
use lockstep_host::{cache, cpu_name, usage::memory_free_and_total};
use lockstep_protocol::{
    network::{LayerPlan, NetworkDescription, PlanDescription, PlanPrediction},
    spec::{Device, JobSpec, ModelSpec, ParallelSpec, from_json},
};
use sha2::{Digest, Sha256};
use std::time::SystemTime;

/// Maximum number of pictures in a measured step, on CPU cores and on a device with its own memory. Larger steps hardly change
/// the speed.
const MAX_PICTURES: [u32; 2] = [8, 256];

/// Builds the network of a job for pictures of `side` pixels. The side of evaluated pictures determines the stem.
///
/// # Errors
/// The pictures are too small for the network.
pub fn build_network(
    model: &ModelSpec,
    (evaluation_side, side): (usize, usize),
    channels: usize,
    classes: usize,
) -> Result<Network, String> {
    let model = ModelSpec { stem: model.stem_for(evaluation_side), ..model.clone() };
    net::build(&model, side, channels, classes)
}

/// The sample to measure for a job with `network`.
pub fn sample_to_measure(spec: &JobSpec, network: &Network, device: DeviceChoice, threads: usize) -> Sample {
    let max_pictures = MAX_PICTURES[usize::from(!device.backend.needs().host_memory)];
    Sample {
        model: ModelSpec {
            stem: spec.model.stem_for(network.image_size),
            pretrained: None,
            ..spec.model.clone()
        },
        image_size: network.image_size,
        // Divided by `parallel.height`, so that the sample has as many rows of pixels as a rank's part of the pictures.
        pictures: (spec.micro_batch_size() / spec.parallel.height.max(1)).clamp(1, max_pictures) as usize,
        precision: spec.train.precision,
        threads,
        heads: wide_heads(network.classes),
    }
}

/// Collective: measures how fast ranks compute concurrently, and the links between them. `local_ranks` is the number of
/// ranks on this machine.
///
/// # Errors
/// As [`lockstep_engine::measure`], or a rank does not respond.
pub fn measure(
    sample: &Sample,
    device: DeviceChoice,
    local_ranks: u32,
    group: &dyn ProcessGroup,
    store: Option<&Store>,
) -> Result<Machine, EngineError> {
    let needs = device.backend.needs();
    let ranks = group.size() as usize;
    let mut link = None;
    if ranks > 1 {
        let ordinal = (!needs.host_memory).then_some(device.ordinal);
        let found = links::measure(group, store, ordinal)?;
        link = Some(Link::of_all_reduce(ranks, found.short_us, found.bytes_per_second));
    }
    let (_, memory_bytes) = name_and_memory(device, local_ranks);
    let (name, rates) = lockstep_engine::measure(sample, device, memory_bytes)?;
    // Ranks wait for each other, because connections may break when the process of the first rank ends.
    group.barrier()?;
    Ok(Machine {
        device: name,
        backend: device.backend.name().into(),
        ranks: local_ranks.max(1) as usize,
        memory_bytes,
        shared_memory: needs.shared_memory,
        rates,
        within: link,
        between: None,
    })
}

/// A device's name, and the memory of a rank on it.
fn name_and_memory(device: DeviceChoice, local_ranks: u32) -> (String, u64) {
    if device.backend.needs().host_memory {
        let (_, total_bytes) = memory_free_and_total();
        return (cpu_name(), total_bytes / u64::from(local_ranks.max(1)));
    }
    let slots = device.backend.devices(Selection::default()).unwrap_or_default().slots;
    let slot = slots.into_iter().nth(device.ordinal.max(0) as usize);
    slot.map_or((String::new(), u64::MAX), |slot| (slot.name, slot.memory_bytes))
}

/// The cache file of the figures that were measured with `sample` and `ranks` ranks.
fn figures_name(sample: &Sample, device: DeviceChoice, ranks: u32) -> Option<String> {
    // For one local rank, the memory is the machine's.
    let key = (sample, device.backend.name(), name_and_memory(device, 1), ranks);
    let digest = Sha256::digest(serde_json::to_vec(&key).ok()?);
    Some(format!("machine-{}.json", hex::encode(&digest[..8])))
}

/// The stored figures that include the sample's heads, if there are any, and when they were measured.
pub fn stored_figures(sample: &Sample, device: DeviceChoice, ranks: u32) -> Option<(Machine, SystemTime)> {
    let read_with = |heads: usize| {
        let sample = Sample { heads: WIDE_HEADS[..heads].to_vec(), ..sample.clone() };
        let name = figures_name(&sample, device, ranks)?;
        let machine: Machine = serde_json::from_slice(&cache::read(&name)?).ok()?;
        machine.check().ok()?;
        Some((machine, cache::modified(&name)?))
    };
    (sample.heads.len()..=WIDE_HEADS.len()).find_map(read_with)
}

/// Stores measured figures. If there is no cache directory, they are measured again each time.
pub fn store_figures(machine: &Machine, sample: &Sample, device: DeviceChoice, ranks: u32) {
    if let (Some(name), Ok(json)) = (figures_name(sample, device, ranks), serde_json::to_vec_pretty(machine))
    {
        cache::write(&name, &json);
    }
}

/// A job's plan, and the alternatives that were considered.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    pub chosen: Candidate,
    /// The best plan of each mesh, best first.
    pub considered: Vec<Candidate>,
    /// `computing`, `communication` or `memory`.
    pub limited_by: &'static str,
    pub why: String,
}

impl Planned {
    /// The plan of a job on machines like `machine`: the plan that the job asks for or, with `parallel.mode =
    /// "auto"`, the best plan.
    ///
    /// # Errors
    /// Why no plan that the job allows can run.
    pub fn of(spec: &JobSpec, network: &Network, machine: &Machine) -> Result<Self, String> {
        let parallel = &spec.parallel;
        let ranks = parallel.ranks as usize;
        if ranks > 1 && machine.within.is_none() {
            return Err(format!(
                "the links of {ranks} ranks are not known: one rank was measured, because this machine has one device. Give the \
                 figures of another machine (--machine FILE)"
            ));
        }
        let work = Workload {
            pictures: spec.global_batch_size(),
            accumulate: spec.train.accumulate.into(),
            state_per_weight: slots(spec.train.optimizer).len() as u64
                + u64::from(spec.train.ema_decay > 0.0),
            sync_batch_norm: parallel.sync_batch_norm,
        };
        let check_plan = |plan: &Plan| {
            check_runs(&with_plan(spec, plan, machine), machine)?;
            if spec.loss.class_weights.is_some() && plan.mesh.model > 1 {
                return Err("loss.class_weights needs all classes on each rank".into());
            }
            if !plan.is_data() {
                LossConfig::from(spec).check_part(&lower(network, plan, ranks - 1)?)?;
            }
            registry::named(&machine.backend).map_or(Ok(()), |backend| backend.check_plan(network, plan))
        };
        // If settings make results depend on how pictures are distributed over ranks, only data parallelism is used.
        let allows_hybrid = parallel.gradients_mean && (parallel.sync_batch_norm || spec.model.freeze_norm);
        let may_run = |plan: &Plan| (allows_hybrid || plan.is_data()) && check_plan(plan).is_ok();
        // With `auto`, the job may set a part of the plan. Otherwise, the search only finds plans to compare with the job's.
        let unconstrained = ParallelSpec::default();
        let pinned = if parallel.is_auto() { parallel } else { &unconstrained };
        let considered = search(network, ranks, (machine, &work), pinned, may_run);
        let chosen = if parallel.is_auto() {
            considered.first().cloned().ok_or_else(|| {
                let why = check_plan(&Plan::data(parallel.ranks)).err();
                let why = why.unwrap_or_else(|| "leave out parallel.model, height, pipeline or shard".into());
                format!("no plan for {ranks} ranks can be run: {why}")
            })?
        } else {
            let plan = Plan::of(parallel);
            let cost = cost(network, &plan, machine, &work)?;
            Candidate { plan, cost }
        };
        let why = explain(&chosen, &considered, parallel, machine);
        let limited_by = name_limit(&chosen, &considered, parallel, machine);
        Ok(Self { chosen, considered, limited_by, why })
    }

    /// The job as ranks run it: the same training, with the plan in place of `auto`.
    pub fn resolve(&self, spec: &JobSpec, machine: &Machine) -> JobSpec {
        with_plan(spec, &self.chosen.plan, machine)
    }

    /// Why the memory of a rank of `machine` does not suffice for the plan. `None` if the memory suffices.
    pub fn memory_shortage(&self, machine: &Machine) -> Option<String> {
        (!self.chosen.fits(machine)).then(|| {
            format!(
                "no plan fits: {} needs {} per rank, which has {}. Use more ranks, smaller pictures, or split the batch \
                 (train.accumulate)",
                self.chosen.plan,
                gigabytes(self.chosen.cost.memory_bytes),
                gigabytes(machine.memory_bytes as f64)
            )
        })
    }

    /// Describes how the plan distributes each layer of `network`, which may be for another size of pictures.
    pub fn describe(&self, network: &Network) -> NetworkDescription {
        let Candidate { plan, cost } = &self.chosen;
        let mut description = network.describe();
        for (layer, operator) in description.layers.iter_mut().zip(&cost.operators) {
            layer.plan = Some(LayerPlan {
                placement: placement(&layer.kind, operator, plan.mesh),
                memory_bytes: operator.memory_bytes as u64,
                sent_bytes: operator.sent_bytes as u64,
                time_us: (operator.ms * 1e3) as f32,
            });
        }
        let predicted = PlanPrediction {
            step_ms: cost.step_ms as f32,
            images_per_second: cost.images_per_second as f32,
            memory_bytes: cost.memory_bytes as u64,
            limited_by: self.limited_by.into(),
            why: self.why.clone(),
        };
        description.plan = Some(PlanDescription { predicted: Some(predicted), ..describe(plan, network) });
        description
    }

    /// A summary for the log, such as `plan: 2 (data) x 1 (height) x 2 (model) ranks, fc split by its outputs; the prediction is
    /// 12.3 ms per step, ...`.
    pub fn in_words(&self) -> String {
        let Candidate { plan, cost } = &self.chosen;
        format!(
            "plan: {plan}; the prediction is {:.1} ms per step, {:.0} images/s and {} per rank, limited by {}; {}",
            cost.step_ms,
            cost.images_per_second,
            gigabytes(cost.memory_bytes),
            self.limited_by,
            self.why
        )
    }
}

/// Describes a plan without predictions.
pub fn describe(plan: &Plan, network: &Network) -> PlanDescription {
    let Mesh { stage, data, height, model } = plan.mesh;
    PlanDescription {
        words: plan.to_string(),
        pipeline: stage as u32,
        later_stages: plan.stage_begins(network),
        data: data as u32,
        height: height as u32,
        model: model as u32,
        shard: plan.shards.clone(),
        predicted: None,
        measured_step_ms: None,
        measured_memory_bytes: None,
    }
}

/// The job that runs `plan`. The number of pictures in a step and in a micro-batch over all ranks is unchanged.
fn with_plan(spec: &JobSpec, plan: &Plan, machine: &Machine) -> JobSpec {
    let mut resolved = spec.clone();
    let Mesh { stage, height, model, .. } = plan.mesh;
    let mesh = [stage, height, model].map(|ranks| ranks as u32);
    resolved.parallel = spec.parallel.with_mesh(mesh, plan.shards.clone());
    resolved.parallel.optimizer_sharding = plan.optimizer_sharding;
    if resolved.parallel.is_hybrid() {
        resolved.parallel.device = machine.backend.parse::<Device>().unwrap_or(spec.parallel.device);
    }
    let pictures = spec.global_batch_size();
    if resolved.global_batch_size() != pictures {
        resolved.train.batch_size = None;
        resolved.train.global_batch_size = u32::try_from(pictures).ok();
    }
    resolved
}

/// Checks that the ranks of a machine can run a job. The error says why they cannot.
fn check_runs(spec: &JobSpec, machine: &Machine) -> Result<(), String> {
    let document = serde_json::to_value(spec).map_err(|e| e.to_string())?;
    from_json(&document).map_err(|mistakes| {
        let first = mistakes.first();
        let key = first.map(|mistake| mistake.pointer.trim_start_matches('/').replace('/', "."));
        key.zip(first).map(|(key, mistake)| format!("{key} {}", mistake.detail)).unwrap_or_default()
    })?;
    registry::named(&machine.backend).map_or(Ok(()), |backend| backend.check(spec))
}

/// Why `chosen` is the plan of the job.
fn explain(
    chosen: &Candidate,
    considered: &[Candidate],
    parallel: &ParallelSpec,
    machine: &Machine,
) -> String {
    let timed =
        |candidate: &Candidate| format!("{} ({:.1} ms per step)", candidate.plan, candidate.cost.step_ms);
    if parallel.ranks == 1 {
        return "there is one rank".into();
    }
    if !parallel.is_auto()
        && let Some(best) = considered.first().filter(|best| best.is_better(chosen, machine))
    {
        return format!("the job asks for it; parallel.mode = \"auto\" would choose {}", timed(best));
    }
    if chosen.plan.optimizer_sharding && !parallel.optimizer_sharding {
        return "the memory of a rank does not suffice for the whole optimizer state".into();
    }
    if !parallel.is_auto() || chosen.plan.is_data() {
        let next_best = considered.iter().find(|other| other.plan.mesh != chosen.plan.mesh);
        return next_best.map_or("these ranks can run no other plan".into(), |next_best| {
            format!("no other plan is 2 % faster; the next best is {}", timed(next_best))
        });
    }
    match considered.iter().find(|other| other.plan.is_data()) {
        Some(data) if !data.fits(machine) => format!(
            "data parallel needs {} per rank, which has {}",
            gigabytes(data.cost.memory_bytes),
            gigabytes(machine.memory_bytes as f64)
        ),
        Some(data) => format!("data parallel takes {:.1} ms per step", data.cost.step_ms),
        None => "the job sets a part of the plan, or has too few pictures per rank for data parallel".into(),
    }
}

fn name_limit(
    chosen: &Candidate,
    considered: &[Candidate],
    parallel: &ParallelSpec,
    machine: &Machine,
) -> &'static str {
    let shards_optimizer = chosen.plan.optimizer_sharding && !parallel.optimizer_sharding;
    let data_fits = considered.iter().filter(|other| other.plan.is_data()).all(|data| data.fits(machine));
    let cost = &chosen.cost;
    if !chosen.fits(machine) || shards_optimizer || !data_fits && !chosen.plan.is_data() {
        "memory"
    } else if cost.exchange_ms + cost.bubble_ms + cost.gradients_ms > cost.compute_ms + cost.update_ms {
        "communication"
    } else {
        "computing"
    }
}

fn placement(kind: &str, operator: &OperatorCost, mesh: Mesh) -> String {
    let mut words = match &operator.placement {
        // The ranks that share rows, and the stages, have the same pictures.
        Placement::Batch if mesh.height > 1 => "same pictures".to_owned(),
        Placement::Batch if mesh.stage > 1 => "same pictures in every stage".into(),
        Placement::Batch => "own pictures".into(),
        Placement::Whole => "all pictures of the group".into(),
        Placement::Channels(_) if kind == "linear" => format!("1/{} of the classes", mesh.model),
        Placement::Channels(_) => format!("1/{} of the channels", mesh.model),
        Placement::Partial => "a part of the sum".into(),
    };
    if operator.shares_rows {
        words += &format!(", up to 1/{} of the rows", mesh.height);
    }
    words
}

/// The size in gigabytes, such as `3.21 GB`.
pub fn gigabytes(bytes: f64) -> String {
    format!("{:.2} GB", bytes / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_engine::plan::Rates;
    use lockstep_protocol::spec::Arch;

    fn machine(backend: &str) -> Machine {
        let link = Some(Link { latency_us: 30.0, bytes_per_second: 1e9 });
        Machine {
            device: "CPU, 1 thread".into(),
            backend: backend.into(),
            ranks: 4,
            memory_bytes: 8 << 30,
            shared_memory: true,
            rates: Rates {
                value_bytes: 4,
                flops_per_second: [("conv3x3".to_owned(), 3e10)].into(),
                linear: Vec::new(),
                memory_bytes_per_second: 1e10,
            },
            within: link,
            between: link,
        }
    }

    fn job() -> (JobSpec, Network) {
        let mut spec = JobSpec::default();
        spec.data.dataset = "clothes".into();
        spec.model.arch = Arch::ResNet20;
        spec.train.batch_size = Some(8);
        spec.parallel = ParallelSpec { ranks: 4, mode: "auto".into(), ..ParallelSpec::default() };
        let network = build_network(&spec.model, (32, 32), 3, 10).unwrap();
        (spec, network)
    }

    #[test]
    fn the_pictures_of_a_step_do_not_depend_on_the_plan() {
        let (spec, network) = job();
        let hybrid = ParallelSpec { mode: "hybrid".into(), height: 2, ..spec.parallel.clone() };
        let resolved = with_plan(&spec, &Plan::of(&hybrid), &machine("cpu"));
        assert_eq!((resolved.global_batch_size(), resolved.micro_batch_size()), (32, 16));
        assert_eq!((resolved.parallel.is_hybrid(), resolved.parallel.device), (true, Device::Cpu));
        let described = describe(&Plan::of(&hybrid), &network);
        assert_eq!((described.data, described.height, described.predicted), (2, 2, None));
        let resolved = with_plan(&spec, &Plan::data(4), &machine("cpu"));
        assert_eq!((resolved.parallel.mode.as_str(), resolved.train), ("data", spec.train));
    }

    /// GPUs split only the last layer by channels, and each rank has at least one row of every activation.
    #[test]
    fn gpus_are_offered_only_plans_that_they_support() {
        let (spec, network) = job();
        let rows_of_two = super::build_network(&spec.model, (8, 8), 3, 10).unwrap();
        for (network, mesh_count) in [(&network, 8), (&rows_of_two, 7)] {
            let planned = Planned::of(&spec, network, &machine("cuda")).unwrap();
            assert_eq!(planned.considered.len(), mesh_count, "{:?}", planned.considered);
            for Candidate { plan, .. } in &planned.considered {
                assert!(plan.shards.iter().all(|shard| shard.pattern == "fc"), "{plan}");
                assert!(network.image_size > 8 || plan.mesh.height <= 2, "{plan}");
            }
        }
    }

    #[test]
    fn plans_that_change_results_or_cannot_run_are_skipped() {
        let (mut spec, network) = job();
        let planned = Planned::of(&spec, &network, &machine("cpu")).unwrap();
        assert!(planned.chosen.plan.is_data() && planned.considered.len() == 9, "{}", planned.why);
        let description = planned.describe(&network);
        assert_eq!(description.check(), Ok(()));
        assert!(description.layers.iter().all(|layer| layer.plan.is_some()));
        for change in [
            (|spec| spec.parallel.sync_batch_norm = false) as fn(&mut JobSpec),
            |spec| spec.parallel.gradients_mean = false,
            |spec| spec.recovery.min_ranks = Some(2),
        ] {
            let mut spec = spec.clone();
            change(&mut spec);
            let planned = Planned::of(&spec, &network, &machine("cpu")).unwrap();
            assert!(planned.considered.iter().all(|candidate| candidate.plan.is_data()), "{}", planned.why);
        }
        spec.parallel.model = 2;
        spec.parallel.sync_batch_norm = false;
        let refused = Planned::of(&spec, &network, &machine("cpu")).unwrap_err();
        assert!(refused.contains("leave out parallel.model"), "{refused}");
        let small = Machine { memory_bytes: 1 << 20, ..machine("cpu") };
        let planned = Planned::of(&job().0, &network, &small).unwrap();
        assert!(planned.memory_shortage(&small).is_some_and(|why| why.starts_with("no plan fits")));
    }
}
