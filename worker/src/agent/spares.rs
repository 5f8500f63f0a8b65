//! A spare process for each GPU without ranks, so that ranks start there sooner.

use super::Warm;
use crate::supervisor::Spare;
use lockstep_host::gpu::{RankGpu, metrics::Reader};
use lockstep_protocol::agent::Slot;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The spare processes of an agent. A spare ends when the agent ends.
#[derive(Debug, Default)]
pub(super) struct Spares {
    program: PathBuf,
    /// By slot: the GPUs that have spares.
    places: Mutex<BTreeMap<u32, Place>>,
}

#[derive(Debug)]
struct Place {
    /// The process sees all GPUs of the agent, because it may become a rank of a job that uses several.
    gpu: RankGpu,
    /// The number of attempts that have the slot. The next attempt may begin just before the previous one is over.
    attempts: u32,
    spare: Option<Spare>,
}

impl Spares {
    /// No process is started before [`Spares::fill`], and none on a GPU that only one process can use: a rank could start
    /// there before the driver has closed the GPU for the spare.
    pub(super) fn new(program: &Path, slots: &[Slot], warm: Warm) -> Self {
        let gpus = || slots.iter().filter_map(|slot| Some((slot, slot.uuid.clone()?)));
        let visible: Vec<String> = gpus().map(|(_, uuid)| uuid).collect();
        let nvml = Reader::open().ok();
        let is_exclusive = |uuid: &str| nvml.as_ref().is_some_and(|nvml| nvml.is_exclusive(uuid));
        let is_kept = |(slot, uuid): &(&Slot, String)| warm.includes(slot) && !is_exclusive(uuid);
        let warm = (0..).zip(gpus()).filter(|(_, gpu)| is_kept(gpu));
        let places = warm.map(|(ordinal, (slot, _))| {
            let gpu = RankGpu { ordinal, visible: visible.clone() };
            (slot.index, Place { gpu, attempts: 0, spare: None })
        });
        Self { program: program.to_owned(), places: Mutex::new(places.collect()) }
    }

    /// Starts a process for each slot that no attempt has, unless there is one.
    pub(super) fn fill(&self) {
        for (slot, place) in &mut *self.places() {
            if place.attempts > 0 || place.spare.as_mut().is_some_and(Spare::is_alive) {
                continue;
            }
            match Spare::start(&self.program, &place.gpu) {
                Ok(spare) => place.spare = Some(spare),
                Err(error) => tracing::warn!(slot, %error, "no process is kept ready for the next job"),
            }
        }
    }

    /// Notes that an attempt has the slots of `ranks`.
    pub(super) fn reserve(&self, ranks: &[(u32, u32)]) {
        let mut places = self.places();
        for (_, slot) in ranks {
            if let Some(place) = places.get_mut(slot) {
                place.attempts += 1;
            }
        }
    }

    /// Notes that the attempt is over, and starts processes for the next.
    pub(super) fn release(&self, ranks: &[(u32, u32)]) {
        let mut places = self.places();
        for (_, slot) in ranks {
            if let Some(place) = places.get_mut(slot) {
                place.attempts = place.attempts.saturating_sub(1);
            }
        }
        drop(places);
        self.fill();
    }

    /// The process for the next rank in a slot.
    pub(super) fn take(&self, slot: u32) -> Option<Spare> {
        self.places().get_mut(&slot)?.spare.take()
    }

    /// Ends all processes, and starts no more.
    pub(super) fn close(&self) {
        self.places().clear();
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<u32, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_with_ample_memory_are_kept_open_and_each_process_sees_all_of_them() {
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
        let kept = |slots: &[Slot], warm| {
            let spares = Spares::new(Path::new("none"), slots, warm);
            let places = spares.places();
            places.iter().map(|(slot, place)| (*slot, place.gpu.clone())).collect::<Vec<_>>()
        };
        let visible: Vec<String> = ["GPU-a", "GPU-b", "GPU-c"].map(str::to_owned).to_vec();
        let gpu = |ordinal| RankGpu { ordinal, visible: visible.clone() };
        assert_eq!(kept(&slots, Warm::Auto), [(2, gpu(0)), (7, gpu(2))]);
        assert_eq!(kept(&slots, Warm::On), [(2, gpu(0)), (5, gpu(1)), (7, gpu(2))]);
        assert!(kept(&slots, Warm::Off).is_empty());
        assert!(kept(&[slot(0, 0, None)], Warm::On).is_empty(), "a slot on CPU cores");
    }
}
