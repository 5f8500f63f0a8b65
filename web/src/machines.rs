//! The machines: a card for each agent, with a cell for each slot and the job that holds it.

mod gauges;
mod join;

pub use join::Join;

use crate::{
    layout::CurrentUser,
    numbers::{age, bytes, plural},
};
use askama::Template;
use gauges::Gauge;
use jiff::Timestamp;
use lockstep_protocol::agent::{Machine, MachineSample, MachineWarning, Slot};
use std::net::IpAddr;

/// The job that holds a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The job's id, for the link to its page.
    pub job_id: String,
    /// The job's name, as shown.
    pub job_name: String,
    /// The rank that runs in the slot.
    pub rank: u32,
}

/// The waiting job for which a slot is reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFor {
    /// The job's id; empty if the user may not see the job.
    pub job_id: String,
    /// The job's name, as shown.
    pub job_name: String,
}

/// A slot with the job that holds it and the job that gets it next.
#[derive(Debug, Clone)]
pub struct SlotCell {
    pub slot: Slot,
    /// The rank that holds the slot.
    pub holder: Option<Holder>,
    /// The job that gets the slot next, if that is certain.
    pub kept_for: Option<KeptFor>,
}

/// The server's information about an agent.
#[derive(Debug, Clone)]
pub struct AgentCard {
    /// The agent's id, which stays the same after restarts.
    pub id: String,
    /// The agent's name. Two agents may have the same name, for example after an agent's state was lost.
    pub name: String,
    /// Whether the agent's websocket is open.
    pub online: bool,
    /// Whether the agent gets no new work.
    pub draining: bool,
    /// Time of the newest heartbeat.
    pub last_seen_at: Timestamp,
    pub connected_at: Option<Timestamp>,
    /// Seconds until the lease expires and the agent's attempts end. `None` without an attempt.
    pub lease_secs_left: Option<f64>,
    /// The agent's description of its machine.
    pub machine: Machine,
    /// The newest measurements.
    pub sample: Option<MachineSample>,
    /// Warnings, the worst first.
    pub warnings: Vec<MachineWarning>,
    /// Slots, in the order of their indices.
    pub slots: Vec<SlotCell>,
}

/// `GET /machines`.
#[derive(Debug, Clone, Template)]
#[template(path = "machines.html")]
pub struct MachinesPage {
    /// Online agents first, then sorted by name.
    pub agents: Vec<AgentCard>,
    /// The commands that join another machine.
    pub join: Join,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl MachinesPage {
    /// Whether another machine has the same name.
    fn shares_name(&self, card: &AgentCard) -> bool {
        self.agents.iter().filter(|other| other.name == card.name).count() > 1
    }

    /// Counts slots and machines: `3 of 8 slots busy · 2 machines online`.
    fn summary(&self) -> String {
        let online = || self.agents.iter().filter(|a| a.online);
        let slots = || online().flat_map(|a| &a.slots);
        format!(
            "{} of {} busy · {} online",
            slots().filter(|cell| cell.holder.is_some()).count(),
            plural(slots().count() as u64, "slot"),
            plural(online().count() as u64, "machine"),
        )
    }
}

impl AgentCard {
    /// Returns the beginning of the agent's id, which distinguishes machines of the same name.
    fn short_id(&self) -> &str {
        const CHARS: usize = 8;
        &self.id[..self.id.char_indices().nth(CHARS).map_or(self.id.len(), |(end, _)| end)]
    }

    /// Describes hardware, version, and the state of the connection and of leases.
    fn about(&self) -> String {
        let m = &self.machine;
        let connected =
            self.connected_at.map_or(String::new(), |since| format!(" · connected {}", age(since)));
        let lease = match self.lease_secs_left {
            Some(left) if !self.online => {
                format!(" · its jobs start again unless it returns within {left:.0} s")
            }
            _ => String::new(),
        };
        let address = m.address.as_ref().map_or(String::new(), |address| {
            if address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()) {
                return " · only this machine reaches it".into();
            }
            let interface = m.interface.as_ref().map_or(String::new(), |name| format!(" ({name})"));
            format!(" · other machines reach it at {address}{interface}")
        });
        let links = m.links_in_words().map_or(String::new(), |links| format!(" · {links}"));
        format!(
            "{} · {} · {} memory · version {}{address}{links}{connected}{lease}",
            m.cpu,
            plural(m.cores.into(), "core"),
            bytes(m.memory_bytes),
            m.version
        )
    }

    fn gauges(&self) -> [Gauge; 5] {
        gauges::machine_gauges(self.sample.as_ref())
    }

    fn slot_gauges(&self, slot: &Slot) -> Vec<Gauge> {
        let sample = self.sample.iter().flat_map(|sample| &sample.gpus).find(|seen| seen.slot == slot.index);
        let all = gauges::slot_gauges(sample, slot.memory_bytes);
        // A slot of CPU cores has only the first two gauges, use and memory.
        let shown = if slot.uuid.is_some() { all.len() } else { 2 };
        all.into_iter().take(shown).collect()
    }

    fn status(&self) -> String {
        if self.online { "online".into() } else { format!("last seen {}", age(self.last_seen_at)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::agent::GpuSample;

    #[test]
    fn slots_show_their_gpu_and_hide_names_of_private_jobs() {
        let gpu = GpuSample {
            slot: 0,
            utilization: Some(0.97),
            memory_used_bytes: 61_000_000_000,
            temperature_celsius: Some(61.4),
            power_watts: None,
        };
        let sample = MachineSample { gpus: vec![gpu], ..MachineSample::default() };
        let slot = |index| Slot {
            index,
            device: "cuda".into(),
            name: "NVIDIA H200".into(),
            memory_bytes: 150_754_820_096,
            uuid: Some(format!("GPU-{index}")),
        };
        let kept = |id: &str, name: &str| KeptFor { job_id: id.into(), job_name: name.into() };
        let holder = Holder { job_id: String::new(), job_name: "private".into(), rank: 3 };
        let card = AgentCard {
            id: "id-a".into(),
            name: "a".into(),
            online: true,
            draining: false,
            last_seen_at: Timestamp::UNIX_EPOCH,
            connected_at: Some(Timestamp::now() - jiff::SignedDuration::from_hours(2)),
            lease_secs_left: Some(14.2),
            machine: Machine {
                hostname: "h".into(),
                cpu: "c".into(),
                cores: 8,
                memory_bytes: 2,
                disk_free_bytes: 1,
                version: "0.1.0".into(),
                ..Machine::default()
            },
            sample: Some(sample),
            warnings: vec![MachineWarning { problem: true, text: "<b>full</b>".into() }],
            slots: vec![
                SlotCell { slot: slot(0), holder: Some(holder), kept_for: Some(kept("", "a private job")) },
                SlotCell { slot: slot(1), holder: None, kept_for: Some(kept("j1", "<i>large")) },
            ],
        };
        let page = MachinesPage { agents: vec![card], join: Join::default(), user: CurrentUser::NOBODY };
        let html = page.render().expect("renders");
        for expected in ["<b>97 %</b>", "<b>61 GB</b>", "<b>61 °C</b>", "connected 2 h ago", "rank 3"] {
            assert!(html.contains(expected), "{expected}: {html}");
        }
        assert!(html.contains("&#60;b&#62;full") && !html.contains("<b>full"), "{html}");
        let (one, other) = html.split_once(r#"data-slot="1""#).expect("two slots");
        assert!(
            one.contains(r#"<span class="muted">private</span>"#) && !html.contains("/jobs/\""),
            "{html}"
        );
        assert!(one.contains("kept for a private job"), "{one}");
        assert!(other.contains(r#"kept for <a href="/jobs/j1">&#60;i&#62;large</a>"#), "{other}");
        assert!(!other.contains(">free<"), "{other}");
        assert!(
            !other.contains("97 %") && other.contains("<b>–</b>"),
            "the second GPU has no measurements: {other}"
        );
    }
}
