//! Implementation of [`Engine`] for the CUDA engine.

use super::{program::SplitHead, steps::split_batch, *};
use crate::{Distribution, StateDict, Writers, distribution};

impl Engine for CudaEngine {
    fn add_image_sizes(&mut self, training: &[usize], evaluation: &[usize]) -> Result<(), EngineError> {
        self.device.wait_idle()?;
        self.graphs.clear();
        let parts = |sizes: &[usize]| -> Result<Vec<_>, EngineError> {
            let part = |size: &usize| {
                let network = Arc::new(self.network.resized(*size));
                plan::part_of(&network, &self.plan, self.comm.rank())
            };
            sizes.iter().map(part).collect()
        };
        let (training, evaluation) = (parts(training)?, parts(evaluation)?);
        self.program.add_image_sizes(&self.device, &training, &evaluation)
    }

    fn set_image_size(&mut self, image_size: usize) -> Result<(), EngineError> {
        if self.network.image_size != image_size {
            let part = self.program.set_image_size(image_size).ok_or_else(|| unknown_size(image_size))?;
            self.network =
                if self.groups.is_some() { Arc::new(self.network.resized(image_size)) } else { part };
        }
        Ok(())
    }

    fn take_data(&mut self, data: &DataSource) -> Result<BatchFormat, EngineError> {
        self.device.bind()?;
        self.program.set_normalisation(&data.shape.mean, &data.shape.std)?;
        if self.program.network().stage().0 > 0 {
            // Only the first stage needs pictures; later stages need only labels.
            return Ok(BatchFormat::AugmentParams);
        }
        if let Some(resident) = data.resident() {
            self.dataset = GpuDataset::new(&self.device, &resident)?;
            self.program.prepare_scaling(&self.device, resident.height, resident.width)?;
        }
        Ok(if self.dataset.is_some() { BatchFormat::AugmentParams } else { BatchFormat::Bytes })
    }

    fn start_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<Option<StepResult>, EngineError> {
        self.device.bind()?;
        let (height, stages) = (self.plan.mesh.height as u32, self.plan.mesh.stage as u32);
        let ranks_with_different_pictures = self.comm.size() / (height * stages);
        let PreparedStep { parts, gradient_scale } =
            PreparedStep::of(micro_batches, &self.config, ranks_with_different_pictures)?;
        // The `height` ranks that share the rows of their pictures compute the same loss, and gradients are summed over all ranks.
        let gradient_scale = gradient_scale / f64::from(height);
        if parts.is_empty() {
            self.pending_steps.push_back(PendingStep::Empty);
            return self.wait_if_too_far_ahead();
        }
        match stages {
            1 => {
                for part in parts {
                    let (phase, control) = self.micro_batch(&part, gradient_scale, lr);
                    self.run(phase, control, part.batch)?;
                }
            }
            _ => self.run_passes(&parts, gradient_scale, lr)?,
        }
        self.has_old_weights = self.program.state.share.is_some();
        let loss = &self.config.loss;
        let divisor =
            loss.class_weights.is_some().then(|| micro_batches.iter().map(|batch| loss.divisor(batch)).sum());
        self.pending_steps.push_back(PendingStep::OnGpu { divisor });
        self.submitted_steps += 1;
        if let Some(watchdog) = &self.watchdog {
            watchdog.record_submitted(self.submitted_steps);
        }
        self.wait_if_too_far_ahead()
    }

    fn finish_steps(&mut self) -> Result<Vec<StepResult>, EngineError> {
        self.device.bind()?;
        while let Some(result) = self.wait_for_oldest_step()? {
            self.unreturned.push(result);
        }
        self.gather_weights()?;
        self.last_end = None;
        Ok(std::mem::take(&mut self.unreturned))
    }

    fn undo_unfinished_steps(&mut self) -> Option<Vec<StepResult>> {
        if self.groups.is_some() || self.program.state.share.is_some() {
            // This rank has only a part of the network, or of the optimizer's state.
            return None;
        }
        let recovered = self.recover_last_step();
        recovered
            .inspect_err(|error| tracing::warn!("the state on the GPU cannot be recovered: {error}"))
            .ok()
    }

    fn gradients(&self) -> Result<NamedTensors, EngineError> {
        self.device.wait_idle()?;
        self.program.gradients()
    }

    fn time_layers(&mut self) {
        self.timed_calls = Some(Vec::new());
    }

    fn layer_times(&mut self) -> Vec<LayerTime> {
        let mut layers = match self.timed_calls.take() {
            Some(calls) if !calls.is_empty() => self.program.layer_times(&calls),
            _ => Vec::new(),
        };
        // A part of a network has other tensor indices than the whole network, so layers without a name cannot be identified.
        layers.retain(|layer| self.groups.is_none() || layer.name.is_some());
        layers
    }

    fn start_evaluation(&mut self, batch: &Batch) -> Result<(), EngineError> {
        if self.evaluated_pictures == 0 {
            self.device.bind()?;
            self.program.clear_totals()?;
        }
        self.evaluate(batch, |engine, pictures| {
            engine.evaluated_pictures += pictures as u64;
            Ok(())
        })
    }

    fn finish_evaluation(&mut self) -> Result<EvalResult, EngineError> {
        let samples = std::mem::take(&mut self.evaluated_pictures);
        if samples == 0 {
            return Ok(EvalResult::default());
        }
        // An error of the GPU also ends this wait, and the read below reports the error.
        self.wait_on_gpu(|program| program.main_stream.0.is_idle().unwrap_or(true))?;
        let (loss_sum, correct) = self.program.read_totals()?;
        Ok(EvalResult { loss_sum, correct, samples })
    }

    fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError> {
        let mut logits = Vec::new();
        self.evaluate(batch, |engine, pictures| {
            logits.extend(match (&engine.groups, engine.program.head()) {
                (Some(groups), Some(head)) => gather_logits(&engine.program, head, groups, pictures)?,
                _ => engine.program.read_logits(pictures)?,
            });
            Ok(())
        })?;
        Ok(logits)
    }

    fn parameters(&self) -> Result<NamedTensors, EngineError> {
        self.read(State::parameters)
    }

    fn set_parameters(&mut self, values: &dyn TensorSource) -> Result<(), EngineError> {
        check::check(self.program.network(), values)?;
        self.device.wait_idle()?;
        self.program.set_parameters(values)
    }

    fn update_average(&mut self, decay: f64) -> Result<(), EngineError> {
        self.device.bind()?;
        if !self.has_average() {
            self.first_average_step = Some(self.started_steps);
        }
        Ok(self.program.average(&self.device, decay, self.started_steps)?)
    }

    fn has_average(&self) -> bool {
        self.program.state.has_average()
    }

    fn averaged(&self) -> Result<Option<NamedTensors>, EngineError> {
        self.read(State::read_average)
    }

    fn set_averaged(&mut self, values: &NamedTensors) -> Result<(), EngineError> {
        check::check(self.program.network(), values)?;
        self.device.wait_idle()?;
        self.first_average_step = None;
        self.program.state.write_average(&self.device, values)
    }

    fn optimizer_state(&self) -> Result<OptimizerState, EngineError> {
        self.read(State::optimizer_state)
    }

    fn set_optimizer_state(&mut self, new_state: &OptimizerState) -> Result<(), EngineError> {
        let network = self.program.network();
        let shapes = crate::optimizer::state_shapes(&self.config.optimizer, network);
        check::check_shapes(network, &new_state.slots, shapes)?;
        self.device.wait_idle()?;
        self.program.state.set_optimizer_state(new_state)
    }

    fn loss_scaling(&self) -> Result<Option<LossScaling>, EngineError> {
        if self.program.dynamic_scale.is_none() {
            return Ok(None);
        }
        self.read(|state| Ok(Some(state.loss_scaling()?)))
    }

    fn set_loss_scaling(&mut self, scaling: LossScaling) -> Result<(), EngineError> {
        if self.program.dynamic_scale != Some(true) {
            return Ok(());
        }
        self.device.wait_idle()?;
        Ok(self.program.state.set_loss_scaling(scaling)?)
    }

    fn precision(&self) -> Precision {
        match self.program.dtype() {
            DType::F32 => Precision::Fp32,
            DType::F16 => Precision::Fp16,
            DType::Bf16 => Precision::Bf16,
        }
    }

    fn state_dict(&self, writers: &Writers) -> Result<Option<StateDict>, EngineError> {
        let distribution = Distribution::new(&self.network, &self.plan, self.comm.as_ref())?;
        distribution.state_dict(self, writers, &self.config.optimizer, |keep| {
            self.read(|state| state.gather_optimizer_state(self.comm.as_ref(), keep))
        })
    }

    fn first_invalid(&self) -> Result<Option<String>, EngineError> {
        self.device.wait_idle()?;
        if self.program.is_finite()? {
            return Ok(None);
        }
        finite::first_of_engine(self)
    }

    fn checksum(&self) -> Result<[u64; 2], EngineError> {
        self.device.wait_idle()?;
        Ok(self.program.checksum()?)
    }

    fn exchange(&self) -> String {
        let stages = self.plan.later_stages_text(&self.network);
        let saving = self.program.state.memory_saving_text();
        self.program
            .reducer
            .as_ref()
            .map(|reducer| reducer.describe_exchange() + &stages + &saving)
            .unwrap_or_default()
    }

    fn broadcast_parameters(&mut self) -> Result<(), EngineError> {
        self.device.wait_idle()?;
        if let Some(groups) = &self.groups {
            let mut parameters = self.parameters()?;
            distribution::broadcast(
                self.program.network(),
                &mut parameters,
                |values| groups.data.broadcast(values.into()),
                |values| groups.model.broadcast(values.into()),
            )?;
            return self.set_parameters(&parameters);
        }
        let mut flat = self.program.state.read_flat()?;
        self.comm.broadcast((&mut flat).into())?;
        self.program.write_flat(&flat)
    }

    fn broadcast_statistics(&mut self) -> Result<(), EngineError> {
        if self.plan.mesh.stage > 1 || self.program.state.splits_statistics() {
            // Rank 0 has only a part of the statistics.
            return self.broadcast_parameters();
        }
        self.device.wait_idle()?;
        let mut statistics = self.program.state.read_statistics()?;
        self.comm.broadcast((&mut statistics).into())?;
        Ok(self.program.state.write_statistics(&statistics)?)
    }

    fn leak(self: Box<Self>) {
        // Destructors would wait for the GPU, for NCCL and for each buffer; the driver frees everything at once when the
        // process ends. Collectives are not aborted: that would send garbage to ranks that still take part.
        std::mem::forget(self);
    }

    fn memory_bytes(&self) -> u64 {
        if self.device.bind().is_err() {
            return 0;
        }
        self.free_before.saturating_sub(self.device.free_and_total_bytes().0)
    }

    fn device_name(&self) -> String {
        format!("{}, {}", self.device.name, self.program.dtype().name())
    }
}

/// Collective, with a split head: gathers the logits `[pictures, classes]` of this rank's first `pictures` pictures from the ranks of the
/// model group, each of which has some of the classes.
fn gather_logits(
    program: &Program,
    head: &SplitHead,
    groups: &Groups,
    pictures: usize,
) -> Result<Vec<f32>, EngineError> {
    let own_logits = program.read_own_logits(head)?;
    let (own_classes, max_classes) = (head.own_classes().len(), head.max_classes());
    // All ranks contribute rows of equal length.
    let padded = |row: &[f32]| [row, &vec![0.0; max_classes - own_classes]].concat();
    let sent: Vec<f32> = own_logits.chunks_exact(own_classes).flat_map(padded).collect();
    let mut received = vec![0f32; sent.len()];
    groups.model.all_to_all((&sent).into(), (&mut received).into())?;
    let batch = received.len() / (head.ranks * max_classes);
    let row = |picture: usize| {
        let part = |rank: usize| {
            let classes = head.bounds[rank + 1] - head.bounds[rank];
            &received[(rank * batch + picture) * max_classes..][..classes]
        };
        (0..head.ranks).flat_map(part).copied().collect::<Vec<_>>()
    };
    Ok((0..pictures).flat_map(row).collect())
}

impl CudaEngine {
    /// Evaluates a batch in parts. On the last stage, calls `read` after each part with the part's number of pictures.
    fn evaluate(
        &mut self,
        batch: &Batch,
        mut read: impl FnMut(&mut Self, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        self.device.bind()?;
        for part in split_batch(batch, self.config.batch_size, &self.network).iter() {
            let pictures = part.labels.len();
            let control = Control { valid: pictures as u32, ..Control::default() };
            self.run(Phase::Evaluate, control, part)?;
            if self.program.network().is_last_stage() {
                read(self, pictures)?;
            }
        }
        Ok(())
    }

    /// Calls `look` with the state. First waits for all launched work, unless a step will never finish ([`State::is_unfinished`]).
    fn read<T>(&self, look: impl FnOnce(&State) -> Result<T, EngineError>) -> Result<T, EngineError> {
        self.device.bind()?;
        if !self.program.state.is_unfinished {
            self.device.synchronize()?;
        }
        look(&self.program.state)
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        if self.has_failed
            && let Some(reducer) = &self.program.reducer
        {
            reducer.abort("this rank has failed");
        }
        let _ = self.device.wait_idle();
    }
}
