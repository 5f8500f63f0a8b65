//! GPU metrics, as measured by NVML.

use super::libraries::{Libraries, Library};
use lockstep_protocol::agent::GpuSample;
use nvml_wrapper::{
    Nvml,
    enum_wrappers::device::{ComputeMode, P2pCapabilitiesIndex, P2pStatus, TemperatureSensor},
    error::NvmlError,
};

/// The measured values under their names in [`lockstep_protocol::metric::NAMES`].
pub fn metrics(sample: &GpuSample) -> Vec<(&'static str, f32)> {
    let measured = [
        ("gpu_utilization", sample.utilization),
        ("gpu_memory_bytes", Some(sample.memory_used_bytes as f32)),
        ("gpu_power_watts", sample.power_watts),
        ("gpu_temperature_celsius", sample.temperature_celsius),
    ];
    measured.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Reads metrics from NVML. It creates no context, so it takes no GPU memory.
#[derive(Debug)]
pub struct Reader(Nvml);

impl Reader {
    /// Loads NVML.
    ///
    /// # Errors
    /// NVML is missing or fails. The error is a sentence.
    pub fn open() -> Result<Self, String> {
        let libraries = Libraries::find();
        let path = libraries.get(Library::Nvml).map(|nvml| nvml.path.clone());
        let path = path.ok_or("no GPU metrics: NVML (libnvidia-ml.so.1) was not found")?;
        let nvml = Nvml::builder().lib_path(path.as_os_str()).init();
        nvml.map(Self).map_err(|e| format!("no GPU metrics: NVML: {e}"))
    }

    /// Measures the GPU with this UUID, which is the device of `slot`. A virtual GPU reports only some of the values.
    ///
    /// # Errors
    /// The GPU is unknown or does not respond.
    pub fn sample(&self, slot: u32, uuid: &str) -> Result<GpuSample, NvmlError> {
        let device = self.0.device_by_uuid(uuid)?;
        let optional = |value: Result<f32, NvmlError>| match value {
            Ok(value) => Ok(Some(value)),
            Err(NvmlError::NotSupported) => Ok(None),
            Err(error) => Err(error),
        };
        Ok(GpuSample {
            slot,
            utilization: optional(device.utilization_rates().map(|u| u.gpu as f32 / 100.0))?,
            memory_used_bytes: device.memory_info()?.used,
            power_watts: optional(device.power_usage().map(|milliwatts| milliwatts as f32 / 1e3))?,
            temperature_celsius: optional(device.temperature(TemperatureSensor::Gpu).map(|t| t as f32))?,
        })
    }

    /// Whether NVML reports that two GPUs are connected by NVLink, directly or through switches.
    pub fn have_nvlink(&self, one: &str, other: &str) -> bool {
        let (Ok(one), Ok(other)) = (self.0.device_by_uuid(one), self.0.device_by_uuid(other)) else {
            return false;
        };
        matches!(one.p2p_status(&other, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok))
    }

    /// Whether NVML reports that only one process at a time can use a GPU (`nvidia-smi --compute-mode`).
    pub fn is_exclusive(&self, uuid: &str) -> bool {
        let mode = self.0.device_by_uuid(uuid).and_then(|device| device.compute_mode());
        matches!(mode, Ok(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_metrics_have_names_that_servers_know() {
        let sample = GpuSample {
            slot: 0,
            utilization: Some(0.97),
            memory_used_bytes: 11 << 30,
            power_watts: Some(650.5),
            temperature_celsius: None,
        };
        let found = metrics(&sample);
        let values = found.iter().map(|(_, value)| *value);
        assert!(values.eq([0.97, (11u64 << 30) as f32, 650.5]), "{found:?}");
        let names = metrics(&GpuSample { temperature_celsius: Some(61.0), ..sample });
        assert!(names.iter().all(|(name, _)| lockstep_protocol::metric::NAMES.contains(name)), "{names:?}");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_metrics_are_plausible() {
        let gpu = crate::gpu::devices::visible(&Libraries::find()).unwrap().remove(0);
        // A CUDA context takes some memory, even if nothing else runs on the GPU.
        let _context = cudarc::driver::CudaContext::new(0).unwrap();
        let seen = Reader::open().unwrap().sample(0, &gpu.uuid).unwrap();
        assert!((1..=gpu.memory_bytes).contains(&seen.memory_used_bytes), "{seen:?}");
        assert!(seen.utilization.is_none_or(|u| (0.0..=1.0).contains(&u)), "{seen:?}");
        assert!(seen.power_watts.is_none_or(|w| (1.0..2000.0).contains(&w)), "{seen:?}");
        assert!(seen.temperature_celsius.is_none_or(|t| (5.0..110.0).contains(&t)), "{seen:?}");
    }
}
