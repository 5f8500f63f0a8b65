//! The kinds of devices on which ranks compute. The engines know more about each kind
//! (`worker/engine/src/{cpu,cuda}/backend.rs`).

use super::{Precision, named::words};
use utoipa::ToSchema;

words! {
    /// The device on which ranks compute.
    #[derive(ToSchema)]
    pub enum Device: "device" {
        Auto = "auto",
        Cuda = "cuda",
        Cpu = "cpu",
    }
}

/// A kind of device.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceKind {
    pub device: Device,
    /// The word for `device`, as in `Slot::device`.
    pub name: &'static str,
    /// Name in sentences.
    pub display_name: &'static str,
    /// Name of one slot of this kind.
    pub slot_name: &'static str,
    /// Whether a slot is a whole device, such as a GPU, so that the machine determines the number of slots. Otherwise a
    /// slot is a share of the CPU cores, and their number can be chosen.
    pub is_accelerator: bool,
    /// The 16-bit formats in which devices of this kind compute. A CPU needs instructions for bf16.
    pub half_precisions: &'static [Precision],
    /// All formats in which devices of this kind compute, in words.
    pub precisions: &'static str,
}

/// All kinds. `auto` uses the first kind of which a machine has slots.
pub const DEVICE_KINDS: &[DeviceKind] = &[
    DeviceKind {
        device: Device::Cuda,
        name: "cuda",
        display_name: "GPU",
        slot_name: "GPU",
        is_accelerator: true,
        half_precisions: &[Precision::Bf16, Precision::Fp16],
        precisions: "fp32, bf16 or fp16",
    },
    DeviceKind {
        device: Device::Cpu,
        name: "cpu",
        display_name: "CPU",
        slot_name: "slot",
        is_accelerator: false,
        half_precisions: &[Precision::Bf16],
        precisions: "fp32 or bf16",
    },
];

impl Device {
    /// This kind of device; `None` for `auto`.
    pub fn kind(self) -> Option<&'static DeviceKind> {
        DEVICE_KINDS.iter().find(|kind| kind.device == self)
    }

    /// Whether slots of this kind are devices of a machine; false for `auto`.
    pub fn is_accelerator(self) -> bool {
        self.kind().is_some_and(|kind| kind.is_accelerator)
    }

    /// Whether slots of this kind are shares of a machine's CPU cores; false for `auto`.
    pub fn is_cpu(self) -> bool {
        self.kind().is_some_and(|kind| !kind.is_accelerator)
    }

    /// Kinds of slots that a rank may take, in order: the rank takes the first kind that the machine has.
    pub fn slot_kinds(self) -> Vec<&'static DeviceKind> {
        let own = self.kind();
        // On a machine whose slots are GPUs, a CPU rank occupies a GPU's slot without using the GPU.
        let others = DEVICE_KINDS.iter().filter(|kind| !self.is_accelerator() && Some(*kind) != own);
        own.into_iter().chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ranks_may_take_gpu_slots() {
        assert!(DEVICE_KINDS.iter().all(|kind| kind.name == kind.device.as_str()));
        let names = |device: Device| device.slot_kinds().iter().map(|kind| kind.name).collect::<Vec<_>>();
        assert_eq!(names(Device::Auto), ["cuda", "cpu"]);
        assert_eq!(names(Device::Cuda), ["cuda"]);
        assert_eq!(names(Device::Cpu), ["cpu", "cuda"]);
    }
}
