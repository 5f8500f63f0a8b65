//! The page of machines.

use super::{KeptFor, all_machines, join};
use crate::{
    api::{
        html::{Page, html},
        server_url::ServerUrl,
    },
    auth::access::Caller,
    http::ingress::Ingress,
    scheduler::Scheduler,
};
use axum::{Extension, extract::State};
use lockstep_web::{Template as _, machines};
use std::sync::Arc;

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
            let holder = match slot_use.job {
                Some(id) => scheduler.store.job(&id).await?.map(|row| machines::Holder {
                    job_id: id.to_string(),
                    job_name: row.job.name,
                    rank: slot_use.rank.unwrap_or(0),
                }),
                None => slot_use.rank.map(|rank| machines::Holder {
                    job_id: String::new(),
                    job_name: "private".into(),
                    rank,
                }),
            };
            let kept_for = match slot_use.kept_for {
                Some(KeptFor { job: Some(id), .. }) => {
                    let row = scheduler.store.job(&id).await?;
                    row.map(|row| machines::KeptFor { job_id: id.to_string(), job_name: row.job.name })
                }
                Some(KeptFor { job: None, .. }) => {
                    Some(machines::KeptFor { job_id: String::new(), job_name: "a private job".into() })
                }
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
    let join = join::commands(&scheduler.config, &ingress, &server_url, &names, user.is_admin);
    html(machines::MachinesPage { agents: cards, join, user }.render())
}
