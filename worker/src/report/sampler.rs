//! Metrics that are measured at intervals, concurrently with training.

use super::Observer;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// A thread that measures and reports until this value is dropped.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// The thread ends when this sender is dropped.
    running: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Calls `measure` at intervals and reports the results, at the step in `progress`. While `progress` does not
    /// change, nothing is measured or reported, because a rank that has hung must be silent, and a metric has one value per step.
    pub(crate) fn start(
        name: &str,
        every: Duration,
        observer: Arc<dyn Observer>,
        progress: Arc<AtomicU64>,
        mut measure: impl FnMut() -> Vec<(&'static str, f32)> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let mut last_step = progress.load(Ordering::Relaxed);
        let watch = move || {
            while receiver.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let step = progress.load(Ordering::Relaxed);
                if step == last_step {
                    continue;
                }
                last_step = step;
                for (name, value) in measure() {
                    observer.metric(name, step, value);
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(watch)?;
        Ok(Self { running: Some(sender), thread: Some(thread) })
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.running = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is ignored, because the thread only measures and reports.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::agent::AttemptEvent;
    use std::{
        sync::{Mutex, mpsc},
        time::Instant,
    };

    struct Reports(Mutex<mpsc::Sender<(String, u64, f32)>>);

    impl Observer for Reports {
        fn metric(&self, name: &str, step: u64, value: f32) {
            self.0.lock().unwrap().send((name.into(), step, value)).unwrap();
        }
        fn log(&self, _: &str) {}
        fn event(&self, _: &AttemptEvent) {}
    }

    #[test]
    fn a_metric_has_one_value_per_step_and_none_without_progress() {
        let (sender, reports) = mpsc::channel();
        let observer = Arc::new(Reports(Mutex::new(sender)));
        let progress = Arc::new(AtomicU64::new(3));
        let measurements = Arc::new(AtomicU64::new(0));
        let counted = measurements.clone();
        let measure = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            vec![("gpu_power_watts", 650.5), ("gpu_memory_bytes", 3e9)]
        };
        let every = Duration::from_millis(1);
        let sampler = Sampler::start("test", every, observer, progress.clone(), measure).unwrap();
        // The sampler measures again only after progress.
        progress.store(7, Ordering::Relaxed);
        let next = || reports.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(next(), ("gpu_power_watts".into(), 7, 650.5));
        assert_eq!(next(), ("gpu_memory_bytes".into(), 7, 3e9));
        progress.store(8, Ordering::Relaxed);
        assert_eq!(next().1, 8);
        let began = Instant::now();
        drop(sampler);
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(measurements.load(Ordering::Relaxed), 2, "the sampler measured without progress");
    }
}
