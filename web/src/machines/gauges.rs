//! The measurements on a machine's card: name, value, total, and the lines of the last hours.

use crate::numbers::{bytes, plural};
use lockstep_protocol::agent::{GpuSample, MachineSample};

/// A measurement, and the metrics that its lines show.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Gauge {
    pub(super) name: &'static str,
    /// Value, such as `37 %`; a dash if unknown.
    pub(super) value: String,
    /// Text after the value, such as `of 64 GB`.
    pub(super) note: String,
    /// Names of the metrics in `GET /api/v1/agents/{id}/metrics`, one for each line.
    pub(super) metrics: &'static [&'static str],
    /// The value at the top of the lines' vertical scale. 0: the maximum of the lines' values.
    pub(super) top: f64,
}

const UNKNOWN: &str = "–";

fn whole_percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

fn byte_rate(bytes_per_second: Option<u64>) -> String {
    bytes_per_second.map_or(UNKNOWN.into(), |rate| format!("{}/s", bytes(rate)))
}

/// Formats a number of CPUs: `2 CPUs`, `1.5 CPUs`.
fn cpus(count: f32) -> String {
    if count.fract() == 0.0 { plural(count as u64, "CPU") } else { format!("{count:.1} CPUs") }
}

/// Returns the gauges of a machine. Without a sample the gauges have no values, so that the layout does not change when a sample arrives.
pub(super) fn machine_gauges(sample: Option<&MachineSample>) -> [Gauge; 5] {
    let Some(s) = sample else {
        let without_value = |gauge| Gauge { value: UNKNOWN.into(), note: String::new(), ..gauge };
        return machine_gauges(Some(&MachineSample::default())).map(without_value);
    };
    let all_cpus = if f64::from(s.cpus) < f64::from(s.host_cpus) {
        format!("{} of the machine's {}", cpus(s.cpus), s.host_cpus)
    } else {
        cpus(s.cpus)
    };
    let all_memory = if s.memory_bytes < s.host_memory_bytes {
        format!("of {} · the machine has {}", bytes(s.memory_bytes), bytes(s.host_memory_bytes))
    } else {
        format!("of {}", bytes(s.memory_bytes))
    };
    let free = s.disk_bytes.saturating_sub(s.disk_used_bytes);
    [
        Gauge {
            name: "CPU",
            value: s.cpu_utilization.map_or(UNKNOWN.into(), |busy| whole_percent(busy.into())),
            note: s.load.map_or(all_cpus.clone(), |load| format!("{all_cpus} · load {load:.1}")),
            metrics: &["cpu_utilization"],
            top: 1.0,
        },
        Gauge {
            name: "Memory",
            value: bytes(s.memory_used_bytes),
            note: all_memory,
            metrics: &["memory_used_bytes"],
            top: s.memory_bytes as f64,
        },
        Gauge {
            name: "Disk",
            value: whole_percent(share(s.disk_used_bytes, s.disk_bytes)),
            note: format!("{} free of {}", bytes(free), bytes(s.disk_bytes)),
            metrics: &["disk_used_bytes"],
            top: s.disk_bytes as f64,
        },
        Gauge {
            name: "Disk traffic",
            value: byte_rate(s.disk_read_bytes_per_second),
            note: format!("read · {} written", byte_rate(s.disk_written_bytes_per_second)),
            metrics: &["disk_read_bytes_per_second", "disk_written_bytes_per_second"],
            top: 0.0,
        },
        Gauge {
            name: "Network",
            value: byte_rate(s.network_received_bytes_per_second),
            note: format!("received · {} sent", byte_rate(s.network_sent_bytes_per_second)),
            metrics: &["network_received_bytes_per_second", "network_sent_bytes_per_second"],
            top: 0.0,
        },
    ]
}

/// Returns the gauges of a GPU, or for a slot of CPU cores the gauges of the rank's process. `memory_bytes`: the GPU's memory, or 0 for a
/// slot of CPU cores.
pub(super) fn slot_gauges(sample: Option<&GpuSample>, memory_bytes: u64) -> [Gauge; 4] {
    let gauge = |name: &'static str, value: Option<String>, metrics: &'static [&'static str], top: f64| {
        let value = value.unwrap_or(UNKNOWN.into());
        Gauge { name, value, note: String::new(), metrics, top }
    };
    let used = sample.and_then(|s| s.utilization).map(|share| whole_percent(share.into()));
    let memory = sample.map(|s| bytes(s.memory_used_bytes));
    let temperature = sample.and_then(|s| s.temperature_celsius).map(|celsius| format!("{celsius:.0} °C"));
    let power = sample.and_then(|s| s.power_watts).map(|watts| format!("{watts:.0} W"));
    [
        gauge("use", used, &["utilization"], 1.0),
        gauge("memory", memory, &["memory_used_bytes"], memory_bytes as f64),
        gauge("temperature", temperature, &["temperature_celsius"], 100.0),
        gauge("power", power, &["power_watts"], 0.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_show_their_part_of_the_machine() {
        let sample = MachineSample {
            cpus: 2.0,
            host_cpus: 64,
            cpu_utilization: Some(0.374),
            load: Some(3.12),
            memory_used_bytes: 1_000_000_000,
            memory_bytes: 4_000_000_000,
            host_memory_bytes: 256_000_000_000,
            disk_used_bytes: 60,
            disk_bytes: 100,
            disk_written_bytes_per_second: Some(12_000_000),
            network_received_bytes_per_second: Some(0),
            network_sent_bytes_per_second: Some(1000),
            ..MachineSample::default()
        };
        let reported = |sample: &MachineSample| {
            machine_gauges(Some(sample)).map(|g| format!("{}: {} {}", g.name, g.value, g.note))
        };
        assert_eq!(
            reported(&sample),
            [
                "CPU: 37 % 2 CPUs of the machine's 64 · load 3.1",
                "Memory: 1.0 GB of 4.0 GB · the machine has 256 GB",
                "Disk: 60 % 40 B free of 100 B",
                "Disk traffic: – read · 12 MB/s written",
                "Network: 0 B/s received · 1.0 kB/s sent",
            ]
        );
        let whole = MachineSample { cpus: 64.0, load: None, memory_bytes: 256_000_000_000, ..sample.clone() };
        assert_eq!(reported(&whole)[..2], ["CPU: 37 % 64 CPUs", "Memory: 1.0 GB of 256 GB"]);
        assert!(
            reported(&MachineSample { cpus: 1.5, ..sample })[0].contains("1.5 CPUs of"),
            "a fraction of a CPU"
        );
        assert!(machine_gauges(None).iter().all(|g| g.value == UNKNOWN && g.note.is_empty()));
        assert!(slot_gauges(None, 1).iter().all(|g| g.value == UNKNOWN));
    }
}
