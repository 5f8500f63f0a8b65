//! Measurements at a point in time, or means over a period.

use jiff::Timestamp;
use lockstep_protocol::agent::{GpuSample, MachineSample};

/// The metrics of a machine, in the order of [`Point::machine`].
pub(crate) const MACHINE_METRICS: [&str; 8] = [
    "cpu_utilization",
    "load",
    "memory_used_bytes",
    "disk_used_bytes",
    "disk_read_bytes_per_second",
    "disk_written_bytes_per_second",
    "network_received_bytes_per_second",
    "network_sent_bytes_per_second",
];
/// The metrics of each GPU, in the order of [`Point::gpus`].
pub(crate) const GPU_METRICS: [&str; 4] =
    ["utilization", "memory_used_bytes", "temperature_celsius", "power_watts"];

/// Measurements at a time of this server's clock. Metrics that were not measured are NaN.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Point {
    pub(crate) at: Timestamp,
    pub(crate) machine: [f32; MACHINE_METRICS.len()],
    /// Slot and metrics of each GPU.
    pub(crate) gpus: Vec<(u32, [f32; GPU_METRICS.len()])>,
}

fn or_nan(value: Option<f32>) -> f32 {
    value.unwrap_or(f32::NAN)
}

fn integer_or_nan(value: Option<u64>) -> f32 {
    value.map_or(f32::NAN, |value| value as f32)
}

impl Point {
    pub(crate) fn of(at: Timestamp, sample: &MachineSample) -> Self {
        let gpu = |gpu: &GpuSample| {
            let GpuSample { slot, utilization, memory_used_bytes, temperature_celsius, power_watts } = gpu;
            let memory = *memory_used_bytes as f32;
            (*slot, [or_nan(*utilization), memory, or_nan(*temperature_celsius), or_nan(*power_watts)])
        };
        Self {
            at,
            machine: [
                or_nan(sample.cpu_utilization),
                or_nan(sample.load),
                sample.memory_used_bytes as f32,
                sample.disk_used_bytes as f32,
                integer_or_nan(sample.disk_read_bytes_per_second),
                integer_or_nan(sample.disk_written_bytes_per_second),
                integer_or_nan(sample.network_received_bytes_per_second),
                integer_or_nan(sample.network_sent_bytes_per_second),
            ],
            gpus: sample.gpus.iter().map(gpu).collect(),
        }
    }

    /// Encodes the values for the database: the number of the machine's values, these values, and for each GPU its slot and values, all in
    /// little endian.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.machine.len() as u8];
        out.extend(self.machine.iter().flat_map(|value| value.to_le_bytes()));
        for (slot, values) in &self.gpus {
            out.extend(slot.to_le_bytes());
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        out
    }

    /// Decodes the format of [`Point::encode`], also with another number of the machine's values. `None` for any other format.
    pub(crate) fn decode(at: Timestamp, bytes: &[u8]) -> Option<Self> {
        let (count, rest) = bytes.split_first()?;
        let (machine_bytes, gpu_bytes) = rest.split_at_checked(4 * usize::from(*count))?;
        let mut machine = [f32::NAN; MACHINE_METRICS.len()];
        for (value, bytes) in machine.iter_mut().zip(machine_bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        let (gpus, rest) = gpu_bytes.as_chunks::<{ 4 + 4 * GPU_METRICS.len() }>();
        let gpu = |bytes: &[u8; 4 + 4 * GPU_METRICS.len()]| {
            let (words, _) = bytes.as_chunks::<4>();
            let mut values = [f32::NAN; GPU_METRICS.len()];
            for (value, word) in values.iter_mut().zip(&words[1..]) {
                *value = f32::from_le_bytes(*word);
            }
            (u32::from_le_bytes(words[0]), values)
        };
        rest.is_empty().then(|| Self { at, machine, gpus: gpus.iter().map(gpu).collect() })
    }
}

/// Sums and counts of measured values.
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    machine: [(f64, u32); MACHINE_METRICS.len()],
    gpus: Vec<(u32, [(f64, u32); GPU_METRICS.len()])>,
}

fn add(sums: &mut [(f64, u32)], values: &[f32]) {
    for ((sum, count), value) in sums.iter_mut().zip(values) {
        if value.is_finite() {
            *sum += f64::from(*value);
            *count += 1;
        }
    }
}

fn means<const N: usize>(sums: [(f64, u32); N]) -> [f32; N] {
    // The mean of no values is 0 / 0, which is NaN.
    sums.map(|(sum, count)| (sum / f64::from(count)) as f32)
}

impl Sums {
    pub(super) fn add(&mut self, point: &Point) {
        add(&mut self.machine, &point.machine);
        for (slot, values) in &point.gpus {
            let index = self.gpus.iter().position(|(known, _)| known == slot).unwrap_or_else(|| {
                self.gpus.push((*slot, Default::default()));
                self.gpus.len() - 1
            });
            add(&mut self.gpus[index].1, values);
        }
    }

    pub(super) fn mean(&self, at: Timestamp) -> Point {
        let gpus = self.gpus.iter().map(|(slot, sums)| (*slot, means(*sums))).collect();
        Point { at, machine: means(self.machine), gpus }
    }
}

/// Means of points in `count` periods of equal length between two times. A period without points has only NaN, which is a gap in a chart.
/// The time of a result is the end of its period.
pub(crate) fn bucket_means(points: &[Point], from: Timestamp, to: Timestamp, count: u32) -> Vec<Point> {
    let (start, count) = (from.as_millisecond(), i64::from(count.max(1)));
    let length = (to.as_millisecond() - start).max(count);
    let mut bins = vec![Sums::default(); count as usize];
    for point in points {
        let index = (point.at.as_millisecond() - start) * count / length;
        if let Some(sums) = usize::try_from(index.min(count - 1)).ok().and_then(|index| bins.get_mut(index)) {
            sums.add(point);
        }
    }
    let end = |index: usize| start + length * (index as i64 + 1) / count;
    let mean =
        |(index, sums): (usize, &Sums)| sums.mean(Timestamp::from_millisecond(end(index)).unwrap_or(to));
    bins.iter().enumerate().map(mean).collect()
}
