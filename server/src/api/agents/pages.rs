//! The page of machines.

use super::{KeptFor, all_machines, join};
use crate::api::prelude::*;
use crate::{
    api::{
        html::{Page, html},
        server_url::ServerUrl,
    },
    http::ingress::Ingress,
    scheduler::Scheduler,
    store::Store,
};
use lockstep_protocol::JobId;
use lockstep_web::{Template as _, machines};

/// Returns a job's id and name, or `None` if the job was deleted. `job` is `None` for a private job of another person: the id is then
/// empty, and the name is `private`.
async fn link(store: &dyn Store, job: Option<JobId>, private: &str) -> Result<Option<(String, String)>> {
    Ok(match job {
        Some(id) => store.job(&id).await?.map(|row| (id.to_string(), row.job.name)),
        None => Some((String::new(), private.to_owned())),
    })
}

/// `GET /machines`
pub(crate) async fn machines(
    State(scheduler): State<Arc<Scheduler>>,
    State(ingress): State<Arc<Ingress>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
) -> Page {
    let mut cards = Vec::new();
    let agents = all_machines(&scheduler, &ingress, &caller).await?;
    let names: Vec<_> = agents.iter().map(|agent| agent.name.clone()).collect();
    for agent in agents {
        let mut slots = Vec::new();
        for slot_use in agent.slots {
            let holder = match slot_use.rank {
                Some(rank) => link(&*scheduler.store, slot_use.job, "private")
                    .await?
                    .map(|(job_id, job_name)| machines::Holder { job_id, job_name, rank }),
                None => None,
            };
            let kept_for = match slot_use.kept_for {
                Some(KeptFor { job, .. }) => link(&*scheduler.store, job, "a private job")
                    .await?
                    .map(|(job_id, job_name)| machines::KeptFor { job_id, job_name }),
                None => None,
            };
            slots.push(machines::SlotCell { slot: slot_use.slot, holder, kept_for });
        }
        cards.push(machines::AgentCard {
            id: agent.id,
            name: agent.name,
            online: agent.online,
            draining: agent.draining,
            last_seen_at: agent.last_seen_at,
            connected_at: agent.connected_at,
            lease_secs_left: agent.lease_secs_left,
            // A sample older than 30 s is not shown. Agents send a sample every 5 s.
            sample: agent
                .sample
                .filter(|_| agent.online && agent.sample_age_secs.is_some_and(|age| age < 30.0)),
            warnings: agent.warnings,
            machine: agent.machine,
            slots,
        });
    }
    let user = caller.current_user();
    let join = join::join_parts(&scheduler.config, &ingress, &server_url, &names, user.is_admin);
    html(machines::MachinesPage { agents: cards, join, user }.render())
}
