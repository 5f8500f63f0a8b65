//! From the queue to slots, and what happens when those who hold them fall silent.
//!
//! Leases live in memory, on the monotonic clock: a wall clock that is set back or forward ends none. Which
//! attempt may write is in the store (its fencing token), so a restarted server gives every live attempt one
//! full lease to be heard of, and no longer.

use crate::{
    agents::Online,
    app::App,
    lifecycle,
    store::{AttemptRow, Claim, JobRow, Place, Result, StoreError},
};
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Slot, StartAttempt, ToAgent},
    job::{Job, JobId, JobState},
    spec::{Device, JobSpec, Precision},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// The queue is looked at this often even when nobody says that something changed.
const POLL: Duration = Duration::from_millis(500);
/// Between a job's second failure and its start; then twice as long each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Which attempts hold which slots, and until when.
#[derive(Debug)]
pub(crate) struct Dispatch {
    lease: Duration,
    held: Mutex<HashMap<JobId, Held>>,
    /// When a job that is being restarted may start, and after which attempt it was.
    pauses: Mutex<HashMap<JobId, (u32, Instant)>>,
    wake: Notify,
}

#[derive(Debug, Clone)]
struct Held {
    attempt: AttemptRef,
    places: Vec<Place>,
    until: Instant,
}

impl Held {
    fn is_at(&self, agent_id: &str) -> bool {
        self.places.iter().any(|p| p.agent_id == agent_id)
    }
}

impl Dispatch {
    pub(crate) fn new(lease: Duration) -> Self {
        Self { lease, held: Mutex::default(), pauses: Mutex::default(), wake: Notify::new() }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<JobId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Look at the queue now.
    pub(crate) fn poke(&self) {
        self.wake.notify_one();
    }

    fn hold(&self, attempt: AttemptRef, places: Vec<Place>) {
        let until = Instant::now() + self.lease;
        self.held().insert(attempt.job.clone(), Held { attempt, places, until });
    }

    /// An attempt of a job holds no slots any more. A later attempt may: its hold stays.
    pub(crate) fn release(&self, job: &JobId, attempt: u32) {
        let mut held = self.held();
        if held.get(job).is_some_and(|h| h.attempt.attempt <= attempt) {
            held.remove(job);
        }
        drop(held);
        self.poke();
    }

    /// An agent says that it has the ranks of these attempts. Returns those that are not (any longer) its own.
    pub(crate) fn renew(&self, agent_id: &str, attempts: &[AttemptRef]) -> Vec<AttemptRef> {
        let until = Instant::now() + self.lease;
        let mut held = self.held();
        attempts
            .iter()
            .filter(|attempt| match held.get_mut(&attempt.job) {
                Some(h) if h.attempt == **attempt && h.is_at(agent_id) => {
                    h.until = until;
                    false
                }
                _ => true,
            })
            .cloned()
            .collect()
    }

    /// Live attempts on an agent.
    pub(crate) fn of_agent(&self, agent_id: &str) -> Vec<AttemptRef> {
        self.held().values().filter(|h| h.is_at(agent_id)).map(|h| h.attempt.clone()).collect()
    }

    /// Job and rank of each slot in use on an agent.
    pub(crate) fn slots_in_use(&self, agent_id: &str) -> HashMap<u32, (JobId, u32)> {
        let held = self.held();
        let places = held.values().flat_map(|h| h.places.iter().map(move |p| (&h.attempt.job, p)));
        places
            .filter(|(_, p)| p.agent_id == agent_id)
            .flat_map(|(job, p)| p.ranks.iter().map(move |(rank, slot)| (*slot, (job.clone(), *rank))))
            .collect()
    }

    /// Agents that hold a job's ranks.
    pub(crate) fn places_of(&self, job: &JobId) -> Vec<Place> {
        self.held().get(job).map(|h| h.places.clone()).unwrap_or_default()
    }

    /// Whether a job that is being restarted is to wait a little longer: the first restart comes at once, each
    /// further one after twice the time of the one before.
    fn is_resting(&self, row: &JobRow) -> bool {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        if row.job.state != JobState::Restarting {
            pauses.remove(&row.job.id);
            return false;
        }
        let now = Instant::now();
        let after = row.job.attempt;
        let pause = pauses.entry(row.job.id.clone()).or_insert((0, now));
        if pause.0 != after {
            *pause = (after, now + backoff(row.restarts));
        }
        now < pause.1
    }

    fn expired(&self) -> Vec<Held> {
        let now = Instant::now();
        self.held().values().filter(|h| h.until <= now).cloned().collect()
    }
}

/// The pause before the restart of this number, from 1.
fn backoff(restarts: u32) -> Duration {
    match restarts {
        0 | 1 => Duration::ZERO,
        n => (FIRST_PAUSE * 2u32.saturating_pow(n - 2)).min(LONGEST_PAUSE),
    }
}

/// At start: every attempt that may write gets one lease to be heard of.
pub(crate) async fn restore(app: &App) -> Result<()> {
    for AttemptRow { attempt, places, .. } in app.store.live_attempts().await? {
        app.dispatch.hold(attempt, places);
    }
    Ok(())
}

/// Looks at leases and queue until dropped.
pub(crate) async fn run(app: App) {
    loop {
        if let Err(error) = round(&app).await {
            tracing::warn!(%error, "dispatch could not do its round; trying again");
        }
        tokio::select! {
            () = app.dispatch.wake.notified() => {}
            () = tokio::time::sleep(POLL) => {}
        }
    }
}

async fn round(app: &App) -> Result<()> {
    for held in app.dispatch.expired() {
        expire(app, held).await?;
    }
    let mut reserved = HashSet::new();
    for row in app.store.waiting().await? {
        if matches!(row.job.state, JobState::Queued | JobState::Restarting) && !app.dispatch.is_resting(&row)
        {
            place(app, &row, &mut reserved).await?;
        }
    }
    Ok(())
}

/// A silent agent's attempt is fenced; its job starts anew elsewhere, or has failed.
async fn expire(app: &App, held: Held) -> Result<()> {
    let online: Vec<_> = app.agents.online().into_iter().map(|o| o.row.id).collect();
    let names: Vec<_> = held.places.iter().map(|p| format!("{:?}", p.agent)).collect();
    let lease = app.dispatch.lease.as_secs_f64();
    let why = if held.places.iter().all(|p| online.contains(&p.agent_id)) {
        format!("agent {} has no ranks of attempt {}", names.join(", "), held.attempt.attempt)
    } else {
        format!("agent {} was silent for {lease} s", names.join(", "))
    };
    let attempt = held.attempt.clone();
    let places = held.places.clone();
    end_attempt(app, &attempt, move |row| {
        let at = if row.job.step > 0 { format!(" at step {}", row.job.step) } else { String::new() };
        lifecycle::lost(row, &format!("{why}{at}"), crate::now())
    })
    .await?;
    for place in &places {
        let reason = "its lease ran out".into();
        app.agents.tell(&place.agent_id, ToAgent::Stop { attempt: attempt.clone(), reason, patient: false });
    }
    Ok(())
}

/// Changes the job of an attempt, if that attempt may still write.
async fn end_attempt(
    app: &App,
    attempt: &AttemptRef,
    change: impl Fn(
        &mut JobRow,
    ) -> std::result::Result<Vec<lockstep_protocol::stream::EventBody>, lifecycle::Refused>
    + Send
    + Sync
    + 'static,
) -> Result<()> {
    let expected = attempt.clone();
    let change = move |row: &mut JobRow| {
        if row.live().as_ref() == Some(&expected) { change(row) } else { Ok(Vec::new()) }
    };
    match app.store.change_job(&attempt.job, Box::new(change)).await {
        Ok(changed) => {
            app.announce(&changed);
            // Whatever the job is doing now, it is not this attempt any more.
            app.dispatch.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(StoreError::NotFound(_)) => {
            app.dispatch.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// An agent that was stopped in order has closed its connection: what it did not finish goes back to the queue.
pub(crate) async fn left(app: &App, agent: &Online, reason: &str) -> Result<()> {
    app.ingest.drained().await;
    for attempt in app.dispatch.of_agent(&agent.row.id) {
        let why = leaving_reason(&agent.row.name, reason);
        end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await?;
    }
    Ok(())
}

/// How a job says that its agent was stopped in order.
pub(crate) fn leaving_reason(agent: &str, reason: &str) -> String {
    format!("agent {agent:?} was stopped in order ({reason})")
}

/// What a person wants of a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    Cancel,
    Pause,
}

/// A person wants a job to end or to stand still: at once when nothing runs, else its agents are told.
///
/// # Errors
/// Its state forbids it, or there is none.
pub(crate) async fn stop(app: &App, id: &JobId, wish: Wish) -> Result<Job> {
    let places = app.dispatch.places_of(id);
    let online = app.agents.online();
    let reachable = places.iter().any(|p| online.iter().any(|o| o.row.id == p.agent_id));
    let change = move |row: &mut JobRow| match wish {
        Wish::Cancel => lifecycle::cancel(row, reachable, crate::now()),
        Wish::Pause => lifecycle::pause(row, crate::now()),
    };
    let changed = app.store.change_job(id, Box::new(change)).await?;
    app.announce(&changed);
    if let Some(row) = app.store.job(id).await?
        && let (Some(attempt), Some((reason, patient))) = (row.live(), wanted(&row))
    {
        for place in &places {
            let (attempt, reason) = (attempt.clone(), reason.clone());
            app.agents.tell(&place.agent_id, ToAgent::Stop { attempt, reason, patient });
        }
    }
    Ok(changed.job)
}

/// Why a job's ranks are to end, and whether a checkpoint is wanted of them.
fn wanted(row: &JobRow) -> Option<(String, bool)> {
    match (&row.stop, row.job.state) {
        (Some(stop), _) => Some((stop.clone(), false)),
        (None, JobState::Pausing) => Some(("paused on request".into(), true)),
        (None, _) => None,
    }
}

/// Slots of a kind on an agent, and those of them that are free.
struct Room {
    all: Vec<u32>,
    free: Vec<u32>,
}

fn room(app: &App, agent: &Online, device: Device) -> Room {
    let in_use = app.dispatch.slots_in_use(&agent.row.id);
    let all = slots_for(&agent.row.slots, device);
    let free = all.iter().copied().filter(|s| !in_use.contains_key(s)).collect();
    Room { all, free }
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

/// Starts a job if an agent has room for all its ranks. If one could have, it is kept free of later jobs, so
/// that a large job is not overtaken for ever.
async fn place(app: &App, row: &JobRow, reserved: &mut HashSet<String>) -> Result<()> {
    let job = &row.job;
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
            let room = room(app, &o, device);
            (o, room)
        })
        .collect();
    // The fullest that has room: large gaps stay for large jobs.
    candidates.sort_by_key(|(_, room)| room.free.len());
    let fits = candidates.iter().find(|(o, r)| r.free.len() >= ranks && !reserved.contains(&o.row.id));
    if let Some((agent, room)) = fits {
        return start(app, row, agent, &room.free[..ranks]).await;
    }
    let unit = if device == Device::Cuda { "GPU" } else { "slot" };
    let slots = |n: usize| if n == 1 { format!("1 {unit}") } else { format!("{n} {unit}s") };
    let largest = candidates.iter().max_by_key(|(_, r)| (r.all.len(), r.free.len()));
    let why = match largest {
        None if app.agents.online().is_empty() => {
            "no agent is online; start one with `lockstep agent --server URL`".to_owned()
        }
        None => "no agent that is online takes this job".to_owned(),
        Some((_, room)) if room.all.is_empty() => {
            format!("needs {}, and no machine that is online has one", slots(ranks))
        }
        Some((agent, room)) if room.all.len() < ranks => format!(
            "needs {} on one machine; the largest, {:?}, has {}",
            slots(ranks),
            agent.row.name,
            room.all.len()
        ),
        Some((agent, room)) => {
            reserved.insert(agent.row.id.clone());
            format!(
                "waits for {}: {} of {} on {:?} free",
                slots(ranks),
                room.free.len(),
                room.all.len(),
                agent.row.name
            )
        }
    };
    if job.state == JobState::Queued && job.reason.as_deref() != Some(&why) {
        // What it says of an earlier attempt is worth more than that it waits.
        if job.attempt > 0 && job.reason.as_deref().is_some_and(|r| r.contains("goes on from")) {
            return Ok(());
        }
        let changed = app.store.change_job(&job.id, Box::new(move |row| lifecycle::waits(row, &why))).await;
        match changed {
            Ok(changed) => app.hub.publish(&changed),
            Err(StoreError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn start(app: &App, row: &JobRow, agent: &Online, slots: &[u32]) -> Result<()> {
    let job = &row.job;
    let ranks: Vec<(u32, u32)> = (0..).zip(slots.iter().copied()).collect();
    let Some(dataset) = app.store.dataset(&job.spec.data.dataset).await? else {
        let why = format!(
            "dataset {:?} is no longer registered; add it again and retry the job",
            job.spec.data.dataset
        );
        let fail = move |row: &mut JobRow| lifecycle::cannot_start(row, &why, crate::now());
        let changed = app.store.change_job(&job.id, Box::new(fail)).await?;
        app.announce(&changed);
        return Ok(());
    };
    forget_missing(app, job).await?;
    let mut spec = job.spec.clone();
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
    app.dispatch.hold(attempt.clone(), vec![place]);
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
        // Only loopback is listened on, so every agent shares this machine's disk.
        job_dir: Some(app.job_dir(&job.id).to_string_lossy().into_owned()),
        resume: claimed.resume,
    }));
    if app.agents.tell(&agent.row.id, message) {
        // Somebody may have cancelled or paused it between the claim and the start.
        let row = app.store.job(&attempt.job).await?;
        let live = row.as_ref().is_some_and(|r| r.live().as_ref() == Some(&attempt));
        if !live {
            app.dispatch.release(&attempt.job, attempt.attempt);
        }
        let wish = match &row {
            Some(row) if live => wanted(row),
            // It may also have run to its end by now, as its agent knows best.
            Some(row) if row.job.state != JobState::Cancelled => None,
            _ => Some(("cancelled before it started".into(), false)),
        };
        if let Some((reason, patient)) = wish {
            app.agents.tell(&agent.row.id, ToAgent::Stop { attempt, reason, patient });
        }
        return Ok(());
    }
    let why = format!("agent {:?} went away before it could start", agent.row.name);
    end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await
}

/// `model.pretrained` may be a checkpoint's id: ranks are told its folder. Some: why they cannot be.
async fn resolve_pretrained(app: &App, spec: &mut JobSpec) -> Result<Option<String>> {
    let Some(given) = &spec.model.pretrained else { return Ok(None) };
    let is_id = given.get(..27).is_some_and(|id| id.parse::<JobId>().is_ok())
        && given.as_bytes().get(27) == Some(&b'-');
    if !is_id {
        return Ok(None);
    }
    Ok(match app.store.checkpoint(given).await? {
        Some(row) => {
            let folder = app.checkpoint_dir(&row);
            spec.model.pretrained = Some(folder.to_string_lossy().into_owned());
            None
        }
        None => Some(format!(
            "model.pretrained: checkpoint {given:?} is no longer there; it was deleted or not kept"
        )),
    })
}

/// Checkpoints whose folder is gone (somebody removed it, or a rank died before it told of removing it) are forgotten
/// before one of them is chosen to go on from.
async fn forget_missing(app: &App, job: &Job) -> Result<()> {
    // No folder at all: this disk is not where they are.
    if !matches!(tokio::fs::try_exists(app.job_dir(&job.id).join("checkpoints")).await, Ok(true)) {
        return Ok(());
    }
    let mut missing = Vec::new();
    for row in app.store.checkpoints(&job.id).await? {
        if matches!(tokio::fs::try_exists(app.checkpoint_dir(&row)).await, Ok(false)) {
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
