//! The learning rate of every step, as a function of the step's number: continuing a run needs no state.

use crate::spec::{ScheduleKind, TrainSpec};

/// How the learning rate changes over a run.
///
/// In the first `warmup_steps` steps the rate rises linearly: step `i` (from 0) has `lr (i + 1) / warmup_steps`. `n` steps follow. In
/// these, `i` counts from 0 again, and step `i` has, with `end = lr * final_lr_fraction`:
/// - `constant`: `lr`
/// - `step`: `lr * gamma^k`, where `k` is the number of milestones (in epochs from the start of the run) that are over
/// - `cosine` (Loshchilov and Hutter 2017): `end + (lr - end) (1 + cos(pi i / (n - 1))) / 2`
/// - `one_cycle` (Smith 2018): `lr (i + 1) / r` in the first `r = pct_start * n` steps, then linearly down to `end` at the last step
#[derive(Debug, Clone)]
pub struct Schedule {
    spec: TrainSpec,
    warmup_steps: u64,
    total_steps: u64,
    steps_per_epoch: u64,
}

impl Schedule {
    /// The schedule of a run of `total_steps` steps.
    pub fn new(spec: &TrainSpec, steps_per_epoch: u64, total_steps: u64) -> Self {
        let warmup_steps = (f64::from(spec.warmup_epochs) * steps_per_epoch as f64).round() as u64;
        let warmup_steps = warmup_steps.min(total_steps);
        Self { spec: spec.clone(), warmup_steps, total_steps, steps_per_epoch: steps_per_epoch.max(1) }
    }

    /// The decay of the weights' moving average in the update after step `step`, counted from 1; `None` if no update
    /// follows this step. As in torchvision's training script, the average is a copy of the weights until the first
    /// update after the warm-up.
    pub fn average_decay(&self, step: u64) -> Option<f64> {
        let spec = &self.spec;
        if spec.ema_decay <= 0.0 || !step.is_multiple_of(spec.ema_steps) {
            return None;
        }
        let is_copy = self.warmup_steps > 0 && step.saturating_sub(spec.ema_steps) <= self.warmup_steps;
        Some(if is_copy { 0.0 } else { spec.ema_decay })
    }

    /// The learning rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f32 {
        let spec = &self.spec;
        let highest = f64::from(spec.lr);
        let end = highest * f64::from(spec.final_lr_fraction);
        if step < self.warmup_steps {
            return (highest * (step + 1) as f64 / self.warmup_steps as f64) as f32;
        }
        let steps = self.total_steps - self.warmup_steps;
        let index = step - self.warmup_steps;
        // 0 at the first step, 1 at the last.
        let progress = |index: u64, count: u64| {
            if count > 1 { (index as f64 / (count - 1) as f64).min(1.0) } else { 0.0 }
        };
        let lr = match spec.schedule {
            ScheduleKind::Constant => highest,
            ScheduleKind::Step => {
                let epoch = step / self.steps_per_epoch;
                let begun = spec.milestones.iter().filter(|m| u64::from(**m) <= epoch).count();
                highest * f64::from(spec.gamma).powi(begun as i32)
            }
            ScheduleKind::Cosine => {
                let angle = std::f64::consts::PI * progress(index, steps);
                end + (highest - end) * (1.0 + libm::cos(angle)) / 2.0
            }
            ScheduleKind::OneCycle => {
                let rise = ((f64::from(spec.pct_start) * steps as f64).round() as u64).clamp(1, steps.max(1));
                if index < rise {
                    highest * (index + 1) as f64 / rise as f64
                } else {
                    // The last step of the rise already had `lr`.
                    highest + (end - highest) * progress(index - rise + 1, steps - rise + 1)
                }
            }
        };
        lr as f32
    }
}

/// Describes how the learning rate changes if a run with schedule `new` continues at step `new_step`, after `step`
/// steps of a run with schedule `old`. `None` if it does not change.
pub fn describe_change(old: &Schedule, step: u64, new: &Schedule, new_step: u64) -> Option<String> {
    if step == 0 || new_step == 0 || new_step >= new.total_steps {
        return None;
    }
    let (old_lr, new_lr) = (old.lr(step - 1), new.lr(new_step - 1));
    // If an epoch has a step more or less than expected, the positions in the two schedules differ a little. So changes of up to 5 %
    // of `lr` are not reported.
    if f64::from((new_lr - old_lr).abs()) <= f64::from(old.spec.lr.max(new.spec.lr)) / 20.0 {
        return None;
    }
    let middle = new_step + (new.total_steps - new_step) / 2;
    Some(format!(
        "the learning rate changes where the run continues: from {} at step {step} of the earlier run to {} at step {}. It is {} at \
         step {middle} and {} at the last step, {} ({} over {} steps). To change this, set train.schedule, train.lr or train.epochs",
        three_digits(old_lr),
        three_digits(new.lr(new_step)),
        new_step + 1,
        three_digits(new.lr(middle.saturating_sub(1))),
        three_digits(new.lr(new.total_steps - 1)),
        new.total_steps,
        new.spec.schedule.as_str(),
        new.total_steps,
    ))
}

fn three_digits(lr: f32) -> String {
    format!("{lr:.2e}").parse::<f64>().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lrs(spec: TrainSpec, steps_per_epoch: u64, total: u64) -> Vec<f32> {
        let schedule = Schedule::new(&spec, steps_per_epoch, total);
        (0..total).map(|step| schedule.lr(step)).collect()
    }

    fn assert_near(got: &[f32], wanted: &[f32]) {
        assert_eq!(got.len(), wanted.len());
        for (g, w) in got.iter().zip(wanted) {
            assert!((g - w).abs() < 1e-6, "{got:?} is not {wanted:?}");
        }
    }

    #[test]
    fn constant_rises_during_the_warm_up_and_then_stays() {
        let spec = TrainSpec { lr: 0.4, warmup_epochs: 0.5, ..TrainSpec::default() };
        assert_near(&lrs(spec, 8, 6), &[0.1, 0.2, 0.3, 0.4, 0.4, 0.4]);
    }

    #[test]
    fn the_average_is_a_copy_until_the_first_update_after_the_warm_up() {
        let spec = TrainSpec { ema_decay: 0.9, ema_steps: 4, ..TrainSpec::default() };
        let updates = |warmup_epochs: f32| -> Vec<(u64, f64)> {
            let schedule = Schedule::new(&TrainSpec { warmup_epochs, ..spec.clone() }, 10, 20);
            (1..=20).filter_map(|step| Some((step, schedule.average_decay(step)?))).collect()
        };
        assert_eq!(updates(0.0), [(4, 0.9), (8, 0.9), (12, 0.9), (16, 0.9), (20, 0.9)]);
        assert_eq!(updates(0.7), [(4, 0.0), (8, 0.0), (12, 0.9), (16, 0.9), (20, 0.9)]);
        assert_eq!(updates(0.8), [(4, 0.0), (8, 0.0), (12, 0.0), (16, 0.9), (20, 0.9)]);
        assert_eq!(Schedule::new(&TrainSpec::default(), 10, 20).average_decay(32), None);
    }

    #[test]
    fn step_multiplies_at_milestones() {
        let spec = TrainSpec {
            lr: 1.0,
            schedule: ScheduleKind::Step,
            milestones: vec![1, 3],
            gamma: 0.1,
            ..TrainSpec::default()
        };
        assert_near(&lrs(spec, 2, 8), &[1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01]);
    }

    #[test]
    fn cosine_ends_at_its_share() {
        let spec = TrainSpec {
            lr: 2.0,
            schedule: ScheduleKind::Cosine,
            final_lr_fraction: 0.5,
            ..TrainSpec::default()
        };
        let half = std::f32::consts::FRAC_1_SQRT_2 / 2.0;
        assert_near(&lrs(spec, 5, 5), &[2.0, 1.5 + half, 1.5, 1.5 - half, 1.0]);
    }

    #[test]
    fn one_cycle_rises_to_lr_and_falls_in_a_line() {
        let spec = TrainSpec {
            lr: 0.4,
            schedule: ScheduleKind::OneCycle,
            pct_start: 0.4,
            final_lr_fraction: 0.25,
            ..TrainSpec::default()
        };
        assert_near(&lrs(spec, 5, 10), &[0.1, 0.2, 0.3, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1]);
    }

    #[test]
    fn a_changed_learning_rate_of_a_continued_run_is_described() {
        let one_cycle = TrainSpec { lr: 0.1, schedule: ScheduleKind::OneCycle, ..TrainSpec::default() };
        let schedule = |total: u64| Schedule::new(&one_cycle, 10, total);
        let words = describe_change(&schedule(100), 100, &schedule(200), 100).unwrap();
        for part in [
            "from 0 at step 100 of the earlier run to 0.0",
            "at step 101",
            "and 0 at the last step, 200 (one_cycle over 200 steps)",
        ] {
            assert!(words.contains(part), "{part:?} in {words}");
        }
        // Retried, at its end, or before its first step.
        assert_eq!(describe_change(&schedule(100), 50, &schedule(100), 50), None);
        assert_eq!(describe_change(&schedule(100), 100, &schedule(100), 100), None);
        assert_eq!(describe_change(&schedule(100), 0, &schedule(200), 0), None);
        let constant = Schedule::new(&TrainSpec { lr: 0.1, ..TrainSpec::default() }, 10, 200);
        assert_eq!(describe_change(&constant, 100, &constant, 120), None);
    }

    #[test]
    fn a_run_of_one_step_has_the_full_learning_rate() {
        for schedule in
            [ScheduleKind::Constant, ScheduleKind::Cosine, ScheduleKind::OneCycle, ScheduleKind::Step]
        {
            assert_eq!(lrs(TrainSpec { lr: 0.1, schedule, ..TrainSpec::default() }, 1, 1), [0.1]);
        }
    }
}
