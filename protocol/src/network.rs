//! A job's network as a list of its layers, in the order of the forward pass. Rank 0 reports it when an attempt starts, and again
//! after measurements.

use crate::{
    limits::{LAYER_NAME_BYTES, MAX_NETWORK_LAYERS, PLAN_TEXT_BYTES},
    spec::{MAX_SHARDS, ShardSpec},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum number of dimensions of a layer's output.
const DIMENSIONS: usize = 8;

/// The layers of a network: at most 4096.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkDescription {
    pub layers: Vec<LayerDescription>,
    /// Number of steps in which the layers were timed; absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timed_steps: Option<u32>,
    /// How the network is divided over the job's ranks; absent for data parallelism without a prediction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanDescription>,
}

/// How a network is divided over ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanDescription {
    /// In words: `data parallel on 4 ranks`. At most 16,384 bytes, like all texts in this type.
    pub words: String,
    /// Number of stages of the network.
    pub pipeline: u32,
    /// The layer at which each stage after the first begins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later_stages: Vec<String>,
    /// Number of copies of the network. A copy is on `pipeline` x `height` x `model` ranks.
    pub data: u32,
    /// Number of ranks that share the rows of each picture.
    pub height: u32,
    /// Number of ranks over which operators are split (`shard`).
    pub model: u32,
    /// How operators are split over the ranks of `model`.
    pub shard: Vec<ShardSpec>,
    /// The predictions; absent if the machine of rank 0 has no measurements. `lockstep plan` measures the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PlanPrediction>,
    /// Measured time of a step, in milliseconds (median of several); absent before enough steps are done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_step_ms: Option<f32>,
    /// Measured memory of rank 0: the memory in use on its GPU, or on CPU cores the peak memory of its process, including the program and
    /// pictures.
    /// Present together with `measured_step_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_memory_bytes: Option<u64>,
}

/// The predictions for a step of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanPrediction {
    /// Time of a step, in milliseconds.
    pub step_ms: f32,
    /// Images per second of all ranks.
    pub images_per_second: f32,
    /// Memory of the rank that needs the most.
    pub memory_bytes: u64,
    /// `computing`, `communication` or `memory`.
    pub limited_by: String,
    /// Why the ranks run this plan.
    pub why: String,
}

/// A layer's part of the plan, predicted for the rank with the largest part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LayerPlan {
    /// The part of the layer's output that a rank has, such as `own pictures` or `1/2 of the channels`.
    pub placement: String,
    /// Bytes of weights, gradients, optimizer state and activations kept for the backward pass.
    pub memory_bytes: u64,
    /// Bytes that a rank sends to other ranks in a step, including gradients.
    pub sent_bytes: u64,
    /// Time of this layer in a step, in microseconds: forward, backward, and the exchange of activations.
    pub time_us: f32,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LayerDescription {
    /// Name in the state dict: `layer1.0.conv1`. At most 200 bytes.
    pub name: String,
    /// The layer's operation, such as `conv 3x3`, `batch_norm`, `relu` or `linear`. At most 200 bytes.
    pub kind: String,
    /// Shape for one picture, without the batch: channels, height, width.
    pub output_shape: Vec<u32>,
    /// Number of trained parameters.
    pub parameters: u64,
    /// Time of this layer in a step, in microseconds: forward and backward together, the median over the network's `timed_steps`. Absent
    /// if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_us: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<LayerPlan>,
}

impl NetworkDescription {
    /// Checks all limits, before a server stores the description.
    ///
    /// # Errors
    /// A sentence that says what is too long or too many.
    pub fn check(&self) -> Result<(), String> {
        let count = self.layers.len();
        if count > MAX_NETWORK_LAYERS {
            return Err(format!("a network of {count} layers; at most {MAX_NETWORK_LAYERS} are allowed"));
        }
        for layer in &self.layers {
            let name = &layer.name;
            if !is_line(name, LAYER_NAME_BYTES) || !is_line(&layer.kind, LAYER_NAME_BYTES) {
                return Err(format!(
                    "a layer's name or kind is not a line of at most {LAYER_NAME_BYTES} bytes"
                ));
            }
            if layer.output_shape.len() > DIMENSIONS {
                let count = layer.output_shape.len();
                return Err(format!(
                    "the output of {name} has {count} dimensions; at most {DIMENSIONS} are allowed"
                ));
            }
            if layer.time_us.is_some_and(|time| !is_time(time)) {
                return Err(format!("the time of {name} is negative or not finite"));
            }
            if let Some(plan) = &layer.plan {
                if !is_line(&plan.placement, LAYER_NAME_BYTES) {
                    return Err(format!(
                        "the placement of {name} is not a line of at most {LAYER_NAME_BYTES} bytes"
                    ));
                }
                if !is_time(plan.time_us) {
                    return Err(format!("the predicted time of {name} is negative or not finite"));
                }
            }
        }
        self.plan.as_ref().map_or(Ok(()), PlanDescription::check)
    }
}

impl PlanDescription {
    /// What to do if the measured time of a step differs from the prediction by more than half of the prediction.
    pub fn advice(&self) -> Option<&'static str> {
        let predicted = self.predicted.as_ref()?.step_ms;
        ((self.measured_step_ms? - predicted).abs() > predicted / 2.0).then_some(
            "the figures of the machine that trains may be out of date: `lockstep plan --measure JOB.toml` measures them again there",
        )
    }

    fn check(&self) -> Result<(), String> {
        let predicted = self.predicted.as_ref();
        let texts = predicted.into_iter().flat_map(|plan| [&plan.limited_by, &plan.why]).chain([&self.words]);
        if texts.into_iter().any(|text| !is_line(text, PLAN_TEXT_BYTES)) {
            return Err(format!("a text of the plan is not a line of at most {PLAN_TEXT_BYTES} bytes"));
        }
        let is_name = |name: &String| is_line(name, LAYER_NAME_BYTES);
        if self.later_stages.len() > MAX_NETWORK_LAYERS || !self.later_stages.iter().all(is_name) {
            return Err("the plan has too many stages, or a stage with an invalid name".into());
        }
        if self.shard.len() > MAX_SHARDS || self.shard.iter().any(|shard| !shard.has_valid_pattern()) {
            return Err(format!("the plan has more than {MAX_SHARDS} strategies, or an invalid pattern"));
        }
        let times = predicted.into_iter().flat_map(|plan| [plan.step_ms, plan.images_per_second]);
        if !times.chain(self.measured_step_ms).all(is_time) {
            return Err("a time or the rate of the plan is negative or not finite".into());
        }
        Ok(())
    }
}

fn is_line(text: &str, max_bytes: usize) -> bool {
    text.len() <= max_bytes && !text.chars().any(char::is_control)
}

fn is_time(time: f32) -> bool {
    time.is_finite() && time >= 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Split;

    fn layer() -> LayerDescription {
        LayerDescription {
            name: "conv1".into(),
            kind: "conv 3x3".into(),
            output_shape: vec![64, 32, 32],
            parameters: 1728,
            time_us: Some(12.5),
            plan: Some(LayerPlan {
                placement: "own pictures".into(),
                memory_bytes: 1 << 20,
                sent_bytes: 0,
                time_us: 12.0,
            }),
        }
    }

    fn plan() -> PlanDescription {
        PlanDescription {
            pipeline: 1,
            later_stages: Vec::new(),
            words: "data parallel on 2 ranks".into(),
            data: 2,
            height: 1,
            model: 1,
            shard: Vec::new(),
            predicted: Some(prediction()),
            measured_step_ms: Some(12.5),
            measured_memory_bytes: Some(1 << 30),
        }
    }

    fn prediction() -> PlanPrediction {
        PlanPrediction {
            step_ms: 12.0,
            images_per_second: 100.0,
            memory_bytes: 1 << 30,
            limited_by: "computing".into(),
            why: "there is no other".into(),
        }
    }

    fn network(layer: LayerDescription) -> NetworkDescription {
        NetworkDescription { layers: vec![layer], timed_steps: Some(5), plan: Some(plan()) }
    }

    #[test]
    fn descriptions_have_a_maximum_of_layers_and_bytes() {
        let many = |count| NetworkDescription { layers: vec![layer(); count], ..Default::default() };
        assert_eq!(many(MAX_NETWORK_LAYERS).check(), Ok(()));
        assert!(many(MAX_NETWORK_LAYERS + 1).check().is_err());
        let (at_limit, beyond) = ("n".repeat(LAYER_NAME_BYTES), "n".repeat(LAYER_NAME_BYTES + 1));
        assert_eq!(
            network(LayerDescription { name: at_limit.clone(), kind: at_limit, ..layer() }).check(),
            Ok(())
        );
        assert!(network(LayerDescription { name: beyond.clone(), ..layer() }).check().is_err());
        assert!(network(LayerDescription { kind: beyond, ..layer() }).check().is_err());
        for text in ["a\0b", "a\n", "\u{1b}[31m"] {
            assert!(network(LayerDescription { name: text.into(), ..layer() }).check().is_err(), "{text:?}");
            assert!(network(LayerDescription { kind: text.into(), ..layer() }).check().is_err(), "{text:?}");
        }
        assert_eq!(
            network(LayerDescription { output_shape: vec![1; DIMENSIONS], ..layer() }).check(),
            Ok(())
        );
        assert!(
            network(LayerDescription { output_shape: vec![1; DIMENSIONS + 1], ..layer() }).check().is_err()
        );
    }

    #[test]
    fn times_are_finite_and_not_negative() {
        assert_eq!(network(LayerDescription { time_us: None, ..layer() }).check(), Ok(()));
        for time in [f32::NAN, f32::INFINITY, -1.0] {
            assert!(network(LayerDescription { time_us: Some(time), ..layer() }).check().is_err(), "{time}");
        }
    }

    #[test]
    fn a_plan_beyond_a_limit_is_refused() {
        let of_plan = |plan| NetworkDescription { plan: Some(plan), ..Default::default() }.check();
        assert_eq!(of_plan(plan()), Ok(()));
        let why = |bytes| PlanPrediction { why: "w".repeat(bytes), ..prediction() };
        let predicted = |prediction| PlanDescription { predicted: Some(prediction), ..plan() };
        assert_eq!(of_plan(predicted(why(PLAN_TEXT_BYTES))), Ok(()));
        assert_eq!(of_plan(PlanDescription { predicted: None, ..plan() }), Ok(()));
        for wrong in [
            predicted(why(PLAN_TEXT_BYTES + 1)),
            PlanDescription { words: "a\nb".into(), ..plan() },
            predicted(PlanPrediction { step_ms: f32::NAN, ..prediction() }),
            PlanDescription { later_stages: vec!["l".repeat(LAYER_NAME_BYTES + 1)], ..plan() },
            PlanDescription { measured_step_ms: Some(-1.0), ..plan() },
            PlanDescription { shard: vec![ShardSpec { pattern: "a b".into(), split: Split::Out }], ..plan() },
        ] {
            assert!(of_plan(wrong.clone()).is_err(), "{wrong:?}");
        }
        let placement = |placement: String| LayerPlan { placement, ..layer().plan.expect("one") };
        let long = placement("p".repeat(LAYER_NAME_BYTES + 1));
        assert!(network(LayerDescription { plan: Some(long), ..layer() }).check().is_err());
    }
}
