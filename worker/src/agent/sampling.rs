//! The machine's usage, measured every few seconds, even while no rank runs.

use super::cpu_slots;
use lockstep_host::{gpu::metrics::Reader, usage::UsageSampler};
use lockstep_protocol::agent::{MachineSample, Slot};
use std::{path::PathBuf, time::Duration};
use tokio::sync::watch;

const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Time from the first measurement to the second. It is short, because the first measurement has no rates.
const SECOND_AFTER: Duration = Duration::from_secs(1);
/// If there are GPUs but NVML was not found, it is searched for again after this many measurements.
const NVML_RETRY_SAMPLES: u32 = 12;

/// Starts a thread that measures until the returned receiver of the newest measurement is dropped. A file system or a GPU that
/// does not respond blocks only this thread.
pub(super) fn start(dir: PathBuf, slots: &[Slot]) -> std::io::Result<watch::Receiver<Option<MachineSample>>> {
    let (sender, samples) = watch::channel(None);
    let gpu_slots: Vec<_> = slots.iter().filter_map(|slot| Some((slot.index, slot.uuid.clone()?))).collect();
    let mut cpu_slots = cpu_slots::CpuSlots::new(&dir, slots);
    let measure = move || {
        let mut usage = UsageSampler::new(&dir);
        let mut nvml = None;
        for index in 0u32.. {
            if !gpu_slots.is_empty() && nvml.is_none() && index % NVML_RETRY_SAMPLES == 0 {
                // If NVML is missing, the agent has no metrics of GPUs. Ranks report some of them as well.
                nvml = Reader::open().ok();
            }
            let mut gpus = Vec::new();
            if let Some(nvml) = &nvml {
                gpus.extend(gpu_slots.iter().filter_map(|(slot, uuid)| nvml.sample(*slot, uuid).ok()));
            }
            let sample = usage.sample();
            gpus.extend(cpu_slots.measure(f64::from(sample.cpus)));
            if sender.send(Some(MachineSample { gpus, ..sample })).is_err() {
                return;
            }
            std::thread::sleep(if index == 0 { SECOND_AFTER } else { SAMPLE_EVERY });
        }
    };
    std::thread::Builder::new().name("machine metrics".into()).spawn(measure)?;
    Ok(samples)
}

/// Waits for the next measurement. Never completes if the thread has ended.
pub(super) async fn next_sample(samples: &mut watch::Receiver<Option<MachineSample>>) -> MachineSample {
    while samples.changed().await.is_ok() {
        if let Some(sample) = samples.borrow_and_update().clone() {
            return sample;
        }
    }
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_second_sample_follows_soon_and_has_rates() {
        let mut samples = start(PathBuf::from("/"), &[]).unwrap();
        let with_rates = samples.wait_for(|s| s.as_ref().is_some_and(|s| s.cpu_utilization.is_some()));
        let sample =
            tokio::time::timeout(Duration::from_secs(20), with_rates).await.unwrap().unwrap().clone();
        let sample = sample.unwrap();
        assert!((0.0..=1.0).contains(&sample.cpu_utilization.unwrap()), "{sample:?}");
        assert!(sample.memory_used_bytes <= sample.memory_bytes && sample.cpus > 0.0, "{sample:?}");
    }
}
