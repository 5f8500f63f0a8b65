//! The newest plan, as pages and REST show it: the place of each waiting job in the queue, why it waits, and what is kept for it. A job's
//! own `reason` may say how its last attempt ended instead, which is more useful where only one is shown.

use super::{Plan, Reservation};
use crate::lifecycle;
use lockstep_protocol::{
    job::{Job, JobId, Waiting},
    reason::Reason,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Not stored: a restarted server plans anew.
#[derive(Debug, Default)]
pub(crate) struct LastPlan(Mutex<Shown>);

#[derive(Debug, Default)]
struct Shown {
    /// Place, from 1, and reason of each waiting job.
    waiting: HashMap<JobId, (u64, Option<Arc<Reason>>)>,
    /// In the order of the queue.
    reservations: Vec<Reservation>,
}

impl LastPlan {
    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the plan by a newer one. A reservation of the same job on the same machine keeps its age, and a job that the newer plan has
    /// no reason for keeps the reason that it had.
    pub(crate) fn replace(&self, plan: Plan) {
        let mut shown = self.lock();
        let before = std::mem::take(&mut *shown);
        let waiting = plan.waiting.into_iter().zip(1..).map(|(waiting, place)| {
            let id = waiting.row.job.id.clone();
            let known = || before.waiting.get(&id).and_then(|(_, why)| why.clone());
            let why = waiting.why.or_else(known);
            (id, (place, why))
        });
        shown.waiting = waiting.collect();
        let since_before = |kept: Reservation| {
            let is_same = |old: &&Reservation| old.job == kept.job && old.agent_id == kept.agent_id;
            let since = before.reservations.iter().find(is_same).map_or(kept.since, |old| old.since);
            Reservation { since, ..kept }
        };
        shown.reservations = plan.reservations.into_iter().map(since_before).collect();
    }

    /// A job's place in the queue and why it waits. `None` before the job was looked at, and once it does not wait any more.
    pub(crate) fn of(&self, job: &JobId) -> Option<Waiting> {
        let shown = self.lock();
        let (place, why) = shown.waiting.get(job)?;
        Some(Waiting { place: *place, reason: why.as_deref().cloned() })
    }

    /// Sorts jobs by their place. Jobs that were queued since the plan was made keep their order, at the end.
    pub(crate) fn sort<T>(&self, jobs: &mut [T], id: impl Fn(&T) -> &JobId) {
        let shown = self.lock();
        // Stable.
        jobs.sort_by_cached_key(|job| shown.waiting.get(id(job)).map_or(u64::MAX, |(place, _)| *place));
    }

    /// Fills in a waiting job's place and current reason. The number of free slots changes without an event of the job, so the stored reason
    /// may be outdated.
    pub(crate) fn tell(&self, job: &mut Job) {
        if !job.state.is_waiting() {
            return;
        }
        job.queue = self.of(&job.id);
        let reason = job.queue.as_ref().and_then(|waiting| waiting.reason.clone());
        if let Some(reason) = reason.filter(|reason| lifecycle::tells_wait(job, reason)) {
            job.set_reason(Some(reason));
        }
    }

    /// What is kept for waiting jobs, in the order of the queue.
    pub(crate) fn reservations(&self) -> Vec<Reservation> {
        self.lock().reservations.clone()
    }

    /// The job has started: nothing is kept for it.
    pub(crate) fn release(&self, job: &JobId) {
        self.lock().reservations.retain(|kept| kept.job != *job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;

    #[test]
    fn a_reservation_of_successive_plans_keeps_its_age() {
        let (last, job) = (LastPlan::default(), JobId::generate());
        let kept = |agent: &str, second| Reservation {
            job: job.clone(),
            agent_id: agent.into(),
            free: Vec::new(),
            ending: Vec::new(),
            whole_machine: true,
            since: Timestamp::from_second(second).unwrap(),
        };
        let replace = |reservations: &[Reservation]| {
            last.replace(Plan { reservations: reservations.to_vec(), ..Plan::default() })
        };
        replace(&[kept("a", 1)]);
        replace(&[kept("a", 2), kept("b", 2)]);
        assert_eq!(last.reservations(), [kept("a", 1), kept("b", 2)]);
        // It was away for one plan.
        replace(&[kept("b", 3)]);
        replace(&[kept("a", 4)]);
        assert_eq!(last.reservations(), [kept("a", 4)]);
        last.release(&job);
        assert_eq!(last.reservations(), []);
    }
}
