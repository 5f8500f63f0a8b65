//! The page of machines.

use super::{all_machines, join};
use crate::api::prelude::*;
use crate::{
    api::{
        html::{Page, html},
        server_url::ServerUrl,
    },
    http::peer::PeerPolicy,
    scheduler::Scheduler,
};
use lockstep_web::machines;
use std::collections::BTreeSet;

/// `GET /machines`
pub(crate) async fn machines(
    State(scheduler): State<Arc<Scheduler>>,
    State(peer_policy): State<Arc<PeerPolicy>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
) -> Page {
    let agents = all_machines(&scheduler, &peer_policy, &caller).await?;
    let slots = agents.iter().flat_map(|agent| &agent.slots);
    let jobs = slots.flat_map(|slot| slot.job.iter().chain(slot.kept_for.iter().flat_map(|kept| &kept.job)));
    let jobs: BTreeSet<_> = jobs.cloned().collect();
    let rows = scheduler.store.jobs_by_id(&jobs.into_iter().collect::<Vec<_>>()).await?;
    let job_names = rows.into_iter().map(|(id, row)| (id, row.job.name)).collect();
    let names: Vec<_> = agents.iter().map(|agent| agent.name.clone()).collect();
    let user = caller.current_user();
    let join = join::join_parts(&scheduler.config, &peer_policy, &server_url, &names, user.is_admin);
    html(machines::MachinesPage { agents, job_names, join, user })
}
