//! The slots that an agent offers.

use super::Options;
use lockstep_engine::{Devices, Selection, registry};
use lockstep_host::gpu::metrics::Reader;
use lockstep_protocol::agent::Slot;

pub(super) fn slots(options: &Options) -> Result<Vec<Slot>, String> {
    let list = options.gpus.as_deref();
    let with_option = |why: String| match list {
        Some(list) => format!("--gpus {list}: {why}"),
        None => why,
    };
    let selection = Selection { list, cpu_slots: options.cpu_slots, ..Selection::default() };
    let Devices { slots, why_no_gpus } = registry::offer(selection).map_err(with_option)?;
    if slots.is_empty() {
        return Err(with_option(
            why_no_gpus.unwrap_or_else(|| "ranks cannot run on any device of this machine".into()),
        ));
    }
    if let Some(why) = why_no_gpus {
        tracing::warn!("there are GPUs, but ranks run on CPU cores: {why}");
    }
    let are_gpus = slots.iter().all(|slot| slot.uuid.is_some());
    if are_gpus {
        let names: Vec<_> = slots.iter().map(|slot| format!("{} ({})", slot.index, slot.name)).collect();
        tracing::info!(gpus = names.join(", "), "ranks run on GPUs");
    }
    Ok(slots)
}

/// Groups of slots whose GPUs are all connected to each other by NVLink. Empty if NVML is not available.
pub(super) fn nvlink_groups(slots: &[Slot]) -> Vec<Vec<u32>> {
    let gpus: Vec<_> = slots.iter().filter_map(|slot| Some((slot.index, slot.uuid.as_deref()?))).collect();
    if gpus.len() < 2 {
        return Vec::new();
    }
    match Reader::open() {
        Ok(nvml) => fully_connected_groups(&gpus, |one, other| nvml.have_nvlink(one, other)),
        Err(_) => Vec::new(),
    }
}

/// Groups of at least two GPUs that are all connected to each other.
fn fully_connected_groups(gpus: &[(u32, &str)], have_nvlink: impl Fn(&str, &str) -> bool) -> Vec<Vec<u32>> {
    let mut groups: Vec<Vec<(u32, &str)>> = Vec::new();
    for gpu in gpus {
        let fits = |group: &&mut Vec<(u32, &str)>| group.iter().all(|other| have_nvlink(gpu.1, other.1));
        match groups.iter_mut().find(fits) {
            Some(group) => group.push(*gpu),
            None => groups.push(vec![*gpu]),
        }
    }
    let groups = groups.into_iter().filter(|group| group.len() > 1);
    groups.map(|group| group.into_iter().map(|(slot, _)| slot).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_of_a_group_is_connected_to_all_others() {
        let gpus = [(0, "a0"), (1, "b0"), (2, "a1"), (3, "b1"), (5, "c0")];
        let same_letter = |one: &str, other: &str| one.as_bytes()[0] == other.as_bytes()[0];
        assert_eq!(fully_connected_groups(&gpus, same_letter), [vec![0, 2], vec![1, 3]]);
        assert_eq!(fully_connected_groups(&gpus, |_, _| true), [vec![0, 1, 2, 3, 5]]);
        assert_eq!(fully_connected_groups(&gpus, |_, _| false), Vec::<Vec<u32>>::new());
        // A chain, whose ends are not connected to each other.
        let next = |one: &str, other: &str| matches!((one, other), ("b0", "a0") | ("a1", "b0"));
        assert_eq!(fully_connected_groups(&gpus[..3], next), [vec![0, 1]]);
    }
}
