//! The training state on the GPU: weights, optimizer state and batch norm's running statistics.

use super::{
    command::{Kernel, Operand, Region, UPDATING},
    device::{Buffer, Device, Pinned, Ptr},
    dtype::DType,
    error::Result,
    layout::Layout,
    ops::Ops,
    planes::{from_planes, to_planes},
    running_statistics::RunningLayout,
};
use crate::{
    EngineError, LossScaling, Optimizer, OptimizerState,
    sharding::{Share, saving_in_words},
};
use bytemuck::{Pod, Zeroable};
use lockstep_comm::ProcessGroup;
use lockstep_host::tensors::{HostTensor, NamedTensors, TensorSource};
use std::{mem::offset_of, ops::Range};

/// Loss scaling, and the state of the latest step's gradients and update. The same layout as `Scaler` in `optimizer.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Scaler {
    /// Loss scale of the next step.
    pub(super) scale: f32,
    /// Number of consecutive finite steps since the scale changed.
    pub(super) good_steps: u32,
    /// Whether the latest step's gradients are finite.
    pub(super) finite: u32,
    /// L2 norm of the latest step's gradients, without the loss scale.
    pub(super) norm: f32,
    /// 1 / the loss scale of the latest step's gradients.
    pub(super) inverse: f32,
    /// Whether the latest step's update is applied.
    pub(super) apply: u32,
    pub(super) updates: u32,
    /// Whether the latest step's update was refused because [`State::held`] was set.
    pub(super) refused: u32,
    pub(super) updating: u32,
    pub(super) pad: u32,
    /// Device address of [`State::held`].
    pub(super) held: Ptr,
}

const _: () = assert!(UPDATING.offset == offset_of!(Scaler, updating));
const _: () = assert!(offset_of!(Scaler, held) == 40 && size_of::<Scaler>() == 48);

/// A value that is never a number of finished steps.
const NO_STEP: u32 = u32::MAX;

pub(super) struct State {
    pub(super) layout: Layout,
    /// Number of weights that are stored in two planes of 16 bits (`planes.rs`). They come first.
    planar_len: usize,
    /// Float32, [`Layout::len`] values.
    pub(super) weights: Buffer,
    optimizer: Optimizer,
    /// The optimizer's slots, each as long as the weights. If ranks divide the optimizer's state, a slot has only this rank's part of each
    /// of [`Layout::reduced_ranges`], one part after another.
    pub(super) optimizer_slots: Vec<Buffer>,
    /// This rank among the ranks that divide the optimizer's state. `None` if each rank has the whole state.
    pub(super) share: Option<Share>,
    /// The matrices in the format of the computation, except those in planes. `None` with float32, where the weights themselves are used.
    low_precision: Option<Buffer>,
    /// Running mean and variance of every batch norm.
    running_values: Buffer,
    /// A copy of `running_values` from before the current step.
    kept_values: Buffer,
    /// For each block of the kernel that copies `kept_values`: the number of finished steps at the time of the copy.
    pub(super) kept_steps: Buffer,
    /// Whether a started step will never finish. Then the running statistics that belong to the weights are in `kept_values`, not in
    /// `running_values`.
    pub(super) is_unfinished: bool,
    running_layouts: Vec<RunningLayout>,
    pub(super) scaler: Buffer,
    /// A `u32` that stops all further updates if set. It is in host memory, because no copy to the GPU completes while a collective waits
    /// for another machine (seen with NCCL 2.28 over sockets and driver 580). Copies from the GPU do complete.
    pub(super) held: Pinned,
    /// Moving averages of the weights and of the running statistics; `None` before the first average.
    average: Option<[Buffer; 2]>,
}

impl State {
    #[allow(clippy::too_many_arguments)] // All inputs of the state's construction.
    pub(super) fn new(
        device: &Device,
        running_layouts: Vec<RunningLayout>,
        layout: Layout,
        share: Option<Share>,
        dtype: DType,
        first_scale: f32,
        optimizer: Optimizer,
        statistics_copy_blocks: u32,
    ) -> Result<Self> {
        let slot_len = match share {
            None => layout.len,
            Some(share) => layout.own_ranges(share).map(|own| own.len()).sum(),
        };
        let planar_len = if dtype == DType::Bf16 { layout.split_matrix_len } else { 0 };
        let low_precision = match dtype {
            DType::F32 => None,
            _ => Some(device.zeros((layout.matrix_len - planar_len) * dtype.size())?),
        };
        let held = Pinned::new(size_of::<u32>())?;
        let scaler = Scaler { scale: first_scale, held: held.device, ..Zeroable::zeroed() };
        Ok(Self {
            weights: device.zeros(4 * layout.len)?,
            optimizer,
            optimizer_slots: optimizer
                .slots()
                .iter()
                .map(|_| device.zeros(4 * slot_len))
                .collect::<Result<_, _>>()?,
            share,
            low_precision,
            running_values: device.zeros(4 * RunningLayout::total_len(&running_layouts).max(1))?,
            kept_values: device.zeros(4 * RunningLayout::total_len(&running_layouts).max(1))?,
            kept_steps: device.upload(&vec![NO_STEP; statistics_copy_blocks as usize])?,
            is_unfinished: false,
            running_layouts,
            scaler: device.upload(&[scaler])?,
            held,
            average: None,
            planar_len,
            layout,
        })
    }

    /// Address of a region of the training state, if it exists.
    pub(super) fn address(&self, region: Region) -> Option<Ptr> {
        let average = |index: usize| self.average.as_ref().map(|both| &both[index]);
        let buffer = match region {
            Region::Weights => Some(&self.weights),
            Region::LowPrecision => {
                // Offsets in this region count from the first matrix, but the buffer begins after the weights in planes.
                let absent_bytes = 2 * self.planar_len as u64;
                return self.low_precision.as_ref().map(|buffer| buffer.ptr.wrapping_sub(absent_bytes));
            }
            Region::OptimizerSlot(slot) => self.optimizer_slots.get(slot),
            Region::RunningStatistics => Some(&self.running_values),
            Region::KeptStatistics => Some(&self.kept_values),
            Region::KeptSteps => Some(&self.kept_steps),
            Region::AverageWeights => average(0),
            Region::AverageStatistics => average(1),
            Region::Scaler => Some(&self.scaler),
            _ => None,
        };
        buffer.map(|buffer| buffer.ptr)
    }

    /// Weights, biases and running statistics.
    pub(super) fn parameters(&self) -> Result<NamedTensors, EngineError> {
        let running = if self.is_unfinished { &self.kept_values } else { &self.running_values };
        self.read_tensors(&self.read_weights()?, running)
    }

    fn read_weights(&self) -> Result<Vec<f32>> {
        let mut weights = vec![0f32; self.layout.len];
        let (planar, others) = weights.split_at_mut(self.planar_len);
        let piece_len = self.layout.piece_len();
        let mut both_planes = vec![0u16; if planar.is_empty() { 0 } else { 2 * piece_len }];
        for (number, piece) in planar.chunks_mut(piece_len).enumerate() {
            let (nearest, differences) = both_planes[..2 * piece.len()].split_at_mut(piece.len());
            self.weights.read(2 * number * piece_len, nearest)?;
            self.weights.read(2 * (self.planar_len + number * piece_len), differences)?;
            from_planes(nearest, differences, piece);
        }
        self.weights.read(4 * self.planar_len, others)?;
        Ok(weights)
    }

    /// Writes `weights` to the values from index `at` on. These values must be either all in planes or all outside planes. `staging` is
    /// used only for planes.
    fn write_weights(&self, staging: &mut Pinned, at: usize, weights: &[f32]) -> Result {
        if at >= self.planar_len {
            return self.weights.write_at(4 * at, weights);
        }
        let both_planes: &mut [u16] = staging.values();
        let piece_len = both_planes.len() / 2;
        for (number, piece) in weights.chunks(piece_len).enumerate() {
            let at = at + number * piece_len;
            let (nearest, differences) = both_planes[..2 * piece.len()].split_at_mut(piece.len());
            to_planes(piece, nearest, differences);
            self.weights.write_at(2 * at, nearest)?;
            self.weights.write_at(2 * (self.planar_len + at), differences)?;
        }
        Ok(())
    }

    /// Page-locked memory for a piece of the weights, from which the GPU copies several times as fast as from other memory.
    fn staging(&self) -> Result<Pinned> {
        Pinned::new(4 * self.layout.piece_len())
    }

    fn read_tensors(&self, weights: &[f32], running: &Buffer) -> Result<NamedTensors, EngineError> {
        let mut all = NamedTensors::new();
        self.layout.export(None, weights, &mut all);
        let running_values = read_floats(running)?;
        for (name, range) in self.running_layouts.iter().flat_map(RunningLayout::tensors) {
            let values = running_values[range].to_vec();
            all.insert(name, HostTensor { shape: vec![values.len()], values });
        }
        Ok(all)
    }

    /// Replaces the parameters; `values` must have been checked (`check.rs`). Returns the kernel that updates the low-precision copy, if
    /// there is a copy; the caller must launch it.
    pub(super) fn set_parameters(
        &mut self,
        ops: &Ops,
        values: &dyn TensorSource,
    ) -> Result<Option<Kernel>, EngineError> {
        let (mut piece_buffer, mut plane_staging) = (self.staging()?, self.staging()?);
        let write = |at: usize, piece: &[f32]| self.write_weights(&mut plane_staging, at, piece);
        self.layout.import(None, values, piece_buffer.values(), write)?;
        self.running_values.write(&self.statistics_of(values))?;
        Ok(self.convert_kernel(ops))
    }

    /// The running statistics of `values`, in the order of the GPU's buffer.
    fn statistics_of(&self, values: &dyn TensorSource) -> Vec<f32> {
        let mut statistics = vec![0f32; self.running_values.bytes / 4];
        for (name, range) in self.running_layouts.iter().flat_map(RunningLayout::tensors) {
            values.read(&name, 0, &mut statistics[range]);
        }
        statistics
    }

    /// The kernels that update the average after step `step`, the newest started step; see [`crate::Engine::average`]. If the step's update
    /// was refused, the GPU has not finished the step, and the kernels do nothing.
    pub(super) fn average_kernels(
        &mut self,
        device: &Device,
        ops: &Ops,
        decay: f64,
        step: u32,
    ) -> Result<Vec<Kernel>> {
        let is_first = self.average.is_none();
        if is_first {
            self.allocate_average(device)?;
        }
        let decay = if is_first { 0.0 } else { decay };
        let planar_bytes = 4 * self.planar_len;
        let averaged = [
            (Region::AverageWeights, Region::Weights, planar_bytes..self.weights.bytes),
            (Region::AverageStatistics, Region::RunningStatistics, 0..self.running_values.bytes),
        ];
        let mut kernels = Vec::from(averaged.map(|(average, values, bytes)| {
            let operand = |region| Operand::new(region, bytes.start, bytes.len());
            ops.average(operand(average), operand(values), bytes.len() as u64 / 4, decay, step)
        }));
        if planar_bytes > 0 {
            let [nearest, differences] = self.layout.planes(0..self.planar_len);
            let average = Operand::new(Region::AverageWeights, 0, planar_bytes);
            let length = self.planar_len as u64;
            kernels.push(ops.average_planes(average, [differences, nearest], length, decay, step));
        }
        Ok(kernels)
    }

    fn allocate_average(&mut self, device: &Device) -> Result {
        let [weights, running] =
            [&self.weights, &self.running_values].map(|buffer| device.zeros(buffer.bytes));
        self.average = Some([weights?, running?]);
        // Another stream will use the zeros.
        device.synchronize()
    }

    /// Discards an average that was created after a step that will never finish. Its memory is leaked, because freeing it would wait for
    /// the GPU.
    pub(super) fn leak_average(&mut self) {
        std::mem::forget(self.average.take());
    }

    pub(super) fn has_average(&self) -> bool {
        self.average.is_some()
    }

    pub(super) fn read_average(&self) -> Result<Option<NamedTensors>, EngineError> {
        let read_tensors =
            |[weights, running]: &[Buffer; 2]| self.read_tensors(&read_floats(weights)?, running);
        self.average.as_ref().map(read_tensors).transpose()
    }

    /// Replaces the average; `values` must have been checked (`check.rs`).
    pub(super) fn write_average(
        &mut self,
        device: &Device,
        values: &NamedTensors,
    ) -> Result<(), EngineError> {
        if self.average.is_none() {
            self.allocate_average(device)?;
        }
        if let Some([weights, running]) = &self.average {
            let mut piece_buffer = self.staging()?;
            self.layout
                .import(None, values, piece_buffer.values(), |at, piece| weights.write_at(4 * at, piece))?;
            running.write(&self.statistics_of(values))?;
        }
        Ok(())
    }

    /// The weights, then the running statistics, as one array.
    pub(super) fn read_flat(&self) -> Result<Vec<f32>, EngineError> {
        let mut flat = self.read_weights()?;
        flat.extend(self.read_statistics()?);
        Ok(flat)
    }

    /// Whether a model group splits a batch norm's channels.
    pub(super) fn splits_statistics(&self) -> bool {
        self.running_layouts.iter().any(|norm| norm.is_split)
    }

    pub(super) fn read_statistics(&self) -> Result<Vec<f32>> {
        read_floats(&self.running_values)
    }

    pub(super) fn write_statistics(&self, statistics: &[f32]) -> Result {
        self.running_values.write(statistics)
    }

    /// Replaces weights and running statistics. Returns a kernel like [`State::set_parameters`].
    pub(super) fn write_flat(&mut self, ops: &Ops, flat: &[f32]) -> Result<Option<Kernel>, EngineError> {
        let (weights, statistics) = flat.split_at(self.layout.len);
        let (planar, others) = weights.split_at(self.planar_len);
        let mut plane_staging = self.staging()?;
        self.write_weights(&mut plane_staging, 0, planar)?;
        self.write_weights(&mut plane_staging, self.planar_len, others)?;
        self.running_values.write(statistics)?;
        Ok(self.convert_kernel(ops))
    }

    /// A kernel that converts the matrices, except those in planes, to `low_precision`. `None` with float32.
    fn convert_kernel(&self, ops: &Ops) -> Option<Kernel> {
        let copied = self.planar_len..self.layout.matrix_len;
        let [weights, low_precision] = [(Region::Weights, 4), (Region::LowPrecision, 2)]
            .map(|(region, size)| Operand::new(region, size * copied.start, size * copied.len()));
        let length = copied.len() as u64;
        self.low_precision.is_some().then(|| ops.convert_to_low_precision(weights, low_precision, length))
    }

    pub(super) fn loss_scaling(&self) -> Result<LossScaling> {
        let scaler = self.read_scaler()?;
        Ok(LossScaling { scale: scaler.scale, growth_tracker: scaler.good_steps })
    }

    pub(super) fn set_loss_scaling(&mut self, scaling: LossScaling) -> Result {
        let scaler = self.read_scaler()?;
        self.scaler.write(&[Scaler { scale: scaling.scale, good_steps: scaling.growth_tracker, ..scaler }])
    }

    pub(super) fn read_scaler(&self) -> Result<Scaler> {
        let mut scaler: [Scaler; 1] = Zeroable::zeroed();
        self.scaler.read(0, &mut scaler)?;
        Ok(scaler[0])
    }

    /// Kernels that check whether all weights, biases, running statistics, optimizer slots and the average are finite. They set
    /// [`Region::CheckResult`] to 1 if a value is not finite.
    pub(super) fn finite_check_kernels(&self, ops: &Ops) -> Vec<Kernel> {
        let slots = self.optimizer_slots.iter().enumerate();
        let average = self.average.iter().flatten();
        let found = Operand::new(Region::CheckResult, 0, 4);
        let planes = (self.planar_len > 0).then(|| {
            // The first plane is enough: the nearest bfloat16 of a weight that is not finite is not finite either.
            let [nearest, _] = self.layout.planes(0..self.planar_len);
            ops.find_not_finite_nearest(nearest, self.planar_len as u64, found)
        });
        [(Region::Weights, &self.weights), (Region::RunningStatistics, &self.running_values)]
            .into_iter()
            .chain(slots.map(|(slot, buffer)| (Region::OptimizerSlot(slot), buffer)))
            .chain([Region::AverageWeights, Region::AverageStatistics].into_iter().zip(average))
            .map(|(region, buffer)| {
                let from = if region == Region::Weights { 4 * self.planar_len } else { 0 };
                let values = Operand::new(region, from, buffer.bytes - from);
                ops.find_not_finite(values, values.bytes as u64 / 4, found)
            })
            .chain(planes)
            .collect()
    }

    /// A kernel that adds a checksum of a range of the weights to [`Region::CheckResult`].
    pub(super) fn checksum_kernel(&self, ops: &Ops, values: Range<usize>) -> Kernel {
        let weights = Operand::new(Region::Weights, 4 * values.start, 4 * values.len());
        ops.add_checksum(weights, values.len() as u64, Operand::new(Region::CheckResult, 0, 8))
    }

    /// A phrase for the log that says how much memory the sharding of the optimizer's state saves. Empty without sharding.
    pub(super) fn memory_saving_text(&self) -> String {
        let own: usize = self.optimizer_slots.iter().map(|slot| slot.bytes).sum();
        self.share.map_or_else(String::new, |share| format!("; {}", saving_in_words(own, own * share.ranks)))
    }

    /// The optimizer's state. If ranks divide it, the other ranks' parts are zeros.
    pub(super) fn optimizer_state(&self) -> Result<OptimizerState, EngineError> {
        let mut slots = NamedTensors::new();
        for (&name, buffer) in self.optimizer.slots().iter().zip(&self.optimizer_slots) {
            let mut flat = read_floats(buffer)?;
            if let Some(share) = self.share {
                let own = std::mem::replace(&mut flat, vec![0.0; self.layout.len]);
                let mut rest = &own[..];
                for range in self.layout.own_ranges(share) {
                    let (part, others) = rest.split_at(range.len());
                    flat[range].copy_from_slice(part);
                    rest = others;
                }
            }
            self.layout.export(Some(name), &flat, &mut slots);
        }
        Ok(OptimizerState { slots, updates: self.read_scaler()?.updates.into() })
    }

    /// The whole optimizer state; `None` on ranks without `keep`. Collective if ranks divide the optimizer's state.
    pub(super) fn gather_optimizer_state(
        &self,
        comm: &dyn ProcessGroup,
        keep: bool,
    ) -> Result<Option<OptimizerState>, EngineError> {
        let Some(share) = self.share else { return keep.then(|| self.optimizer_state()).transpose() };
        let mut slots = NamedTensors::new();
        for (&name, buffer) in self.optimizer.slots().iter().zip(&self.optimizer_slots) {
            let own = read_floats(buffer)?;
            let (mut rest, mut flat) = (&own[..], Vec::new());
            for range in self.layout.own_ranges(share) {
                let (part, others) = rest.split_at(range.len());
                let mut all = vec![0.0; part.len() * share.ranks];
                comm.all_gather(part.into(), (&mut all).into())?;
                if keep {
                    flat.extend(all);
                }
                rest = others;
            }
            if keep {
                // Parameters that are not trained have no state.
                flat.resize(self.layout.len, 0.0);
                self.layout.export(Some(name), &flat, &mut slots);
            }
        }
        Ok(keep.then_some(OptimizerState { slots, updates: self.read_scaler()?.updates.into() }))
    }

    /// Replaces the optimizer's state by `new_state`, which must have all slots of all parameters.
    pub(super) fn set_optimizer_state(&mut self, new_state: &OptimizerState) -> Result<(), EngineError> {
        let mut piece_buffer = self.staging()?;
        for (&name, buffer) in self.optimizer.slots().iter().zip(&self.optimizer_slots) {
            let Some(share) = self.share else {
                let write = |at: usize, piece: &[f32]| buffer.write_at(4 * at, piece);
                self.layout.import(Some(name), &new_state.slots, piece_buffer.values(), write)?;
                continue;
            };
            let flat = self.layout.flatten(Some(name), &new_state.slots)?;
            let own: Vec<f32> = self.layout.own_ranges(share).flat_map(|own| flat[own].to_vec()).collect();
            buffer.write(&own)?;
        }
        // No run has more than `u32::MAX` updates, and Adam's bias corrections are 1 long before that number.
        let updates = u32::try_from(new_state.updates).unwrap_or(u32::MAX);
        let scaler = self.read_scaler()?;
        Ok(self.scaler.write(&[Scaler { updates, ..scaler }])?)
    }
}

/// Copies all float32 values of a buffer to the host.
fn read_floats(buffer: &Buffer) -> Result<Vec<f32>> {
    let mut values = vec![0f32; buffer.bytes / 4];
    buffer.read(0, &mut values)?;
    Ok(values)
}
