//! The queue: waiting jobs in order, their reasons for waiting, and reserved slots.

use crate::{
    jobs::percent_encode,
    layout::CurrentUser,
    numbers::{ShortText, age, plural},
};
use askama::Template;
use lockstep_protocol::{
    JobId, JobState,
    labels::DEFAULT_PROJECT,
    queue::{QueuedJob, Reservation},
};
use std::collections::HashSet;

/// `GET /queue`.
#[derive(Debug, Clone, Template)]
#[template(path = "queue.html")]
pub struct QueuePage {
    /// Jobs in the order of their places.
    pub jobs: Vec<QueuedJob>,
    /// The number of jobs on all pages.
    pub total: u64,
    /// Slots that are reserved for jobs.
    pub reservations: Vec<Reservation>,
    /// The filter by project (`?project=vision`). Empty: jobs of any project.
    pub project: String,
    /// The filter by owner, a person or a token (`?owner=ada`). Empty: jobs of any owner.
    pub owner: String,
    /// Waiting jobs that the user may change.
    pub changeable: HashSet<JobId>,
    /// Whether this is the first page.
    pub is_first: bool,
    /// Cursor of the next page.
    pub next: Option<String>,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl QueuePage {
    fn may_change(&self, job: &QueuedJob) -> bool {
        job.id.as_ref().is_some_and(|id| self.changeable.contains(id))
    }

    fn is_filtered(&self) -> bool {
        !self.project.is_empty() || !self.owner.is_empty()
    }

    /// Counts jobs and slots: `3 jobs wait · 2 slots kept`.
    fn summary(&self) -> String {
        let waits = if self.total == 1 { "waits" } else { "wait" };
        let slot_count: usize = self.reservations.iter().map(|r| r.free.len() + r.ending.len()).sum();
        let kept = match slot_count {
            0 => String::new(),
            count => format!(" · {} kept", plural(count as u64, "slot")),
        };
        format!("{} {waits}{kept}", plural(self.total, "job"))
    }

    /// Returns the URL of the page with these filters, from the cursor on. Empty parameters are left out.
    fn url(&self, project: &str, owner: &str, cursor: &str) -> String {
        let query = [("project", project), ("owner", owner), ("cursor", cursor)].into_iter();
        let query = query.filter(|(_, value)| !value.is_empty());
        let query: Vec<_> = query.map(|(key, value)| format!("{key}={}", percent_encode(value))).collect();
        if query.is_empty() { "/queue".into() } else { format!("/queue?{}", query.join("&")) }
    }

    /// Describes a job: `ada · vision · priority 5`. The id distinguishes jobs of one name.
    fn about(&self, job: &QueuedJob) -> String {
        let project = job.project.clone().filter(|project| project != DEFAULT_PROJECT);
        let priority = job.priority.filter(|n| *n != 0).map(|n| format!("priority {n}"));
        let state = job.state.filter(|state| *state != JobState::Queued).map(|state| state.to_string());
        let namesakes =
            self.jobs.iter().filter(|other| other.name.is_some() && other.name == job.name).count();
        let id = job.id.as_ref().filter(|_| namesakes > 1).map(ToString::to_string);
        let parts = [job.owner.clone(), project, priority, state, id];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" · ")
    }

    /// Returns how long a job has waited: `for 3 min`. Empty if unknown.
    fn waiting_time(&self, job: &QueuedJob) -> String {
        let Some(since) = job.waiting_since else { return String::new() };
        age(since).strip_suffix(" ago").map_or("for a moment".into(), |time| format!("for {time}"))
    }

    fn reason(&self, job: &QueuedJob) -> ShortText {
        let unknown = || "The scheduler has not considered this job yet.".to_owned();
        ShortText::sentence(&job.reason.as_ref().map_or_else(unknown, ToString::to_string))
    }

    /// Counts the slots that are reserved for a job: `2 slots kept`. Empty if no slot is reserved.
    fn kept_slots(&self, job: &QueuedJob) -> String {
        let slots = job.kept_slots.filter(|slots| *slots > 0);
        slots.map(|slots| format!("{} kept", plural(slots.into(), "slot"))).unwrap_or_default()
    }

    /// Describes the reserved slots, as a text after `kept for NAME: `: `slots 0, 1, and every other slot that becomes free`.
    fn reserved_slots(&self, reservation: &Reservation) -> String {
        let mut parts = Vec::new();
        let Reservation { free, ending, whole_machine, .. } = reservation;
        if !free.is_empty() {
            parts.push(slots(free));
        }
        if !ending.is_empty() {
            let whose = if ending.len() == 1 { "whose job is ending" } else { "whose jobs are ending" };
            parts.push(format!("{} {whose}", slots(ending)));
        }
        if *whole_machine {
            let other = if parts.is_empty() { "" } else { " other" };
            parts.push(format!("every{other} slot that becomes free"));
        }
        parts.join(", and ")
    }
}

/// Formats indices of slots: `slot 0`, `slots 0, 1`.
fn slots(indices: &[u32]) -> String {
    let list: Vec<_> = indices.iter().map(ToString::to_string).collect();
    format!("slot{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

    fn page() -> QueuePage {
        QueuePage {
            jobs: Vec::new(),
            total: 0,
            reservations: Vec::new(),
            project: String::new(),
            owner: String::new(),
            changeable: HashSet::new(),
            is_first: true,
            next: None,
            user: CurrentUser::NOBODY,
        }
    }

    #[test]
    fn private_jobs_show_only_their_place_and_texts_are_escaped() {
        let id = JobId::generate();
        let job = QueuedJob {
            place: 2,
            id: Some(id.clone()),
            name: Some("<b>large".into()),
            state: Some(JobState::Queued),
            project: Some("vision".into()),
            owner: Some("ada".into()),
            priority: Some(5),
            ranks: Some(4),
            waiting_since: Some(Timestamp::now() - jiff::SignedDuration::from_hours(2)),
            reason: Some("waits for 4 slots".into()),
            kept_slots: Some(2),
        };
        let kept = |job: Option<JobId>, free: &[u32], ending: &[u32]| Reservation {
            agent_id: "id-a".into(),
            agent: "a".into(),
            name: job.as_ref().map(|_| "<b>large".into()),
            job,
            free: free.to_vec(),
            ending: ending.to_vec(),
            whole_machine: ending.is_empty(),
            since: Timestamp::UNIX_EPOCH,
        };
        let mut page = page();
        page.jobs = vec![QueuedJob { place: 1, ..QueuedJob::default() }, job];
        page.total = 2;
        page.reservations = vec![kept(Some(id), &[0, 1], &[]), kept(None, &[], &[2]), kept(None, &[], &[])];
        page.next = Some("x".into());
        page.project = "vision".into();
        let html = page.render().expect("renders");
        for expected in [
            "2 jobs wait · 3 slots kept",
            "&#60;b&#62;large",
            "ada · vision · priority 5",
            "for 2 h",
            "waits for 4 slots",
            "2 slots kept",
            "slots 0, 1, and every other slot that becomes free",
            "slot 2 whose job is ending",
            ": every slot that becomes free",
            "kept for a private job",
            "/queue?project=vision&#38;cursor=x",
        ] {
            assert!(html.contains(expected), "{expected}: {html}");
        }
        assert!(!html.contains("<b>large"), "{html}");
        assert!(html.contains("A private job") && !html.contains("data-cancel"), "{html}");
        page.changeable = page.jobs.iter().filter_map(|job| job.id.clone()).collect();
        let html = page.render().expect("renders");
        assert_eq!(html.matches("data-cancel").count(), 1, "one job may be changed: {html}");
        assert!(html.contains(r#"value="5""#), "with its priority: {html}");
    }

    #[test]
    fn an_empty_queue_has_a_message() {
        let html = page().render().expect("renders");
        assert!(html.contains("Nothing waits") && html.contains("0 jobs wait"), "{html}");
        let html = QueuePage { owner: "ada".into(), ..page() }.render().expect("renders");
        assert!(html.contains("No waiting job matches") && html.contains(r#"href="/queue""#), "{html}");
    }
}
