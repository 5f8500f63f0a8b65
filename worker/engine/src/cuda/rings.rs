//! Ring buffers in page-locked memory, through which the host sends control blocks to the GPU and receives results without driver calls.

use super::{
    command::{Operand, Region},
    device::{Buffer, Device, Pinned},
    error::Result,
};
use bytemuck::{Pod, Zeroable};
use lockstep_data::loader::{Batch, MixParams};
use std::ops::Range;

/// Number of control blocks in the ring: maximum number of micro-batches that the host has sent and the GPU has not read yet.
pub(super) const SLOTS: usize = 64;
/// `Totals` in `loss.cu`: loss, number of correct predictions, number of pictures.
pub(super) const TOTALS: Operand = Operand::new(Region::Totals, 0, 24);
/// Number of results in the ring: maximum number of results that the host has not read yet.
pub(super) const RESULTS: usize = 64;
// Counts wrap at 2^32, and a count selects the slot, so the number of slots must divide 2^32.
const _: () = assert!(SLOTS.is_power_of_two() && RESULTS.is_power_of_two());

/// A micro-batch's inputs; `Control` in `numbers.cu`. In memory, four arrays over the pictures follow: index in
/// the dataset, augmentation parameters, label, and label of the picture that is mixed in.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Control {
    /// Number of real pictures. The remaining pictures of the batch are padding.
    pub(super) valid: u32,
    /// 1 if mixup or cutmix applies, otherwise 0.
    pub(super) mixed: u32,
    /// Number of pictures in batch norm's statistics.
    pub(super) stat_pictures: f32,
    /// Factor of each picture's loss gradient.
    pub(super) grad_scale: f32,
    /// Learning rate.
    pub(super) lr: f32,
    /// Share of the batch's picture in a mixed picture, 0 to 1. The picture that is mixed in has the rest.
    pub(super) lambda: f32,
    /// If the GPU mixes pictures: index and augmentation parameters of the picture that is mixed into the first picture. Each
    /// other picture is mixed with its predecessor.
    pub(super) previous: [u32; 2],
    /// With cutmix: first row of the other picture's rectangle, and the row after its last. Zeros with mixup.
    pub(super) cut_rows: [u32; 2],
    /// The same for columns.
    pub(super) cut_columns: [u32; 2],
}

impl Control {
    /// Adds the values with which the GPU mixes pictures of the dataset.
    pub(super) fn with_mix(self, params: Option<&MixParams>) -> Self {
        let Some(MixParams { mix, previous_index, previous_params }) = params else { return self };
        let ends = |range: &Range<usize>| [range.start as u32, range.end as u32];
        let [cut_rows, cut_columns] =
            mix.cut.as_ref().map_or_else(Default::default, |cut| cut.each_ref().map(ends));
        Self { previous: [*previous_index as u32, *previous_params], cut_rows, cut_columns, ..self }
    }
}

/// Number of `u32` words of a [`Control`].
const CONTROL_WORDS: usize = size_of::<Control>() / 4;

/// Results of a step; `Result` in `step.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Record {
    /// The step's number, from 1; written last.
    pub(super) sequence: u32,
    /// Sum of the losses of this rank's pictures.
    pub(super) loss_sum: f32,
    pub(super) correct: u32,
    /// Number of this rank's pictures.
    pub(super) samples: u32,
    /// L2 norm of the gradient.
    pub(super) grad_norm: f32,
    pub(super) loss_scale: f32,
    /// 1 if the gradient was finite. With fp16, a step whose gradient is not finite is skipped.
    pub(super) finite: u32,
    pub(super) pad: u32,
    /// GPU clock in nanoseconds at: begin, end of backward, end of the reduction of gradients, end.
    pub(super) stamps: [u64; 4],
}

/// The ring of control blocks.
pub(super) struct Inputs {
    pub(super) ring: Pinned,
    /// On the GPU: the control block of each micro-batch in flight.
    pub(super) control: Buffer,
    /// Number of control blocks that the GPU has read.
    pub(super) counter: Buffer,
    /// The same number in host memory, written by the GPU.
    pub(super) host_counter: Pinned,
    /// Maximum number of pictures of a micro-batch.
    batch: usize,
    /// Number of micro-batches sent so far, modulo 2^32 like the GPU's count.
    sent_count: u32,
}

impl Inputs {
    pub(super) fn new(device: &Device, batch: usize, micro_batches_in_flight: usize) -> Result<Self> {
        let bytes = 4 * Self::control_words(batch);
        Ok(Self {
            ring: Pinned::new(SLOTS * bytes)?,
            control: device.zeros(bytes * micro_batches_in_flight)?,
            counter: device.zeros(256)?,
            host_counter: Pinned::new(256)?,
            batch,
            sent_count: 0,
        })
    }

    /// Number of `u32` words of a control block with its arrays, for at most `batch` pictures.
    pub(super) fn control_words(batch: usize) -> usize {
        (CONTROL_WORDS + 4 * batch).next_multiple_of(64)
    }

    /// Whether the GPU has read the previous content of the next slot.
    pub(super) fn has_room(&self) -> bool {
        self.sent_count.wrapping_sub(self.host_counter.load(0)) < SLOTS as u32
    }

    /// Writes a micro-batch to the next slot, which must be free ([`Inputs::has_room`]).
    pub(super) fn send(&mut self, control: Control, batch: &Batch) {
        let mut words = vec![0u32; Self::control_words(self.batch)];
        words[..CONTROL_WORDS].copy_from_slice(bytemuck::cast_slice(&[control]));
        let mut lists = words[CONTROL_WORDS..].chunks_exact_mut(self.batch);
        let mut next_list = || lists.next().into_iter().flatten();
        next_list().zip(&batch.indices).for_each(|(w, v)| *w = *v as u32);
        next_list().zip(&batch.augment_params).for_each(|(w, v)| *w = *v);
        next_list().zip(&batch.labels).for_each(|(w, v)| *w = *v);
        next_list().zip(&batch.mixed_labels).for_each(|(w, v)| *w = *v);
        self.ring.write(self.sent_count as usize % SLOTS * words.len() * 4, &words);
        self.sent_count = self.sent_count.wrapping_add(1);
    }
}

/// The ring of results.
pub(super) struct Results {
    pub(super) ring: Pinned,
    /// On the GPU: number of results so far.
    pub(super) counter: Buffer,
    /// Number of results that the host has read, modulo 2^32.
    pub(super) read_count: u32,
}

impl Results {
    pub(super) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            ring: Pinned::new(RESULTS * size_of::<Record>())?,
            counter: device.zeros(256)?,
            read_count: 0,
        })
    }

    /// Whether the GPU has written the next result.
    pub(super) fn has_next(&self) -> bool {
        self.ring.load(self.next_offset()) == self.read_count.wrapping_add(1)
    }

    /// Reads the next result, which the GPU must have written ([`Results::has_next`]).
    pub(super) fn take(&mut self) -> Record {
        let record = self.ring.read(self.next_offset());
        self.read_count = self.read_count.wrapping_add(1);
        record
    }

    fn next_offset(&self) -> usize {
        self.read_count as usize % RESULTS * size_of::<Record>()
    }
}
