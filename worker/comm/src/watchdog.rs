//! Detects that steps no longer complete, and reports which ranks delay the others.
//!
//! If one rank never joins a collective, the collective runs on the other GPUs forever, and nothing in their
//! processes fails. So every rank posts the number of its last finished step at the rendezvous, about once a second.
//! A rank whose steps do not complete within the stall time-out compares these numbers, reports which ranks are behind,
//! and ends its attempt.

use crate::rendezvous::Store;
use lockstep_host::lock;
use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Interval between two posts of a rank. Shorter in tests.
const POST_EVERY: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 1000 });
/// A rank counts as silent if its posts have not changed for this long.
const SILENT_AFTER: Duration = Duration::from_secs(5);

/// Watches the steps of one rank until it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    shared: Arc<Shared>,
}

/// The state that the watchdog shares with its threads.
#[derive(Debug)]
struct Shared {
    began: Instant,
    rank: u32,
    /// The step of the checkpoint that this attempt continues from.
    base_step: AtomicU64,
    /// The last submitted step, counted from `base_step`.
    submitted: AtomicU64,
    /// The last finished step, counted from `base_step`.
    done: AtomicU64,
    /// Milliseconds after `began` at which a step was last completed, or was submitted while no step was pending.
    progress_ms: AtomicU64,
    has_ended: AtomicBool,
    posted: Mutex<PostedSteps>,
    stall_reason: OnceLock<String>,
}

#[derive(Debug, Default)]
struct PostedSteps {
    ranks: Vec<Option<Post>>,
    /// When rank 0, which stores the posts, last responded. `None` if it has not responded yet.
    last_response: Option<Instant>,
}

/// The newest post of a rank.
#[derive(Debug, Clone)]
struct Post {
    /// The last finished step.
    step: u64,
    value: Vec<u8>,
    /// When this rank first saw the post.
    first_seen: Instant,
}

impl Watchdog {
    /// Starts watching. If a submitted step is not done within `limit` after the previous step, the watchdog calls
    /// `on_stall` once, on a separate thread, with a description of the stall.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        store: Option<Arc<Store>>,
        limit: Duration,
        on_stall: impl FnOnce(&str) + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let (rank, world_size) =
            store.as_ref().map_or((0, 1), |store| (store.config().rank, store.config().world_size));
        let posted = PostedSteps { ranks: vec![None; world_size as usize], last_response: None };
        let shared = Arc::new(Shared {
            began: Instant::now(),
            rank,
            base_step: AtomicU64::new(0),
            submitted: AtomicU64::new(0),
            done: AtomicU64::new(0),
            progress_ms: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
            posted: Mutex::new(posted),
            stall_reason: OnceLock::new(),
        });
        if let Some(store) = store {
            // A separate thread, because posting blocks while rank 0's process is suspended.
            let shared = shared.clone();
            let post = move || shared.post(&store);
            std::thread::Builder::new().name("watchdog post".into()).spawn(post)?;
        }
        let watched = shared.clone();
        let watch = move || watched.watch(limit, on_stall);
        std::thread::Builder::new().name("watchdog".into()).spawn(watch)?;
        Ok(Arc::new(Self { shared }))
    }

    /// Sets the step of the checkpoint from which training continues. Posted steps are counted from there.
    pub fn set_base_step(&self, step: u64) {
        self.shared.base_step.store(step, Ordering::Release);
    }

    /// Records that step `step` (counted from 1 in this process) was submitted to the GPU. The step must complete within
    /// the limit.
    pub fn record_submitted(&self, step: u64) {
        let shared = &self.shared;
        if shared.submitted.fetch_max(step, Ordering::AcqRel) <= shared.done.load(Ordering::Acquire) {
            shared.record_progress();
        }
    }

    /// Records that step `step` and all steps before it are done.
    pub fn record_done(&self, step: u64) {
        self.shared.done.fetch_max(step, Ordering::AcqRel);
        self.shared.record_progress();
    }

    /// The number of steps that this process has completed.
    pub fn steps_done(&self) -> u64 {
        self.shared.done.load(Ordering::Acquire)
    }

    /// Why the watchdog ended the attempt, if it did.
    pub fn stall_reason(&self) -> Option<&str> {
        self.shared.stall_reason.get().map(String::as_str)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
    }
}

impl Shared {
    fn record_progress(&self) {
        self.progress_ms.store(self.began.elapsed().as_millis() as u64, Ordering::Release);
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Calls `on_stall` if a submitted step is not done within `limit`. Returns then, or when the watchdog has been dropped.
    fn watch(&self, limit: Duration, on_stall: impl FnOnce(&str)) {
        let poll_every = (limit / 20).clamp(Duration::from_millis(5), Duration::from_millis(500));
        while !self.has_ended() {
            std::thread::sleep(poll_every);
            let done = self.done.load(Ordering::Acquire);
            let is_pending = self.submitted.load(Ordering::Acquire) > done;
            let last_progress = Duration::from_millis(self.progress_ms.load(Ordering::Acquire));
            let without_progress = self.began.elapsed().saturating_sub(last_progress);
            if is_pending && without_progress > limit && !self.has_ended() {
                let step = self.base_step.load(Ordering::Acquire) + done;
                let text = lock(&self.posted).describe(limit, self.rank, step, Instant::now());
                on_stall(self.stall_reason.get_or_init(|| text));
                return;
            }
        }
    }

    /// Posts this rank's step and reads the other ranks' posts, until the watchdog has been dropped or rank 0 is gone.
    fn post(&self, store: &Store) {
        let world_size = store.config().world_size;
        let key = |rank: u32| format!("watchdog/{rank}");
        let keys: Vec<String> = (0..world_size).map(key).collect();
        let mut post_count = 0u64;
        while !self.has_ended() {
            post_count += 1;
            let step = self.base_step.load(Ordering::Acquire) + self.done.load(Ordering::Acquire);
            let mut value = step.to_le_bytes().to_vec();
            // The posts of a live rank change even if its step does not.
            value.extend_from_slice(&post_count.to_le_bytes());
            let posted = store.set(&key(self.rank), &value).and_then(|()| store.get(&keys, Duration::ZERO));
            let Ok(values) = posted else { return };
            lock(&self.posted).record(values, Instant::now());
            std::thread::sleep(POST_EVERY);
        }
    }
}

impl PostedSteps {
    /// Records the posts that rank 0 has returned at the time `now`, by rank.
    fn record(&mut self, values: Vec<Option<Vec<u8>>>, now: Instant) {
        self.last_response = Some(now);
        for (newest, value) in self.ranks.iter_mut().zip(values) {
            let Some(value) = value else { continue };
            let Some(step) = value.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)) else { continue };
            if newest.as_ref().is_none_or(|post| post.value != value) {
                *newest = Some(Post { step, value, first_seen: now });
            }
        }
    }

    /// Describes a stall, for example `no step for 120 s: rank 1 is at step 812, the others at 813`.
    fn describe(&self, limit: Duration, own_rank: u32, own_step: u64, now: Instant) -> String {
        let stall = format!("no step for {:.0} s", limit.as_secs_f64());
        if self.ranks.len() < 2 {
            return format!("{stall} after step {own_step}: the GPU does not complete the submitted work");
        }
        // While rank 0 does not respond, no posts arrive. So silence is measured up to rank 0's last response.
        let last_response = self.last_response.map_or(now, |at| at.min(now));
        let state_of = |(rank, post): (u32, &Option<Post>)| match post {
            _ if rank == own_rank => (rank, Some(own_step), Duration::ZERO),
            None => (rank, None, Duration::ZERO),
            Some(post) => (rank, Some(post.step), last_response.saturating_duration_since(post.first_seen)),
        };
        let states: Vec<_> = (0..).zip(&self.ranks).map(state_of).collect();
        let ahead = states.iter().filter_map(|(_, step, _)| *step).max().unwrap_or(own_step);
        let mut behind = Vec::new();
        for (rank, step, mut silence) in states {
            if rank == 0 && own_rank != 0 {
                silence = silence.max(now - last_response);
            }
            let silent = if silence >= SILENT_AFTER {
                format!(" and silent for {:.0} s (suspended?)", silence.as_secs_f64())
            } else {
                String::new()
            };
            match step {
                None => behind.push(format!("rank {rank} has not finished a step")),
                Some(step) if step < ahead || !silent.is_empty() => {
                    behind.push(format!("rank {rank} is at step {step}{silent}"));
                }
                Some(_) => {}
            }
        }
        if behind.is_empty() {
            return format!("{stall}: all ranks are at step {ahead}, in a collective that does not complete");
        }
        let others = match self.ranks.len() - behind.len() {
            0 => String::new(),
            1 => format!(", the other at {ahead}"),
            _ => format!(", the others at {ahead}"),
        };
        format!("{stall}: {}{others}", behind.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::loopback::on_joined_ranks;
    use std::sync::mpsc;

    const MAX_WAIT: Duration = Duration::from_secs(20);

    #[test]
    fn waiting_ranks_name_the_rank_that_is_behind() {
        let (sender, receiver) = mpsc::channel();
        let stores = on_joined_ranks(3, Duration::ZERO, |store| store);
        let watchdogs: Vec<_> = stores
            .iter()
            .map(|store| {
                let (rank, sender) = (store.config().rank, sender.clone());
                let on_stall = move |text: &str| sender.send((rank, text.to_owned())).unwrap();
                let limit = Duration::from_millis(400);
                Watchdog::start(Some(store.clone()), limit, on_stall).unwrap()
            })
            .collect();
        // Rank 1 never reaches step 813, and has no pending step.
        for (rank, watchdog) in watchdogs.iter().enumerate() {
            // Training continues from a checkpoint, and a process counts only its own steps.
            watchdog.set_base_step(800);
            watchdog.record_submitted(12);
            watchdog.record_done(12);
            if rank != 1 {
                watchdog.record_submitted(13);
                watchdog.record_done(13);
                watchdog.record_submitted(14);
            }
        }
        for _ in 0..2 {
            let (rank, text) = receiver.recv_timeout(MAX_WAIT).unwrap();
            assert_ne!(rank, 1);
            assert_eq!(text, "no step for 0 s: rank 1 is at step 812, the others at 813");
            assert_eq!(watchdogs[rank as usize].stall_reason(), Some(text.as_str()));
        }
        assert_eq!(watchdogs[1].stall_reason(), None);
    }

    #[test]
    fn work_other_than_steps_is_not_a_stall() {
        let (sender, receiver) = mpsc::channel();
        let on_stall = move |text: &str| sender.send(text.to_owned()).unwrap();
        let limit = Duration::from_millis(100);
        let watchdog = Watchdog::start(None, limit, on_stall).unwrap();
        watchdog.record_submitted(1);
        watchdog.record_done(1);
        // An evaluation or a checkpoint takes longer than the limit, but no step is pending.
        assert!(receiver.recv_timeout(Duration::from_millis(500)).is_err());
        watchdog.record_submitted(2);
        let text = receiver.recv_timeout(MAX_WAIT).unwrap();
        assert!(text.contains("after step 1"), "{text}");
    }

    #[test]
    fn a_suspended_rank_and_a_hung_collective_are_distinguished() {
        let now = Instant::now();
        let Some(earlier) = now.checked_sub(Duration::from_secs(60)) else { return };
        let at = |step: u64, when| Some(Post { step, value: step.to_le_bytes().to_vec(), first_seen: when });
        let limit = Duration::from_secs(120);
        let mut posted = PostedSteps { ranks: vec![at(7, now), at(7, now)], last_response: Some(now) };
        assert_eq!(
            posted.describe(limit, 0, 7, now),
            "no step for 120 s: all ranks are at step 7, in a collective that does not complete"
        );
        posted.ranks[1] = at(7, earlier);
        assert_eq!(
            posted.describe(limit, 0, 7, now),
            "no step for 120 s: rank 1 is at step 7 and silent for 60 s (suspended?), the other at 7"
        );
        // Rank 0 stores the posts. While it is suspended, it does not respond.
        posted = PostedSteps { ranks: vec![at(7, earlier), at(7, earlier)], last_response: Some(earlier) };
        assert_eq!(
            posted.describe(limit, 1, 7, now),
            "no step for 120 s: rank 0 is at step 7 and silent for 60 s (suspended?), the other at 7"
        );
    }
}
