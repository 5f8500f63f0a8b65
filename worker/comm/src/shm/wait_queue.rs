//! Waits for other processes: spins for a moment, then sleeps.

use rustix::{
    event::Timespec,
    io::Errno,
    thread::futex::{self, Flags},
};
use std::{
    sync::atomic::{AtomicU32, Ordering, fence},
    time::{Duration, Instant},
};

/// Number of spins before the thread first yields, about 50 us.
const SPINS: u32 = 1000;
/// After [`SPINS`], each spin yields to other threads until this time has passed without work. If each rank has a
/// core, most waits are shorter than this, and waking a thread often takes longer than the wait.
const YIELD_FOR: Duration = Duration::from_millis(2);
/// After spinning, the thread sleeps and wakes at this interval to check that all ranks are alive, because a dead
/// rank wakes no one.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// A futex in shared memory. All zeros are a valid initial state.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct WaitQueue {
    wakes: AtomicU32,
    sleepers: AtomicU32,
}

impl WaitQueue {
    /// Wakes all sleepers, so that they check their condition. Nearly free if no thread sleeps.
    pub(super) fn notify_all(&self) {
        // Either the sleeper sees the preceding write, or this thread sees the sleeper.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wakes.fetch_add(1, Ordering::SeqCst);
            // Cannot fail for an address of this process.
            let _ = futex::wake(&self.wakes, Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Waits until `is_ready` returns true, and returns the time for which there was no work. If `spins`, the thread spins before
    /// it sleeps. `idle` does a piece of useful work and returns whether there was any. `check` is called from time to time
    /// with the time since the last progress, and its error ends the wait.
    pub(super) fn wait<E>(
        &self,
        spins: bool,
        idle: &mut dyn FnMut() -> bool,
        is_ready: &dyn Fn() -> bool,
        mut check: impl FnMut(Duration) -> Result<(), E>,
    ) -> Result<Duration, E> {
        let mut waited = Duration::ZERO;
        loop {
            if is_ready() {
                return Ok(waited);
            }
            if idle() {
                continue;
            }
            let began = Instant::now();
            let mut spins_done = 0;
            let has_worked = loop {
                if is_ready() {
                    break false;
                }
                spins_done += 1;
                if spins && spins_done < SPINS {
                    std::hint::spin_loop();
                } else if spins && began.elapsed() < YIELD_FOR {
                    std::thread::yield_now();
                } else {
                    self.sleepers.fetch_add(1, Ordering::SeqCst);
                    let wakes = self.wakes.load(Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    let slept = if is_ready() || idle() {
                        Ok(())
                    } else {
                        futex::wait(&self.wakes, Flags::empty(), wakes, Some(&SLEEP))
                    };
                    self.sleepers.fetch_sub(1, Ordering::SeqCst);
                    if slept == Err(Errno::TIMEDOUT) && !is_ready() {
                        check(began.elapsed())?;
                    }
                }
                if idle() {
                    break true;
                }
            };
            waited += began.elapsed();
            if !has_worked {
                return Ok(waited);
            }
        }
    }
}
