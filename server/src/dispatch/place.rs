//! Placement: finds an agent with enough free slots for a job, claims the job and starts it there.

use super::ends::{end_attempt, wanted};
use crate::{
    agents::Online,
    app::App,
    artifacts, lifecycle,
    store::{Claim, JobRow, Place, Result, StoreError},
};
use lockstep_protocol::{
    agent::{AttemptEvent, MARK, Slot, StartAttempt, StartFiles, ToAgent},
    job::{Job, JobId, JobState},
    reason::{Facts, Reason, ReasonCode},
    spec::{Device, JobSpec, Precision},
};
use std::collections::HashSet;

/// Slots of a kind on an agent, and those of them that are free.
struct AgentSlots {
    all: Vec<u32>,
    free: Vec<u32>,
}

fn slots_on(app: &App, agent: &Online, device: Device) -> AgentSlots {
    let in_use = app.leases.slots_in_use(&agent.row.id);
    let all = slots_for(&agent.row.slots, device);
    let free = all.iter().copied().filter(|s| !in_use.contains_key(s)).collect();
    AgentSlots { all, free }
}

/// The slots of a machine that ranks of such a job may run in.
pub(crate) fn slots_for(slots: &[Slot], device: Device) -> Vec<u32> {
    let of = |kind: &str| -> Vec<u32> {
        slots.iter().filter(|slot| slot.device == kind).map(|slot| slot.index).collect()
    };
    let (first, second) = match device {
        Device::Cuda => ("cuda", None),
        // GPUs where there are any.
        Device::Auto => ("cuda", Some("cpu")),
        // A machine that offers GPUs has CPU cores, too: such a rank takes a GPU's place, not the GPU.
        Device::Cpu => ("cpu", Some("cuda")),
    };
    let found = of(first);
    match second {
        Some(second) if found.is_empty() => of(second),
        _ => found,
    }
}

/// The device that a job needs: half precision is for GPUs alone.
pub(crate) fn device_for(spec: &JobSpec) -> Device {
    let half = matches!(spec.train.precision, Precision::Bf16 | Precision::Fp16);
    match spec.parallel.device {
        Device::Auto if half => Device::Cuda,
        device => device,
    }
}

/// Starts a job on the agent with the fewest free slots that has enough for all its ranks. When none has, but one has enough
/// slots in total, that agent is reserved in this round, so that smaller jobs behind do not starve a large one.
pub(super) async fn place(app: &App, row: &JobRow, reserved: &mut HashSet<String>) -> Result<()> {
    let job = &row.job;
    if let Some(flaw) = &job.unreadable {
        let facts = Facts { detail: Some(flaw.clone()), ..Facts::default() };
        return store_wait_reason(app, row, Reason::new(ReasonCode::UnreadableSpec, facts)).await;
    }
    let ranks = job.ranks as usize;
    let device = device_for(&job.spec);
    let serves = |o: &Online| {
        o.leaving.is_none()
            && !app.agents.is_draining(&o.row.id)
            && o.only_job.as_ref().is_none_or(|only| *only == job.id)
    };
    let mut candidates: Vec<_> = app
        .agents
        .online()
        .into_iter()
        .filter(serves)
        .map(|o| {
            let slots = slots_on(app, &o, device);
            (o, slots)
        })
        .collect();
    // The fullest that has enough free slots: large gaps stay for large jobs.
    candidates.sort_by_key(|(_, slots)| slots.free.len());
    let fits = candidates.iter().find(|(o, r)| r.free.len() >= ranks && !reserved.contains(&o.row.id));
    if let Some((agent, slots)) = fits {
        return start(app, row, agent, &slots.free[..ranks]).await;
    }
    let largest = candidates.iter().max_by_key(|(_, r)| (r.all.len(), r.free.len()));
    let mut facts = Facts {
        slots_needed: Some(job.ranks),
        device: Some(if device == Device::Cuda { "cuda" } else { "cpu" }.into()),
        ..Facts::default()
    };
    let number = |slots: &[u32]| u32::try_from(slots.len()).unwrap_or(u32::MAX);
    let why = match largest {
        None if app.agents.online().is_empty() => ReasonCode::NoAgentOnline.into(),
        None => ReasonCode::NoAgentAccepts.into(),
        Some((agent, slots)) => {
            facts.agent = Some(agent.row.name.clone());
            (facts.slots_free, facts.slots_total) = (Some(number(&slots.free)), Some(number(&slots.all)));
            let code = if slots.all.len() < ranks {
                ReasonCode::TooFewSlots
            } else {
                reserved.insert(agent.row.id.clone());
                ReasonCode::WaitingForSlots
            };
            Reason::new(code, facts)
        }
    };
    store_wait_reason(app, row, why).await
}

/// Sets the reason why a queued job waits.
pub(super) async fn store_wait_reason(app: &App, row: &JobRow, why: Reason) -> Result<()> {
    app.wait_reasons.set(&row.job.id, why.clone());
    // Looked at before anything is written: the queue is gone through twice a second.
    let known = row.job.reason.as_deref() == Some(why.words());
    if known || lifecycle::waits(&mut row.clone(), &why).is_ok_and(|events| events.is_empty()) {
        return Ok(());
    }
    match app.store.change_job(&row.job.id, Box::new(move |row| lifecycle::waits(row, &why))).await {
        Ok(changed) => app.hub.publish(&changed),
        Err(StoreError::NotFound(_)) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

async fn start(app: &App, row: &JobRow, agent: &Online, slots: &[u32]) -> Result<()> {
    let job = &row.job;
    let ranks: Vec<(u32, u32)> = (0..).zip(slots.iter().copied()).collect();
    let Some(dataset) = app.store.dataset(&job.spec.data.dataset).await? else {
        let facts = Facts { dataset: Some(job.spec.data.dataset.clone()), ..Facts::default() };
        let why = Reason::new(ReasonCode::DatasetMissing, facts);
        let fail = move |row: &mut JobRow| lifecycle::cannot_start(row, &why, crate::now());
        let changed = app.store.change_job(&job.id, Box::new(fail)).await?;
        app.announce(&changed);
        return Ok(());
    };
    forget_missing(app, job, &agent.row.id).await?;
    let mut spec = job.spec.clone();
    let mut files = start_files(app, job).await;
    files.pretrained = spec.model.pretrained.clone().filter(|given| is_checkpoint_id(given));
    if let Some(why) = resolve_pretrained(app, &mut spec).await? {
        let fail = move |row: &mut JobRow| lifecycle::cannot_start(row, &why, crate::now());
        let changed = app.store.change_job(&job.id, Box::new(fail)).await?;
        app.announce(&changed);
        return Ok(());
    }
    let place = Place { agent_id: agent.row.id.clone(), agent: agent.row.name.clone(), ranks: ranks.clone() };
    let claim = Claim {
        job: job.id.clone(),
        after_attempt: job.attempt,
        places: vec![place.clone()],
        at: crate::now(),
    };
    let Some(claimed) = app.store.claim(claim).await? else { return Ok(()) };
    let attempt = claimed.attempt;
    app.leases.hold(attempt.clone(), vec![place]);
    app.announce(&claimed.changed);
    let message = ToAgent::Start(Box::new(StartAttempt {
        attempt: attempt.clone(),
        spec,
        dataset_path: dataset.path,
        world_size: job.ranks,
        ranks,
        // One machine: its ranks meet on its own loopback, at a port that the agent finds free.
        master_addr: "127.0.0.1".into(),
        master_port: 0,
        secret: format!("{:032x}{:032x}", uuid::Uuid::new_v4().as_u128(), uuid::Uuid::new_v4().as_u128()),
        // An agent that does not find the mark there uses a folder of its own.
        job_dir: Some(app.job_dir(&job.id).to_string_lossy().into_owned()),
        resume: claimed.resume,
        files,
    }));
    if app.agents.send(&agent.row.id, message) {
        // Somebody may have cancelled or paused it between the claim and the start.
        let row = app.store.job(&attempt.job).await?;
        let live = row.as_ref().is_some_and(|r| r.live().as_ref() == Some(&attempt));
        if !live {
            app.leases.release(&attempt.job, attempt.attempt);
        }
        let wish = match &row {
            Some(row) if live => wanted(row),
            // It may also have run to its end by now, as its agent knows best.
            Some(row) if row.job.state != JobState::Cancelled => None,
            _ => Some((Reason::from(ReasonCode::CancelledByUser).words().to_owned(), false)),
        };
        if let Some((reason, patient)) = wish {
            app.agents.send(&agent.row.id, ToAgent::Stop { attempt, reason, patient });
        }
        return Ok(());
    }
    let facts = Facts { agent: Some(agent.row.name.clone()), ..Facts::default() };
    let why = Reason::new(ReasonCode::AgentLeft, facts);
    end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await
}

/// Whether `model.pretrained` is a checkpoint's id, and no path.
pub(crate) fn is_checkpoint_id(given: &str) -> bool {
    given.get(..27).is_some_and(|id| id.parse::<JobId>().is_ok()) && given.as_bytes().get(27) == Some(&b'-')
}

/// Replaces a checkpoint's id in `model.pretrained` by its folder. `Some` is the reason why that is not possible.
async fn resolve_pretrained(app: &App, spec: &mut JobSpec) -> Result<Option<Reason>> {
    let Some(given) = &spec.model.pretrained else { return Ok(None) };
    if !is_checkpoint_id(given) {
        return Ok(None);
    }
    Ok(match app.store.checkpoint(given).await? {
        Some(row) => {
            let folder = app.checkpoint_dir(&row);
            spec.model.pretrained = Some(folder.to_string_lossy().into_owned());
            None
        }
        None => {
            let facts = Facts { checkpoint: Some(given.clone()), ..Facts::default() };
            Some(Reason::new(ReasonCode::CheckpointMissing, facts))
        }
    })
}

/// What an agent needs to know that has not the server's disk. The mark tells it whether it has.
async fn start_files(app: &App, job: &Job) -> StartFiles {
    let folder = app.job_dir(&job.id);
    let word = uuid::Uuid::new_v4().simple().to_string();
    let marked = tokio::fs::write(folder.join(MARK), &word).await;
    if let Err(error) = &marked {
        tracing::warn!(%error, job = %job.id, "the job's folder cannot be marked");
    }
    let mark = marked.is_ok().then_some(word);
    let dataset = tokio::task::spawn_blocking(move || artifacts::dataset_note(&folder)).await;
    StartFiles { mark, dataset: dataset.unwrap_or_default(), pretrained: None }
}

/// Removes the rows of checkpoints that the next attempt cannot have, before one of them is chosen to continue from: those whose folder is
/// gone (a user removed it, or a rank died before it reported removing it), and those that were never uploaded from another machine
/// than `agent`.
async fn forget_missing(app: &App, job: &Job, agent: &str) -> Result<()> {
    // No folder at all: this disk is not where they are.
    let is_here = matches!(tokio::fs::try_exists(app.job_dir(&job.id).join("checkpoints")).await, Ok(true));
    let mut missing = Vec::new();
    for row in app.store.checkpoints(&job.id).await? {
        let is_missing = match artifacts::on_its_way(app, &row) {
            Some(holder) => holder.agent_id != agent,
            None => is_here && matches!(tokio::fs::try_exists(app.checkpoint_dir(&row)).await, Ok(false)),
        };
        if is_missing {
            missing.push((row.info.epoch, row.info.step));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let change = move |row: &mut JobRow| {
        let removed = |(epoch, step): &(u32, u64)| {
            let event = AttemptEvent::CheckpointRemoved { epoch: *epoch, step: *step };
            lifecycle::report(row, event, None, crate::now())
        };
        Ok(missing.iter().map(removed).collect::<std::result::Result<Vec<_>, _>>()?.concat())
    };
    let changed = app.store.change_job(&job.id, Box::new(change)).await?;
    app.announce(&changed);
    Ok(())
}
