//! A histogram of durations with fixed buckets, in Prometheus' text format. The crate `prometheus` would also bring a registry and labels,
//! which the server does not need.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Upper bounds of the buckets, in microseconds.
const BOUNDS: [u64; 14] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000, 60_000_000,
];

/// Durations that were observed since the start.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    /// The last bucket counts the durations above all bounds.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    pub(crate) fn observe(&self, duration: Duration) {
        let micros = duration.as_micros() as u64;
        self.buckets[BOUNDS.partition_point(|bound| *bound < micros)].fetch_add(1, Ordering::Relaxed);
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.buckets.iter().all(|bucket| bucket.load(Ordering::Relaxed) == 0)
    }

    /// Appends the samples of the family `name`. `labels` is empty or `label="value"` pairs, each followed by a comma.
    pub(crate) fn write(&self, text: &mut String, name: &str, labels: &str) {
        let mut count = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            count += bucket.load(Ordering::Relaxed);
            let bound = BOUNDS.get(index).map_or("+Inf".into(), |micros| (*micros as f64 / 1e6).to_string());
            let _ = writeln!(text, "{name}_bucket{{{labels}le=\"{bound}\"}} {count}");
        }
        let sum = self.sum_micros.load(Ordering::Relaxed) as f64 / 1e6;
        let labels = labels.trim_end_matches(',');
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_counts_values_up_to_its_bound() {
        let histogram = Histogram::default();
        for millis in [0, 1, 2, 60_000, 60_001] {
            histogram.observe(Duration::from_millis(millis));
        }
        let mut text = String::new();
        histogram.write(&mut text, "a_seconds", "b=\"c\",");
        for line in [
            "a_seconds_bucket{b=\"c\",le=\"0.001\"} 2",
            "a_seconds_bucket{b=\"c\",le=\"0.0025\"} 3",
            "a_seconds_bucket{b=\"c\",le=\"10\"} 3",
            "a_seconds_bucket{b=\"c\",le=\"60\"} 4",
            "a_seconds_bucket{b=\"c\",le=\"+Inf\"} 5",
            "a_seconds_sum{b=\"c\"} 120.004",
            "a_seconds_count{b=\"c\"} 5",
        ] {
            assert!(text.lines().any(|each| each == line), "{line}\n{text}");
        }
    }
}
