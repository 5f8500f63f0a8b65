//! Metrics of a rank's GPU, reported once a second while training moves on.

use super::libraries::{Libraries, Library};
use crate::report::{self, Observer};
use nvml_wrapper::{
    Nvml,
    enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TemperatureSensor},
    error::NvmlError,
};
use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

const EVERY: Duration = Duration::from_secs(1);

/// What NVML reports of a GPU; a virtual one reports only some of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Part of the last moment in which something ran on it, 0 to 1.
    pub utilization: Option<f32>,
    /// Taken by anybody.
    pub memory_bytes: u64,
    pub power_watts: Option<f32>,
    pub temperature_celsius: Option<f32>,
}

/// Asks NVML about GPUs. It opens no context, so no GPU memory is taken.
#[derive(Debug)]
pub(crate) struct Reader(Nvml);

impl Reader {
    /// # Errors
    /// NVML is not there; a sentence.
    pub(crate) fn open() -> Result<Self, String> {
        let libraries = Libraries::find();
        let path = libraries.get(Library::Nvml).map(|nvml| nvml.path.clone());
        let path = path.ok_or("no GPU metrics: NVML (libnvidia-ml.so.1) is not there")?;
        let nvml = Nvml::builder().lib_path(path.as_os_str()).init();
        nvml.map(Self).map_err(|e| format!("no GPU metrics: NVML: {e}"))
    }

    /// # Errors
    /// NVML's own: it does not know the GPU, or the GPU does not answer.
    pub(crate) fn sample(&self, uuid: &str) -> Result<Sample, NvmlError> {
        sample(&self.0, uuid)
    }

    /// Whether two GPUs are joined by NVLink, directly or through switches, as far as NVML says.
    pub(crate) fn are_joined(&self, one: &str, other: &str) -> bool {
        let (Ok(one), Ok(other)) = (self.0.device_by_uuid(one), self.0.device_by_uuid(other)) else {
            return false;
        };
        matches!(one.p2p_status(&other, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok))
    }
}

/// Reports a GPU's metrics until it is dropped.
#[derive(Debug)]
pub struct Sampler {
    _inner: report::Sampler,
}

impl Sampler {
    /// Watches the GPU with this UUID; `progress` counts the completed steps, at which the values are reported.
    ///
    /// Nothing is reported while `progress` stands still: a rank that has hung must look silent to its
    /// agent, and a metric has one value a step.
    ///
    /// # Errors
    /// NVML is not there or does not know the GPU; a sentence. Training does without.
    pub fn start(uuid: &str, observer: Arc<dyn Observer>, progress: Arc<AtomicU64>) -> Result<Self, String> {
        let reader = Reader::open()?;
        reader.sample(uuid).map_err(|e| format!("no GPU metrics: NVML on {uuid}: {e}"))?;
        let uuid = uuid.to_owned();
        let look = move || reader.sample(&uuid).ok();
        Self::with(look, observer, progress, EVERY).map_err(|e| e.to_string())
    }

    fn with(
        look: impl Fn() -> Option<Sample> + Send + 'static,
        observer: Arc<dyn Observer>,
        progress: Arc<AtomicU64>,
        every: Duration,
    ) -> std::io::Result<Self> {
        let measure = move || look().map(metrics).unwrap_or_default();
        let inner = report::Sampler::start("gpu metrics", every, observer, progress, measure)?;
        Ok(Self { _inner: inner })
    }
}

fn metrics(sample: Sample) -> Vec<(&'static str, f32)> {
    let measured = [
        ("gpu_utilization", sample.utilization),
        ("gpu_memory_bytes", Some(sample.memory_bytes as f32)),
        ("gpu_power_watts", sample.power_watts),
        ("gpu_temperature_celsius", sample.temperature_celsius),
    ];
    measured.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn sample(nvml: &Nvml, uuid: &str) -> Result<Sample, NvmlError> {
    let device = nvml.device_by_uuid(uuid)?;
    let or_nothing = |value: Result<f32, NvmlError>| match value {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::NotSupported) => Ok(None),
        Err(error) => Err(error),
    };
    Ok(Sample {
        utilization: or_nothing(device.utilization_rates().map(|u| u.gpu as f32 / 100.0))?,
        memory_bytes: device.memory_info()?.used,
        power_watts: or_nothing(device.power_usage().map(|milliwatts| milliwatts as f32 / 1e3))?,
        temperature_celsius: or_nothing(device.temperature(TemperatureSensor::Gpu).map(|t| t as f32))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::agent::AttemptEvent;
    use std::{
        sync::{Mutex, atomic::Ordering, mpsc},
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
    fn every_metric_is_told_once_a_step_and_none_while_training_stands_still() {
        let (sender, reports) = mpsc::channel();
        let observer = Arc::new(Reports(Mutex::new(sender)));
        let progress = Arc::new(AtomicU64::new(3));
        let looks = Arc::new(AtomicU64::new(0));
        let counted = looks.clone();
        let look = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Some(Sample {
                utilization: Some(0.97),
                memory_bytes: 11 << 30,
                power_watts: Some(650.5),
                temperature_celsius: Some(61.0),
            })
        };
        let sampler = Sampler::with(look, observer, progress.clone(), Duration::from_millis(1)).unwrap();
        // Continues only when the rank does.
        progress.store(7, Ordering::Relaxed);
        let four: Vec<_> = (0..4).map(|_| reports.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
        assert!(four.iter().all(|(_, step, _)| *step == 7), "{four:?}");
        let value = |name: &str| four.iter().find(|(n, ..)| n == name).unwrap().2;
        assert_eq!(value("gpu_power_watts"), 650.5);
        assert_eq!(value("gpu_memory_bytes"), (11u64 << 30) as f32);
        for (name, ..) in &four {
            assert!(lockstep_protocol::metric::NAMES.contains(&name.as_str()), "{name}");
        }
        progress.store(8, Ordering::Relaxed);
        let next = reports.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(next.1, 8);
        let began = Instant::now();
        drop(sampler);
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(looks.load(Ordering::Relaxed), 2, "it was read while nothing moved");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_metrics_are_those_of_a_gpu() {
        let libraries = Libraries::find();
        let gpu = crate::gpu::devices::visible(&libraries).unwrap().remove(0);
        let nvml =
            Nvml::builder().lib_path(libraries.get(Library::Nvml).unwrap().path.as_os_str()).init().unwrap();
        // A context takes some memory, whatever else runs there.
        let _context = cudarc::driver::CudaContext::new(0).unwrap();
        let seen = sample(&nvml, &gpu.uuid).unwrap();
        assert!(seen.memory_bytes > 0 && seen.memory_bytes <= gpu.memory_bytes, "{seen:?}");
        assert!(seen.utilization.is_none_or(|u| (0.0..=1.0).contains(&u)), "{seen:?}");
        assert!(seen.power_watts.is_none_or(|w| (1.0..2000.0).contains(&w)), "{seen:?}");
        assert!(seen.temperature_celsius.is_none_or(|t| (5.0..110.0).contains(&t)), "{seen:?}");
    }
}
