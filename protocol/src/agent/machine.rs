//! A machine: how it introduces itself, what its agent measures there every few seconds, and what `doctor` found.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A machine as it introduces itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    pub hostname: String,
    pub cpu: String,
    pub cores: u32,
    pub memory_bytes: u64,
    pub disk_free_bytes: u64,
    pub version: String,
    /// Where ranks on other machines reach the ranks here: an IP address or a name. Agents of older versions report none, and share
    /// no job with others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The network interface that has this address, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Speed of this interface in Mbit/s; absent where the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface_mbits: Option<u32>,
    /// The machine's boot and network namespace: agents that report the same reach each other at loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_id: Option<String>,
    /// Slots whose GPUs are all joined to each other by NVLink, group by group. None where there are no such GPUs, or NVML does not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlink_groups: Vec<Vec<u32>>,
}

impl Machine {
    /// How its ranks reach others, in words: `network 100 Gbit/s · NVLink joins slots 0 1 2 3`; none where nothing is known.
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

/// What an agent has measured of its machine. What the system does not say is absent. A container with limits of its own
/// (control groups) is a machine of that size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineSample {
    /// By the machine's own clock.
    #[schema(value_type = String)]
    pub at: Timestamp,
    /// CPUs that the agent's processes may use; a container's limit may be a part of one.
    pub cpus: f32,
    /// All CPUs of the machine.
    pub host_cpus: u32,
    /// Busy part of `cpus` since the sample before, 0 to 1.
    pub cpu_utilization: Option<f32>,
    /// Processes that ran or waited for a CPU, a mean of the last minute, of the whole machine.
    pub load: Option<f32>,
    pub memory_used_bytes: u64,
    /// What processes here may have together.
    pub memory_bytes: u64,
    /// All memory of the machine.
    pub host_memory_bytes: u64,
    /// Of the file system of the agent's folder.
    pub disk_used_bytes: u64,
    /// What is used and what this account may still use.
    pub disk_bytes: u64,
    /// Of all disks.
    pub disk_read_bytes_per_second: Option<u64>,
    pub disk_written_bytes_per_second: Option<u64>,
    /// Of all interfaces but loopback. InfiniBand's own traffic does not pass through them.
    pub network_received_bytes_per_second: Option<u64>,
    pub network_sent_bytes_per_second: Option<u64>,
    /// Of slots: those that are GPUs, and shares of CPU cores on which a rank runs.
    pub gpus: Vec<GpuSample>,
}

/// What NVML said of a slot's GPU; of a share of CPU cores, what the rank's process takes of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuSample {
    pub slot: u32,
    /// Part of the last moment in which something ran on it, 0 to 1; of CPU cores, their busy part.
    pub utilization: Option<f32>,
    /// Taken by anybody; of CPU cores, by the rank.
    pub memory_used_bytes: u64,
    pub temperature_celsius: Option<f32>,
    pub power_watts: Option<f32>,
}

/// Something about a machine that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineWarning {
    /// Training will fail or crawl; otherwise it works, but.
    pub problem: bool,
    /// Sentences for people: what there is, and what to do about it.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_said_in_words() {
        let words = |mbits: Option<u32>, groups: &[&[u32]]| {
            let machine = Machine {
                hostname: "h".into(),
                cpu: "c".into(),
                cores: 1,
                memory_bytes: 1,
                disk_free_bytes: 1,
                version: "0".into(),
                address: None,
                interface: None,
                interface_mbits: mbits,
                network_id: None,
                nvlink_groups: groups.iter().map(|group| group.to_vec()).collect(),
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
