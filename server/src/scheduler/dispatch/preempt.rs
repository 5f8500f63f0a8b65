//! Carries out planned preemptions: orders running jobs to end in favour of a waiting job.

use super::{
    ends::order_stop,
    needs::{fail, find_needs, read_datasets},
};
use crate::{
    agents::leases::Leases,
    lifecycle,
    scheduler::{Preemption, Scheduler, Snapshot},
    store::{JobRow, Result, StoreError},
};
use lockstep_protocol::job::JobId;
use std::collections::HashSet;

/// Orders jobs to end. Returns false if no job was preempted, because the waiting job cannot start, or because slots became free after the
/// snapshot. Freed slots wake dispatch for another round.
pub(super) async fn preempt(
    scheduler: &Scheduler,
    snapshot: &Snapshot,
    preemption: &Preemption,
) -> Result<bool> {
    let Preemption { row, victims, ending, .. } = preemption;
    let mut is_plan_current = true;
    if !victims.is_empty() {
        let job = &row.job;
        if let Err(why) = find_needs(scheduler, job, &read_datasets(scheduler, [job]).await?).await? {
            return fail(scheduler, &job.id, why).await.map(|()| false);
        }
        let live = scheduler.store.live_attempts().await?.into_iter().map(|row| row.attempt.job).collect();
        let agents = snapshot.agents.iter().filter(|agent| agent.takes_work);
        let held = agents.map(|agent| (agent.row.id.as_str(), &agent.slots_in_use));
        is_plan_current = all_still_held(held, &scheduler.agents.leases, &live);
    }
    for victim in victims.iter().filter(|_| is_plan_current) {
        let preemptor = row.job.clone();
        let change = move |row: &mut JobRow| lifecycle::preempt(row, &preemptor, crate::now());
        match scheduler.events.change_job(victim, Box::new(change)).await {
            Ok(_) => {}
            Err(StoreError::NotFound(_)) => continue,
            Err(error) => return Err(error),
        }
        order_stop(scheduler, victim).await?;
    }
    // The end of these jobs was stored, but their agents may not have received the order.
    for job in ending.iter().filter(|job| !scheduler.agents.leases.is_stop_requested(job)) {
        order_stop(scheduler, job).await?;
    }
    Ok(is_plan_current)
}

/// Whether all slots that agents `held` in the snapshot are still in use. An attempt ends in the store before its slots are released, so
/// `live`, the jobs whose attempt may still write, counts as well.
fn all_still_held<'a>(
    held: impl IntoIterator<Item = (&'a str, &'a HashSet<u32>)>,
    leases: &Leases,
    live: &HashSet<JobId>,
) -> bool {
    let in_use = leases.jobs_in_slots();
    held.into_iter().all(|(agent, slots)| {
        let jobs = in_use.get(agent);
        let is_held = |slot: &u32| jobs.and_then(|jobs| jobs.get(slot)).is_some_and(|job| live.contains(job));
        slots.iter().all(is_held)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Place;
    use lockstep_protocol::agent::{AttemptRef, FencingToken};
    use std::time::Duration;

    #[test]
    fn a_plan_is_out_of_date_once_slots_become_free() {
        let leases = Leases::new(Duration::from_secs(15));
        let hold = |agent: &str, slot: u32| {
            let job = JobId::generate();
            let attempt = AttemptRef { job: job.clone(), attempt: 1, fencing_token: FencingToken::NONE };
            let place = Place { agent_id: agent.to_owned(), agent: agent.to_owned(), ranks: vec![(0, slot)] };
            leases.add(attempt, vec![place]);
            job
        };
        let (first, second, elsewhere) = (hold("a", 0), hold("a", 1), hold("b", 0));
        let held = HashSet::from([0, 1]);
        let is_current = |live: &[&JobId]| {
            let live = live.iter().map(|job| (*job).clone()).collect();
            all_still_held([("a", &held)], &leases, &live)
        };
        // Slots of other agents, and slots assigned since the plan was made, do not matter.
        hold("a", 2);
        leases.release(&elsewhere, 1);
        assert!(is_current(&[&first, &second]));
        // The end of the first job is stored, but its slot is still held; then it is released.
        assert!(!is_current(&[&second]));
        leases.release(&first, 1);
        assert!(!is_current(&[&first, &second]));
    }
}
