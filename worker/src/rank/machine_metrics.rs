//! Metrics of the machine (CPU, memory, disk, network), which one rank of each machine reports, and metrics of each rank's
//! device.

use super::RankConfig;
use crate::report::{Observer, Reporter, Sampler};
use lockstep_host::usage::UsageSampler;
use lockstep_protocol::agent::MachineSample;
use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

const MACHINE_EVERY: Duration = Duration::from_secs(2);
const DEVICE_EVERY: Duration = Duration::from_secs(1);

/// Reports the metrics of the machine and of the rank's device until the result is dropped. If metrics are missing, logs why,
/// and training continues without them.
pub(super) fn start(
    config: &RankConfig,
    reporter: &Arc<Reporter>,
    progress: &Arc<AtomicU64>,
) -> [Option<Sampler>; 2] {
    let device = start_device(config, reporter.clone(), progress.clone());
    let machine = start_machine(config, reporter.clone(), progress.clone());
    let machine = machine.map_err(|why| format!("no metrics of the machine: {why}"));
    [device, machine].map(|started| {
        started.unwrap_or_else(|why| {
            reporter.log(&why);
            None
        })
    })
}

/// Starts to report the metrics of the machine. `None` if another rank of this machine reports them.
fn start_machine(
    config: &RankConfig,
    observer: Arc<dyn Observer>,
    progress: Arc<AtomicU64>,
) -> std::io::Result<Option<Sampler>> {
    // The configuration names the ranks of this agent. The first of them reports.
    if config.start.ranks.first().is_some_and(|(first, _)| *first != config.rank) {
        return Ok(None);
    }
    let mut usage = UsageSampler::new(&config.job_dir);
    // Rates are relative to the previous measurement.
    usage.sample();
    let measure = move || metrics(&usage.sample());
    Sampler::start("machine metrics", MACHINE_EVERY, observer, progress, measure).map(Some)
}

/// Starts to report the metrics of the rank's device. `None` if the device has no metrics.
fn start_device(
    config: &RankConfig,
    observer: Arc<dyn Observer>,
    progress: Arc<AtomicU64>,
) -> Result<Option<Sampler>, String> {
    let measure = config.device().backend.device_metrics(config.gpu.as_ref())?;
    let start = |measure| Sampler::start("gpu metrics", DEVICE_EVERY, observer, progress, measure);
    measure.map(start).transpose().map_err(|e| e.to_string())
}

fn metrics(sample: &MachineSample) -> Vec<(&'static str, f32)> {
    let bytes = [
        ("memory_used_bytes", Some(sample.memory_used_bytes)),
        ("disk_used_bytes", Some(sample.disk_used_bytes)),
        ("disk_read_bytes_per_second", sample.disk_read_bytes_per_second),
        ("disk_written_bytes_per_second", sample.disk_written_bytes_per_second),
        ("network_received_bytes_per_second", sample.network_received_bytes_per_second),
        ("network_sent_bytes_per_second", sample.network_sent_bytes_per_second),
    ];
    let bytes = bytes.into_iter().filter_map(|(name, value)| Some((name, value? as f32)));
    sample.cpu_utilization.map(|share| ("cpu_utilization", share)).into_iter().chain(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn servers_know_every_machine_metric() {
        let found = metrics(&UsageSampler::new(Path::new("/")).sample());
        assert!(found.iter().any(|(name, value)| *name == "memory_used_bytes" && *value > 0.0), "{found:?}");
        assert!(found.iter().all(|(name, _)| lockstep_protocol::metric::NAMES.contains(name)), "{found:?}");
    }
}
