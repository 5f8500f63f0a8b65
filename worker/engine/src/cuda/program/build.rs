//! Builds a program: step plan, memory and settings.

use super::{
    facts::{SQUARES_BYTES, policies},
    *,
};
use crate::cuda::cudnn::Cudnn;
use lockstep_protocol::spec::LossScale;

/// Initial loss scale of dynamic loss scaling, as in PyTorch's `GradScaler`.
const INITIAL_LOSS_SCALE: f32 = 65_536.0;

impl Program {
    #[allow(clippy::too_many_arguments)] // All inputs of an engine's construction.
    pub(in crate::cuda) fn new(
        device: &Device,
        network: Arc<Network>,
        config: &EngineConfig,
        dtype: DType,
        comm: Arc<dyn ProcessGroup>,
        groups: Option<&Groups>,
        gpu: &DeviceConfig,
        kernels: Kernels,
        cudnn: Cudnn,
    ) -> Result<Self, EngineError> {
        let plan = StepPlan::new(
            network.clone(),
            config.batch_size,
            dtype,
            capabilities(Ops::multiplies_matrices(device.capability, dtype)),
        )?
        .with_loss(&config.loss);
        if plan.splits_operators && plan.sampled_classes().is_some() {
            let text = "loss.sample_share: GPUs sample classes where only the last layer is split. Leave other strategies \
                        ([[parallel.shard]]) out, or set parallel.device = \"cpu\"";
            return Err(CudaError::Unsupported(text.into()).into());
        }
        let share = (gpu.plan.optimizer_sharding && !plan.is_split() && comm.size() > 1)
            .then(|| Share { rank: comm.rank() as usize, ranks: comm.size() as usize });
        let part_count = share.unwrap_or(Share::WHOLE).ranks;
        let layout = Layout::new(&plan, part_count);
        let ops = Ops::new(dtype, device.multiprocessors, device.capability);
        let (first_scale, dynamic_scale) = match (&gpu.loss_scale, dtype) {
            (_, DType::F32 | DType::Bf16) => (1.0, None),
            (LossScale::Static(scale), DType::F16) => (*scale, Some(false)),
            (LossScale::Named(_), DType::F16) => (INITIAL_LOSS_SCALE, Some(true)),
        };
        let running_layouts = RunningLayout::for_network(&network, plan.norms());
        let (norms, norm_bytes) = norm_sites(&plan, &layout, &running_layouts);
        let state = State::new(
            device,
            running_layouts,
            layout.clone(),
            share,
            dtype,
            first_scale,
            config.optimizer,
            ops.statistics_copy_blocks(),
        )?;
        let syncs_norms = config.sync_batch_norm && comm.size() > 1 && !network.frozen_norm;
        let stages = groups.map_or(1, |groups| groups.stage.size() as usize);
        let reducer = match (comm.size(), stages) {
            (1, 1) => None,
            _ => {
                let channels: Vec<usize> = norms.iter().map(NormSite::channels).collect();
                // Leaves out split parameters, whose parts may have different sizes on the ranks.
                let buckets: Vec<usize> = layout.buckets.iter().map(|bucket| bucket.len()).collect();
                let vectors = layout.trained_len - layout.matrix_len - layout.split_vector_len;
                let gradients = format!("{} {buckets:?} {vectors}", dtype.name());
                Some(Reducer::new(
                    device,
                    gpu,
                    comm.as_ref(),
                    groups,
                    plan.splits_operators,
                    &gradients,
                    syncs_norms.then_some(&channels[..]),
                )?)
            }
        };
        let data_ranks = groups.map_or(1, |groups| groups.data.size() as usize);
        let is_unstored = plan.recomputes_head_gradient(config.accumulate > 1, data_ranks)
            || plan.sampled_classes().is_some();
        let unstored_len = if is_unstored { layout.split_matrix_len } else { 0 };
        let matrix_gradients = device.zeros(dtype.size() * (layout.matrix_len - unstored_len))?;
        let parameters = layout.parameters_with_gradients();
        let whole = parameters.iter().map(|parameter| parameter.range.clone()).collect();
        let segments: Vec<u64> = [whole, share.map_or_else(Vec::new, |share| layout.own_segments(share))]
            .iter()
            .flat_map(|ranges| ranges.iter().zip(parameters))
            .flat_map(|(range, parameter)| {
                let is_adapted = config.optimizer.policy_of(parameter.kind).is_adapted && !parameter.is_fixed;
                [range.start as u64, range.len() as u64, u64::from(is_adapted)]
            })
            .collect();
        let count = parameters.len();
        let channels = network.tensors.iter().map(|tensor| tensor.channels).max().unwrap_or(1);
        let mut buffers = HashMap::from([
            (Region::Segments, device.upload(&segments)?),
            (Region::Rates, device.zeros(8 * count)?),
            (Region::ChannelSums, device.zeros(8 * channels)?),
            (Region::Stamps, device.zeros(256)?),
            (Region::Totals, device.zeros(256)?),
            (Region::CheckResult, device.zeros(256)?),
            (Region::Normalisation, device.zeros(4 * 256 * network.channels)?),
            (Region::VectorGradients, device.zeros(4 * (layout.trained_len - layout.matrix_len).max(1))?),
        ]);
        if config.accumulate > 1 {
            buffers.insert(Region::Accumulated, device.zeros(4 * layout.matrix_len)?);
        }
        if config.optimizer.is_muon() {
            buffers.insert(Region::Policies, device.upload(&policies(&layout, &config.optimizer))?);
        }
        if share.is_some() {
            buffers.insert(Region::BucketSquares, device.zeros(8 * layout.reduced_ranges().count())?);
            buffers.insert(Region::SegmentSquares, device.zeros(count * SQUARES_BYTES)?);
        }
        // In the schedule, at most one micro-batch for each stage from this one to the last is between its forward and its backward pass.
        let micro_batches_in_flight = (stages - network.stage().0).min(config.accumulate.max(1));
        let inputs = Inputs::new(device, config.batch_size, micro_batches_in_flight)?;
        let norm_values = device.zeros(norm_bytes.max(4) * micro_batches_in_flight)?;
        buffers.insert(Region::NormValues, norm_values);
        // A split head has separate kernels and does not copy its logits.
        let (padded_classes, logits_bytes) = match &plan.head {
            None => (plan.padded_classes, 4 * config.batch_size * network.classes),
            Some(_) => (0, 4),
        };
        buffers.insert(Region::EvaluatedLogits, device.zeros(logits_bytes)?);
        if plan.is_split() {
            let bytes = (plan.model_ranks + 1) * inputs.control.bytes;
            buffers.insert(Region::GroupControls, device.zeros(bytes)?);
        }
        let scratch = ops.scratch_bytes(config.batch_size as u32, padded_classes as u32, count as u32);
        buffers.insert(Region::Scratch, device.zeros(scratch)?);
        if let Some(weights) = &config.loss.class_weights {
            buffers.insert(Region::ClassWeights, device.upload(&weights[..])?);
        }
        let event_ids = [EventId::SideBegin, EventId::SideEnd, EventId::CollectivesDone]
            .into_iter()
            .chain((0..plan.ops.len()).map(EventId::WeightGradient))
            .chain((0..=layout.buckets.len()).map(EventId::BucketReady));
        let mut program = Self {
            ops,
            kernels,
            buffers,
            tuner: Tuner::new(device, cudnn, gpu.deterministic),
            inputs,
            data_ranks,
            micro_batches_in_flight,
            results: Results::new(device)?,
            scalings: HashMap::new(),
            main_stream: OwnedStream::new()?,
            side_stream: OwnedStream::new()?,
            events: event_ids.map(|id| Ok((id, Event::new()?))).collect::<Result<_, CudaError>>()?,
            dynamic_scale,
            config: config.clone(),
            state,
            reducer,
            matrix_gradients,
            unstored_len,
            norms,
            networks: vec![network],
            plan,
        };
        let trains = true;
        program.tune_convolutions(device, trains)?;
        let bytes = arena_bytes(&program.facts(), trains)?;
        program.allocate(device, bytes)?;
        Ok(program)
    }

    /// Prepares for more image sizes. `training` has this rank's part of the network for each size in training, and `evaluation` for each
    /// size that only evaluations use. No graph may be captured yet, because memory moves.
    pub(in crate::cuda) fn add_image_sizes(
        &mut self,
        device: &Device,
        training: &[Arc<Network>],
        evaluation: &[Arc<Network>],
    ) -> Result<(), EngineError> {
        let current = self.plan.network.clone();
        let is_odd =
            |network: &&Arc<Network>| self.plan.has_folded_input && !network.image_size.is_multiple_of(2);
        if let Some(odd) = training.iter().chain(evaluation).find(is_odd) {
            let odd = odd.image_size;
            let text = format!(
                "the image size {odd} is odd, but in a run with the size {} the GPU reads 2x2 pixels at once. Choose even sizes \
                 (data.image_size, data.validation_size), or set parallel.device = \"cpu\"",
                current.image_size
            );
            return Err(CudaError::Unsupported(text).into());
        }
        // The memory must suffice for the largest size.
        let mut bytes = self.buffer(Region::Arena).bytes / self.micro_batches_in_flight;
        for (networks, trains) in [(training, true), (evaluation, false)] {
            for network in networks {
                check(network)?;
                self.networks.push(network.clone());
                self.plan.set_network(network.clone());
                self.tune_convolutions(device, trains)?;
                bytes = bytes.max(arena_bytes(&self.facts(), trains)?);
            }
        }
        self.plan.set_network(current);
        self.allocate(device, bytes)
    }

    /// Chooses cuDNN's plan for each convolution of the current size, for the forward pass or, if `trains`, for all passes. Before that,
    /// checks that there is memory for the activations, because timing the plans for a large batch takes minutes.
    fn tune_convolutions(&mut self, device: &Device, trains: bool) -> Result<(), EngineError> {
        let bytes = arena_bytes(&self.facts(), trains)?.saturating_mul(self.micro_batches_in_flight);
        // The current arena, if there is one, is freed before a larger one is allocated.
        let current_bytes = self.buffers.get(&Region::Arena).map_or(0, |arena| arena.bytes);
        device.check_free(bytes.saturating_sub(current_bytes))?;
        let mut convolutions = Vec::new();
        for op in &self.plan.ops {
            let Some(convolution) = self.plan.convolution(op) else { continue };
            convolutions.push(Convolution { direction: Direction::Forward, ..convolution });
            if !trains {
                continue;
            }
            // In training, a head that samples multiplies only the sampled classes.
            let is_head = matches!(op, FusedOp::Linear { is_head: true, .. });
            let sampled = self.plan.sampled_convolution().filter(|_| is_head);
            convolutions.extend(sampled);
            let convolution = sampled.unwrap_or(convolution);
            if matches!(op, FusedOp::Conv(Conv { norm_after: Some(_), .. }))
                && self.may_compute_sums(&convolution)
            {
                convolutions.push(Convolution { sums: true, ..convolution });
            }
            convolutions.push(Convolution { direction: Direction::Weight, ..convolution });
            if !reads_pictures(op) {
                convolutions.push(Convolution { direction: Direction::Input, ..convolution });
            }
        }
        Ok(self.tuner.prepare(device, &convolutions)?)
    }

    /// Allocates memory for activations, `bytes` for each micro-batch in flight, and the workspaces of all convolutions.
    fn allocate(&mut self, device: &Device, bytes: usize) -> Result<(), EngineError> {
        let [of_weight_gradients, of_others] = self.tuner.workspace_bytes();
        let of_others = of_others.max(self.ops.bottleneck_bytes());
        self.buffers.insert(Region::Workspace, device.alloc(of_others)?);
        self.buffers.insert(Region::SideWorkspace, device.alloc(of_weight_gradients)?);
        // Frees the old arena first, because both arenas may not fit.
        drop(self.buffers.remove(&Region::Arena));
        let all_bytes = bytes * self.micro_batches_in_flight;
        self.buffers.insert(Region::Arena, device.zeros(all_bytes)?);
        if self.plan.network.stage().0 > 0 {
            let values = |network: &Arc<Network>| network.tensors[network.input()].len();
            let values = self.networks.iter().map(values).max().unwrap_or(0);
            let bytes = self.plan.batch * values * self.plan.dtype.size();
            self.buffers.insert(Region::InputGradient, device.zeros(bytes)?);
        }
        let (main, side) = (of_others >> 20, of_weight_gradients >> 20);
        tracing::debug!("activations take {} MB, workspaces {main} and {side} MB", all_bytes >> 20);
        Ok(())
    }

    /// Whether a convolution may also compute the sums for the following batch norm. It may in float16 and without groups, but not in
    /// deterministic mode, because cuDNN sums in the order in which its blocks end, and not for small activations, whose sums the batch
    /// norm's single kernel computes.
    fn may_compute_sums(&self, convolution: &Convolution) -> bool {
        let shape = ops::Shape {
            pictures: convolution.batch as u32,
            pixels: (convolution.out_h * convolution.out_w) as u32,
            channels: convolution.out_c as u32,
        };
        let waits = self.reducer.as_ref().is_some_and(|r| r.statistics.kernels_wait_for_ranks());
        convolution.groups == 1
            && self.plan.dtype == DType::F16
            && !self.tuner.is_deterministic
            && self.ops.one_launch_geometry(shape, waits).is_none()
    }
}
