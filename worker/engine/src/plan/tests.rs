//! Plans and their costs, on machines with round figures.

use super::*;
use crate::{LayerTime, net::resnet};
use lockstep_protocol::spec::Arch;

/// Approximately a machine with eight H200 GPUs.
fn gpus() -> Machine {
    let rate = |(kind, rate): (&str, f64)| (kind.to_owned(), rate);
    Machine {
        device: "GPU, fp16".into(),
        backend: "cuda".into(),
        ranks: 8,
        memory_bytes: 140_000_000_000,
        shared_memory: false,
        rates: Rates {
            value_bytes: 2,
            flops_per_second: [
                ("conv1x1", 3e14),
                ("conv3x3", 4e14),
                ("conv7x7", 1e14),
                ("grouped", 1e14),
                ("linear", 4e14),
            ]
            .map(rate)
            .into(),
            linear: Vec::new(),
            memory_bytes_per_second: 3.5e12,
        },
        within: Some(Link { latency_us: 3.0, bytes_per_second: 2e11 }),
        between: Some(Link { latency_us: 15.0, bytes_per_second: 4e10 }),
    }
}

fn resnet(arch: Arch, classes: usize) -> Network {
    resnet::of(arch, 224, classes)
}

fn work(pictures: u64) -> Workload {
    Workload { pictures, accumulate: 1, state_per_weight: 1, sync_batch_norm: true }
}

fn best(network: &Network, ranks: usize, machine: &Machine, pictures: u64) -> Candidate {
    let candidates = search(network, ranks, (machine, &work(pictures)), &ParallelSpec::default(), |_| true);
    candidates.into_iter().next().unwrap()
}

fn mesh(data: usize, height: usize, model: usize) -> Mesh {
    Mesh { stage: 1, data, height, model }
}

fn out(pattern: &str) -> ShardSpec {
    ShardSpec { pattern: pattern.into(), split: Split::Out }
}

#[test]
fn an_ordinary_resnet_is_trained_data_parallel() {
    for (arch, ranks) in [(Arch::ResNet50, 4), (Arch::ResNet50, 8), (Arch::ResNet18, 8)] {
        let found = best(&resnet(arch, 1000), ranks, &gpus(), 256 * ranks as u64);
        assert_eq!(found.plan, Plan::data(ranks as u32), "{arch:?}: {}", found.plan);
        assert!(found.fits(&gpus()));
        let Cost { step_ms, compute_ms, exchange_ms, bubble_ms, gradients_ms, update_ms, .. } = found.cost;
        let parts = compute_ms + exchange_ms + bubble_ms + gradients_ms + update_ms;
        assert!((step_ms - parts).abs() < 1e-9 * step_ms, "{:?}", found.cost);
    }
    // Measured: 10,289 images/s on one H200.
    let one = best(&resnet(Arch::ResNet50, 1000), 1, &gpus(), 256);
    assert!((4000.0..20_000.0).contains(&one.cost.images_per_second), "{}", one.cost.images_per_second);
}

/// PyTorch with a million classes on two GPUs: 8,295 images/s with a split head, 5,922 with a whole head.
#[test]
fn the_head_of_a_very_wide_classifier_is_split() {
    let network = resnet(Arch::ResNet50, 1_000_000);
    let found = best(&network, 2, &gpus(), 512);
    assert_eq!(found.plan.mesh, mesh(1, 1, 2), "{}", found.plan);
    assert_eq!(found.plan.shards, [out("fc")]);
    let whole = cost(&network, &Plan::data(2), &gpus(), &work(512)).unwrap();
    let faster = found.cost.images_per_second / whole.images_per_second;
    assert!((1.1..2.5).contains(&faster), "{faster}");
    // With one GPU per machine, ranks are on two machines.
    let far = Machine { ranks: 1, ..gpus() };
    assert_eq!(best(&network, 2, &far, 64).plan.shards, [out("fc")]);
}

/// The predicted time of a step with a measured head is the measured time, also if the head is a rank's part of a larger one.
#[test]
fn the_predicted_time_of_a_measured_head_is_the_measured_time() {
    let mut machine = gpus();
    let measured = [(1_000, 0.08), (65_536, 0.1), (524_288, 0.2)];
    let network = |classes: usize| resnet(Arch::ResNet50, classes);
    for (classes, secs) in measured {
        // A quarter of the step is the products of the head. The update is slower than memory.
        let times = [LayerTime { name: Some("fc".into()), output: 0, micros: 0.25e6 * secs }];
        machine.rates.add_head(&network(classes), 256.0, &times, (secs, 1.0));
    }
    assert!(machine.rates.linear.len() == 3 && machine.check().is_ok(), "{machine:?}");
    for (classes, secs) in measured {
        let found = cost(&network(classes), &Plan::data(1), &machine, &work(256)).unwrap();
        assert!((found.step_ms / (1e3 * secs) - 1.0).abs() < 1e-9, "{classes}: {} ms", found.step_ms);
    }
    // Each rank has the classes of the measured head, for the pictures of both ranks: these heads are so slow that reading the
    // weights limits them.
    let link = Some(Link { latency_us: 1e-9, bytes_per_second: 1e20 });
    let near = Machine { within: link, ..machine };
    let work = Workload { pictures: 512, sync_batch_norm: false, ..work(256) };
    let split = Plan::on(mesh(1, 1, 2), vec![out("fc")]);
    for (classes, secs) in &measured[1..] {
        let found = cost(&network(2 * classes), &split, &near, &work).unwrap();
        let computed = found.step_ms - found.exchange_ms;
        assert!((computed / (1e3 * secs) - 1.0).abs() < 1e-6, "{classes}: {computed} ms");
    }
}

/// GPUs of one machine add statistics within a kernel. Exchanges between kernels take longer: statistics of several machines, features and
/// losses of a split head, and rows of pictures, which are a message per picture.
#[test]
fn gpus_exchange_between_kernels_more_slowly_than_within_a_kernel() {
    let network = resnet(Arch::ResNet50, 1000);
    let link = |latency_us| Some(Link { latency_us, bytes_per_second: 1e20 });
    let near = Machine { within: link(3.0), between: link(15.0), ..gpus() };
    let far = Machine { ranks: 1, ..near.clone() };
    let (synced, unsynced) = (work(8), Workload { sync_batch_norm: false, ..work(8) });
    let (data, split) = (Plan::data(2), Plan::on(mesh(1, 1, 2), vec![out("fc")]));
    let rows = Plan::on(mesh(1, 2, 1), Vec::new());
    // Two exchanges of each of 53 batch norms, five exchanges of the head, and 35 exchanges of the rows of 8 pictures.
    let norms = 106.0;
    for (machine, plan, work, micros) in [
        (&near, &data, &synced, norms * 3.0),
        (&far, &data, &synced, norms * (18.0 + 2.0 * 15.0)),
        (&near, &data, &unsynced, 0.0),
        (&near, &split, &unsynced, 2.0 * (18.0 + 3.0) + 3.0 * (18.0 + 2.0 * 3.0)),
        (&near, &rows, &unsynced, 35.0 * (18.0 + 2.0 * 8.0 * 3.0) + (18.0 + 2.0 * 3.0)),
    ] {
        let found = cost(&network, plan, machine, work).unwrap();
        assert!((1e3 * found.exchange_ms - micros).abs() < 1e-3, "{plan}: {} ms", found.exchange_ms);
    }
    // CPU ranks add statistics in place.
    let cpu = Machine { shared_memory: true, ..near };
    assert_eq!(cost(&network, &data, &cpu, &synced).unwrap().exchange_ms, 0.0);
}

/// GPUs reduce the gradient of a wide head during the backward pass of all other layers, whose kernels then take longer.
#[test]
fn the_backward_pass_of_other_layers_hides_the_gradient_of_a_head() {
    let network = resnet(Arch::ResNet50, 1_000_000);
    let body = cost(&resnet(Arch::ResNet50, 10), &Plan::data(2), &gpus(), &work(128)).unwrap();
    let backward = 2.0 / 3.0 * body.compute_ms;
    let gigabytes = 2e-9 * network.parameter_count() as f64;
    for (gigabytes_per_second, expected) in [
        (100.0, 1e3 * gigabytes / 100.0 - backward),
        // The whole reduction is hidden, during which kernels take 1.5 times as long.
        (4000.0, 1e3 * gigabytes / 4000.0 * 0.5 / 1.5),
    ] {
        let within = Some(Link { latency_us: 3.0, bytes_per_second: 1e9 * gigabytes_per_second });
        let machine = Machine { within, ..gpus() };
        let found = cost(&network, &Plan::data(2), &machine, &work(128)).unwrap();
        assert!(
            (found.gradients_ms / expected - 1.0).abs() < 0.02,
            "{} ms, not {expected}",
            found.gradients_ms
        );
    }
}

#[test]
fn too_little_memory_forces_a_split_and_excludes_plans() {
    let network = resnet(Arch::ResNet18, 100_000);
    let data = cost(&network, &Plan::data(4), &gpus(), &work(128)).unwrap();
    // The link is so slow that the head is not split.
    let slow = Link { latency_us: 1e6, bytes_per_second: 1e12 };
    let large = Machine { within: Some(slow), ..gpus() };
    let work = Workload { sync_batch_norm: false, ..work(128) };
    let first = |machine: &Machine| -> Candidate {
        search(&network, 4, (machine, &work), &ParallelSpec::default(), |_| true).remove(0)
    };
    assert!(first(&large).plan.is_data());
    let small = Machine { memory_bytes: data.memory_bytes as u64 - 1, ..large.clone() };
    let found = first(&small);
    assert!(found.plan != Plan::data(4) && found.fits(&small), "{}", found.plan);
    let none = Machine { memory_bytes: 1 << 20, ..large };
    assert!(!first(&none).fits(&none));
}

#[test]
fn stages_and_divided_state_take_less_memory_and_more_time() {
    let (network, machine) = (resnet(Arch::ResNet50, 400_000), gpus());
    let work = Workload { accumulate: 4, ..work(64) };
    let cost_of = |plan: &Plan| cost(&network, plan, &machine, &work).unwrap();
    let data = cost_of(&Plan::data(4));
    let divided = cost_of(&Plan { optimizer_sharding: true, ..Plan::data(4) });
    // Dividing over four ranks saves three quarters of the momentum.
    let saved = data.memory_bytes - divided.memory_bytes;
    let state = network.parameter_count() as f64 * 4.0;
    assert!((saved / (0.75 * state) - 1.0).abs() < 0.01, "{saved} of {state}");
    let staged = cost_of(&Plan::on(Mesh { stage: 2, data: 2, height: 1, model: 1 }, Vec::new()));
    // The slower stage waits while the first of four micro-batches passes through the other stage.
    let worked = staged.compute_ms + staged.exchange_ms;
    assert!(staged.bubble_ms > 0.0 && staged.bubble_ms <= worked / 4.0, "{staged:?}");
    assert_eq!(staged.operators.len(), data.operators.len());
    assert!(staged.memory_bytes < data.memory_bytes, "{} of {}", staged.memory_bytes, data.memory_bytes);

    // The whole state does not fit into memory, and a split head does not help over slow links.
    let slow = Link { latency_us: 1e6, bytes_per_second: 1e12 };
    let small = Machine { within: Some(slow), memory_bytes: data.memory_bytes as u64 - 1, ..machine };
    let unsynced = Workload { sync_batch_norm: false, ..work };
    let found =
        search(&network, 4, (&small, &unsynced), &ParallelSpec::default(), |plan| plan.mesh.model == 1);
    let Candidate { plan, .. } = &found[0];
    assert_eq!((plan.is_data(), plan.optimizer_sharding), (true, true), "{plan}");
    let pinned = ParallelSpec { pipeline: 2, ..ParallelSpec::default() };
    let found = search(&network, 4, (&small, &unsynced), &pinned, |_| true);
    assert!(!found.is_empty() && found.iter().all(|candidate| candidate.plan.mesh.stage == 2));
}

#[test]
fn pinned_settings_are_kept_and_impossible_plans_omitted() {
    let (network, machine, work) = (resnet(Arch::ResNet18, 1000), gpus(), work(128));
    let pinned = ParallelSpec { shard: vec![out("layer4.*.conv1")], ..ParallelSpec::default() };
    let found = search(&network, 4, (&machine, &work), &pinned, |_| true);
    assert!(found.iter().all(
        |candidate| candidate.plan.mesh.model > 1 && candidate.plan.shards.last() == pinned.shard.last()
    ));
    let pinned = ParallelSpec { model: 2, height: 2, ..ParallelSpec::default() };
    let found = search(&network, 4, (&machine, &work), &pinned, |_| true);
    assert_eq!(found.iter().map(|candidate| candidate.plan.mesh).collect::<Vec<_>>(), [mesh(1, 2, 2)]);
    let found = search(&network, 4, (&machine, &work), &ParallelSpec::default(), Plan::is_data);
    assert_eq!(found.len(), 1);
    // Two pictures are too few for four data ranks, so ranks share rows or have stages.
    let few =
        search(&network, 4, (&machine, &Workload { pictures: 2, ..work }), &ParallelSpec::default(), |_| {
            true
        });
    assert!(!few.is_empty() && few.iter().all(|candidate| candidate.plan.mesh.data <= 2));
}

/// A chain with a residual addition, of random sizes, on a random machine.
fn random_case(draw: &mut impl FnMut(usize) -> usize) -> (Network, Machine) {
    let mut network = Network::new("small", 8 << draw(2), 3, 1);
    let width = 16 << draw(4);
    let mut x = network.conv("stem", network.input(), width, 3, 1);
    x = network.batch_norm("stem_norm", x);
    x = network.relu(x);
    let shortcut = x;
    x = network.conv("first", x, width << draw(3), 3, 1);
    x = network.batch_norm("first_norm", x);
    x = network.relu(x);
    x = network.conv("second", x, width, [1, 3][draw(2)], 1);
    x = network.batch_norm("second_norm", x);
    x = network.add(x, shortcut);
    x = network.relu(x);
    x = network.global_average_pool(x);
    x = network.linear("middle", x, 64 << draw(6));
    network.classes = 10 << draw(14);
    network.linear("fc", x, network.classes);
    let link = Link { latency_us: [1.0, 30.0][draw(2)], bytes_per_second: [1e9, 1e10, 2e11][draw(3)] };
    let machine = Machine { within: Some(link), ranks: 4, ..gpus() };
    (network, machine)
}

/// The plan that the search finds is at most 5 % slower than the best of all plans, with memory for any plan and with less.
#[test]
fn the_search_matches_an_exhaustive_search() {
    let mut state = 1u64;
    // Knuth's linear congruential generator (MMIX).
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut plans_with_splits = 0;
    for case in 0..24 {
        let (network, mut machine) = random_case(&mut draw);
        let work = work(4 << draw(5));
        let mut plans = Vec::new();
        for (height, model) in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)] {
            let mesh = mesh(4 / (height * model), height, model);
            let names = ["stem", "first", "second", "middle", "fc"];
            let count = if model == 1 { 1 } else { 3usize.pow(names.len() as u32) };
            for combination in 0..count {
                let split = |index: usize| {
                    [None, Some(Split::Out), Some(Split::In)][combination / 3usize.pow(index as u32) % 3]
                };
                let shards = names.iter().enumerate().filter_map(|(index, name)| {
                    Some(ShardSpec { pattern: (*name).into(), split: split(index)? })
                });
                let plan = Plan::on(mesh, shards.collect());
                if let Ok(cost) = cost(&network, &plan, &machine, &work) {
                    plans.push(Candidate { plan, cost });
                }
            }
        }
        let min_memory = plans.iter().map(|candidate| candidate.cost.memory_bytes).fold(f64::MAX, f64::min);
        for memory in [machine.memory_bytes, (1.3 * min_memory) as u64] {
            machine.memory_bytes = memory;
            let fastest = plans
                .iter()
                .filter(|candidate| candidate.fits(&machine))
                .map(|candidate| candidate.cost.step_ms);
            let fastest = fastest.fold(f64::MAX, f64::min);
            let found = best(&network, 4, &machine, work.pictures);
            assert!(found.fits(&machine), "{case}: {}", found.plan);
            let slower = found.cost.step_ms / fastest;
            assert!(slower <= 1.05, "{case}, {memory} bytes: {slower} with {}", found.plan);
            plans_with_splits += usize::from(!found.plan.shards.is_empty());
        }
    }
    assert!((10..48).contains(&plans_with_splits), "{plans_with_splits} of 48 plans have splits");
}

#[test]
fn one_error_names_all_unusable_strategies() {
    let spec = |shard: Vec<ShardSpec>| {
        let mut spec = JobSpec::default();
        spec.model.arch = Arch::ResNet50;
        spec.parallel =
            ParallelSpec { ranks: 2, mode: "hybrid".into(), model: 2, shard, ..ParallelSpec::default() };
        spec
    };
    assert_eq!(check(&spec(vec![out("layer4.*"), out("fc")])), Ok(()));
    let wrong = check(&spec(vec![out("layer9.*"), out("head")])).unwrap_err();
    assert_eq!(
        wrong,
        "resnet50 has no operator named \"layer9.*\" or \"head\"; its operators are conv1, layer1.0.conv1, layer1.0.conv2, \
         layer1.0.conv3, layer1.0.downsample.0, layer1.1.conv1, layer1.1.conv2, layer1.1.conv3, layer1.2.conv1, layer1.2.conv2 \
         and 44 more (lockstep plan lists them)"
    );
    let mut auto = spec(vec![ShardSpec { pattern: "fc".into(), split: Split::Groups }]);
    (auto.parallel.mode, auto.parallel.model) = ("auto".into(), 1);
    assert!(check(&auto).unwrap_err().starts_with("fc cannot be split by \"groups\" over 2 ranks"));
}

#[test]
fn a_machine_s_figures_are_positive_numbers() {
    assert_eq!(gpus().check(), Ok(()));
    let text = serde_json::to_string(&gpus()).unwrap();
    assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), gpus());
    for wrong in [
        Machine { ranks: 0, ..gpus() },
        Machine { within: Some(Link { latency_us: 1.0, bytes_per_second: 0.0 }), ..gpus() },
        Machine { rates: Rates { flops_per_second: [].into(), ..gpus().rates }, ..gpus() },
        Machine { rates: Rates { memory_bytes_per_second: f64::NAN, ..gpus().rates }, ..gpus() },
    ] {
        assert!(wrong.check().is_err(), "{wrong:?}");
    }
}
