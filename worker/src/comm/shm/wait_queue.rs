//! Waiting for other processes: spins for a moment, then sleeps.

use rustix::{
    event::Timespec,
    io::Errno,
    thread::futex::{self, Flags},
};
use std::{
    sync::atomic::{AtomicU32, Ordering, fence},
    time::{Duration, Instant},
};

/// Looks in a row before others get a chance to run: some 50 us.
const SPINS: u32 = 1000;
/// From then on others run first when there are any, up to this time since the last thing to do; most waits of
/// ranks that have a core each are shorter, and waking up takes longer than many of them.
const YIELD_FOR: Duration = Duration::from_millis(2);
/// After spinning it sleeps. A rank that died wakes nobody, so it checks this often that all are alive.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// A futex on which processes wait. Lies in memory that the processes share; all zeros is a new one.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct WaitQueue {
    wakes: AtomicU32,
    sleepers: AtomicU32,
}

impl WaitQueue {
    /// Wakes all sleepers to check their condition. Costs next to nothing while nobody sleeps.
    pub(super) fn notify_all(&self) {
        // Either a sleeper sees what was written before this, or this sees the sleeper.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wakes.fetch_add(1, Ordering::SeqCst);
            // Nothing can go wrong with an address of our own.
            let _ = futex::wake(&self.wakes, Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Waits until `ready`; `spins` when there are cores enough for that. `idle` does something useful and says
    /// whether it did. `watch` is asked from time to time whether to continue, and given for how long nothing has
    /// happened. Gives the time in which there was nothing to do.
    pub(super) fn wait<E>(
        &self,
        spins: bool,
        idle: &mut dyn FnMut() -> bool,
        ready: &dyn Fn() -> bool,
        mut watch: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<Duration, E> {
        let mut waited = Duration::ZERO;
        loop {
            if ready() {
                return Ok(waited);
            }
            if idle() {
                continue;
            }
            let began = Instant::now();
            let mut looks = 0;
            let busy = loop {
                if ready() {
                    break false;
                }
                looks += 1;
                if spins && looks < SPINS {
                    std::hint::spin_loop();
                } else if spins && began.elapsed() < YIELD_FOR {
                    std::thread::yield_now();
                } else {
                    self.sleepers.fetch_add(1, Ordering::SeqCst);
                    let wakes = self.wakes.load(Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    let slept = if ready() || idle() {
                        Ok(())
                    } else {
                        futex::wait(&self.wakes, Flags::empty(), wakes, Some(&SLEEP))
                    };
                    self.sleepers.fetch_sub(1, Ordering::SeqCst);
                    if slept == Err(Errno::TIMEDOUT) && !ready() {
                        watch(began.elapsed())?;
                    }
                }
                if idle() {
                    break true;
                }
            };
            waited += began.elapsed();
            if !busy {
                return Ok(waited);
            }
        }
    }
}
