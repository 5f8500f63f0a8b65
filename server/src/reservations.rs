//! The reservations of waiting jobs on machines, as of the newest round of dispatch.

use jiff::Timestamp;
use lockstep_protocol::job::JobId;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A waiting job's reservation on one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) job: JobId,
    pub(crate) agent_id: String,
    /// Reserved slots that are free.
    pub(crate) free: Vec<u32>,
    /// Reserved slots of jobs that are ending.
    pub(crate) ending: Vec<u32>,
    /// Jobs behind this one get nothing of the machine.
    pub(crate) whole_machine: bool,
}

/// Nothing is stored: the next round finds it again.
#[derive(Debug, Default)]
pub(crate) struct Reservations(Mutex<Vec<(Kept, Timestamp)>>);

impl Reservations {
    fn lock(&self) -> MutexGuard<'_, Vec<(Kept, Timestamp)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the reservations by those of a round. A reservation of the same job on the same machine keeps its age.
    pub(crate) fn keep(&self, kept: Vec<Kept>, now: Timestamp) {
        let mut known = self.lock();
        let since = |kept: &Kept| {
            let same = |(old, _): &&(Kept, Timestamp)| old.job == kept.job && old.agent_id == kept.agent_id;
            known.iter().find(same).map_or(now, |(_, since)| *since)
        };
        let kept: Vec<_> = kept.into_iter().map(|kept| (since(&kept), kept)).collect();
        *known = kept.into_iter().map(|(since, kept)| (kept, since)).collect();
    }

    /// The job has started.
    pub(crate) fn forget(&self, job: &JobId) {
        self.lock().retain(|(kept, _)| kept.job != *job);
    }

    /// All reservations with the times since when they exist, in the order of the queue.
    pub(crate) fn all(&self) -> Vec<(Kept, Timestamp)> {
        self.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_on_is_kept_since_its_first_round() {
        let (reservations, job) = (Reservations::default(), JobId::generate());
        let kept = |agent: &str, free: &[u32]| Kept {
            job: job.clone(),
            agent_id: agent.into(),
            free: free.to_vec(),
            ending: Vec::new(),
            whole_machine: true,
        };
        let at = |second| Timestamp::from_second(second).unwrap();
        reservations.keep(vec![kept("a", &[])], at(1));
        reservations.keep(vec![kept("a", &[0]), kept("b", &[])], at(2));
        assert_eq!(reservations.all(), [(kept("a", &[0]), at(1)), (kept("b", &[]), at(2))]);
        // It was away for a round.
        reservations.keep(vec![kept("b", &[])], at(3));
        reservations.keep(vec![kept("a", &[])], at(4));
        assert_eq!(reservations.all(), [(kept("a", &[]), at(4))]);
        reservations.forget(&job);
        assert_eq!(reservations.all(), []);
    }
}
