//! Measurements of machines by their agents: all samples of the last ten minutes in memory, and means of each minute of the last day in the
//! database. A machine with eight GPUs needs 200 bytes per minute in the database (300 KB per day), and about 30 KB of memory.

mod minutes;
mod point;
mod warnings;

pub(crate) use minutes::{minute_of, point_of};
pub(crate) use point::{GPU_METRICS, MACHINE_METRICS, Point, bucket_means};
pub(crate) use warnings::{MachineState, warnings};

use crate::{
    store::{MinuteRow, Store},
    util::{lock, remove_oldest},
};
use jiff::Timestamp;
use lockstep_protocol::{
    agent::{MachineSample, MachineWarning, Slot},
    invisible::escape_invisible,
    limits::{FINDING_CHARS, MAX_FINDINGS, MAX_MEASURED_GPUS, MAX_MEASURED_MACHINES},
};
use minutes::Minute;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Mutex,
    time::{Duration, Instant},
};
use tokio::time::interval;

/// Time for which the means of minutes are kept in the database.
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);
/// Interval at which finished minutes are stored. A server that is killed loses the minutes since the last time.
const STORE_INTERVAL: Duration = Duration::from_secs(20);
const PURGE_INTERVAL: Duration = Duration::from_secs(600);
/// Number of samples in memory: ten minutes with one sample every five seconds.
const RECENT_SAMPLES: usize = 120;
/// Minimum time between two samples of an agent. A sample that arrives sooner is ignored. Agents send a sample every five seconds.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of minutes of a machine that wait to be stored while the database cannot be written.
const MAX_UNSTORED: usize = 60;
/// Maximum value of a measurement: more than any machine has, and well within the range of a float32.
const MAX_VALUE: f32 = 1e18;
/// Number of samples from which the difference of the clocks is computed. Messages may be delayed, so the fastest message is used.
const CLOCK_SAMPLES: usize = 12;
/// Minimum number of these samples, because the first may have waited for the connection.
const MIN_CLOCK_SAMPLES: usize = 3;

/// Measurements by the agent's id.
#[derive(Debug, Default)]
pub(crate) struct Machines {
    by_agent: Mutex<HashMap<String, Measurements>>,
}

#[derive(Debug)]
struct Measurements {
    /// When the newest sample arrived.
    arrived_at: Instant,
    newest: MachineSample,
    /// The samples in memory, oldest first.
    recent: VecDeque<Point>,
    /// For each of the last samples, the milliseconds by which the sample's time was behind this server's clock on arrival.
    behind_ms: VecDeque<i64>,
    minute: Minute,
    /// Finished minutes that are not in the database yet.
    unstored: VecDeque<MinuteRow>,
}

/// The newest sample of a machine.
#[derive(Debug, Clone)]
pub(crate) struct NewestSample {
    pub(crate) sample: MachineSample,
    /// Time since the sample arrived.
    pub(crate) age: Duration,
    /// Milliseconds by which the machine's clock is behind this server's clock. `None` until enough samples have arrived.
    pub(crate) clock_behind_ms: Option<i64>,
}

/// `value` if it is between 0 and `max`, otherwise `None`.
fn in_range(value: Option<f32>, max: f32) -> Option<f32> {
    value.filter(|value| (0.0..=max).contains(value))
}

/// Removes impossible values from a sample, such as numbers that are not finite and GPUs without a slot. The limits are far above what any
/// machine has.
fn sanitize(mut sample: MachineSample, slots: &[Slot]) -> MachineSample {
    let has_slot = |slot: u32| slots.iter().any(|s| s.index == slot);
    // An agent has at most 1024 slots.
    sample.gpus.truncate(1024);
    let mut seen = HashSet::new();
    sample.gpus.retain(|gpu| seen.len() < MAX_MEASURED_GPUS && has_slot(gpu.slot) && seen.insert(gpu.slot));
    sample.cpus = in_range(Some(sample.cpus), 1e6).unwrap_or(0.0);
    sample.cpu_utilization = in_range(sample.cpu_utilization, 1.0);
    sample.load = in_range(sample.load, 1e9);
    let limit = |bytes: &mut u64| *bytes = (*bytes).min(MAX_VALUE as u64);
    [
        &mut sample.memory_used_bytes,
        &mut sample.memory_bytes,
        &mut sample.host_memory_bytes,
        &mut sample.disk_used_bytes,
        &mut sample.disk_bytes,
    ]
    .into_iter()
    .for_each(limit);
    let rates = [
        &mut sample.disk_read_bytes_per_second,
        &mut sample.disk_written_bytes_per_second,
        &mut sample.network_received_bytes_per_second,
        &mut sample.network_sent_bytes_per_second,
    ];
    rates.into_iter().flatten().for_each(limit);
    for gpu in &mut sample.gpus {
        gpu.utilization = in_range(gpu.utilization, 1.0);
        gpu.temperature_celsius = in_range(gpu.temperature_celsius, 1000.0);
        gpu.power_watts = in_range(gpu.power_watts, 1e6);
        limit(&mut gpu.memory_used_bytes);
    }
    sample
}

/// Limits the number and length of findings.
pub(crate) fn limit_findings(findings: Vec<MachineWarning>) -> Vec<MachineWarning> {
    let short = |finding: MachineWarning| MachineWarning {
        text: escape_invisible(&finding.text).chars().take(FINDING_CHARS).collect(),
        ..finding
    };
    findings.into_iter().take(MAX_FINDINGS).map(short).collect()
}

impl Machines {
    /// Adds a sample of an agent with these slots, which arrived at the time `at` of this server's clock.
    pub(crate) fn add(&self, agent: &str, sample: MachineSample, slots: &[Slot], at: Timestamp) {
        let behind_ms = at.as_millisecond() - sample.at.as_millisecond();
        let sample = sanitize(sample, slots);
        let point = Point::of(at, &sample);
        let mut by_agent = lock(&self.by_agent);
        if !by_agent.contains_key(agent) && by_agent.len() >= MAX_MEASURED_MACHINES {
            remove_oldest(&mut by_agent, |measured| Some(measured.arrived_at));
        }
        let now = Instant::now();
        let measured = match by_agent.get_mut(agent) {
            Some(measured) if now - measured.arrived_at < MIN_SAMPLE_INTERVAL => return,
            Some(measured) => measured,
            None => by_agent.entry(agent.to_owned()).or_insert_with(|| Measurements {
                arrived_at: now,
                newest: sample.clone(),
                recent: VecDeque::new(),
                behind_ms: VecDeque::new(),
                minute: Minute::new(at),
                unstored: VecDeque::new(),
            }),
        };
        measured.arrived_at = now;
        measured.newest = sample;
        if let Some(finished) = measured.minute.add(agent, &point) {
            measured.unstored.push_back(finished);
        }
        measured.recent.push_back(point);
        measured.behind_ms.push_back(behind_ms);
        let excess = |length: usize, max: usize| length.saturating_sub(max);
        measured.recent.drain(..excess(measured.recent.len(), RECENT_SAMPLES));
        measured.behind_ms.drain(..excess(measured.behind_ms.len(), CLOCK_SAMPLES));
        measured.unstored.drain(..excess(measured.unstored.len(), MAX_UNSTORED));
    }

    /// Called when an agent connects. Earlier differences of the clocks are dropped.
    pub(crate) fn note_connected(&self, agent: &str) {
        if let Some(measured) = lock(&self.by_agent).get_mut(agent) {
            measured.behind_ms.clear();
        }
    }

    pub(crate) fn forget(&self, agent: &str) {
        lock(&self.by_agent).remove(agent);
    }

    /// The newest sample of a machine.
    pub(crate) fn newest(&self, agent: &str) -> Option<NewestSample> {
        let by_agent = lock(&self.by_agent);
        let measured = by_agent.get(agent)?;
        let fastest = measured.behind_ms.iter().copied().min_by_key(|ms| ms.abs());
        Some(NewestSample {
            sample: measured.newest.clone(),
            age: measured.arrived_at.elapsed(),
            clock_behind_ms: fastest.filter(|_| measured.behind_ms.len() >= MIN_CLOCK_SAMPLES),
        })
    }

    /// All finished minutes that are not in the database, and the samples in memory from `since` on. Both are in order of time.
    pub(crate) fn measurements_since(&self, agent: &str, since: Timestamp) -> (Vec<MinuteRow>, Vec<Point>) {
        let by_agent = lock(&self.by_agent);
        let Some(measured) = by_agent.get(agent) else { return (Vec::new(), Vec::new()) };
        let recent = measured.recent.iter().filter(|point| point.at >= since).cloned();
        (measured.unstored.iter().cloned().collect(), recent.collect())
    }

    /// Takes the minutes that are over at the time `now`.
    fn take_minutes(&self, now: Timestamp) -> Vec<MinuteRow> {
        let mut minutes = Vec::new();
        for (agent, measured) in lock(&self.by_agent).iter_mut() {
            minutes.extend(measured.unstored.drain(..));
            // This also ends the last minute of a machine that has disconnected.
            minutes.extend(measured.minute.finish_if_over(agent, now));
        }
        minutes
    }

    /// Takes minutes back that could not be stored.
    pub(crate) fn put_back(&self, minutes: Vec<MinuteRow>) {
        let mut by_agent = lock(&self.by_agent);
        for minute in minutes.into_iter().rev() {
            if let Some(measured) = by_agent.get_mut(&minute.agent_id)
                && measured.unstored.len() < MAX_UNSTORED
            {
                measured.unstored.push_front(minute);
            }
        }
    }

    /// Stores finished minutes and removes old ones. Runs until dropped.
    pub(crate) async fn run(&self, store: &dyn Store) {
        let (mut store_tick, mut purge_tick) = (interval(STORE_INTERVAL), interval(PURGE_INTERVAL));
        loop {
            tokio::select! {
                _ = store_tick.tick() => self.store_minutes(store, crate::now()).await,
                _ = purge_tick.tick() => {
                    let before = minute_of(crate::now() - RETENTION);
                    if let Err(error) = store.purge_machine_minutes(before).await {
                        tracing::warn!(%error, "old measurements of machines could not be removed");
                    }
                }
            }
        }
    }

    /// Stores the minutes that are over at the time `now`.
    pub(crate) async fn store_minutes(&self, store: &dyn Store, now: Timestamp) {
        let minutes = self.take_minutes(now);
        if !minutes.is_empty()
            && let Err(error) = store.add_machine_minutes(&minutes).await
        {
            tracing::warn!(%error, "measurements of machines could not be stored");
            self.put_back(minutes);
        }
    }
}

#[cfg(test)]
mod tests;
