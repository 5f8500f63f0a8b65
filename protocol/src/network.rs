//! A job's network as a list of its layers, in the order in which a picture passes them. Rank 0 says it once an attempt.

use crate::limits::{LAYER_NAME_BYTES, NETWORK_LAYERS};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Dimensions of a layer's output.
const DIMENSIONS: usize = 8;

/// The layers of a network: at most [`NETWORK_LAYERS`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkDescription {
    pub layers: Vec<LayerDescription>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LayerDescription {
    /// As the state dict names it: `layer1.0.conv1`. At most [`LAYER_NAME_BYTES`].
    pub name: String,
    /// What it computes: `conv 3x3`, `batch_norm`, `relu`, `linear`. At most [`LAYER_NAME_BYTES`].
    pub kind: String,
    /// Of one picture, without the batch: channels, height, width.
    pub output_shape: Vec<u32>,
    /// How many numbers of it are trained.
    pub parameters: u64,
    /// How long it takes in a step, forward and backward together, in microseconds; absent where it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_us: Option<f32>,
}

impl NetworkDescription {
    /// Whether it keeps its limits, as a server asks before it stores one.
    ///
    /// # Errors
    /// A sentence that says what is too long or too many.
    pub fn check(&self) -> Result<(), String> {
        let count = self.layers.len();
        if count > NETWORK_LAYERS {
            return Err(format!("a network of {count} layers; {NETWORK_LAYERS} are allowed"));
        }
        for layer in &self.layers {
            let name = &layer.name;
            if name.len() > LAYER_NAME_BYTES || layer.kind.len() > LAYER_NAME_BYTES {
                return Err(format!(
                    "a layer's name or kind is longer than {LAYER_NAME_BYTES} bytes, which is the most"
                ));
            }
            if name.chars().chain(layer.kind.chars()).any(char::is_control) {
                return Err("a layer's name or kind has characters that cannot be shown".into());
            }
            if layer.output_shape.len() > DIMENSIONS {
                let count = layer.output_shape.len();
                return Err(format!("the output of {name} has {count} dimensions; {DIMENSIONS} are allowed"));
            }
            if layer.time_us.is_some_and(|time| !time.is_finite() || time < 0.0) {
                return Err(format!("the time of {name} is no time"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer() -> LayerDescription {
        LayerDescription {
            name: "conv1".into(),
            kind: "conv 3x3".into(),
            output_shape: vec![64, 32, 32],
            parameters: 1728,
            time_us: Some(12.5),
        }
    }

    fn of(layer: LayerDescription) -> NetworkDescription {
        NetworkDescription { layers: vec![layer] }
    }

    #[test]
    fn as_many_layers_and_bytes_as_allowed_and_one_more() {
        assert_eq!(NetworkDescription { layers: vec![layer(); NETWORK_LAYERS] }.check(), Ok(()));
        assert!(NetworkDescription { layers: vec![layer(); NETWORK_LAYERS + 1] }.check().is_err());
        let (most, more) = ("n".repeat(LAYER_NAME_BYTES), "n".repeat(LAYER_NAME_BYTES + 1));
        assert_eq!(of(LayerDescription { name: most.clone(), kind: most, ..layer() }).check(), Ok(()));
        assert!(of(LayerDescription { name: more.clone(), ..layer() }).check().is_err());
        assert!(of(LayerDescription { kind: more, ..layer() }).check().is_err());
        for text in ["a\0b", "a\n", "\u{1b}[31m"] {
            assert!(of(LayerDescription { name: text.into(), ..layer() }).check().is_err(), "{text:?}");
            assert!(of(LayerDescription { kind: text.into(), ..layer() }).check().is_err(), "{text:?}");
        }
        assert_eq!(of(LayerDescription { output_shape: vec![1; DIMENSIONS], ..layer() }).check(), Ok(()));
        assert!(of(LayerDescription { output_shape: vec![1; DIMENSIONS + 1], ..layer() }).check().is_err());
    }

    #[test]
    fn a_time_is_a_number() {
        assert_eq!(of(LayerDescription { time_us: None, ..layer() }).check(), Ok(()));
        for time in [f32::NAN, f32::INFINITY, -1.0] {
            assert!(of(LayerDescription { time_us: Some(time), ..layer() }).check().is_err(), "{time}");
        }
    }
}
