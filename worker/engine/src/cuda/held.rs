//! What a rank has when another one is lost: its GPU may wait in a collective for ever, and the host is steps ahead of it.
//!
//! Nothing ends that waiting. A collective that is aborted leaves garbage, not only here: NCCL sends it on to ranks that have not been
//! aborted yet, and these would take it for gradients. What is needed is read past what waits, by copies on a stream of its own:
//!
//! 1. The host sets `held` in its own memory: no update begins any more. One thread of the step looks at it, so all of the update's
//!    kernels agree.
//! 2. It waits until `updating` is not set. The step sets it, in the kernel before the one that looks at `held`. So either that one finds
//!    the weights held, or the host finds it updating. An update waits for no other rank, and its end is the step's record.
//! 3. Now the number of recorded steps says which step the weights are of. Running statistics, which the forward pass of the next step
//!    changes, were kept when it began.

use super::{
    CudaEngine, UnderWay,
    device::{Buffer, OwnedStream, Pinned},
    error::CudaError,
    state::Scaling,
};
use crate::{EngineError, StepResult};
use bytemuck::{AnyBitPattern, Zeroable};
use std::{
    mem::{size_of, take},
    sync::atomic::{Ordering, fence},
    time::{Duration, Instant},
};

/// How long the GPU may take for what it waits for nobody for: an update, or the beginning of a step. Agents end ranks some seconds after
/// they have lost another.
const SETTLES_WITHIN: Duration = Duration::from_secs(2);
/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// A way to the GPU's memory past what waits there. Made beforehand: to make it, the driver may wait for the GPU.
pub(super) struct Bypass {
    stream: OwnedStream,
    words: Pinned,
}

impl Bypass {
    /// For up to `bytes` at a time.
    pub(super) fn new(bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { stream: OwnedStream::new(true)?, words: Pinned::new(bytes.max(size_of::<Scaling>()))? })
    }

    /// The first values of a buffer.
    fn read<T: AnyBitPattern + Zeroable + Copy>(
        &mut self,
        from: &Buffer,
        count: usize,
        until: Instant,
    ) -> Result<Vec<T>, CudaError> {
        self.stream.0.download(&mut self.words, from, count * size_of::<T>())?;
        wait(until, "a copy from it", || self.stream.0.is_idle())?;
        Ok((0..count).map(|index| self.words.read(index * size_of::<T>())).collect())
    }
}

/// Waits until `is_so`.
fn wait(
    until: Instant,
    what: &'static str,
    mut is_so: impl FnMut() -> Result<bool, CudaError>,
) -> Result<(), CudaError> {
    while !is_so()? {
        if Instant::now() > until {
            return Err(CudaError::Hung { secs: SETTLES_WITHIN.as_secs_f64(), what });
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

impl CudaEngine {
    /// See [`crate::Engine::undo_unfinished_steps`].
    pub(super) fn settle(&mut self) -> Result<Vec<StepResult>, EngineError> {
        self.device.bind()?;
        let until = Instant::now() + SETTLES_WITHIN;
        self.hold();
        wait(until, "an update", || Ok(!self.is_updating(until)?))?;
        let finished = self.finished(until)?;
        self.settle_statistics(finished, until)?;
        if self.averaged_from.is_some_and(|step| is_after(step, finished)) {
            self.program.state.forget_average();
        }
        let mut results = take(&mut self.unreturned);
        while let Some(step) = self.under_way.front() {
            if matches!(step, UnderWay::OnGpu) && self.program.results.read == finished {
                break;
            }
            results.extend(self.result()?);
        }
        match self.program.results.read == finished {
            true => Ok(results),
            false => Err(CudaError::Unsupported("a step has finished that was not started".into()).into()),
        }
    }

    /// Has no update begin any more.
    pub(super) fn hold(&mut self) {
        self.program.state.held.write(0, &[1u32]);
        // Before anything is read of the GPU: it reads this only after it has said that it may be updating.
        fence(Ordering::SeqCst);
    }

    /// Whether an update may be under way. Once it is not and the weights are held, none will be.
    pub(super) fn is_updating(&mut self, until: Instant) -> Result<bool, CudaError> {
        let scaling: Vec<Scaling> = self.bypass.read(&self.program.state.scaling, 1, until)?;
        Ok(scaling.iter().any(|scaling| scaling.updating != 0))
    }

    /// Steps that the GPU has finished, modulo 2^32.
    fn finished(&mut self, until: Instant) -> Result<u32, CudaError> {
        Ok(self.bypass.read(&self.program.results.counter, 1, until)?[0])
    }

    /// Waits until what the state says of running statistics is of that many steps.
    fn settle_statistics(&mut self, finished: u32, until: Instant) -> Result<(), CudaError> {
        if self.begun == finished {
            let main = self.program.main.0;
            return wait(until, "what it has begun", || main.is_idle());
        }
        // The next step's first kernel comes right behind what is finished, and waits for nobody.
        wait(until, "the beginning of a step", || {
            let kept_of = &self.program.state.kept_of;
            let steps: Vec<u32> = self.bypass.read(kept_of, kept_of.bytes / size_of::<u32>(), until)?;
            Ok(steps.iter().all(|step| *step == finished))
        })?;
        self.program.state.is_unfinished = true;
        Ok(())
    }
}

/// Whether one number of steps is larger than another; both are modulo 2^32, and few apart.
fn is_after(step: u32, other: u32) -> bool {
    step.wrapping_sub(other).cast_signed() > 0
}
