//! Fair share: the order in which jobs of one priority are considered. The job whose owner or project has the fewest slots in use comes
//! first. Of several such owners or projects, the one whose newest attempt started longest ago comes first, then the one with the oldest job.

use crate::{config::FairShare, store::ShareUse};
use lockstep_protocol::job::Job;
use std::collections::{BTreeSet, HashMap, VecDeque};

/// The share that a job belongs to: its owner or project.
pub(super) fn share(fair_share: FairShare, job: &Job) -> String {
    match fair_share {
        FairShare::Off => String::new(),
        FairShare::Owner => job.owner.clone().unwrap_or_default(),
        FairShare::Project => job.project.clone(),
    }
}

/// Waiting jobs of one priority, in a separate list for each share.
pub(super) struct Queue<T> {
    /// The use of slots by each share, including jobs that get slots in this round.
    uses: HashMap<String, ShareUse>,
    /// The newest start of all shares, including jobs that got slots in this round.
    newest_start: u64,
    /// Jobs in the order of their submission, with their index in this order.
    by_share: HashMap<String, VecDeque<(usize, T)>>,
    /// The first job of each share: the share's use, the job's index, the share.
    firsts: BTreeSet<(ShareUse, usize, String)>,
    /// The share of the job that [`Queue::next`] returned last.
    last_share: Option<String>,
}

impl<T> Queue<T> {
    pub(super) fn new(uses: HashMap<String, ShareUse>) -> Self {
        let newest_start = uses.values().map(|share| share.newest_start).max().unwrap_or(0);
        Self { uses, newest_start, by_share: HashMap::new(), firsts: BTreeSet::new(), last_share: None }
    }

    /// Replaces the jobs by the jobs of the next priority, with their shares, in the order of their submission. All previous jobs must have
    /// been returned by [`Queue::next`].
    pub(super) fn fill(&mut self, waiting: impl IntoIterator<Item = (String, T)>) {
        self.by_share.clear();
        for (index, (share, job)) in waiting.into_iter().enumerate() {
            self.by_share.entry(share).or_default().push_back((index, job));
        }
        for share in self.by_share.keys().cloned().collect::<Vec<_>>() {
            self.add_first(share);
        }
    }

    fn add_first(&mut self, share: String) {
        if let Some((index, _)) = self.by_share.get(&share).and_then(VecDeque::front) {
            let share_use = self.uses.get(&share).copied().unwrap_or_default();
            self.firsts.insert((share_use, *index, share));
        }
    }

    /// The next job. `slots_given`: number of slots that the previous job got or that are reserved for it.
    pub(super) fn next(&mut self, slots_given: u32) -> Option<T> {
        if let Some(share) = self.last_share.take() {
            if slots_given > 0 {
                self.newest_start += 1;
                let share_use = self.uses.entry(share.clone()).or_default();
                share_use.slots += u64::from(slots_given);
                share_use.newest_start = self.newest_start;
            }
            self.add_first(share);
        }
        let (_, _, share) = self.firsts.pop_first()?;
        let (_, job) = self.by_share.get_mut(&share)?.pop_front()?;
        self.last_share = Some(share);
        Some(job)
    }
}

#[cfg(test)]
mod tests;
