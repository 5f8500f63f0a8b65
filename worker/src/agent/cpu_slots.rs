//! Slots that are shares of CPU cores: measures the CPU time and memory of the ranks in them.

use super::state_dir::current_attempts;
use crate::supervisor::{RankUsage, rank_usage};
use lockstep_protocol::agent::{GpuSample, Slot};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// The slots, and the last measurement of the rank in each slot.
#[derive(Debug)]
pub(super) struct CpuSlots {
    dir: PathBuf,
    slots: Vec<u32>,
    measurements: HashMap<u32, RankUsage>,
}

impl CpuSlots {
    pub(super) fn new(state_dir: &Path, slots: &[Slot]) -> Self {
        let shares = slots.iter().filter(|slot| slot.uuid.is_none()).map(|slot| slot.index);
        Self { dir: state_dir.to_owned(), slots: shares.collect(), measurements: HashMap::new() }
    }

    /// Measures the slots in which a rank runs, on a machine with `cpus` CPUs. The first measurement of a rank has no
    /// utilization.
    pub(super) fn measure(&mut self, cpus: f64) -> Vec<GpuSample> {
        if self.slots.is_empty() {
            return Vec::new();
        }
        let cpus_per_slot = (cpus / self.slots.len() as f64).max(f64::MIN_POSITIVE);
        let mut now = HashMap::new();
        for stored in current_attempts(&self.dir) {
            let folder = stored.attempt_dir();
            for (rank, slot) in stored.start.ranks.iter().filter(|(_, slot)| self.slots.contains(slot)) {
                now.extend(rank_usage(&folder, *rank).map(|usage| (*slot, usage)));
            }
        }
        let before = std::mem::replace(&mut self.measurements, now);
        let sample = |(slot, usage): (&u32, &RankUsage)| {
            let previous = before.get(slot).filter(|previous| previous.process == usage.process);
            let busy = previous.map(|previous| {
                let secs = (usage.at - previous.at).as_secs_f64();
                (usage.cpu_secs - previous.cpu_secs) / secs / cpus_per_slot
            });
            GpuSample {
                slot: *slot,
                utilization: busy.filter(|busy| busy.is_finite()).map(|busy| busy.clamp(0.0, 1.0) as f32),
                memory_used_bytes: usage.memory_bytes,
                temperature_celsius: None,
                power_watts: None,
            }
        };
        self.measurements.iter().map(sample).collect()
    }
}
