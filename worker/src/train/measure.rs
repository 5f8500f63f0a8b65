//! Reports how a rank spends its time, about once a second and whenever its activity changes.

use crate::report::Observer;
use lockstep_protocol::agent::{AttemptEvent, AxisTimes, RankReport};
use std::time::{Duration, Instant};

const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Duration and waiting times of a step, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepTimes {
    pub(super) secs: f64,
    pub(super) data_secs: f64,
    pub(super) all_reduce_secs: f64,
    pub(super) axis_secs: Option<AxisTimes>,
}

/// Sums since the last report.
pub(super) struct ThroughputMeter<'a> {
    observer: &'a dyn Observer,
    rank: u32,
    device: String,
    step: u64,
    epoch: u32,
    last: Instant,
    steps: u32,
    times: StepTimes,
    samples: u64,
    /// The most recent step times and rate, which are reported again while no step is done, such as during an
    /// evaluation.
    averages: [f64; 4],
    axis_ms: Option<AxisTimes>,
}

impl<'a> ThroughputMeter<'a> {
    /// `device` is a provisional name, until the engine is built and [`ThroughputMeter::device`] sets the real one.
    pub(super) fn new(observer: &'a dyn Observer, rank: u32, device: String) -> Self {
        Self {
            observer,
            rank,
            device,
            step: 0,
            epoch: 0,
            last: Instant::now(),
            steps: 0,
            times: StepTimes::default(),
            samples: 0,
            averages: [0.0; 4],
            axis_ms: None,
        }
    }

    pub(super) fn device(&mut self, name: String) {
        self.device = name;
    }

    /// Records a finished step. `samples` is the number of this rank's pictures.
    pub(super) fn step(&mut self, step: u64, epoch: u32, times: StepTimes, samples: u32) {
        let first = self.step == 0;
        (self.step, self.epoch) = (step, epoch);
        self.steps += 1;
        self.times.secs += times.secs;
        self.times.data_secs += times.data_secs;
        self.times.all_reduce_secs += times.all_reduce_secs;
        if let Some(of_step) = times.axis_secs {
            self.times.axis_secs.get_or_insert_default().add(of_step, 1.0);
        }
        self.samples += u64::from(samples);
        if first || self.last.elapsed() >= REPORT_EVERY {
            self.report("training");
        }
    }

    /// Reports progress of work other than a step, if the last report is a second old.
    pub(super) fn still_alive(&mut self, status: &str) {
        if self.last.elapsed() >= REPORT_EVERY {
            self.report(status);
        }
    }

    pub(super) fn report(&mut self, status: &str) {
        if self.steps > 0 {
            let steps = f64::from(self.steps) / 1e3;
            let times = std::mem::take(&mut self.times);
            self.averages = [
                times.secs / steps,
                times.all_reduce_secs / steps,
                times.data_secs / steps,
                self.samples as f64 / times.secs.max(1e-9),
            ];
            self.axis_ms = times.axis_secs.map(|of_steps| {
                let mut average = AxisTimes::default();
                average.add(of_steps, 1.0 / steps);
                average
            });
            (self.steps, self.samples) = (0, 0);
        }
        self.last = Instant::now();
        let [step_ms, all_reduce_ms, data_ms, images_per_second] = self.averages;
        let report = RankReport {
            status: status.into(),
            step: self.step,
            epoch: self.epoch,
            step_ms,
            all_reduce_ms,
            data_ms,
            images_per_second,
            pid: std::process::id(),
            device: self.device.clone(),
            axis_ms: self.axis_ms,
        };
        self.observer.event(&AttemptEvent::Rank { rank: self.rank, report });
    }
}
