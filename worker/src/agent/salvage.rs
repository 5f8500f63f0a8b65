//! Complete checkpoints on disk that no rank has reported.
//! Rank 0 writes checkpoints concurrently with training, and reports each complete checkpoint. If rank 0 is killed
//! before the report, or ends because another rank died during the write, the report is lost, and the next attempt
//! would begin before that checkpoint. So the agent looks for unreported checkpoints when all ranks have ended.

use crate::checkpoint;
use lockstep_protocol::agent::{AttemptEvent, CheckpointInfo};
use std::{collections::BTreeMap, path::Path};

/// The checkpoints that the ranks of an attempt have reported.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ReportedCheckpoints {
    /// The step after which the attempt began. `None` until rank 0 has reported that it runs.
    start_step: Option<u64>,
    /// The steps of checkpoints reported as written, and whether each exists. Checkpoints are removed if they are too old or damaged.
    steps: BTreeMap<u64, bool>,
}

impl ReportedCheckpoints {
    pub(super) fn record(&mut self, event: &AttemptEvent) {
        match event {
            AttemptEvent::Running { start_step, .. } => self.start_step = Some(*start_step),
            AttemptEvent::Checkpoint(info) => _ = self.steps.insert(info.step, true),
            AttemptEvent::CheckpointRemoved { step, .. } => _ = self.steps.insert(*step, false),
            _ => {}
        }
    }

    /// The checkpoints in `directory` that this attempt wrote up to `recorded_step` and did not report. All ranks
    /// have recorded their results up to that step, so continuing from such a checkpoint leaves no gap in the results.
    pub(super) fn unreported(&self, directory: &Path, recorded_step: u64) -> Vec<CheckpointInfo> {
        let Some(start) = self.start_step else { return Vec::new() };
        let Ok(on_disk) = checkpoint::list(directory) else { return Vec::new() };
        on_disk
            .into_iter()
            .filter(|(_, step)| *step > start && *step <= recorded_step && !self.steps.contains_key(step))
            // A damaged checkpoint does not count.
            .filter_map(|(epoch, step)| {
                checkpoint::verified_info(&directory.join(checkpoint::folder_name(epoch, step))).ok()
            })
            .collect()
    }

    /// A log line about the steps that are lost if an attempt is stopped after step `step`. `None` if no steps are lost.
    /// `unreported` are the checkpoints that the attempt wrote and did not report.
    pub(super) fn describe_lost_steps(&self, step: u64, unreported: &[CheckpointInfo]) -> Option<String> {
        let existing = self.steps.iter().filter(|(_, exists)| **exists).map(|(step, _)| *step);
        let known = self.start_step.into_iter().chain(existing);
        let newest = known.chain(unreported.iter().map(|info| info.step)).max()?;
        let newest_checkpoint = if newest == 0 {
            "there is no checkpoint yet".into()
        } else {
            format!("the newest checkpoint is of step {newest}")
        };
        (step > newest).then(|| {
            format!(
                "stopped without a checkpoint of step {step}: {newest_checkpoint}, steps {} to {step} are lost",
                newest + 1
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{MODEL, folder_name, tests::snapshot, write};

    fn running(start_step: u64) -> AttemptEvent {
        AttemptEvent::Running { total_steps: 200, steps_per_epoch: 200, start_step, train_samples: 0 }
    }

    #[test]
    fn unreported_checkpoints_are_found_if_complete_and_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = dir.path().join("checkpoints");
        for step in [20, 40, 60, 80, 100] {
            write(&checkpoints, &snapshot(1, step, Some(0.5)), None).unwrap();
        }
        let mut reported = ReportedCheckpoints::default();
        assert_eq!(reported.unreported(&checkpoints, 1000), [], "the attempt never ran");
        reported.record(&running(20));
        reported.record(&AttemptEvent::Checkpoint(
            checkpoint::verified_info(&checkpoints.join(folder_name(1, 40))).unwrap(),
        ));
        let model = checkpoints.join(folder_name(1, 60)).join(MODEL);
        let mut bytes = std::fs::read(&model).unwrap();
        bytes.pop();
        std::fs::write(&model, bytes).unwrap();
        let found = reported.unreported(&checkpoints, 99);
        assert_eq!(found.iter().map(|info| info.step).collect::<Vec<_>>(), [80]);
        assert_eq!((found[0].val_accuracy, found[0].best), (Some(0.5), false));
        assert!(found[0].size_bytes > 0);
        assert_eq!(reported.unreported(&dir.path().join("nowhere"), 1000), []);
    }

    #[test]
    fn a_stop_without_a_checkpoint_reports_the_lost_steps() {
        let mut reported = ReportedCheckpoints::default();
        assert_eq!(reported.describe_lost_steps(7, &[]), None, "the attempt never ran");
        reported.record(&running(0));
        assert_eq!(reported.describe_lost_steps(0, &[]), None);
        let message = reported.describe_lost_steps(7, &[]).unwrap();
        assert!(message.contains("no checkpoint yet, steps 1 to 7 are lost"), "{message}");
        let checkpoint_of =
            |step| CheckpointInfo { epoch: 1, step, size_bytes: 1, ..CheckpointInfo::default() };
        reported.record(&AttemptEvent::Checkpoint(checkpoint_of(20)));
        // A checkpoint that was found damaged at the start.
        reported.record(&AttemptEvent::CheckpointRemoved { epoch: 2, step: 100 });
        let message = reported.describe_lost_steps(57, &[]).unwrap();
        assert!(message.contains("of step 20, steps 21 to 57 are lost"), "{message}");
        assert_eq!(reported.describe_lost_steps(57, &[checkpoint_of(57)]), None, "the agent has found one");
    }
}
