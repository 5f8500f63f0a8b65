//! Under plans with each kind of exchange, gradients match finite differences of the loss. So the backward pass of each exchange is the
//! adjoint of its forward pass.

use super::{
    hybrid::{data_rank, data_ranks, plan, staged},
    *,
};
use lockstep_engine::Distribution;
use lockstep_protocol::spec::Split;

/// Number of pictures in a step, divisible by two, three and four ranks.
const GLOBAL: usize = 12;
/// How far each tensor is moved for the finite differences.
const H: f32 = 4e-3;

/// A network whose numbers of channels, rows and classes have few divisors.
fn small_network() -> Arc<Network> {
    let mut network = Network::new("small", SIDE, 3, 10);
    let input = network.input();
    let relu = conv_norm_relu(&mut network, "conv1", input, [9, 3, 1]);
    let conv = network.conv("conv2", relu, 12, 5, 2);
    let relu = network.relu(conv);
    let conv = network.padded_conv("conv3", relu, 9, (3, 1, 1), 3);
    let average = network.global_average_pool(conv);
    network.linear("fc", average, 10);
    Arc::new(network)
}

/// The loss of all pictures for each of `weights`, and the gradient for the first.
fn losses_and_gradient(plan: &Plan, weights: &[NamedTensors]) -> (Vec<f32>, NamedTensors) {
    let (network, per_rank) = (small_network(), GLOBAL / data_ranks(plan));
    let of_ranks = on_ranks(plan.mesh.ranks() as u32, |comm| {
        let from = data_rank(plan, &comm) * per_rank;
        let optimizer = Optimizer { momentum: 0.9, weight_decay: 0.0, ..Optimizer::default() };
        let config = EngineConfig { optimizer, ..config(per_rank) };
        let mut engine = build_cpu_with(network.clone(), &weights[0], config, comm.clone(), plan).unwrap();
        let distribution = Distribution::new(&network, plan, comm.as_ref()).unwrap();
        let parts =
            |whole: &NamedTensors| distribution.scatter(Some(whole.clone()), distribution.shapes()).unwrap();
        let mut gradient = None;
        let mut steps = Vec::new();
        for weights in weights {
            // Ranks of one machine share the weights.
            comm.barrier().unwrap();
            engine.set_parameters(&parts(weights)).unwrap();
            comm.barrier().unwrap();
            let batch = part_of(GLOBAL, pictures(0, from, from + per_rank));
            steps.push(engine.train_step(&[batch], 0.0).unwrap());
            // After the first step, momentum is the gradient.
            if gradient.is_none() {
                gradient = Some(engine.state_dict(&Writers::default()).unwrap());
            }
        }
        (steps, gradient)
    });
    let loss = |step: usize| {
        let all = || of_ranks.iter().map(|(steps, _)| &steps[step]);
        let samples: f32 = all().map(|result| result.samples as f32).sum();
        all().map(|result| result.loss * result.samples as f32).sum::<f32>() / samples
    };
    let losses = (0..weights.len()).map(loss).collect();
    let Some((_, Some(Some(state)))) = of_ranks.into_iter().next() else { panic!("rank 0 has the state") };
    (losses, state.optimizer.unwrap().slots)
}

#[test]
fn gradients_of_every_plan_match_finite_differences() {
    use Split::{Groups, In, Out};
    for plan in [
        Plan::data(2),
        plan([1, 1, 2], &[("conv1", Out), ("conv2", In), ("conv3", Groups), ("fc", Out)]),
        plan([1, 1, 3], &[("conv1", In), ("conv2", Out), ("fc", In)]),
        plan([2, 1, 2], &[]),
        plan([1, 3, 1], &[]),
        plan([1, 2, 2], &[("conv2", Out), ("fc", Out)]),
        staged(2, plan([1, 2, 1], &[])),
    ] {
        let initial = init::initial_parameters(&small_network(), false, 1);
        let (_, slots) = losses_and_gradient(&plan, std::slice::from_ref(&initial));
        let gradient = |name: &str| &slots[&format!("{name}.momentum")].values;
        let trained: Vec<&String> =
            initial.keys().filter(|name| slots.contains_key(&format!("{name}.momentum"))).collect();
        let length = |name: &str| gradient(name).iter().map(|v| v * v).sum::<f32>().sqrt();
        let sum: f32 = trained.iter().map(|name| length(name)).sum();
        assert!(trained.len() >= 6 && sum > 0.0, "{trained:?}");
        // Weights are moved along the gradients of all tensors, then against the gradient of every second tensor.
        for every in [1, 2] {
            let sign = |number: usize| if number.is_multiple_of(every) { 1.0 } else { -1.0 };
            let moved = |distance: f32| {
                let mut weights = initial.clone();
                for (number, name) in trained.iter().enumerate() {
                    let step = sign(number) * distance / length(name).max(f32::MIN_POSITIVE);
                    let values = &mut weights.get_mut(*name).unwrap().values;
                    values.iter_mut().zip(gradient(name)).for_each(|(value, g)| *value += step * g);
                }
                weights
            };
            let (losses, _) = losses_and_gradient(&plan, &[moved(H), moved(-H)]);
            let found = (losses[0] - losses[1]) / (2.0 * H);
            let expected: f32 = trained.iter().enumerate().map(|(n, name)| sign(n) * length(name)).sum();
            assert!(
                (found - expected).abs() < 0.02 * sum,
                "{plan}, every {every}: the slope is {found}, but the gradients (sum of norms {sum}) give {expected}"
            );
        }
    }
}
