//! Histograms of a network's weights and gradients, layer by layer. Rank 0 reports them every `log.histograms` steps.

use crate::{
    limits::{HISTOGRAM_BINS, LAYER_NAME_BYTES, MAX_HISTOGRAM_LAYERS},
    spec::named::words,
};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use utoipa::ToSchema;

/// The histograms of one step: at most [`MAX_HISTOGRAM_LAYERS`] histograms, of weights and gradients together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerHistograms {
    /// The optimizer step, from 1. The weights are those after this step, the gradients those of this step.
    pub step: u64,
    pub layers: Vec<LayerHistogram>,
}

/// The histogram of one layer at one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerHistogram {
    /// Name in the state dict: `layer1.0.conv1.weight`. At most [`LAYER_NAME_BYTES`] bytes.
    pub name: String,
    pub kind: HistogramKind,
    /// The smallest finite value; 0 without finite values.
    pub min: f32,
    /// The largest finite value.
    pub max: f32,
    /// Number of finite values in each of [`HISTOGRAM_BINS`] bins of equal width from `min` to `max`. `max` itself is
    /// in the last bin. If `min` equals `max`, all values are in the first bin.
    pub counts: Vec<u32>,
}

words! {
    /// The kind of the values.
    #[derive(Hash, PartialOrd, Ord, ToSchema)]
    pub enum HistogramKind: "kind" {
        Weight = "weight",
        Gradient = "gradient",
    }
}

impl LayerHistograms {
    /// Checks all limits, before a server stores the histograms.
    ///
    /// # Errors
    /// A sentence that says what is too long, too many or not a number.
    pub fn check(&self) -> Result<(), String> {
        if self.step == 0 || i64::try_from(self.step).is_err() {
            return Err(format!("histograms of step {}: steps count from 1", self.step));
        }
        let (count, limit) = (self.layers.len(), MAX_HISTOGRAM_LAYERS);
        if count > limit {
            return Err(format!("{count} histograms of one step; at most {limit} are allowed"));
        }
        self.layers.iter().try_for_each(LayerHistogram::check)?;
        let mut known = HashSet::new();
        match self.layers.iter().find(|layer| !known.insert((&layer.name, layer.kind))) {
            Some(twice) => {
                Err(format!("two histograms of the {} of {}; one is allowed", twice.kind, twice.name))
            }
            None => Ok(()),
        }
    }
}

impl LayerHistogram {
    fn check(&self) -> Result<(), String> {
        let Self { name, min, max, counts, .. } = self;
        if name.is_empty() || name.len() > LAYER_NAME_BYTES || name.chars().any(char::is_control) {
            let bytes = name.len();
            return Err(format!(
                "a layer's name has {bytes} bytes; 1 to {LAYER_NAME_BYTES} bytes without control characters are allowed"
            ));
        }
        if counts.len() != HISTOGRAM_BINS {
            return Err(format!(
                "the histogram of {name} must have {HISTOGRAM_BINS} bins, has {}",
                counts.len()
            ));
        }
        if !min.is_finite() || !max.is_finite() || min > max {
            return Err(format!(
                "the histogram of {name} must have finite, ascending bounds, has {min} and {max}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: &str) -> LayerHistogram {
        let counts = vec![1; HISTOGRAM_BINS];
        LayerHistogram { name: name.into(), kind: HistogramKind::Weight, min: -1.0, max: 1.0, counts }
    }

    fn with_layers(layers: Vec<LayerHistogram>) -> LayerHistograms {
        LayerHistograms { step: 1, layers }
    }

    #[test]
    fn histograms_have_a_maximum_of_layers_bins_and_bytes() {
        let many = |count: usize| with_layers((0..count).map(|n| layer(&format!("layer{n}"))).collect());
        assert_eq!(many(MAX_HISTOGRAM_LAYERS).check(), Ok(()));
        assert!(many(MAX_HISTOGRAM_LAYERS + 1).check().is_err());
        for bins in [0, HISTOGRAM_BINS - 1, HISTOGRAM_BINS + 1] {
            let wrong = LayerHistogram { counts: vec![1; bins], ..layer("a") };
            assert!(with_layers(vec![wrong]).check().is_err(), "{bins}");
        }
        assert_eq!(with_layers(vec![layer(&"n".repeat(LAYER_NAME_BYTES))]).check(), Ok(()));
        assert!(with_layers(vec![layer(&"n".repeat(LAYER_NAME_BYTES + 1))]).check().is_err());
        assert!(
            with_layers(vec![layer("")]).check().is_err() && with_layers(vec![layer("a\0")]).check().is_err()
        );
    }

    #[test]
    fn a_layer_has_one_histogram_of_each_kind() {
        let gradient = LayerHistogram { kind: HistogramKind::Gradient, ..layer("a") };
        assert_eq!(with_layers(vec![layer("a"), gradient, layer("b")]).check(), Ok(()));
        assert!(with_layers(vec![layer("a"), layer("b"), layer("a")]).check().is_err());
    }

    #[test]
    fn bounds_are_finite_and_ascend_and_steps_start_at_1() {
        for (min, max) in [(f32::NAN, 1.0), (0.0, f32::INFINITY), (1.0, 0.0)] {
            assert!(
                with_layers(vec![LayerHistogram { min, max, ..layer("a") }]).check().is_err(),
                "{min} {max}"
            );
        }
        assert_eq!(with_layers(vec![LayerHistogram { min: 2.0, max: 2.0, ..layer("a") }]).check(), Ok(()));
        for (step, good) in [(0, false), (1, true), (i64::MAX as u64, true), (1 << 63, false)] {
            assert_eq!(LayerHistograms { step, layers: Vec::new() }.check().is_ok(), good, "{step}");
        }
    }
}
