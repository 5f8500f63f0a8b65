//! The slots that an agent offers.

use super::Options;
use crate::engine::{Devices, Selection, registry};
use lockstep_protocol::agent::Slot;

/// The slots of this machine.
pub(super) fn slots(options: &Options) -> Result<Vec<Slot>, String> {
    let list = options.gpus.as_deref();
    let of_list = |why: String| match list {
        Some(list) => format!("--gpus {list}: {why}"),
        None => why,
    };
    let selection = Selection { list, cpu_slots: options.cpu_slots, ..Selection::default() };
    let Devices { slots, hindrance } = registry::offer(selection).map_err(of_list)?;
    if slots.is_empty() {
        return Err(of_list(hindrance.unwrap_or_else(|| "ranks can run nowhere on this machine".into())));
    }
    if let Some(why) = hindrance {
        tracing::warn!("there are GPUs, but ranks run on CPU cores: {why}");
    }
    if slots.iter().all(|slot| slot.uuid.is_some()) {
        let names: Vec<_> = slots.iter().map(|slot| format!("{} ({})", slot.index, slot.name)).collect();
        tracing::info!(gpus = names.join(", "), "ranks run on GPUs");
    }
    Ok(slots)
}
