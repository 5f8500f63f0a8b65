//! The newest plan for pages and REST: each waiting job's place in the queue, the reason why it waits, and its reservations. The stored
//! `reason` of a job may instead be the end of its last attempt, which is more useful where only one reason is shown.

use super::{Plan, Reservation};
use crate::{lifecycle, util::lock};
use lockstep_protocol::{
    job::{Job, JobId, Waiting},
    reason::Reason,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// The newest plan. It is not stored, because a restarted server makes a new plan.
#[derive(Debug, Default)]
pub(crate) struct LastPlan(Mutex<Shown>);

/// The parts of a plan that are shown.
#[derive(Debug, Default)]
struct Shown {
    /// Place (from 1) and reason of each waiting job.
    waiting: HashMap<JobId, (u64, Option<Arc<Reason>>)>,
    /// In the order of the queue.
    reservations: Vec<Reservation>,
}

impl LastPlan {
    /// Replaces the plan by a newer one. A reservation of the same job on the same machine keeps its age. A job without a reason in the
    /// newer plan keeps its previous reason.
    pub(crate) fn replace(&self, plan: Plan) {
        let mut shown = lock(&self.0);
        let previous = std::mem::take(&mut *shown);
        let waiting = plan.waiting.into_iter().zip(1..).map(|(waiting, place)| {
            let id = waiting.row.job.id.clone();
            let previous_why = || previous.waiting.get(&id).and_then(|(_, why)| why.clone());
            let why = waiting.why.or_else(previous_why);
            (id, (place, why))
        });
        shown.waiting = waiting.collect();
        let keep_age = |new: Reservation| {
            let is_same = |old: &&Reservation| old.job == new.job && old.agent_id == new.agent_id;
            let since = previous.reservations.iter().find(is_same).map_or(new.since, |old| old.since);
            Reservation { since, ..new }
        };
        shown.reservations = plan.reservations.into_iter().map(keep_age).collect();
    }

    /// A job's place in the queue and the reason why it waits. `None` if the newest plan has no such waiting job.
    pub(crate) fn find(&self, job: &JobId) -> Option<Waiting> {
        let shown = lock(&self.0);
        let (place, why) = shown.waiting.get(job)?;
        Some(Waiting { place: *place, reason: why.as_deref().cloned() })
    }

    /// Sorts jobs by their place. Jobs that were queued since the plan was made keep their order, at the end.
    pub(crate) fn sort<T>(&self, jobs: &mut [T], id: impl Fn(&T) -> &JobId) {
        let shown = lock(&self.0);
        // The sort is stable.
        jobs.sort_by_cached_key(|job| shown.waiting.get(id(job)).map_or(u64::MAX, |(place, _)| *place));
    }

    /// Fills in a waiting job's place and current reason. The number of free slots changes without an event of the job, so the stored
    /// reason may be outdated.
    pub(crate) fn fill_in(&self, job: &mut Job) {
        if !job.state.is_waiting() {
            return;
        }
        job.queue = self.find(&job.id);
        let reason = job.queue.as_ref().and_then(|waiting| waiting.reason.clone());
        if let Some(reason) = reason.filter(|reason| lifecycle::shows_wait_reason(job, reason)) {
            job.set_reason(Some(reason));
        }
    }

    /// The reservations of waiting jobs, in the order of the queue.
    pub(crate) fn reservations(&self) -> Vec<Reservation> {
        lock(&self.0).reservations.clone()
    }

    /// Removes the reservations of a job that has started.
    pub(crate) fn remove_reservations(&self, job: &JobId) {
        lock(&self.0).reservations.retain(|reservation| reservation.job != *job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

    #[test]
    fn a_reservation_of_successive_plans_keeps_its_age() {
        let (last, job) = (LastPlan::default(), JobId::generate());
        let reservation = |agent: &str, second| Reservation {
            job: job.clone(),
            agent_id: agent.into(),
            free: Vec::new(),
            ending: Vec::new(),
            is_whole_machine: true,
            since: Timestamp::from_second(second).unwrap(),
        };
        let replace = |reservations: &[Reservation]| {
            last.replace(Plan { reservations: reservations.to_vec(), ..Plan::default() })
        };
        replace(&[reservation("a", 1)]);
        replace(&[reservation("a", 2), reservation("b", 2)]);
        assert_eq!(last.reservations(), [reservation("a", 1), reservation("b", 2)]);
        // The plan in between has no reservation on agent a.
        replace(&[reservation("b", 3)]);
        replace(&[reservation("a", 4)]);
        assert_eq!(last.reservations(), [reservation("a", 4)]);
        last.remove_reservations(&job);
        assert_eq!(last.reservations(), []);
    }
}
