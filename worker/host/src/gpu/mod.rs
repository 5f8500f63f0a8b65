//! The GPUs of this machine: NVIDIA's libraries, the devices, and the environment of a rank that uses a GPU.

pub mod devices;
pub mod libraries;
pub mod metrics;

use devices::VISIBLE_DEVICES;
use libraries::{Libraries, links_dir};
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, io};

/// The number of the driver's hardware queues for the streams of a process. Streams that share a queue wait for each
/// other. With the default of 8, nvJPEG's fourteen streams waited for whole training steps. 32 is the maximum.
const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// The variable that sets the number of queues. `None` if it is set already.
fn queues_variable() -> Option<(OsString, OsString)> {
    std::env::var_os(QUEUES.0).is_none().then(|| (QUEUES.0.into(), QUEUES.1.into()))
}

/// The GPU of a rank, as passed by its launcher.
/// A rank process sees all GPUs that the attempt uses on its machine, in rank order. A spare process, which the agent starts
/// before an attempt needs it, sees all GPUs of the agent. Each process creates a context only on its own GPU. The other GPUs are
/// visible because `cuDeviceCanAccessPeer`, which reports whether two GPUs can access each other's memory, accepts only
/// visible devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGpu {
    /// The position in `visible`: CUDA's number for the GPU in this process.
    pub ordinal: i32,
    /// The value of `CUDA_VISIBLE_DEVICES`: UUIDs (`GPU-...`).
    pub visible: Vec<String>,
}

impl RankGpu {
    pub fn uuid(&self) -> Option<&str> {
        self.visible.get(usize::try_from(self.ordinal).ok()?).map(String::as_str)
    }

    /// The environment variables of the rank process, in addition to inherited ones (such as NCCL_*): the visible
    /// GPUs and the paths of NVIDIA's libraries. The process itself reports missing libraries.
    ///
    /// # Errors
    /// No folder for links to libraries can be created.
    pub fn environment(&self) -> io::Result<Vec<(OsString, OsString)>> {
        let mut variables = Libraries::find().environment(&links_dir()?)?;
        variables.push((VISIBLE_DEVICES.into(), self.visible.join(",").into()));
        variables.extend(queues_variable());
        Ok(variables)
    }
}
