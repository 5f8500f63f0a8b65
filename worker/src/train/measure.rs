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

/// Sums what a rank does, and reports it.
pub(super) struct ThroughputMeter<'a> {
    observer: &'a dyn Observer,
    rank: u32,
    last_report_at: Instant,
    /// The steps since the last report.
    steps: u32,
    /// The times of these steps, added up.
    times: StepTimes,
    /// This rank's pictures in these steps.
    samples: u64,
    /// The last report. Its times and rate are reported again while no step is done, such as during an evaluation.
    last_report: RankReport,
}

impl<'a> ThroughputMeter<'a> {
    /// `device` is a provisional name, until the engine is built and [`ThroughputMeter::set_device`] sets the real one.
    pub(super) fn new(observer: &'a dyn Observer, rank: u32, device: String) -> Self {
        Self {
            observer,
            rank,
            last_report_at: Instant::now(),
            steps: 0,
            times: StepTimes::default(),
            samples: 0,
            last_report: RankReport { pid: std::process::id(), device, ..RankReport::default() },
        }
    }

    pub(super) fn set_device(&mut self, name: String) {
        self.last_report.device = name;
    }

    /// Records a finished step. `samples` is the number of this rank's pictures.
    pub(super) fn record_step(&mut self, step: u64, epoch: u32, times: StepTimes, samples: u32) {
        let is_first = self.last_report.step == 0;
        (self.last_report.step, self.last_report.epoch) = (step, epoch);
        self.steps += 1;
        self.times.secs += times.secs;
        self.times.data_secs += times.data_secs;
        self.times.all_reduce_secs += times.all_reduce_secs;
        if let Some(axis_secs) = times.axis_secs {
            self.times.axis_secs.get_or_insert_default().add(axis_secs, 1.0);
        }
        self.samples += u64::from(samples);
        if is_first || self.last_report_at.elapsed() >= REPORT_EVERY {
            self.report("training");
        }
    }

    /// Reports progress of work other than a step, if the last report is a second old.
    pub(super) fn report_if_due(&mut self, status: &str) {
        if self.last_report_at.elapsed() >= REPORT_EVERY {
            self.report(status);
        }
    }

    pub(super) fn report(&mut self, status: &str) {
        let report = &mut self.last_report;
        if self.steps > 0 {
            // Seconds divided by thousands of steps are milliseconds per step.
            let thousands = f64::from(self.steps) / 1e3;
            let times = std::mem::take(&mut self.times);
            report.step_ms = times.secs / thousands;
            report.all_reduce_ms = times.all_reduce_secs / thousands;
            report.data_ms = times.data_secs / thousands;
            report.images_per_second = self.samples as f64 / times.secs.max(1e-9);
            report.axis_ms = times.axis_secs.map(|sums| {
                let mut average = AxisTimes::default();
                average.add(sums, 1.0 / thousands);
                average
            });
            (self.steps, self.samples) = (0, 0);
        }
        self.last_report_at = Instant::now();
        report.status = status.into();
        self.observer.event(&AttemptEvent::Rank { rank: self.rank, report: report.clone() });
    }
}
