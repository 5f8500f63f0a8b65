//! Steps that float16 could not hold. Each is skipped and the loss scale halved, as PyTorch's `GradScaler` does; when that
//! persists, the run needs another format.

use serde::{Deserialize, Serialize};

/// So many skipped steps in a row are too many: the scale has shrunk to a thirty-second without effect.
const IN_A_ROW: u64 = 5;
/// So are more than one in a hundred of the last [`WINDOW`] steps.
const MAX_IN_WINDOW: usize = (WINDOW / 100) as usize;
const WINDOW: u64 = 500;

/// The skipped steps of a run; part of a checkpoint, so that a run that was stopped decides as one that was not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedSteps {
    /// Since the run began.
    pub total: u64,
    /// Their numbers, ascending; those that are too old to count are forgotten.
    pub recent: Vec<u64>,
}

impl SkippedSteps {
    /// Takes down what became of `step`, which is later than all before.
    pub fn note(&mut self, step: u64, skipped: bool) {
        if skipped {
            self.total += 1;
            self.recent.push(step);
        }
        self.recent.retain(|old| old + WINDOW > step);
    }

    /// Why float16 will not do, if too many steps up to the newest were skipped.
    pub fn persist(&self) -> Option<String> {
        let in_a_row = match *self.recent.as_slice() {
            [.., first, _, _, _, last] => last.checked_sub(first) == Some(IN_A_ROW - 1),
            _ => false,
        };
        if in_a_row {
            return Some(format!("{IN_A_ROW} steps in a row"));
        }
        let count = self.recent.len();
        (count > MAX_IN_WINDOW).then(|| format!("{count} of the last {WINDOW} steps"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After `steps` steps of which those in `skipped` were.
    fn after(steps: u64, skipped: &[u64]) -> SkippedSteps {
        let mut all = SkippedSteps::default();
        (1..=steps).for_each(|step| all.note(step, skipped.contains(&step)));
        all
    }

    #[test]
    fn four_in_a_row_are_borne_and_five_are_not() {
        assert_eq!(after(10, &[3, 4, 5, 6]).persist(), None);
        assert_eq!(after(10, &[3, 4, 5, 6, 8]).persist(), None);
        assert_eq!(after(7, &[3, 4, 5, 6, 7]).persist().as_deref(), Some("5 steps in a row"));
    }

    #[test]
    fn five_of_five_hundred_are_borne_and_six_are_not() {
        let every_hundredth: Vec<u64> = (1..=30).map(|n| 100 * n).collect();
        for steps in [499, 500, 501, 3000] {
            assert_eq!(after(steps, &every_hundredth).persist(), None, "{steps}");
        }
        let six = [100, 200, 300, 400, 500, 599];
        assert_eq!(after(599, &six).persist().as_deref(), Some("6 of the last 500 steps"));
        assert_eq!(after(600, &six).persist(), None, "the first is too old to count");
        assert_eq!(after(600, &six).total, 6);
    }
}
