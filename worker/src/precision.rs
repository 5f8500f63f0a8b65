//! Steps whose gradients overflow float16. Each such step is skipped and the loss scale is halved, as by PyTorch's
//! `GradScaler`. If overflows persist, the run needs another floating-point format.

use serde::{Deserialize, Serialize};

/// Number of consecutive skipped steps that shows that float16 is unsuitable. The scale has then been divided by 32 without
/// effect.
const TOO_MANY_IN_A_ROW: u64 = 5;
/// Maximum number of skipped steps among the last [`WINDOW`] steps: one in a hundred.
const MAX_IN_WINDOW: usize = (WINDOW / 100) as usize;
const WINDOW: u64 = 500;

/// The skipped steps of a run. They are part of a checkpoint, so that an interrupted run makes the same decisions as
/// an uninterrupted one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedSteps {
    /// Number of skipped steps since the run began.
    pub total: u64,
    /// The numbers of recent skipped steps, in ascending order. Steps that are too old to count are removed.
    pub recent: Vec<u64>,
}

impl SkippedSteps {
    /// Records whether `step` was skipped. `step` must be later than all previous steps.
    pub fn record(&mut self, step: u64, is_skipped: bool) {
        if is_skipped {
            self.total += 1;
            self.recent.push(step);
        }
        self.recent.retain(|old| old + WINDOW > step);
    }

    /// Whether so many recent steps were skipped that float16 is unsuitable.
    pub fn is_persistent(&self) -> bool {
        self.describe_if_persistent().is_some()
    }

    /// Describes the recent skipped steps. `None` unless they are so many that float16 is unsuitable.
    pub fn describe_if_persistent(&self) -> Option<String> {
        let are_consecutive = match *self.recent.as_slice() {
            [.., first, _, _, _, last] => last.checked_sub(first) == Some(TOO_MANY_IN_A_ROW - 1),
            _ => false,
        };
        if are_consecutive {
            return Some(format!("{TOO_MANY_IN_A_ROW} steps in a row"));
        }
        let count = self.recent.len();
        (count > MAX_IN_WINDOW).then(|| format!("{count} of the last {WINDOW} steps"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The state after `steps` steps, of which `skipped` were skipped.
    fn after(steps: u64, skipped: &[u64]) -> SkippedSteps {
        let mut all = SkippedSteps::default();
        (1..=steps).for_each(|step| all.record(step, skipped.contains(&step)));
        all
    }

    #[test]
    fn four_consecutive_skipped_steps_are_tolerated_but_not_five() {
        assert_eq!(after(10, &[3, 4, 5, 6]).describe_if_persistent(), None);
        assert_eq!(after(10, &[3, 4, 5, 6, 8]).describe_if_persistent(), None);
        assert_eq!(after(7, &[3, 4, 5, 6, 7]).describe_if_persistent().as_deref(), Some("5 steps in a row"));
    }

    #[test]
    fn five_skipped_of_500_steps_are_tolerated_but_not_six() {
        let every_hundredth: Vec<u64> = (1..=30).map(|n| 100 * n).collect();
        for steps in [499, 500, 501, 3000] {
            assert_eq!(after(steps, &every_hundredth).describe_if_persistent(), None, "{steps}");
        }
        let six = [100, 200, 300, 400, 500, 599];
        assert_eq!(after(599, &six).describe_if_persistent().as_deref(), Some("6 of the last 500 steps"));
        assert_eq!(after(600, &six).describe_if_persistent(), None, "the first is too old to count");
        assert_eq!(after(600, &six).total, 6);
    }
}
