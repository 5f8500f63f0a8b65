//! Checks before any allocation that a machine has the memory that a run needs. The system overcommits memory, and
//! kills processes when memory runs out.

use super::TrainError;
use crate::planning::gigabytes;
use lockstep_engine::{
    EngineConfig, Needs, Sample,
    net::{self, Network},
};
use lockstep_host::usage::memory_and_swap;
use lockstep_protocol::{numbers::plural, spec::JobSpec};

/// The size in bytes of a float32, the type of weights and of a CPU rank's activations.
const VALUE_BYTES: u64 = 4;

/// Checks that this machine has the memory that `ranks` ranks need to measure the `sample` of a job.
///
/// # Errors
/// The sample's network cannot be built, or the machine has less memory.
pub fn check_sample(spec: &JobSpec, sample: &Sample, needs: Needs, ranks: u32) -> Result<(), TrainError> {
    let Some(available) = memory_and_swap() else { return Ok(()) };
    // A network with the fewest classes, because wide heads are measured only if they fit.
    let network = net::build(&sample.model, sample.image_size, 3, 2).map_err(TrainError::Impossible)?;
    RequiredMemory::of_pictures(&network, sample.pictures as u64, needs, ranks)
        .check(spec, &network, available)
}

/// A lower bound of the memory that the ranks of a machine need. It excludes memory that a run may never need (a
/// larger size of later epochs or of evaluation, batches that the dataset cannot fill), so that no run is refused by
/// mistake.
pub(super) struct RequiredMemory {
    /// The maximum number of pictures of a rank in a micro-batch.
    pictures: u64,
    /// Bytes of each rank.
    rank_bytes: u64,
    /// Bytes that all ranks share.
    shared_bytes: u64,
    ranks: u32,
}

impl RequiredMemory {
    /// The requirement of a network at the smallest size of training pictures, with `samples` pictures over
    /// `world_size` ranks. Buffers of convolutions, and pictures that are prepared ahead, are not counted.
    pub(super) fn of(
        network: &Network,
        config: &EngineConfig,
        needs: Needs,
        ranks: u32,
        (samples, world_size): (u64, u32),
    ) -> Self {
        let rank_samples =
            samples.div_ceil(u64::from(world_size.max(1)).saturating_mul(config.accumulate.max(1) as u64));
        Self::of_pictures(network, (config.batch_size as u64).min(rank_samples), needs, ranks)
    }

    fn of_pictures(network: &Network, pictures: u64, needs: Needs, ranks: u32) -> Self {
        let parameters = (network.parameter_count() as u64).saturating_mul(VALUE_BYTES);
        let rank_bytes = if needs.host_memory {
            // Activations and their gradients. All ranks may share weights and optimizer state.
            pictures
                .saturating_mul(network.kept_values())
                .saturating_mul(VALUE_BYTES)
                .saturating_add(parameters)
        } else {
            // The batch in transit to the GPU, with one byte per value. The engine checks the GPU's memory.
            pictures.saturating_mul(network.tensors[network.input()].len() as u64)
        };
        let shared_bytes = if needs.host_memory { parameters } else { 0 };
        Self { pictures, rank_bytes, shared_bytes, ranks: ranks.max(1) }
    }

    fn machine_bytes(&self) -> u64 {
        self.rank_bytes.saturating_mul(self.ranks.into()).saturating_add(self.shared_bytes)
    }

    /// A warning if the machine has the memory, but other processes use a part of it: only `free` bytes are free.
    pub(super) fn warning(&self, free: u64) -> Option<String> {
        (self.machine_bytes() > free).then(|| {
            format!(
                "warning: {} of this machine need at least {} of memory, and {} are free: the kernel may end processes; use fewer ranks or \
                 a smaller batch",
                plural(self.ranks.into(), "rank"),
                gigabytes(self.machine_bytes() as f64),
                gigabytes(free as f64)
            )
        })
    }

    /// Compares the requirement with the machine's memory, in bytes.
    ///
    /// # Errors
    /// The machine has less memory. The message tells the required and the available memory, and which settings to
    /// lower.
    pub(super) fn check(&self, spec: &JobSpec, network: &Network, available: u64) -> Result<(), TrainError> {
        let machine_bytes = self.machine_bytes();
        if machine_bytes <= available {
            return Ok(());
        }
        let for_ranks = match self.ranks {
            1 => String::new(),
            ranks => format!(", {} for the {ranks} ranks of this machine", gigabytes(machine_bytes as f64)),
        };
        let batch_key = spec.train.batch_key();
        Err(TrainError::Memory(format!(
            "a rank's {} pictures of {side} x {side} pixels take at least {} in {}{for_ranks}, and this machine has {}: lower \
             data.image_size or train.{batch_key}, or split the batch (train.accumulate)",
            self.pictures,
            gigabytes(self.rank_bytes as f64),
            network.arch,
            gigabytes(available as f64),
            side = network.image_size
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_engine::{Optimizer, net::resnet};
    use lockstep_protocol::spec::{Arch, ModelSpec};

    fn config(batch_size: usize) -> EngineConfig {
        EngineConfig::new(batch_size, Optimizer::default())
    }

    #[test]
    fn a_run_may_need_all_memory_but_not_more() {
        let model = ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() };
        let network = resnet::build(&model, 32, 3, 10).unwrap();
        let cpu = Needs { host_memory: true, ..Needs::default() };
        let many = (1_000_000, 2);
        let needed = RequiredMemory::of(&network, &config(64), cpu, 2, many);
        let parameters = 4 * network.parameter_count() as u64;
        assert_eq!(needed.rank_bytes, 64 * 4 * network.kept_values() + parameters);
        let spec = JobSpec::default();
        let check = |needed: &RequiredMemory, available: u64| needed.check(&spec, &network, available);
        // Weights are counted once.
        let all = 2 * needed.rank_bytes + parameters;
        assert!(check(&needed, all).is_ok());
        assert_eq!(needed.warning(all), None);
        assert!(needed.warning(all - 1).is_some_and(|words| words.contains("2 ranks of this machine need")));
        let message = check(&needed, all - 1).unwrap_err().to_string();
        for part in [
            "64 pictures of 32 x 32 pixels",
            "resnet20",
            "for the 2 ranks of this machine",
            "train.accumulate",
        ] {
            assert!(message.contains(part), "{part} in {message}");
        }
        // The batch is limited by the number of pictures.
        let few = RequiredMemory::of(&network, &config(64), cpu, 2, (10, 2));
        assert_eq!(few.rank_bytes, 5 * 4 * network.kept_values() + parameters);
        // Nothing overflows.
        let huge = resnet::build(&ModelSpec::default(), 4096, 3, 100_000).unwrap();
        let needed = RequiredMemory::of(&huge, &config(usize::MAX), cpu, u32::MAX, (u64::MAX, 1));
        assert!(needed.check(&spec, &huge, u64::MAX - 1).is_err());
        let gpu = RequiredMemory::of(&network, &config(64), Needs::default(), 1, many);
        assert_eq!((gpu.rank_bytes, gpu.shared_bytes), (64 * 3 * 32 * 32, 0));
    }
}
