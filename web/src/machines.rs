//! The machines: one card an agent, one cell a slot and whose job holds it.

mod gauges;
mod join;

pub use join::Join;

use crate::{
    layout::{Bar, Nav, Viewer},
    numbers::{age, bytes, plural},
};
use askama::Template;
use gauges::Gauge;
use jiff::Timestamp;
use lockstep_protocol::agent::{Machine, MachineSample, MachineWarning, Slot};

/// The job that holds a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The job's id, for the link to its page.
    pub job_id: String,
    /// As shown.
    pub job_name: String,
    /// Which of its ranks.
    pub rank: u32,
}

/// An agent as the server knows it.
#[derive(Debug, Clone)]
pub struct AgentCard {
    /// Kept by the agent over restarts.
    pub id: String,
    /// Unique among agents.
    pub name: String,
    /// Its socket is open.
    pub online: bool,
    /// It is to take no new work.
    pub draining: bool,
    /// Its newest heartbeat.
    pub last_seen_at: Timestamp,
    /// Since when its connection is there.
    pub connected_at: Option<Timestamp>,
    /// Until its attempts end without word from it; none: it has no attempt.
    pub lease_secs_left: Option<f64>,
    /// As it introduced itself.
    pub machine: Machine,
    /// What it measures now.
    pub sample: Option<MachineSample>,
    /// What is not as it should be, the worst first.
    pub warnings: Vec<MachineWarning>,
    /// In index order, each with its holder.
    pub slots: Vec<(Slot, Option<Holder>)>,
}

/// `GET /machines`.
#[derive(Debug, Clone)]
pub struct MachinesPage {
    /// Online ones first, then by name.
    pub agents: Vec<AgentCard>,
    /// What joins another machine.
    pub join: Join,
    /// What ages are counted from.
    pub now: Timestamp,
    /// Who looks.
    pub viewer: Viewer,
}

impl MachinesPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        MachinesTemplate { page: self }.render()
    }
}

#[derive(Template)]
#[template(path = "machines.html")]
struct MachinesTemplate<'a> {
    page: &'a MachinesPage,
}

impl MachinesTemplate<'_> {
    fn nav(&self) -> Bar {
        Nav::Machines.seen_by(self.page.viewer)
    }

    /// `3 of 8 slots busy on 2 machines`.
    fn summary(&self) -> String {
        let online = || self.page.agents.iter().filter(|a| a.online);
        let slots = || online().flat_map(|a| &a.slots);
        format!(
            "{} of {} busy · {} online",
            slots().filter(|(_, holder)| holder.is_some()).count(),
            plural(slots().count() as u64, "slot"),
            plural(online().count() as u64, "machine"),
        )
    }
}

impl AgentCard {
    /// Hardware, version, and how the connection and its leases are.
    fn about(&self, now: Timestamp) -> String {
        let m = &self.machine;
        let connected = self.connected_at.map_or(String::new(), |since| match age(since, now).as_str() {
            "just now" => " · connected just now".into(),
            age => format!(" · connected {age}"),
        });
        let lease = match self.lease_secs_left {
            Some(left) if self.online => format!(" · its attempts' lease has {left:.0} s left"),
            Some(left) => format!(" · its attempts' lease ends in {left:.0} s"),
            None => String::new(),
        };
        format!(
            "{} · {} · {} memory · version {}{connected}{lease}",
            m.cpu,
            plural(m.cores.into(), "core"),
            bytes(m.memory_bytes),
            m.version
        )
    }

    fn gauges(&self) -> [Gauge; 5] {
        gauges::of_machine(self.sample.as_ref())
    }

    fn gpu_gauges(&self, slot: &Slot) -> [Gauge; 4] {
        let sample = self.sample.iter().flat_map(|sample| &sample.gpus).find(|gpu| gpu.slot == slot.index);
        gauges::of_gpu(sample, slot.memory_bytes)
    }

    fn status(&self, now: Timestamp) -> String {
        if self.online { "online".into() } else { format!("last seen {}", age(self.last_seen_at, now)) }
    }
}
