//! Sends micro-batches to the GPU and receives the results of steps.

use super::{ops::GatherMode, *};
use std::{borrow::Cow, time::Instant};

/// How long to wait for the ring to detect an ended rank, after NCCL has reported a failure.
const RING_DETECTION_LIMIT: Duration = Duration::from_secs(1);

impl CudaEngine {
    /// The phase and the control block of a micro-batch. With stages, the caller adds the pass to the phase.
    pub(super) fn micro_batch(&self, part: &StepPart<'_>, gradient_scale: f64, lr: f32) -> (Phase, Control) {
        let StepPart { batch, is_first, is_last, stat_pictures } = *part;
        let control = Control {
            valid: batch.labels.len() as u32,
            stat_pictures: stat_pictures as f32,
            grad_scale: gradient_scale as f32,
            lr,
            mixed: batch.mixed().is_some().into(),
            lambda: batch.lambda,
            ..Control::default()
        };
        let is_full = batch.labels.len() == self.config.batch_size;
        let micro_batch = MicroBatch { is_first, is_last, is_full, pass: None };
        (Phase::Train(micro_batch), control.with_mix(batch.mix_params.as_ref()))
    }

    /// Runs the passes of a step through this rank's stage, in the order of the schedule.
    pub(super) fn run_passes(
        &mut self,
        parts: &[StepPart<'_>],
        gradient_scale: f64,
        lr: f32,
    ) -> Result<(), EngineError> {
        let memory_parts = self.program.micro_batches_in_flight;
        for (number, pass) in StagePass::schedule(self.program.network().stage(), parts.len(), memory_parts) {
            let (mut phase, control) = self.micro_batch(&parts[number], gradient_scale, lr);
            if let Phase::Train(micro_batch) = &mut phase {
                micro_batch.pass = Some(pass);
            }
            if pass.is_backward {
                self.launch(phase, Input::NONE)?;
            } else {
                self.run(phase, control, parts[number].batch)?;
            }
        }
        Ok(())
    }

    /// Sends a micro-batch to the GPU and launches `phase` on it.
    pub(super) fn run(&mut self, phase: Phase, control: Control, batch: &Batch) -> Result<(), EngineError> {
        let (pictures, max_pictures) = (batch.labels.len(), self.config.batch_size);
        if pictures > max_pictures {
            return Err(EngineError::Parameters(format!(
                "a batch has {pictures} pictures, but at most {max_pictures} fit"
            )));
        }
        let has_pixels = self.program.network().stage().0 == 0 && batch.augment_params.len() != pictures;
        let values = has_pixels.then_some(batch.images.len().max(batch.bytes.len()));
        check::check_batch(&self.network, batch, values)?;
        let input = self.send_pictures(phase, batch)?;
        self.wait_on_gpu(|program| program.inputs.has_room())?;
        self.program.inputs.send(control, batch);
        if matches!(phase, Phase::Train(MicroBatch { is_first: true, .. })) {
            self.started_steps = self.started_steps.wrapping_add(1);
        }
        self.launch(phase, input)
    }

    /// Launches `phase` on a micro-batch that was sent before.
    fn launch(&mut self, phase: Phase, input: Input) -> Result<(), EngineError> {
        if let Some(calls) = &mut self.timed_calls {
            calls.extend(self.program.profile(phase, input)?);
            return Ok(());
        }
        let key = GraphKey { image_size: self.network.image_size, phase, input };
        let main = self.program.main_stream.0;
        match self.graphs.get(&key) {
            Some(CapturedGraph::Graph(graph)) => graph.launch(main)?,
            Some(CapturedGraph::RunOnce) => {
                main.begin_capture()?;
                // A capture that has begun must end, also after an error.
                let launched = self.program.run(phase, input);
                let graph = main.end_capture();
                launched?;
                let graph = graph?;
                tracing::debug!("captured {key:?}: {} nodes", graph.nodes);
                graph.launch(main)?;
                self.graphs.insert(key, CapturedGraph::Graph(graph));
            }
            None => {
                self.program.run(phase, input)?;
                self.graphs.insert(key, CapturedGraph::RunOnce);
            }
        }
        Ok(())
    }

    /// Copies the pictures of `batch` to the GPU, unless they are there already, and returns their location.
    pub(super) fn send_pictures(&mut self, phase: Phase, batch: &Batch) -> Result<Input, EngineError> {
        if self.program.network().stage().0 > 0 {
            return Ok(Input::NONE);
        }
        let has_pixels = batch.augment_params.len() != batch.labels.len();
        if let Some(data) = &self.dataset
            && !has_pixels
        {
            let (crop_padding, reflects) = (data.crop_padding as u32, data.reflects);
            let (pictures, mode) = match phase {
                Phase::Evaluate => (data.validation_pictures(), GatherMode::Indexed),
                Phase::Train(_) if batch.mix_params.is_some() => {
                    (data.train_pictures(), GatherMode::Mixed { crop_padding, reflects })
                }
                Phase::Train(_) => (data.train_pictures(), GatherMode::Augmented { crop_padding, reflects }),
            };
            return Ok(Input::Dataset { pictures, height: data.height, width: data.width, mode });
        }
        let format = if batch.bytes.is_empty() { BatchFormat::Normalised } else { BatchFormat::Bytes };
        // A batch without pictures fits into a buffer for either format.
        if self.staging.as_ref().is_none_or(|s| s.format != format && !batch.labels.is_empty()) {
            let values = self.config.batch_size * self.program.max_picture_values();
            self.device.synchronize()?;
            self.graphs.clear();
            self.staging = Some(Staging::new(&self.device, format, values)?);
        }
        if let Some(staging) = self.staging.take() {
            // If the GPU has failed, `send` below reports the error.
            let outcome = self.wait_on_gpu(|_| staging.is_free().unwrap_or(true));
            self.staging = Some(staging);
            outcome?;
        }
        let Some(staging) = &mut self.staging else {
            return Err(
                CudaError::Unsupported("there is no buffer for pictures (a bug in lockstep)".into()).into()
            );
        };
        staging.send(self.program.main_stream.0, batch)?;
        Ok(Input::Staged { at: staging.input.ptr, format: staging.format })
    }

    /// If the host is ahead of the GPU by more than [`MAX_STEPS_AHEAD`] steps: waits for the oldest of them and returns its result.
    pub(super) fn wait_if_too_far_ahead(&mut self) -> Result<Option<StepResult>, EngineError> {
        if self.pending_steps.len() > MAX_STEPS_AHEAD { self.wait_for_oldest_step() } else { Ok(None) }
    }

    /// Waits for the oldest pending step and returns its result; `None` if no step is pending.
    pub(super) fn wait_for_oldest_step(&mut self) -> Result<Option<StepResult>, EngineError> {
        let divisor = match self.pending_steps.front() {
            None => return Ok(None),
            Some(PendingStep::Empty) => {
                self.pending_steps.pop_front();
                return Ok(Some(StepResult::default()));
            }
            Some(PendingStep::OnGpu { divisor }) => *divisor,
        };
        self.wait_on_gpu(|program| program.results.has_next())?;
        let record = self.program.results.take();
        self.pending_steps.pop_front();
        self.done_steps += 1;
        if let Some(watchdog) = &self.watchdog {
            watchdog.record_done(self.done_steps);
        }
        let [begin, backward, reduced, end] = record.stamps;
        let divisor = divisor.map_or(record.samples as f32, |divisor| divisor as f32);
        // While steps directly follow each other, the duration of a step is the time between their ends, which includes waits for the host.
        let step_begin = self.last_end.unwrap_or(begin);
        self.last_end = Some(end);
        Ok(Some(StepResult {
            loss: if record.samples > 0 { record.loss_sum / divisor } else { 0.0 },
            correct: record.correct,
            samples: record.samples,
            grad_norm: record.grad_norm,
            step_secs: end.saturating_sub(step_begin) as f64 / 1e9,
            all_reduce_secs: reduced.saturating_sub(backward) as f64 / 1e9,
            axis_secs: None,
            loss_scale: self.program.dynamic_scale.map(|_| record.loss_scale),
        }))
    }

    /// Collective: where ranks divide the optimizer's state, gets the float32 weights that other ranks have updated.
    pub(super) fn gather_weights(&mut self) -> Result<(), EngineError> {
        if !std::mem::take(&mut self.has_old_weights) {
            return Ok(());
        }
        self.program.gather_weights()?;
        // An error of the GPU also ends this wait, and the next read of the weights reports the error.
        self.wait_on_gpu(|program| program.main_stream.0.is_idle().unwrap_or(true))
    }

    /// Waits until the GPU has done the work that `is_done` checks. While waiting, checks that the other ranks are alive.
    pub(super) fn wait_on_gpu(&mut self, is_done: impl Fn(&Program) -> bool) -> Result<(), EngineError> {
        const OPERATION: &str = "a step on the GPU";
        let is_alone = self.comm.size() == 1;
        let time_limit = if is_alone { Duration::from_secs(600) } else { self.comm.timeout() };
        let (program, comm) = (&self.program, self.comm.as_ref());
        let check_alive = || -> Result<(), EngineError> {
            program.main_stream.0.check_failure()?;
            // On one machine NCCL does not detect a dead rank, but the connection of the ring does, immediately.
            comm.check(OPERATION)?;
            let Some(reducer) = &program.reducer else { return Ok(()) };
            // Between machines NCCL may detect a dead rank first, but only the ring knows which rank it is.
            reducer.check_errors().map_err(|error| ring_error(comm, OPERATION).unwrap_or(error).into())
        };
        wait_until(|| is_done(program), time_limit, check_alive).map_err(|error| {
            self.has_failed = true;
            match self.watchdog.as_ref().and_then(|w| w.stall_reason()) {
                Some(reason) => CommError::Aborted { operation: OPERATION, reason: reason.into() }.into(),
                None => error,
            }
        })
    }
}

/// Waits until `is_done` returns true. While waiting, regularly calls `check_alive`, which fails if the GPU cannot continue. Fails after
/// `time_limit`.
fn wait_until(
    is_done: impl Fn() -> bool,
    time_limit: Duration,
    check_alive: impl Fn() -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let began = Instant::now();
    let mut polls = 0u32;
    while !is_done() {
        polls += 1;
        // Polls during short waits; sleeps during long waits, so that other threads can use the core.
        if polls < 2_000 {
            std::hint::spin_loop();
            continue;
        }
        std::thread::sleep(Duration::from_micros(20));
        if polls.is_multiple_of(256) {
            check_alive()?;
            if began.elapsed() > time_limit {
                return Err(CudaError::Hung { secs: began.elapsed().as_secs_f64(), what: "a step" }.into());
            }
        }
    }
    Ok(())
}

/// After NCCL has detected a failure: the ring's error, which names the rank that has ended. `None` if the ring detects no ended rank
/// within [`RING_DETECTION_LIMIT`].
fn ring_error(comm: &dyn ProcessGroup, operation: &'static str) -> Option<CommError> {
    let deadline = Instant::now() + RING_DETECTION_LIMIT;
    loop {
        match comm.check(operation) {
            Err(error) => return Some(error),
            Ok(()) if Instant::now() > deadline => return None,
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Splits a batch into parts of at most `max_pictures` pictures. Copies nothing if the batch is one part.
pub(super) fn split_batch<'a>(batch: &'a Batch, max_pictures: usize, network: &Network) -> Cow<'a, [Batch]> {
    if batch.labels.len() <= max_pictures {
        return std::slice::from_ref(batch).into();
    }
    let picture_len = network.tensors[network.input()].len();
    let part = |from: usize| {
        let to = (from + max_pictures).min(batch.labels.len());
        // The range of this part in an array of `len` values with `size` values per picture. Batches leave out arrays that they do
        // not need, so `len` may be 0.
        let range = |len: usize, size: usize| if len == 0 { 0..0 } else { from * size..to * size };
        Batch {
            images: batch.images[range(batch.images.len(), picture_len)].to_vec(),
            bytes: batch.bytes[range(batch.bytes.len(), picture_len)].to_vec(),
            augment_params: batch.augment_params[range(batch.augment_params.len(), 1)].to_vec(),
            labels: batch.labels[from..to].to_vec(),
            indices: batch.indices[range(batch.indices.len(), 1)].to_vec(),
            global_samples: to - from,
            ..Batch::default()
        }
    };
    (0..batch.labels.len()).step_by(max_pictures).map(part).collect::<Vec<_>>().into()
}
