//! Checks for invalid values: NaN, infinities, and negative means of squares (running variances, Adam's second moments). A
//! model with such values can neither predict nor continue to train.

use super::{Engine, EngineError, NamedTensors};

/// Exponent bits of a float32: all set in NaN and the infinities.
const EXPONENT: u32 = 0x7f80_0000;
/// Number of values that are checked between two tests of the result, so that the check of a tensor with NaN ends
/// early.
const BLOCK: usize = 1 << 14;

/// Finds the first tensor, in the order of names, with a non-finite value or a negative mean of squares. Returns a phrase
/// that names the tensor, the value and the value's index.
///
/// Reads every value once, at about memory bandwidth.
pub fn first_invalid(tensors: &NamedTensors) -> Option<String> {
    tensors.iter().find_map(|(name, tensor)| describe_invalid(name, &tensor.values))
}

/// [`Engine::first_invalid`] on copies of all of the engine's tensors.
pub(super) fn first_of_engine(engine: &(impl Engine + ?Sized)) -> Result<Option<String>, EngineError> {
    if let Some(found) = first_invalid(&engine.parameters()?) {
        return Ok(Some(found));
    }
    if let Some(found) = first_invalid(&engine.optimizer_state()?.slots) {
        return Ok(Some(found));
    }
    let invalid_average = engine.averaged()?.as_ref().and_then(first_invalid);
    Ok(invalid_average.map(|found| format!("of the average {found}")))
}

/// Whether no value is NaN or infinite.
pub fn all_finite(values: &[f32]) -> bool {
    // A maximum over the integer exponents compiles to vector instructions.
    values
        .chunks(BLOCK)
        .all(|block| block.iter().fold(0, |largest, v| largest.max(v.to_bits() & EXPONENT)) < EXPONENT)
}

/// [`first_invalid`] for one tensor.
fn describe_invalid(name: &str, values: &[f32]) -> Option<String> {
    if !all_finite(values) {
        let (index, value) = values.iter().enumerate().find(|(_, v)| !v.is_finite())?;
        let count = values.iter().filter(|v| !v.is_finite()).count();
        return Some(format!(
            "{name} contains {value} at index {index} ({count} of its {} values are not finite)",
            values.len()
        ));
    }
    let of_squares = [("running_var", "a variance"), (".exp_avg_sq", "a mean of squares")];
    if let Some((_, what)) = of_squares.iter().find(|(end, _)| name.ends_with(end))
        // A loop without an early end compiles to vector instructions.
        && values.iter().fold(false, |any, v| any | (*v < 0.0))
    {
        let (index, value) = values.iter().enumerate().find(|(_, v)| **v < 0.0)?;
        return Some(format!("{name} contains {value} at index {index}: {what} is never below zero"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_host::tensors::HostTensor;

    fn tensors(name: &str, values: Vec<f32>) -> NamedTensors {
        let fine = HostTensor { shape: vec![2], values: vec![f32::MAX, -f32::MIN_POSITIVE] };
        NamedTensors::from([
            ("a.weight".into(), fine),
            (name.into(), HostTensor { shape: vec![values.len()], values }),
        ])
    }

    #[test]
    fn a_non_finite_value_is_found_at_any_index() {
        let length = BLOCK + 3;
        for (wrong, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
            for index in [0, 1, BLOCK - 1, BLOCK, length - 1] {
                let mut values = vec![-1.5; length];
                values[index] = wrong;
                assert!(!all_finite(&values));
                let found = first_invalid(&tensors("conv1.weight", values)).unwrap();
                let expected = format!(
                    "conv1.weight contains {word} at index {index} (1 of its {length} values are not finite)"
                );
                assert_eq!(found, expected);
            }
        }
        assert_eq!(first_invalid(&tensors("conv1.weight", vec![f32::MIN, -0.0, 1e-45])), None);
        assert_eq!(first_invalid(&tensors("conv1.weight", Vec::new())), None);
    }

    #[test]
    fn a_negative_running_variance_is_found() {
        let found = first_invalid(&tensors("bn1.running_var", vec![1.0, 0.0, -1e-45])).unwrap();
        assert!(found.starts_with("bn1.running_var contains -0.00"), "{found}");
        assert!(found.contains("at index 2") && found.contains("variance"), "{found}");
        assert_eq!(first_invalid(&tensors("bn1.running_var", vec![0.0, -0.0, 3.0])), None);
        assert_eq!(first_invalid(&tensors("bn1.running_mean", vec![-3.0])), None, "means may be negative");
        let found = first_invalid(&tensors("fc.bias.exp_avg_sq", vec![0.0, -1.0])).unwrap();
        assert!(found.contains("fc.bias.exp_avg_sq contains -1 at index 1: a mean of squares"), "{found}");
        assert_eq!(first_invalid(&tensors("fc.bias.exp_avg", vec![-1.0])), None);
    }
}
