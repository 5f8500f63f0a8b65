//! Recovery of a rank's state after another rank is lost. The GPU may then wait in a collective forever, and the host is up to two steps
//! ahead of the GPU.
//!
//! Nothing can end this wait safely, because an aborted collective leaves garbage, and NCCL sends this garbage to ranks that have not been
//! aborted yet, which would use it as gradients. Instead, a separate stream reads the state while the main stream still waits:
//!
//! 1. The host sets `held`, in host memory, which stops further updates. One thread of the step reads `held`, so all kernels of the update
//!    agree.
//! 2. The host waits until `updating` is not set. The step sets `updating` in a kernel, and reads `held` in the next kernel. So either the
//!    step sees `held`, or the host sees `updating`. An update waits for no other rank, and ends with the record of the step.
//! 3. The weights are now those after the last recorded step. Running statistics, which the next step's forward pass changes, were copied
//!    when the next step began.

use super::{
    CudaEngine, PendingStep,
    device::{Buffer, OwnedStream, Pinned},
    error::{CudaError, Result},
    state::Scaler,
};
use crate::{EngineError, StepResult};
use bytemuck::AnyBitPattern;
use std::{
    mem::{size_of, take},
    sync::atomic::{Ordering, fence},
    time::{Duration, Instant},
};

/// Time limit for GPU work that depends on no other rank: an update, or the beginning of a step. Agents end ranks some seconds after
/// another rank is lost.
const RECOVERY_LIMIT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A stream that reads GPU memory while other streams wait. It is created in advance, because its creation may wait for the GPU.
pub(super) struct RecoveryStream {
    stream: OwnedStream,
    staging: Pinned,
}

impl RecoveryStream {
    /// Creates a stream that can read at most `bytes` bytes at a time.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        Ok(Self {
            stream: OwnedStream::with_highest_priority()?,
            staging: Pinned::new(bytes.max(size_of::<Scaler>()))?,
        })
    }

    /// Reads the first `count` values of a buffer.
    fn read<T: AnyBitPattern>(&mut self, from: &Buffer, count: usize, deadline: Instant) -> Result<Vec<T>> {
        self.stream.0.download(&mut self.staging, from, count * size_of::<T>())?;
        wait(deadline, "a copy to the host", || self.stream.0.is_idle())?;
        Ok((0..count).map(|index| self.staging.read(index * size_of::<T>())).collect())
    }
}

/// Waits until `is_done` returns true. Fails after `deadline`; `what` is the awaited work, for the error.
fn wait(deadline: Instant, what: &'static str, mut is_done: impl FnMut() -> Result<bool>) -> Result {
    while !is_done()? {
        if Instant::now() > deadline {
            return Err(CudaError::Hung { secs: RECOVERY_LIMIT.as_secs_f64(), what });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

impl CudaEngine {
    /// See [`crate::Engine::undo_unfinished_steps`].
    pub(super) fn recover_last_step(&mut self) -> Result<Vec<StepResult>, EngineError> {
        self.device.bind()?;
        let deadline = Instant::now() + RECOVERY_LIMIT;
        self.freeze_updates();
        wait(deadline, "an update", || Ok(!self.is_updating(deadline)?))?;
        let finished_steps = self.finished_steps(deadline)?;
        self.recover_statistics(finished_steps, deadline)?;
        // The average's first values may be those of an unfinished step.
        if self.first_average_step.is_some_and(|step| is_after(step, finished_steps)) {
            self.program.state.leak_average();
        }
        // The results of all finished steps. Steps without pictures need no GPU, so they are finished, too.
        let mut results = take(&mut self.unreturned);
        while let Some(step) = self.pending_steps.front() {
            if matches!(step, PendingStep::OnGpu { .. }) && self.program.results.read_count == finished_steps
            {
                break;
            }
            results.extend(self.wait_for_oldest_step()?);
        }
        if self.program.results.read_count != finished_steps {
            return Err(CudaError::Unsupported("the GPU has finished an unknown step".into()).into());
        }
        Ok(results)
    }

    /// Stops all further updates.
    pub(super) fn freeze_updates(&mut self) {
        self.program.state.held.write(0, &[1u32]);
        // Orders this write before later reads of `updating`: the GPU reads `held` only after it has set `updating`.
        fence(Ordering::SeqCst);
    }

    /// Whether an update may be under way. If updates are frozen, this stays false once it is false.
    pub(super) fn is_updating(&mut self, deadline: Instant) -> Result<bool> {
        let scaler: Vec<Scaler> = self.recovery_stream.read(&self.program.state.scaler, 1, deadline)?;
        Ok(scaler.iter().any(|scaler| scaler.updating != 0))
    }

    /// Number of steps that the GPU has finished, modulo 2^32.
    fn finished_steps(&mut self, deadline: Instant) -> Result<u32> {
        Ok(self.recovery_stream.read(&self.program.results.counter, 1, deadline)?[0])
    }

    /// Waits until the state has the running statistics after the last of the `finished_steps`.
    fn recover_statistics(&mut self, finished_steps: u32, deadline: Instant) -> Result {
        if self.started_steps == finished_steps {
            let main = self.program.main_stream.0;
            return wait(deadline, "the started steps", || main.is_idle());
        }
        // The first kernel of the next step copies the statistics. It directly follows the finished work and waits for no other rank.
        wait(deadline, "the beginning of a step", || {
            let kept_steps = &self.program.state.kept_steps;
            let steps: Vec<u32> =
                self.recovery_stream.read(kept_steps, kept_steps.bytes / size_of::<u32>(), deadline)?;
            Ok(steps.iter().all(|step| *step == finished_steps))
        })?;
        self.program.state.is_unfinished = true;
        Ok(())
    }
}

/// Whether the step with number `step` follows the step `other`. Numbers are modulo 2^32, and their distance is less than 2^31.
fn is_after(step: u32, other: u32) -> bool {
    step.wrapping_sub(other).cast_signed() > 0
}
