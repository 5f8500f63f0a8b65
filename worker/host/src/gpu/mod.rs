//! A GPU machine for the rest of Lockstep: which libraries and devices there are, and how a rank is configured for its own.

pub mod devices;
pub mod libraries;
pub mod metrics;

use devices::VISIBLE;
use libraries::{Libraries, links_dir};
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, io};

/// How many queues the driver has for a process's streams. Streams that share one wait for each other, and with the usual 8,
/// the fourteen of nvJPEG's decoder waited for whole training steps. 32 are as many as there can be.
const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// The variable for it, unless somebody has set it.
fn queues() -> Option<(OsString, OsString)> {
    std::env::var_os(QUEUES.0).is_none().then(|| (QUEUES.0.into(), QUEUES.1.into()))
}

/// The GPU of a rank, as its launcher gives it.
///
/// Every rank process of an attempt sees the attempt's GPUs on its machine, in rank order, and opens a
/// context on its own alone. With only its own visible, CUDA could not be asked whether two GPUs
/// reach each other's memory (`cuDeviceCanAccessPeer` takes visible devices).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGpu {
    /// Among `visible`: what CUDA calls it in this process.
    pub ordinal: i32,
    /// `CUDA_VISIBLE_DEVICES` of the process: UUIDs (`GPU-...`).
    pub visible: Vec<String>,
}

impl RankGpu {
    /// The UUID of this rank's own.
    pub fn uuid(&self) -> Option<&str> {
        self.visible.get(usize::try_from(self.ordinal).ok()?).map(String::as_str)
    }

    /// The variables that its process is started with, in addition to those that it inherits (such as NCCL_*): which GPUs it sees,
    /// and where NVIDIA's libraries are. The process itself reports what is missing.
    ///
    /// # Errors
    /// No folder can be had for links to libraries.
    pub fn environment(&self) -> io::Result<Vec<(OsString, OsString)>> {
        let mut variables = Libraries::find().environment(&links_dir()?)?;
        variables.push((VISIBLE.into(), self.visible.join(",").into()));
        variables.extend(queues());
        Ok(variables)
    }
}
