//! An attempt's speed: pictures divided by training time. All numbers called "images per second" follow this definition.

use crate::spec::JobSpec;
use serde::{Deserialize, Serialize};

/// Minimum training time in each complete part of [`Throughput::recent`], in seconds.
const RECENT_SECS: f64 = 60.0;

/// Pictures that an attempt has trained on, and the time of its steps, which is the sum of rank 0's `step_ms`. The time
/// includes waits for data and for other ranks. It excludes everything between steps, so evaluations, checkpoints and
/// pauses, and all steps of earlier attempts or of a fork's parent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Throughput {
    pictures: u64,
    secs: f64,
    /// Pictures and seconds of the newest steps, from which the time left follows: the last complete part, then the part that is being
    /// measured.
    recent: [(u64, f64); 2],
    /// Number of pictures of a full step, over all ranks.
    global_batch_size: u64,
    /// Number of pictures of an epoch whose last step may be smaller than the others; 0 if all steps have the same size.
    epoch: u64,
}

impl Throughput {
    /// The throughput of an attempt that is about to train. `train_samples`: number of pictures in the training split; 0 if unknown.
    pub fn new(spec: &JobSpec, train_samples: u64) -> Self {
        let epoch = if spec.data.drop_remainder { 0 } else { train_samples };
        Self { global_batch_size: spec.global_batch_size(), epoch, ..Self::default() }
    }

    /// Adds finished steps from a column `step_ms` of rank 0.
    pub fn add(&mut self, steps: &[u64], step_ms: &[f32]) {
        for (step, ms) in steps.iter().zip(step_ms).filter(|(_, ms)| ms.is_finite() && **ms > 0.0) {
            let (pictures, secs) = (self.pictures_of(*step), f64::from(*ms) / 1e3);
            self.pictures += pictures;
            self.secs += secs;
            let [complete, current] = &mut self.recent;
            if current.1 >= RECENT_SECS {
                *complete = std::mem::take(current);
            }
            current.0 += pictures;
            current.1 += secs;
        }
    }

    /// Number of pictures of an epoch whose last step may be smaller than the others; 0 if all steps have the same size.
    pub fn epoch_samples(&self) -> u64 {
        self.epoch
    }

    /// Number of pictures of a step (counted from 1), over all ranks.
    pub fn pictures_of(&self, step: u64) -> u64 {
        self.pictures_until(step).saturating_sub(self.pictures_until(step.saturating_sub(1)))
    }

    /// Images per second; `None` before the first step.
    pub fn images_per_second(&self) -> Option<f64> {
        (self.pictures > 0 && self.secs > 0.0).then(|| self.pictures as f64 / self.secs)
    }

    /// Seconds from step `done` to step `total`, at the speed of the newest one to two minutes of training.
    pub fn secs_left(&self, done: u64, total: u64) -> Option<f64> {
        let left = self.pictures_until(total).saturating_sub(self.pictures_until(done));
        let [complete, current] = self.recent;
        let (pictures, secs) = (complete.0 + current.0, complete.1 + current.1);
        (pictures > 0).then(|| left as f64 * secs / pictures as f64)
    }

    /// Number of pictures in the steps 1 to `step` of a run.
    pub fn pictures_until(&self, step: u64) -> u64 {
        if self.epoch == 0 || self.global_batch_size == 0 {
            return step.saturating_mul(self.global_batch_size);
        }
        let steps = self.epoch.div_ceil(self.global_batch_size);
        let rest = (step % steps).saturating_mul(self.global_batch_size);
        (step / steps).saturating_mul(self.epoch).saturating_add(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(drop_remainder: bool) -> JobSpec {
        let mut spec = JobSpec::default();
        spec.train.batch_size = Some(16);
        spec.parallel.ranks = 2;
        spec.data.drop_remainder = drop_remainder;
        spec
    }

    #[test]
    fn throughput_is_pictures_divided_by_time() {
        let mut speed = Throughput::new(&spec(true), 1000);
        assert_eq!((speed.images_per_second(), speed.secs_left(0, 10)), (None, None));
        speed.add(&[1, 2, 3], &[500.0, f32::NAN, 1500.0]);
        assert_eq!(speed.images_per_second(), Some(64.0 / 2.0));
        assert_eq!(speed.secs_left(3, 13), Some(10.0));
        assert_eq!(speed.secs_left(13, 3), Some(0.0));
        // The time left follows from the newest steps, and the speed from all steps.
        speed.add(&[4], &[120_000.0]);
        speed.add(&[5, 6], &[60_000.0, 60_000.0]);
        assert_eq!((speed.secs_left(6, 8), speed.images_per_second()), (Some(120.0), Some(160.0 / 242.0)));
    }

    #[test]
    fn a_smaller_last_step_of_an_epoch_counts_its_own_pictures() {
        // Steps of 32, 32 and 6 pictures.
        let mut speed = Throughput::new(&spec(false), 70);
        speed.add(&[3], &[1000.0]);
        assert_eq!((speed.images_per_second(), speed.epoch_samples()), (Some(6.0), 70));
        assert_eq!([1, 2, 3, 4].map(|step| speed.pictures_of(step)), [32, 32, 6, 32]);
        speed.add(&[4, 5, 6], &[1000.0, 1000.0, 2000.0]);
        assert_eq!(speed.images_per_second(), Some(76.0 / 5.0));
        assert_eq!(speed.secs_left(6, 9), Some(70.0 * 5.0 / 76.0));
        // `drop_remainder` makes all steps equal.
        assert_eq!(Throughput::new(&spec(true), 70).epoch_samples(), 0);
        let mut whole = Throughput::new(&spec(false), 0);
        whole.add(&[3], &[1000.0]);
        assert_eq!(whole.images_per_second(), Some(32.0), "the number of training pictures is unknown");
    }
}
