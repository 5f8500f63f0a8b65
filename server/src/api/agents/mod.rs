//! Machines and their slots.

pub(crate) mod dataset_files;
pub(crate) mod files;
mod join;
pub(crate) mod machine_metrics;
pub(crate) mod pages;
mod requesting_agent;
pub(crate) mod socket;

use super::{
    jobs,
    list::{List, ListParams, list_of},
};
use crate::api::prelude::*;
use crate::{
    agents::machines::{MachineState, warnings},
    http::peer::PeerPolicy,
    scheduler::{Reservation, Scheduler},
    store::{AgentRow, Store},
};
use jiff::SignedDuration;
use lockstep_protocol::{
    agent::{Agent, KeptFor, MachineWarning, SlotUse},
    job::JobId,
};

/// Time for which a warning about a second agent with the same identity is shown. A refused agent retries every few seconds.
const TWIN_WARNING_LIFE: SignedDuration = SignedDuration::from_secs(60);

list_of! {
    /// A page of machines.
    AgentList
    /// Ordered by name, unless `sort` is given.
    agents: Agent
}

const LIST: List<Agent> = List {
    name: "agents",
    sorts: &[
        ("name", |agent| agent.name.as_str().into()),
        ("last_seen", |agent| agent.last_seen_at.into()),
        ("slots", |agent| Some(agent.slots.len() as f64).into()),
    ],
    default_sort: "name",
    id: |agent| &agent.id,
    created: None,
};

/// List machines
///
/// `sort`: `name`, `last_seen`, `slots`. Machines have no time of creation, so `created_after` and `created_before` are refused.
#[utoipa::path(get, path = "/agents", tag = "agents", params(ListParams), responses((status = 200, body = AgentList)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    State(peer_policy): State<Arc<PeerPolicy>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<ListParams>,
) -> Result<Json<AgentList>> {
    Ok(Json(LIST.page(None, all_machines(&scheduler, &peer_policy, &caller).await?, &params)?.into()))
}

/// Drain a machine
///
/// The machine gets no new work. Running ranks continue.
#[utoipa::path(post, path = "/agents/{id}/drain", tag = "agents", responses((status = 204)))]
pub(crate) async fn drain(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    set_draining(&scheduler, &id, true).await
}

/// Undrain a machine
#[utoipa::path(post, path = "/agents/{id}/undrain", tag = "agents", responses((status = 204)))]
pub(crate) async fn undrain(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    set_draining(&scheduler, &id, false).await
}

/// Remove a machine that is offline
///
/// The machine and its measurements are removed. If its agent starts again, the machine joins again.
#[utoipa::path(delete, path = "/agents/{id}", tag = "agents", responses((status = 204), (status = 409, body = Problem)))]
pub(crate) async fn remove(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let name = find(&*scheduler.store, &id).await?.name;
    if scheduler.agents.is_connected(&id) {
        let detail =
            format!("{name:?} is online: stop its agent first (or drain it, so that it gets no new work)");
        return Err(Error::Conflict(detail));
    }
    if let Some((attempt, _)) = scheduler.agents.leases.attempts_on(&id).first() {
        return Err(Error::Conflict(format!(
            "{name:?} may still have ranks of job {}: wait until the machine's lease has expired, or cancel the job",
            attempt.job
        )));
    }
    forget(&scheduler, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn find(store: &dyn Store, id: &str) -> Result<AgentRow> {
    let found = store.agents().await?.into_iter().find(|agent| agent.id == id);
    found.ok_or_else(|| Error::NotFound("no machine has this id".into()))
}

/// Removes a machine that is offline and has no attempts.
pub(super) async fn forget(scheduler: &Scheduler, id: &str) -> crate::store::Result<()> {
    let agents = &scheduler.agents;
    scheduler.store.remove_agent(id).await?;
    agents.machines.forget(id);
    agents.drain(id, false);
    // The machine may have reconnected meanwhile. Its row is then stored again.
    if let Some(online) = agents.online().into_iter().find(|online| online.row.id == id) {
        agents.rows.put(&*scheduler.store, AgentRow::clone(&online.row)).await?;
    }
    agents.leases.wake_dispatch();
    Ok(())
}

async fn set_draining(scheduler: &Scheduler, id: &str, draining: bool) -> Result<StatusCode> {
    find(&*scheduler.store, id).await?;
    scheduler.store.set_draining(id, draining).await?;
    scheduler.agents.drain(id, draining);
    scheduler.agents.leases.wake_dispatch();
    Ok(StatusCode::NO_CONTENT)
}

/// Returns all known machines with their current state.
pub(super) async fn all_machines(
    scheduler: &Scheduler,
    peer_policy: &PeerPolicy,
    caller: &Caller,
) -> Result<Vec<Agent>> {
    let reservations = scheduler.last_plan.reservations();
    // Read after the reservations, so that a private job that is submitted in between is hidden.
    let hidden = jobs::hidden_jobs(&*scheduler.store, caller).await?;
    let online = scheduler.agents.online();
    let agents = scheduler.store.agents().await?.into_iter().map(|row| {
        let connected = online.iter().find(|agent| agent.row.id == row.id);
        // The row of a connected agent in memory is newer than the stored row.
        let row = connected.map_or(row, |agent| AgentRow::clone(&agent.row));
        let mut in_use = scheduler.agents.leases.slots_in_use(&row.id);
        let if_visible = |job: JobId| Some(job).filter(|job| !hidden.contains(job));
        let kept_for = |slot: u32| {
            let is_of_slot = |reservation: &&Reservation| {
                let mut slots = reservation.free.iter().chain(&reservation.ending);
                reservation.agent_id == row.id && slots.any(|reserved| *reserved == slot)
            };
            let reservation = reservations.iter().find(is_of_slot).filter(|_| connected.is_some())?;
            Some(KeptFor { job: if_visible(reservation.job.clone()), since: reservation.since })
        };
        let slots = row.slots.into_iter().map(|slot| {
            let kept_for = kept_for(slot.index);
            let (job, rank) = in_use.remove(&slot.index).unzip();
            SlotUse { job: job.and_then(if_visible), rank, kept_for, slot }
        });
        let slots = slots.collect();
        let draining = scheduler.agents.is_draining(&row.id);
        let newest = scheduler.agents.machines.newest(&row.id);
        let connected_at = connected.map(|agent| agent.connected_at);
        let state = MachineState {
            machine: &row.machine,
            newest: newest.as_ref(),
            findings: connected.map_or(&[], |agent| &agent.findings),
            connected_at,
            last_seen_at: row.last_seen_at,
            attempt_count: scheduler.agents.leases.attempts_on(&row.id).len(),
            is_draining: draining,
            now: crate::now(),
        };
        let mut warnings = warnings(&state);
        if let Some(why) = connected.and_then(|agent| agent.no_work_reason.as_ref()) {
            let text = format!("Takes no new jobs: {why}. Its running ranks continue.");
            warnings.insert(0, MachineWarning { problem: true, text });
        }
        let twin = connected.and_then(|agent| agent.twin);
        if let Some((address, _)) = twin.filter(|(_, at)| crate::now().duration_since(*at) < TWIN_WARNING_LIFE) {
            let text = format!(
                "Another agent with this machine's identity tries to connect from {address} and is refused. If this machine has crashed \
                 and restarted, the other agent is its own: wait, it is accepted soon. If the other agent's folder is a copy of this \
                 agent's folder, remove the file agent_id in the copy and start the other agent with its own token and another --name."
            );
            warnings.insert(0, MachineWarning { problem: true, text });
        }
        if let Some(warning) = peer_policy.agent_trust().and_then(|agents| agents.warning_of(&row.id)) {
            let text = format!("{}{}.", warning[..1].to_uppercase(), &warning[1..]);
            warnings.push(MachineWarning { problem: false, text });
        }
        let lease_secs_left = scheduler.agents.leases.remaining_time(&row.id).map(|left| left.as_secs_f64());
        Agent {
            id: row.id,
            name: row.name,
            online: connected.is_some(),
            draining,
            last_seen_at: row.last_seen_at,
            connected_at,
            lease_secs_left,
            links: row.machine.links_in_words(),
            machine: row.machine,
            sample_age_secs: newest.as_ref().map(|newest| newest.age.as_secs_f64()),
            sample: newest.map(|newest| newest.sample),
            warnings,
            slots,
        }
    });
    Ok(agents.collect())
}
