//! With class weights, the loss is the weighted mean over the global batch, at any number of ranks and micro-batches.

use super::*;

/// Number of pictures in a step.
const GLOBAL: usize = 16;

#[test]
fn class_weights_give_equal_steps_on_any_ranks_and_micro_batches() {
    // Batch norms are frozen, because their statistics depend on the micro-batches.
    let model = ModelSpec { arch: Arch::ResNet20, freeze_norm: true, ..ModelSpec::default() };
    let network = Arc::new(resnet::build(&model, SIDE, 3, 10).unwrap());
    let initial = init::initial_parameters(&network, false, 1);
    let weights: Arc<[f32]> = (1..=10u8).map(|class| f32::from(class) / 4.0).collect();
    let all_labels = labels("ranks.labels.0", GLOBAL, 10);
    let weight_of =
        |labels: &[u32]| labels.iter().map(|label| f64::from(weights[*label as usize])).sum::<f64>();
    let run = |ranks: u32, accumulate: usize, weights: Option<Arc<[f32]>>| {
        on_ranks(ranks, |comm| {
            let (rank, ranks) = (comm.rank() as usize, ranks as usize);
            let count = GLOBAL / ranks / accumulate;
            let loss =
                LossConfig { label_smoothing: 0.1, class_weights: weights.clone(), ..LossConfig::default() };
            let config = EngineConfig { loss, accumulate, ..config(count) };
            let mut engine = build_cpu(network.clone(), &initial, config, comm).unwrap();
            let micro_batch = |micro: usize| {
                let (first, own_first) = (micro * ranks * count, (micro * ranks + rank) * count);
                let global_weight =
                    weights.is_some().then(|| weight_of(&all_labels[first..][..ranks * count]));
                Batch { global_weight, ..part_of(ranks * count, pictures(0, own_first, own_first + count)) }
            };
            let step: Vec<Batch> = (0..accumulate).map(micro_batch).collect();
            let result = engine.train_step(&step, 0.01).unwrap();
            let own_weight: f64 = step.iter().map(|batch| weight_of(&batch.labels)).sum();
            (result, own_weight, engine.parameters().unwrap())
        })
    };
    let (single, total_weight, after) = &run(1, 1, Some(weights.clone()))[0];
    let (unweighted, ..) = &run(1, 1, None)[0];
    assert!(single.grad_norm != unweighted.grad_norm, "class weights change the gradient");
    for (ranks, accumulate) in [(2, 1), (1, 2), (2, 2), (4, 1)] {
        let of_ranks = run(ranks, accumulate, Some(weights.clone()));
        let sum: f64 = of_ranks.iter().map(|(result, weight, _)| f64::from(result.loss) * weight).sum();
        let loss = sum / total_weight / f64::from(single.loss);
        assert!((loss - 1.0).abs() < 1e-5, "{ranks} x {accumulate}: {loss}");
        for (result, _, parameters) in &of_ranks {
            let difference = max_difference(parameters, after);
            assert!(difference < 1e-4, "{ranks} x {accumulate}: {difference}");
            assert!((result.grad_norm / single.grad_norm - 1.0).abs() < 1e-4, "{ranks} x {accumulate}");
        }
    }
}
