//! A job's best checkpoint, as shown next to the best validation accuracy. The checkpoint has another accuracy if there is no
//! checkpoint of the best epoch, or if the best checkpoint is chosen by the lowest loss.

use crate::{agent::CheckpointInfo, job::Measured, numbers::percent};

/// Whether a network with this validation `value` and `loss` is better than an earlier network with the value and loss `before`. A higher
/// value is better; of equal values, the lower loss; of equal losses, the newer network.
pub fn is_better(value: f64, loss: Option<f64>, before: (f64, Option<f64>)) -> bool {
    let has_lower_loss = || loss.zip(before.1).is_none_or(|(loss, before)| loss <= before);
    value > before.0 || (value == before.0 && has_lower_loss())
}

/// The checkpoint that commands call `best`, with its validation accuracy; `None` if no evaluation has chosen one.
pub fn best_checkpoint<'a>(
    checkpoints: impl IntoIterator<Item = &'a CheckpointInfo>,
) -> Option<(&'a CheckpointInfo, f64)> {
    let best = checkpoints.into_iter().filter(|c| c.best).max_by_key(|c| c.step)?;
    best.val_accuracy.map(|accuracy| (best, accuracy))
}

/// `best 82.2 % at epoch 3, best checkpoint 63.2 %`: the best evaluation with its epoch, and the best checkpoint's accuracy
/// if it differs. The same as `bestWords` in `static/job/checkpoints.js`.
pub fn best_words<'a>(best: Measured, checkpoints: impl IntoIterator<Item = &'a CheckpointInfo>) -> String {
    let best_accuracy = percent(best.value);
    let of_checkpoint = best_checkpoint(checkpoints).map(|(_, accuracy)| percent(accuracy));
    let addition = of_checkpoint
        .filter(|accuracy| *accuracy != best_accuracy)
        .map(|accuracy| format!(", best checkpoint {accuracy}"));
    format!("best {best_accuracy} at {}{}", best.epoch_or_step(), addition.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(epoch: u32, val_accuracy: Option<f64>, best: bool) -> CheckpointInfo {
        CheckpointInfo {
            epoch,
            step: u64::from(epoch) * 20,
            val_accuracy,
            best,
            size_bytes: 1,
            ..CheckpointInfo::default()
        }
    }

    #[test]
    fn loss_decides_between_equal_accuracies() {
        for (value, loss, before, better) in [
            (0.3, Some(2.0), (0.2, Some(1.0)), true),
            (0.2, Some(1.0), (0.3, Some(2.0)), false),
            (0.2333, Some(1.594), (0.2333, Some(1.684)), true),
            (0.2333, Some(1.684), (0.2333, Some(1.594)), false),
            (0.2, Some(1.0), (0.2, Some(1.0)), true),
            (0.2, None, (0.2, Some(1.0)), true),
        ] {
            assert_eq!(is_better(value, loss, before), better, "{value} {loss:?} after {before:?}");
        }
    }

    #[test]
    fn the_best_checkpoint_is_named_if_its_accuracy_differs() {
        let best = Measured { value: 0.822, loss: None, step: 60, epoch: 3 };
        let [older, newer] = [checkpoint(2, Some(0.632), true), checkpoint(4, Some(0.5), false)];
        assert_eq!(best_words(best, [&newer, &older]), "best 82.2 % at epoch 3, best checkpoint 63.2 %");
        assert_eq!(best_words(best, [&checkpoint(3, Some(0.822), true)]), "best 82.2 % at epoch 3");
        // Without validation, or before the first checkpoint, there is no best checkpoint.
        assert_eq!(best_words(best, [&checkpoint(3, None, true), &newer]), "best 82.2 % at epoch 3");
        assert_eq!(best_words(best, []), "best 82.2 % at epoch 3");
        assert_eq!(best_words(Measured { epoch: 0, ..best }, []), "best 82.2 % at step 60");
    }
}
