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
use lockstep_protocol::{
    agent::{Agent, MachineSample, Slot, SlotUse},
    job::JobId,
};
use std::{collections::HashMap, net::IpAddr};

/// A job in a slot: its id, which is empty for a private job of another person, and its name as shown.
#[derive(Debug)]
struct JobLink<'a> {
    job_id: &'a str,
    job_name: &'a str,
}

/// `GET /machines`.
#[derive(Debug, Clone, Template)]
#[template(path = "machines.html")]
pub struct MachinesPage {
    /// Online agents first, then sorted by name.
    pub agents: Vec<Agent>,
    /// Names of the jobs in the slots. Jobs that were deleted are absent.
    pub job_names: HashMap<JobId, String>,
    /// The commands that join another machine.
    pub join: Join,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl MachinesPage {
    /// Whether another machine has the same name.
    fn shares_name(&self, agent: &Agent) -> bool {
        self.agents.iter().filter(|other| other.name == agent.name).count() > 1
    }

    /// Counts slots and machines: `3 of 8 slots busy · 2 machines online`.
    fn summary(&self) -> String {
        let online = || self.agents.iter().filter(|a| a.online);
        let slots = || online().flat_map(|a| &a.slots);
        format!(
            "{} of {} busy · {} online",
            slots().filter(|slot_use| self.holder(slot_use).is_some()).count(),
            plural(slots().count() as u64, "slot"),
            plural(online().count() as u64, "machine"),
        )
    }

    fn job_link<'a>(&'a self, job: Option<&'a JobId>, private: &'a str) -> Option<JobLink<'a>> {
        let Some(id) = job else { return Some(JobLink { job_id: "", job_name: private }) };
        Some(JobLink { job_id: id.as_str(), job_name: self.job_names.get(id)? })
    }

    /// The job that holds a slot.
    fn holder<'a>(&'a self, slot_use: &'a SlotUse) -> Option<JobLink<'a>> {
        slot_use.rank.and_then(|_| self.job_link(slot_use.job.as_ref(), "private"))
    }

    /// The waiting job that gets a slot next, if that is certain.
    fn kept_for<'a>(&'a self, slot_use: &'a SlotUse) -> Option<JobLink<'a>> {
        self.job_link(slot_use.kept_for.as_ref()?.job.as_ref(), "a private job")
    }

    /// Returns the beginning of the agent's id, which distinguishes machines of the same name.
    fn short_id(&self, agent: &Agent) -> String {
        const CHARS: usize = 8;
        agent.id.chars().take(CHARS).collect()
    }

    /// Describes hardware, version, and the state of the connection and of leases.
    fn about(&self, agent: &Agent) -> String {
        let m = &agent.machine;
        let connected =
            agent.connected_at.map_or(String::new(), |since| format!(" · connected {}", age(since)));
        let lease = match agent.lease_secs_left {
            Some(left) if !agent.online => {
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
        let links = agent.links.as_ref().map_or(String::new(), |links| format!(" · {links}"));
        format!(
            "{} · {} · {} memory · version {}{address}{links}{connected}{lease}",
            m.cpu,
            plural(m.cores.into(), "core"),
            bytes(m.memory_bytes),
            m.version
        )
    }

    fn gauges(&self, agent: &Agent) -> [Gauge; 5] {
        gauges::machine_gauges(current_sample(agent))
    }

    fn slot_gauges(&self, agent: &Agent, slot: &Slot) -> Vec<Gauge> {
        let sample = current_sample(agent)
            .into_iter()
            .flat_map(|sample| &sample.gpus)
            .find(|seen| seen.slot == slot.index);
        let all = gauges::slot_gauges(sample, slot.memory_bytes);
        // A slot of CPU cores has only the first two gauges, use and memory.
        let shown = if slot.uuid.is_some() { all.len() } else { 2 };
        all.into_iter().take(shown).collect()
    }

    fn status(&self, agent: &Agent) -> String {
        if agent.online { "online".into() } else { format!("last seen {}", age(agent.last_seen_at)) }
    }
}

/// The agent's newest sample, if it is not older than 30 s. Agents send a sample every 5 s.
fn current_sample(agent: &Agent) -> Option<&MachineSample> {
    agent.sample.as_ref().filter(|_| agent.online && agent.sample_age_secs.is_some_and(|age| age < 30.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;
    use lockstep_protocol::agent::{GpuSample, KeptFor, Machine, MachineWarning};

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
        let (large, deleted) = (JobId::generate(), JobId::generate());
        let kept_for =
            |job: Option<&JobId>| Some(KeptFor { job: job.cloned(), since: Timestamp::UNIX_EPOCH });
        let agent = Agent {
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
            links: None,
            sample: Some(sample),
            sample_age_secs: Some(5.0),
            warnings: vec![MachineWarning { problem: true, text: "<b>full</b>".into() }],
            slots: vec![
                SlotUse { slot: slot(0), job: None, rank: Some(3), kept_for: kept_for(None) },
                SlotUse {
                    slot: slot(1),
                    job: Some(deleted),
                    rank: Some(4),
                    kept_for: kept_for(Some(&large)),
                },
            ],
        };
        let link = format!(r#"kept for <a href="/jobs/{large}">&#60;i&#62;large</a>"#);
        let page = MachinesPage {
            agents: vec![agent],
            job_names: HashMap::from([(large, "<i>large".into())]),
            join: Join::default(),
            user: CurrentUser::NOBODY,
        };
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
        assert!(other.contains(&link), "{other}");
        assert!(!other.contains(">free<") && !other.contains("rank 4"), "{other}");
        assert!(
            !other.contains("97 %") && other.contains("<b>–</b>"),
            "the second GPU has no measurements: {other}"
        );
    }
}
