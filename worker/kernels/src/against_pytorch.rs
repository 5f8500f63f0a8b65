//! Tests every operation, forward and backward, against `tests/pytorch/fixtures/operations.safetensors`,
//! which `tests/pytorch/make_fixtures.py` computes in float64.

use crate::{
    TensorShape,
    batch_norm::{self, Affine, Mask, Statistics},
    conv::{self, ConvShape, Scratch},
    linear, loss,
    optimizer::{Optimizer, ParameterKind, Update},
    orthogonal,
    pool::{self, MaxPool},
    synthetic::{labels, values as synthetic_values},
};
use lockstep_protocol::spec::OptimizerKind;
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::BTreeMap;

const OPERATIONS: &str = "operations.safetensors";
/// Maximum difference, relative to the largest value.
const TOLERANCE: f32 = 1e-5;

/// The contents of a file in `tests/pytorch/fixtures`.
fn read(file: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../tests/pytorch/fixtures/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Calls `check(fixtures, name, numbers)` for every case of `op` in `file`. A name is `op.number.number...`; `numbers` are their absolute
/// values.
fn cases(file: &str, op: &str, mut check: impl FnMut(&Fixtures<'_>, &str, &[usize])) {
    let bytes = read(file);
    let fixtures = Fixtures(SafeTensors::deserialize(&bytes).unwrap());
    let mut names: Vec<String> = fixtures
        .0
        .names()
        .iter()
        .filter(|n| n.split('.').next() == Some(op))
        .filter_map(|n| n.rsplit_once('.').map(|(case, _)| case.to_string()))
        .collect();
    names.sort();
    names.dedup();
    assert!(!names.is_empty(), "no case of {op}");
    for name in names {
        let numbers: Vec<usize> =
            name.split('.').skip(1).map(|n| n.trim_start_matches('-').parse().unwrap()).collect();
        check(&fixtures, &name, &numbers);
    }
}

struct Fixtures<'a>(SafeTensors<'a>);

impl Fixtures<'_> {
    fn get(&self, name: &str) -> Option<Vec<f32>> {
        let tensor = self.0.tensor(name).ok()?;
        Some(tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }

    fn compare(&self, name: &str, ours: &[f32]) {
        let theirs = self.get(name).unwrap_or_else(|| panic!("no fixture {name}"));
        compare(name, ours, &theirs, TOLERANCE);
    }

    /// Compares `ours` with the fixture `name`, if it exists.
    fn compare_if_present(&self, name: &str, ours: &[f32]) {
        if self.get(name).is_some() {
            self.compare(name, ours);
        }
    }
}

/// `tolerance` is the maximum difference, relative to the largest of `theirs`.
fn compare(name: &str, ours: &[f32], theirs: &[f32], tolerance: f32) {
    assert_eq!(theirs.len(), ours.len(), "{name}");
    let largest = theirs.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let difference = (a - b).abs();
        assert!(difference <= tolerance * largest, "{name}[{i}]: {a} instead of {b} (largest {largest})");
    }
}

#[test]
fn convolutions_match_pytorch() {
    cases(OPERATIONS, "conv", |fixtures, name, numbers| {
        let &[batch, side, in_c, out_c, kernel, stride] = numbers else { panic!("{name}") };
        compare_convolution(fixtures, name, [batch, side, in_c, out_c, kernel, stride, 1]);
    });
}

#[test]
fn grouped_convolutions_match_pytorch() {
    cases("grouped.safetensors", "grouped", |fixtures, name, numbers| {
        compare_convolution(fixtures, name, numbers.try_into().unwrap());
    });
}

fn compare_convolution(fixtures: &Fixtures<'_>, name: &str, numbers: [usize; 7]) {
    let [batch, side, in_c, out_c, kernel, stride, groups] = numbers;
    for instructions in conv::Instructions::ALL {
        let Some(mut scratch) = Scratch::with_instructions(instructions, conv::Format::Float32) else {
            continue;
        };
        let padding = kernel / 2;
        let (in_h, in_w, row_padding) = (side, side, padding);
        let s = ConvShape { batch, in_h, in_w, in_c, out_c, kernel, stride, padding, row_padding, groups };
        let x = synthetic_values(&format!("{name}.x"), s.input_len());
        let dy = synthetic_values(&format!("{name}.dy"), s.output_len());
        let mut w = vec![0.0; s.weight_len()];
        conv::weight_from_oihw(&s, &synthetic_values(&format!("{name}.w"), s.weight_len()), &mut w);
        let (mut y, mut dx, mut dw) = (vec![f32::NAN; dy.len()], vec![f32::NAN; x.len()], w.clone());
        conv::forward(&s, &x, &w, &mut y, &mut scratch);
        fixtures.compare(&format!("{name}.y"), &y);
        conv::backward_input(&s, &dy, &w, &mut dx, &mut scratch);
        fixtures.compare(&format!("{name}.dx"), &dx);
        conv::backward_weight(&s, &x, &dy, &mut dw, &mut scratch);
        let mut oihw = vec![0.0; dw.len()];
        conv::weight_to_oihw(&s, &dw, &mut oihw);
        fixtures.compare(&format!("{name}.dw"), &oihw);
    }
}

#[test]
fn batch_norms_match_pytorch() {
    cases(OPERATIONS, "norm", |fixtures, name, numbers| {
        let &[batch, side, channels, relu, shortcut, offset] = numbers else { panic!("{name}") };
        // The name has the offset's sign.
        let offset = if name.ends_with(&format!("-{offset}")) { -(offset as f32) } else { offset as f32 };
        let (rows, relu, shortcut) = (batch * side * side, relu == 1, shortcut == 1);
        let make = |key: &str, len| synthetic_values(&format!("{name}.{key}"), len);
        let x: Vec<f32> = make("x", rows * channels).iter().map(|v| v + offset).collect();
        let s = make("s", x.len());
        let (gamma, beta) = (make("gamma", channels), make("beta", channels));
        let mut running = (make("mean", channels), make("var", channels));
        running.1.iter_mut().for_each(|v| *v += 1.0);

        let statistics = Statistics::from_sums(&batch_norm::sums(&x, channels), rows as f64);
        statistics.update_running(rows as f64, batch_norm::MOMENTUM, &mut running.0, &mut running.1);
        let affine = Affine { statistics: &statistics, gamma: &gamma, beta: &beta };
        let mut y = vec![f32::NAN; x.len()];
        batch_norm::forward(&x, affine, shortcut.then_some(&s[..]), relu, &mut y);
        fixtures.compare_if_present(&format!("{name}.y"), &y);
        fixtures.compare(&format!("{name}.mean"), &running.0);
        fixtures.compare(&format!("{name}.var"), &running.1);

        let dy = make("dy", x.len());
        // The results are the same if `dy` is given as one tensor or as two summands. The sum is stored if there are two summands or a shortcut.
        for parts in [1, 2] {
            let mut g = dy.clone();
            let second = (parts == 2).then(|| vec![0.25; x.len()]);
            if parts == 2 {
                g.iter_mut().for_each(|v| *v -= 0.25);
            }
            let stores_g = shortcut || second.is_some();
            let mask = match (relu, shortcut) {
                (false, _) => Mask::None,
                (true, false) => Mask::Input,
                (true, true) => Mask::Output(&y),
            };
            let sums = batch_norm::backward_sums(&x, affine, &mut g, second.as_deref(), mask, stores_g);
            let (dgamma, dbeta) = batch_norm::parameter_gradients(&sums, &statistics);
            for (key, ours) in [("dgamma", dgamma), ("dbeta", dbeta)] {
                let ours: Vec<f32> = ours.iter().map(|v| *v as f32).collect();
                fixtures.compare(&format!("{name}.{key}"), &ours);
            }
            if shortcut {
                let mut dx = vec![f32::NAN; x.len()];
                batch_norm::backward_input(&x, affine, &sums, rows as f64, &g, &mut dx);
                fixtures.compare_if_present(&format!("{name}.dx"), &dx);
                fixtures.compare_if_present(&format!("{name}.ds"), &g);
            } else {
                batch_norm::backward_input_in_place(
                    &x,
                    affine,
                    &sums,
                    rows as f64,
                    relu && !stores_g,
                    &mut g,
                );
                fixtures.compare_if_present(&format!("{name}.dx"), &g);
            }
        }
    });
}

#[test]
fn poolings_match_pytorch() {
    let square = |side, channels| TensorShape { height: side, width: side, channels };
    cases(OPERATIONS, "max_pool", |fixtures, name, numbers| {
        let &[batch, side, channels] = numbers else { panic!("{name}") };
        let (input, output) = (square(side, channels), square(side.div_ceil(2), channels));
        let pool = MaxPool { input, output, kernel: 3, stride: 2, padding: 1, row_padding: 1 };
        let x: Vec<f32> = synthetic_values(&format!("{name}.x"), batch * input.len())
            .iter()
            .map(|v| (v * 4.0).round_ties_even().max(0.0))
            .collect();
        let (mut y, mut argmax) = (vec![f32::NAN; batch * output.len()], vec![9; batch * output.len()]);
        pool.forward(&x, &mut y, &mut argmax);
        fixtures.compare(&format!("{name}.y"), &y);
        let mut dx = vec![f32::NAN; x.len()];
        pool.backward(&synthetic_values(&format!("{name}.dy"), y.len()), &argmax, &mut dx);
        fixtures.compare(&format!("{name}.dx"), &dx);
    });
    cases(OPERATIONS, "average_pool", |fixtures, name, numbers| {
        let &[batch, side, channels] = numbers else { panic!("{name}") };
        let input = square(side, channels);
        let x = synthetic_values(&format!("{name}.x"), batch * input.len());
        let (mut y, mut dx) = (vec![f32::NAN; batch * channels], vec![f32::NAN; x.len()]);
        pool::global_average(&x, input, &mut y);
        fixtures.compare(&format!("{name}.y"), &y);
        pool::global_average_backward(&synthetic_values(&format!("{name}.dy"), y.len()), input, &mut dx);
        fixtures.compare(&format!("{name}.dx"), &dx);
    });
}

#[test]
fn linear_layers_match_pytorch() {
    cases(OPERATIONS, "linear", |fixtures, name, numbers| {
        let &[batch, inputs, outputs] = numbers else { panic!("{name}") };
        let make = |key: &str, len| synthetic_values(&format!("{name}.{key}"), len);
        let (x, w, b) = (make("x", batch * inputs), make("w", inputs * outputs), make("b", outputs));
        let dy = make("dy", batch * outputs);
        let (mut y, mut dx) = (vec![f32::NAN; dy.len()], vec![f32::NAN; x.len()]);
        let (mut dw, mut db) = (vec![f32::NAN; w.len()], vec![f32::NAN; outputs]);
        linear::forward(&x, &w, &b, &mut y);
        linear::backward_input(&dy, &w, outputs, &mut dx);
        linear::backward_weight(&x, &dy, outputs, &mut dw);
        linear::backward_bias(&dy, &mut db);
        for (key, ours) in [("y", &y), ("dx", &dx), ("dw", &dw), ("db", &db)] {
            fixtures.compare(&format!("{name}.{key}"), ours);
        }
    });
}

#[test]
fn losses_match_pytorch() {
    cases(OPERATIONS, "loss", |fixtures, name, numbers| {
        let &[batch, classes, smoothing, scale] = numbers else { panic!("{name}") };
        let logits: Vec<f32> = synthetic_values(&format!("{name}.x"), batch * classes)
            .iter()
            .map(|v| v * scale as f32)
            .collect();
        let labels = labels(&format!("{name}.labels"), batch, classes);
        let mut gradient = vec![f32::NAN; logits.len()];
        let found = loss::cross_entropy(
            &logits,
            &labels,
            None,
            classes,
            smoothing as f32 / 100.0,
            None,
            Some((&mut gradient, 1.0 / batch as f64)),
        );
        fixtures.compare(&format!("{name}.loss"), &[(found.sum / batch as f64) as f32]);
        fixtures.compare(&format!("{name}.correct"), &[found.correct as f32]);
        fixtures.compare(&format!("{name}.dx"), &gradient);
    });
}

/// A loss with weights of classes, from `class_weights` of `make_fixtures.py`.
#[derive(Deserialize)]
struct Weighted {
    smoothing: f32,
    lambda: Option<f32>,
    loss: f32,
    dx: Vec<f32>,
}

#[test]
fn losses_with_class_weights_match_pytorch() {
    const BATCH: usize = 6;
    const CLASSES: usize = 5;
    let cases: Vec<Weighted> = serde_json::from_slice(&read("class_weights.json")).unwrap();
    assert_eq!(cases.len(), 4);
    for (index, case) in cases.iter().enumerate() {
        let name = format!("class_weights.{index}");
        let logits: Vec<f32> =
            synthetic_values(&format!("{name}.x"), BATCH * CLASSES).iter().map(|v| v * 3.0).collect();
        let weights: Vec<f32> =
            synthetic_values(&format!("{name}.weights"), CLASSES).iter().map(|v| v + 1.5).collect();
        let [own, others] = ["labels", "others"].map(|key| labels(&format!("{name}.{key}"), BATCH, CLASSES));
        let mixed = case.lambda.map(|lambda| (&others[..], lambda));
        // PyTorch divides by the sum of the labels' weights, or by the number of pictures if targets are probabilities.
        let divisor: f64 = match mixed {
            None => own.iter().map(|label| f64::from(weights[*label as usize])).sum(),
            Some(_) => BATCH as f64,
        };
        let mut gradient = vec![f32::NAN; logits.len()];
        let into = Some((&mut gradient[..], 1.0 / divisor));
        let found = loss::cross_entropy(&logits, &own, mixed, CLASSES, case.smoothing, Some(&weights), into);
        let is_near = |ours: f32, theirs: f32| (ours - theirs).abs() <= TOLERANCE * theirs.abs().max(0.1);
        let loss = (found.sum / divisor) as f32;
        assert!(is_near(loss, case.loss), "{name}: {loss}, not {}", case.loss);
        for (ours, theirs) in gradient.iter().zip(&case.dx) {
            assert!(is_near(*ours, *theirs), "{name}: {gradient:?}, not {:?}", case.dx);
        }
    }
}

#[test]
fn steps_of_sgd_match_pytorch() {
    cases(OPERATIONS, "sgd", |fixtures, name, numbers| {
        let kind = if numbers == [1] { OptimizerKind::Nesterov } else { OptimizerKind::Momentum };
        let sgd = Optimizer { kind, momentum: 0.9, weight_decay: 0.01, ..Optimizer::default() };
        let (mut w, mut v) = (synthetic_values(&format!("{name}.w"), 50), vec![0.0; 50]);
        // The fixture's ".w" is the result; the initial weights come from the generator.
        for step in 0..3 {
            let update = Update::new(&sgd, 0.1, step + 1);
            let (rate, decay) = update.rates(sgd.policy(true), || unreachable!("no norms"));
            let g = synthetic_values(&format!("{name}.g{step}"), 50);
            update.apply(rate, decay, &mut w, [&mut v, &mut []], &g);
        }
        fixtures.compare(&format!("{name}.w"), &w);
        fixtures.compare(&format!("{name}.v"), &v);
    });
}

/// The filters of a convolution over several steps, from `muon` of `make_fixtures.py`.
#[derive(Deserialize)]
struct Filters {
    /// Number of outputs, number of inputs, and side length of the kernel.
    shape: [usize; 3],
    momentum: f32,
    lr: f32,
    /// The weights after each step.
    weights: Vec<Vec<f32>>,
}

#[test]
fn steps_of_muon_match_pytorch() {
    let fixture: BTreeMap<String, Filters> = serde_json::from_slice(&read("muon.json")).unwrap();
    assert_eq!(fixture.len(), 3);
    for (name, Filters { shape: [out_c, in_c, kernel], momentum, lr, weights }) in fixture {
        let shape = ConvShape {
            batch: 1,
            in_h: kernel,
            in_w: kernel,
            in_c,
            out_c,
            kernel,
            stride: 1,
            padding: 0,
            row_padding: 0,
            groups: 1,
        };
        let drawn = |what: &str, scale: f32| {
            let oihw: Vec<f32> = synthetic_values(&format!("{name}.{what}"), shape.weight_len())
                .iter()
                .map(|v| v * scale)
                .collect();
            let mut ours = vec![0.0; oihw.len()];
            conv::weight_from_oihw(&shape, &oihw, &mut ours);
            ours
        };
        let optimizer =
            Optimizer { kind: OptimizerKind::Muon, filter_momentum: momentum, ..Optimizer::default() };
        let policy = optimizer.policy_of(ParameterKind::Filters);
        let (mut w, mut v) = (drawn("w", 1.0), vec![0.0; shape.weight_len()]);
        for (step, expected) in weights.iter().enumerate() {
            let mut g = drawn(&format!("g{step}"), [1.0, 1e-3, 10.0][step]);
            let update = Update::new(&optimizer, lr, step as u64 + 1);
            update.prepare(policy, &w, [&mut v, &mut []], &mut g);
            update.orthogonalise(&shape, &mut w, &g);
            let mut oihw = vec![0.0; w.len()];
            conv::weight_to_oihw(&shape, &w, &mut oihw);
            // Small singular values grow by a factor of forty, and so do their rounding errors.
            compare(&format!("{name}, step {}", step + 1), &oihw, expected, 10.0 * TOLERANCE);
        }
    }
}

/// A parameter's values over several steps, from `optimizer_steps` of `make_fixtures.py`.
#[derive(Deserialize)]
struct OptimizerRun {
    optimizer: OptimizerKind,
    lr: f32,
    weight_decay: f32,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    /// The weights after each step.
    weights: Vec<Vec<f32>>,
}

#[test]
fn steps_of_adamw_and_lamb_match_pytorch() {
    let fixture: serde_json::Value = serde_json::from_slice(&read("optimizers.json")).unwrap();
    let runs: BTreeMap<String, OptimizerRun> = serde_json::from_value(fixture["steps"].clone()).unwrap();
    assert_eq!(runs.len(), 6);
    for (name, run) in runs {
        let OptimizerRun { optimizer: kind, weight_decay, beta1, beta2, epsilon, .. } = run;
        let optimizer = Optimizer { kind, weight_decay, beta1, beta2, epsilon, ..Optimizer::default() };
        let policy = optimizer.policy(true);
        let mut w = synthetic_values(&format!("{name}.w"), 16);
        let [mut m, mut v] = [(); 2].map(|()| vec![0.0; 16]);
        assert_eq!(run.weights.len(), 20);
        for (step, expected) in run.weights.iter().enumerate() {
            // The learning rate decreases; every third gradient is small, and every seventh is zero.
            let lr = run.lr * (1.0 - step as f32 / 40.0);
            let scale = if step % 7 == 6 { 0.0 } else { [1.0, 10.0, 1e-3][step % 3] };
            let mut g: Vec<f32> =
                synthetic_values(&format!("{name}.g{step}"), 16).iter().map(|v| v * scale).collect();
            let update = Update::new(&optimizer, lr, step as u64 + 1);
            if optimizer.needs_norms() {
                update.prepare(policy, &w, [&mut m, &mut v], &mut g);
            }
            let (rate, decay) = update.rates(policy, || [orthogonal::norm(&g), orthogonal::norm(&w)]);
            update.apply(rate, decay, &mut w, [&mut m, &mut v], &g);
            compare(&format!("{name}, step {}", step + 1), &w, expected, TOLERANCE);
        }
    }
}
