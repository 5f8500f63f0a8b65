//! Metrics that are measured at intervals, next to training.

use super::Observer;
use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Measures and reports until it is dropped.
#[derive(Debug)]
pub(crate) struct Sampler {
    ended: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Calls `measure` at intervals and reports what it returns, at the step that `progress` counts. Nothing is measured or reported while
    /// `progress` stands still: a rank that has hung must look silent to its agent, and a metric has one value a step.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(
        name: &str,
        every: Duration,
        observer: Arc<dyn Observer>,
        progress: Arc<AtomicU64>,
        mut measure: impl FnMut() -> Vec<(&'static str, f32)> + Send + 'static,
    ) -> std::io::Result<Self> {
        let ended = Arc::new((Mutex::new(false), Condvar::new()));
        let asked_to_end = ended.clone();
        let mut last = progress.load(Ordering::Relaxed);
        let watch = move || {
            let (flag, changed) = &*asked_to_end;
            let mut over = flag.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                (over, _) = changed
                    .wait_timeout_while(over, every, |over| !*over)
                    .unwrap_or_else(PoisonError::into_inner);
                if *over {
                    return;
                }
                let step = progress.load(Ordering::Relaxed);
                if step == last {
                    continue;
                }
                last = step;
                for (name, value) in measure() {
                    observer.metric(name, step, value);
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(watch)?;
        Ok(Self { ended, thread: Some(thread) })
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        *self.ended.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ended.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // It only reads and reports.
            let _ = thread.join();
        }
    }
}
