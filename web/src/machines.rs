//! The machines: one card an agent, one cell a slot and whose job holds it.

use crate::{
    layout::{Bar, Nav, Viewer},
    numbers::{age, bytes, plural},
};
use askama::Template;
use jiff::Timestamp;
use lockstep_protocol::agent::{Machine, Slot};

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
    /// As it introduced itself.
    pub machine: Machine,
    /// In index order, each with its holder.
    pub slots: Vec<(Slot, Option<Holder>)>,
}

/// `GET /machines`.
#[derive(Debug, Clone)]
pub struct MachinesPage {
    /// Online ones first, then by name.
    pub agents: Vec<AgentCard>,
    /// This server's address, for the command that joins a machine.
    pub server_url: String,
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
    fn about(&self) -> String {
        let m = &self.machine;
        format!(
            "{} · {} · {} memory · {} free on disk · version {}",
            m.cpu,
            plural(m.cores.into(), "core"),
            bytes(m.memory_bytes),
            bytes(m.disk_free_bytes),
            m.version
        )
    }

    fn status(&self, now: Timestamp) -> String {
        if self.online { "online".into() } else { format!("last seen {}", age(self.last_seen_at, now)) }
    }
}
