//! Histograms of tensors.

use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::{
    histograms::{HistogramKind, LayerHistogram, LayerHistograms},
    limits::{HISTOGRAM_BINS, MAX_HISTOGRAM_LAYERS},
};
use rayon::prelude::*;

/// The histograms of `step`: of each trained tensor in `weights`, and of its gradient if there is one.
pub(super) fn histograms(step: u64, weights: &NamedTensors, gradients: &NamedTensors) -> LayerHistograms {
    let is_trained = |name: &str| !name.ends_with(".running_mean") && !name.ends_with(".running_var");
    let tensors: Vec<(&String, HistogramKind, &[f32])> = weights
        .iter()
        .filter(|(name, _)| is_trained(name))
        .flat_map(|(name, weight)| {
            let gradient = gradients.get(name).map(|g| (name, HistogramKind::Gradient, &g.values[..]));
            std::iter::once((name, HistogramKind::Weight, &weight.values[..])).chain(gradient)
        })
        .take(MAX_HISTOGRAM_LAYERS)
        .collect();
    let layers = tensors.par_iter().map(|(name, kind, values)| histogram((*name).clone(), *kind, values));
    LayerHistograms { step, layers: layers.collect() }
}

/// The histogram of the finite values of a tensor.
fn histogram(name: String, kind: HistogramKind, values: &[f32]) -> LayerHistogram {
    let finite = || values.iter().copied().filter(|v| v.is_finite());
    let (min, max) =
        finite().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), v| (min.min(v), max.max(v)));
    let mut counts = vec![0u32; HISTOGRAM_BINS];
    if min > max {
        return LayerHistogram { name, kind, min: 0.0, max: 0.0, counts };
    }
    // In float64, because the difference of float32's extreme values is not a float32.
    let (from, width) = (f64::from(min), f64::from(max) - f64::from(min));
    let bins_per_unit = if width > 0.0 { HISTOGRAM_BINS as f64 / width } else { 0.0 };
    for value in finite() {
        let bin = ((f64::from(value) - from) * bins_per_unit) as usize;
        counts[bin.min(HISTOGRAM_BINS - 1)] += 1;
    }
    LayerHistogram { name, kind, min, max, counts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_host::tensors::HostTensor;
    use lockstep_kernels::synthetic::values;

    fn weight_histogram(values: &[f32]) -> LayerHistogram {
        let found = histogram("a".into(), HistogramKind::Weight, values);
        let finite = values.iter().filter(|v| v.is_finite()).count();
        assert_eq!(found.counts.iter().sum::<u32>() as usize, finite);
        assert_eq!(LayerHistograms { step: 1, layers: vec![found.clone()] }.check(), Ok(()));
        found
    }

    #[test]
    fn bins_are_equal_and_the_largest_value_is_in_the_last() {
        let all: Vec<f32> = (0..=64).map(|i| i as f32).collect();
        let found = weight_histogram(&all);
        assert_eq!((found.min, found.max), (0.0, 64.0));
        assert_eq!(found.counts[..63], [1; 63]);
        assert_eq!(found.counts[63], 2, "63 and 64");
        let found = weight_histogram(&[-1.0, 0.0, 0.0, 1.0]);
        assert_eq!((found.counts[0], found.counts[32], found.counts[63]), (1, 2, 1));
    }

    #[test]
    fn constant_and_non_finite_tensors_have_histograms() {
        let found = weight_histogram(&[2.5; 7]);
        assert_eq!((found.min, found.max, found.counts[0]), (2.5, 2.5, 7));
        let found = weight_histogram(&[f32::NAN, f32::INFINITY, 1.0, f32::NEG_INFINITY, 3.0]);
        assert_eq!((found.min, found.max, found.counts[0], found.counts[63]), (1.0, 3.0, 1, 1));
        let found = weight_histogram(&[f32::NAN]);
        assert_eq!((found.min, found.max, found.counts.iter().sum::<u32>()), (0.0, 0.0, 0));
        assert_eq!(weight_histogram(&[]).max, 0.0);
        let found = weight_histogram(&[f32::MIN, 0.0, f32::MAX]);
        assert_eq!((found.counts[0], found.counts[32], found.counts[63]), (1, 1, 1));
    }

    fn tensors(count: usize, suffix: &str) -> NamedTensors {
        let tensor = |i: usize| {
            let name = format!("layer{i:04}.{suffix}");
            let values = values(&name, 50 + i);
            (name, HostTensor { shape: vec![values.len()], values })
        };
        (0..count).map(tensor).collect()
    }

    #[test]
    fn weights_and_gradients_come_in_pairs() {
        let (mut weights, mut gradients) = (tensors(30, "weight"), tensors(30, "weight"));
        weights.extend(tensors(3, "running_mean"));
        weights.extend(tensors(3, "running_var"));
        // A tensor of a frozen batch norm.
        gradients.remove("layer0007.weight");
        let found = histograms(20, &weights, &gradients);
        assert_eq!((found.step, found.layers.len(), found.check()), (20, 59, Ok(())));
        let kinds: Vec<_> = found.layers[..3].iter().map(|l| (l.name.as_str(), l.kind)).collect();
        let (weight, gradient) = (HistogramKind::Weight, HistogramKind::Gradient);
        assert_eq!(
            kinds,
            [("layer0000.weight", weight), ("layer0000.weight", gradient), ("layer0001.weight", weight)]
        );
        assert!(!found.layers.iter().any(
            |l| l.name.contains("running") || (l.kind, l.name.as_str()) == (gradient, "layer0007.weight")
        ));
    }

    #[test]
    fn the_number_of_histograms_is_limited() {
        for (count, total) in [(512, 1024), (513, 1024)] {
            let all = tensors(count, "weight");
            let found = histograms(10, &all, &all);
            assert_eq!((found.layers.len(), found.check()), (total, Ok(())));
        }
    }
}
