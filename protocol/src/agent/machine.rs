//! A machine: its description, its agent's measurements every few seconds, `doctor`'s findings, and its state in the list of machines.

use super::Slot;
use crate::job::JobId;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A machine's description of itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    pub hostname: String,
    pub cpu: String,
    pub cores: u32,
    pub memory_bytes: u64,
    pub disk_free_bytes: u64,
    /// Version of the agent's program.
    pub version: String,
    /// Address by which ranks on other machines reach the ranks here: an IP address or a name. An agent without an
    /// address shares no job with other machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The network interface with this address, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Speed of this interface in Mbit/s; absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface_mbits: Option<u32>,
    /// Identifies the machine's boot and its network namespace: agents with equal values reach each other at loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_id: Option<String>,
    /// Groups of slots, by index, whose GPUs are all connected to each other by NVLink. Empty without such GPUs, or if NVML does not report
    /// links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlink_groups: Vec<Vec<u32>>,
}

impl Machine {
    /// The machine's links in words: `network 100 Gbit/s · NVLink joins slots 0 1 2 3`; `None` if nothing is known.
    pub fn links_in_words(&self) -> Option<String> {
        let network = self.interface_mbits.map(|mbits| match mbits {
            0..1000 => format!("network {mbits} Mbit/s"),
            _ if mbits % 1000 == 0 => format!("network {} Gbit/s", mbits / 1000),
            _ => format!("network {:.1} Gbit/s", f64::from(mbits) / 1000.0),
        });
        let groups = self.nvlink_groups.iter().map(|group| {
            let slots: Vec<_> = group.iter().map(u32::to_string).collect();
            slots.join(" ")
        });
        let groups: Vec<_> = groups.collect();
        let nvlink = (!groups.is_empty()).then(|| format!("NVLink joins slots {}", groups.join(", and ")));
        let known: Vec<_> = network.into_iter().chain(nvlink).collect();
        (!known.is_empty()).then(|| known.join(" · "))
    }
}

/// Measurements of a machine by its agent. A value that the system does not report is absent. In a container,
/// `cpus` and `memory_bytes` are the limits of its control group; `host_*` are the whole machine's.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineSample {
    /// Time, by the machine's own clock.
    pub at: Timestamp,
    /// CPUs that the agent's processes may use; with a container's limit, possibly a fraction.
    pub cpus: f32,
    /// All CPUs of the machine.
    pub host_cpus: u32,
    /// Busy fraction of `cpus` since the previous sample, 0 to 1.
    pub cpu_utilization: Option<f32>,
    /// Processes of the whole machine that ran or waited for a CPU, averaged over the last minute.
    pub load: Option<f32>,
    pub memory_used_bytes: u64,
    /// Memory that the agent's processes may use together.
    pub memory_bytes: u64,
    /// All memory of the machine.
    pub host_memory_bytes: u64,
    /// Used bytes of the file system with the agent's folder.
    pub disk_used_bytes: u64,
    /// Used bytes plus the bytes that this account may still use.
    pub disk_bytes: u64,
    /// Bytes per second read from all disks.
    pub disk_read_bytes_per_second: Option<u64>,
    pub disk_written_bytes_per_second: Option<u64>,
    /// Bytes per second of all interfaces except loopback. InfiniBand's own traffic does not pass through them.
    pub network_received_bytes_per_second: Option<u64>,
    pub network_sent_bytes_per_second: Option<u64>,
    /// Measurements of slots: GPUs, and shares of CPU cores on which a rank runs.
    pub gpus: Vec<GpuSample>,
}

/// NVML's measurements of a slot's GPU; for a share of CPU cores, the usage of the rank's process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuSample {
    pub slot: u32,
    /// Fraction of NVML's last sampling period in which the GPU was busy, 0 to 1; for CPU cores, their busy fraction.
    pub utilization: Option<f32>,
    /// Memory used by all processes; for CPU cores, by the rank.
    pub memory_used_bytes: u64,
    pub temperature_celsius: Option<f32>,
    pub power_watts: Option<f32>,
}

/// A problem of a machine, or a note about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineWarning {
    /// Whether training will fail or be very slow. Otherwise the text is a note.
    pub problem: bool,
    /// Sentences for people: what was found, and what to do.
    pub text: String,
}

/// A machine, as its agent reports it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Agent {
    pub id: String,
    pub name: String,
    pub online: bool,
    /// Whether the machine is drained and gets no new work.
    pub draining: bool,
    pub last_seen_at: Timestamp,
    /// Start of the current connection; absent if the machine is offline.
    pub connected_at: Option<Timestamp>,
    /// Seconds until the machine's attempts end if its agent sends no message; absent without attempts.
    pub lease_secs_left: Option<f64>,
    pub machine: Machine,
    /// Connections of the machine's ranks, as text: the network's speed, and the GPUs that NVLink connects; absent if neither is known.
    pub links: Option<String>,
    /// The newest sample since the server's start; absent if the machine has sent none.
    pub sample: Option<MachineSample>,
    /// Age of the newest sample, in seconds.
    pub sample_age_secs: Option<f64>,
    /// Warnings about the machine, most severe first.
    pub warnings: Vec<MachineWarning>,
    pub slots: Vec<SlotUse>,
}

/// A slot, and the job that occupies it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct SlotUse {
    #[serde(flatten)]
    pub slot: Slot,
    #[schema(value_type = Option<String>)]
    pub job: Option<JobId>,
    /// The job's rank in the slot. For a private job of another person, only the rank is given.
    pub rank: Option<u32>,
    /// The waiting job for which the slot is reserved, even while another job still occupies it.
    pub kept_for: Option<KeptFor>,
}

/// The reservation of a slot for a waiting job.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct KeptFor {
    /// The job's id; absent for a private job of another person.
    #[schema(value_type = Option<String>)]
    pub job: Option<JobId>,
    pub since: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_described_in_words() {
        let words = |mbits: Option<u32>, groups: &[&[u32]]| {
            let machine = Machine {
                interface_mbits: mbits,
                nvlink_groups: groups.iter().map(|group| group.to_vec()).collect(),
                ..Machine::default()
            };
            machine.links_in_words()
        };
        assert_eq!(words(None, &[]), None);
        assert_eq!(words(Some(100), &[]).unwrap(), "network 100 Mbit/s");
        assert_eq!(words(Some(2500), &[]).unwrap(), "network 2.5 Gbit/s");
        assert_eq!(words(None, &[&[0, 1]]).unwrap(), "NVLink joins slots 0 1");
        let both = words(Some(100_000), &[&[0, 1, 2, 3], &[4, 5]]).unwrap();
        assert_eq!(both, "network 100 Gbit/s · NVLink joins slots 0 1 2 3, and 4 5");
    }
}
