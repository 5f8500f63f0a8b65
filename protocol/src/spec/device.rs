//! The kinds of devices that ranks compute on: what everything except their backends knows of them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Auto,
    Cuda,
    Cpu,
}

/// A kind of devices.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceKind {
    pub device: Device,
    /// As job files and slots have it.
    pub name: &'static str,
    /// As people call it.
    pub display_name: &'static str,
    /// What one slot of it is called.
    pub slot_name: &'static str,
    /// The machine counts its slots: each is a device. Otherwise slots are shares of the machine's cores, as many as are asked for,
    /// and a machine that offers devices has them, too.
    pub is_counted: bool,
    /// Whether it computes in bf16 and fp16.
    pub has_half_precision: bool,
}

/// All kinds; `auto` takes the first that a machine has slots of.
pub const DEVICE_KINDS: &[DeviceKind] = &[
    DeviceKind {
        device: Device::Cuda,
        name: "cuda",
        display_name: "GPU",
        slot_name: "GPU",
        is_counted: true,
        has_half_precision: true,
    },
    DeviceKind {
        device: Device::Cpu,
        name: "cpu",
        display_name: "CPU",
        slot_name: "slot",
        is_counted: false,
        has_half_precision: false,
    },
];

/// What `parallel.device` may be: `auto`, and all kinds.
pub const DEVICE_NAMES: [&str; DEVICE_KINDS.len() + 1] = {
    let mut names = [AUTO; DEVICE_KINDS.len() + 1];
    let mut n = 0;
    while n < DEVICE_KINDS.len() {
        names[n + 1] = DEVICE_KINDS[n].name;
        n += 1;
    }
    names
};

const AUTO: &str = "auto";

impl DeviceKind {
    /// The kind of a slot's `device`; none for one of another version.
    pub fn named(name: &str) -> Option<&'static Self> {
        DEVICE_KINDS.iter().find(|kind| kind.name == name)
    }
}

impl Device {
    /// None for `auto`.
    pub fn kind(self) -> Option<&'static DeviceKind> {
        DEVICE_KINDS.iter().find(|kind| kind.device == self)
    }

    /// As in a job file.
    pub fn name(self) -> &'static str {
        self.kind().map_or(AUTO, |kind| kind.name)
    }

    /// What a job file calls so.
    pub fn named(name: &str) -> Option<Self> {
        if name == AUTO { Some(Self::Auto) } else { DeviceKind::named(name).map(|kind| kind.device) }
    }

    /// Its slots are devices that a machine has; not so of `auto`.
    pub fn is_counted(self) -> bool {
        self.kind().is_some_and(|kind| kind.is_counted)
    }

    /// Its slots are shares of a machine's cores; not so of `auto`.
    pub fn is_cores(self) -> bool {
        self.kind().is_some_and(|kind| !kind.is_counted)
    }

    /// Kinds whose slots a rank may take, the first of which a machine has slots of.
    pub fn slot_kinds(self) -> Vec<&'static DeviceKind> {
        let own = self.kind();
        // A machine that offers devices has cores, too: a rank on cores takes a device's place, not the device.
        let others = DEVICE_KINDS.iter().filter(|kind| !self.is_counted() && Some(*kind) != own);
        own.into_iter().chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_named_as_in_a_job_file() {
        for name in DEVICE_NAMES {
            let device: Device = serde_json::from_value(name.into()).unwrap();
            assert_eq!((device.name(), Device::named(name)), (name, Some(device)));
        }
        assert_eq!(Device::named("tpu"), None);
    }

    #[test]
    fn ranks_take_slots_of_their_kind_and_those_on_cores_any() {
        let names = |device: Device| device.slot_kinds().iter().map(|kind| kind.name).collect::<Vec<_>>();
        assert_eq!(names(Device::Auto), ["cuda", "cpu"]);
        assert_eq!(names(Device::Cuda), ["cuda"]);
        assert_eq!(names(Device::Cpu), ["cpu", "cuda"]);
    }
}
