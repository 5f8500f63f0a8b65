//! A spare process for each GPU, so that the next rank on the GPU starts sooner. It may become a rank of the next job, or
//! of the next attempt of the running job.

use super::Warm;
use crate::supervisor::Spare;
use lockstep_host::{
    gpu::{RankGpu, metrics::Reader},
    lock,
};
use lockstep_protocol::agent::Slot;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Mutex,
};

/// The spare processes of an agent. A spare ends when the agent ends.
#[derive(Debug, Default)]
pub(super) struct Spares {
    program: PathBuf,
    /// The GPUs that can have spares, by slot.
    slots: Mutex<BTreeMap<u32, SpareSlot>>,
}

#[derive(Debug)]
struct SpareSlot {
    /// The process sees all GPUs of the agent, because it may become a rank of a job that uses several.
    gpu: RankGpu,
    spare: Option<Spare>,
}

impl Spares {
    /// No process is started before [`Spares::fill`]. GPUs in exclusive mode (one process at a time) get no spare, because
    /// a rank could start before the driver has released the GPU of the ended spare.
    pub(super) fn new(program: &Path, slots: &[Slot], warm: Warm) -> Self {
        let gpus = || slots.iter().filter_map(|slot| Some((slot, slot.uuid.clone()?)));
        let visible: Vec<String> = gpus().map(|(_, uuid)| uuid).collect();
        let nvml = Reader::open().ok();
        let is_exclusive = |uuid: &str| nvml.as_ref().is_some_and(|nvml| nvml.is_exclusive(uuid));
        let gets_spare = |(slot, uuid): &(&Slot, String)| warm.includes(slot) && !is_exclusive(uuid);
        let with_spare = (0..).zip(gpus()).filter(|(_, gpu)| gets_spare(gpu));
        let slots = with_spare.map(|(ordinal, (slot, _))| {
            let gpu = RankGpu { ordinal, visible: visible.clone() };
            (slot.index, SpareSlot { gpu, spare: None })
        });
        Self { program: program.to_owned(), slots: Mutex::new(slots.collect()) }
    }

    /// Starts a spare for each slot without a live spare.
    pub(super) fn fill(&self) {
        for (slot, spare_slot) in &mut *lock(&self.slots) {
            if spare_slot.spare.as_mut().is_some_and(Spare::is_alive) {
                continue;
            }
            match Spare::start(&self.program, &spare_slot.gpu) {
                Ok(spare) => spare_slot.spare = Some(spare),
                Err(error) => {
                    tracing::warn!(slot, %error, "the spare process for the next job cannot be started")
                }
            }
        }
    }

    /// Takes the spare for the next rank in a slot.
    pub(super) fn take(&self, slot: u32) -> Option<Spare> {
        lock(&self.slots).get_mut(&slot)?.spare.take()
    }

    /// Ends all processes, and starts no more.
    pub(super) fn close(&self) {
        lock(&self.slots).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_gpus_get_spares_and_each_spare_sees_all_gpus() {
        let slot = |index: u32, memory_bytes, uuid: Option<&str>| Slot {
            index,
            device: "cuda".into(),
            name: String::new(),
            memory_bytes,
            uuid: uuid.map(str::to_owned),
        };
        let slots = [
            slot(2, 80 << 30, Some("GPU-a")),
            slot(5, 24 << 30, Some("GPU-b")),
            slot(7, 40 << 30, Some("GPU-c")),
        ];
        let with_spare = |slots: &[Slot], warm| {
            let spares = Spares::new(Path::new("none"), slots, warm);
            let slots = lock(&spares.slots);
            slots.iter().map(|(slot, spare_slot)| (*slot, spare_slot.gpu.clone())).collect::<Vec<_>>()
        };
        let visible: Vec<String> = ["GPU-a", "GPU-b", "GPU-c"].map(str::to_owned).to_vec();
        let gpu = |ordinal| RankGpu { ordinal, visible: visible.clone() };
        assert_eq!(with_spare(&slots, Warm::Auto), [(2, gpu(0)), (7, gpu(2))]);
        assert_eq!(with_spare(&slots, Warm::On), [(2, gpu(0)), (5, gpu(1)), (7, gpu(2))]);
        assert!(with_spare(&slots, Warm::Off).is_empty());
        assert!(with_spare(&[slot(0, 0, None)], Warm::On).is_empty(), "a slot on CPU cores");
    }
}
