//! What the host and the GPU exchange about steps, through page-locked memory that both see: nothing
//! is copied or waited for by a call.

#![allow(unsafe_code)] // Plain numbers are said to be such, to be copied as bytes.

use super::{
    command::{Operand, Region},
    device::{Buffer, Device, Pinned},
    error::CudaError,
    ops,
};
use lockstep_data::loader::{Batch, MixParams};
use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// Micro-batches that may be on their way to the GPU; one more waits for the first to arrive.
pub(super) const SLOTS: usize = 64;
/// Steps whose results may wait to be read.
const RESULTS: usize = 64;
// Counts wrap at 2^32, which must not skip a slot.
const _: () = assert!(SLOTS.is_power_of_two() && RESULTS.is_power_of_two());

/// What changes from one micro-batch to the next; `Control` of the kernels. Followed by the place in the
/// dataset, the augmentation, the label and the label of the picture that it is mixed with, of each picture.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Control {
    /// Real pictures among those that the step has room for.
    pub(super) valid: u32,
    /// Whether pictures are mixed with others.
    pub(super) mixed: u32,
    /// Pictures that batch norm's statistics are of.
    pub(super) stat_pictures: f32,
    /// Factor of each picture's loss gradient.
    pub(super) grad_scale: f32,
    pub(super) lr: f32,
    /// How much of a mixed picture is itself.
    pub(super) lambda: f32,
    /// Place in the dataset and augmentation of the picture that the first one is mixed with, where the GPU mixes them: every
    /// other is mixed with the one before it.
    pub(super) before: [u32; 2],
    /// cutmix: first row and column that is the other picture's, and the first that is not. Zeros for mixup.
    pub(super) cut_rows: [u32; 2],
    pub(super) cut_columns: [u32; 2],
}

impl Control {
    /// With what the GPU needs to mix pictures of the dataset.
    pub(super) fn with_mix(self, drawn: Option<&MixParams>) -> Self {
        let Some(MixParams { mix, before_index, before_params }) = drawn else { return self };
        let ends = |range: &Range<usize>| [range.start as u32, range.end as u32];
        let [cut_rows, cut_columns] =
            mix.cut.as_ref().map_or_else(Default::default, |cut| cut.each_ref().map(ends));
        Self { before: [*before_index as u32, *before_params], cut_rows, cut_columns, ..self }
    }
}

// SAFETY: numbers without a gap between them.
unsafe impl bytemuck::Zeroable for Control {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Control {}

/// Words of a [`Control`].
const CONTROL_WORDS: usize = size_of::<Control>() / 4;

/// What a step measured; `Result` of the kernels.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Record {
    /// Steps recorded before, plus one; written last.
    pub(super) sequence: u32,
    pub(super) loss_sum: f32,
    pub(super) correct: u32,
    pub(super) samples: u32,
    /// L2 norm of the gradient.
    pub(super) grad_norm: f32,
    pub(super) loss_scale: f32,
    /// Whether the gradient was finite; a step whose was not is left out with fp16.
    pub(super) finite: u32,
    pub(super) pad: u32,
    /// Nanoseconds of the GPU's clock: begin, end of backward, gradients reduced, end.
    pub(super) stamps: [u64; 4],
}

// SAFETY: numbers without a gap between them.
unsafe impl bytemuck::Zeroable for Record {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Record {}

/// Micro-batches on their way in.
pub(super) struct Inputs {
    pub(super) ring: Pinned,
    /// Where the GPU keeps the one that is under way.
    pub(super) control: Buffer,
    /// Which slot is next, counted by the GPU.
    pub(super) counter: Buffer,
    /// The same number, written by the GPU where the host reads it.
    pub(super) taken: Pinned,
    /// Pictures that a micro-batch has room for.
    batch: usize,
    /// Micro-batches sent so far, modulo 2^32 like the GPU's count.
    sent: u32,
}

impl Inputs {
    pub(super) fn new(device: &Device, batch: usize) -> Result<Self, CudaError> {
        let bytes = 4 * Self::words_for(batch);
        Ok(Self {
            ring: Pinned::new(SLOTS * bytes)?,
            control: device.zeros(bytes)?,
            counter: device.zeros(256)?,
            taken: Pinned::new(256)?,
            batch,
            sent: 0,
        })
    }

    fn words_for(batch: usize) -> usize {
        (CONTROL_WORDS + 4 * batch).next_multiple_of(64)
    }

    /// Words of a slot.
    pub(super) fn words(&self) -> usize {
        Self::words_for(self.batch)
    }

    /// Micro-batches that the GPU has not taken yet.
    fn under_way(&self) -> u32 {
        self.sent.wrapping_sub(self.taken.load(0))
    }

    /// Puts a micro-batch into the next slot, once the GPU has taken the one that was there; `alive` is asked now
    /// and then whether it still can.
    pub(super) fn send<E: From<CudaError>>(
        &mut self,
        control: Control,
        batch: &Batch,
        patience: Duration,
        alive: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        wait_until(|| self.under_way() < SLOTS as u32, patience, alive)?;
        let mut words = vec![0u32; self.words()];
        words[..CONTROL_WORDS].copy_from_slice(bytemuck::cast_slice(&[control]));
        let mut lists = words[CONTROL_WORDS..].chunks_exact_mut(self.batch);
        let mut next = || lists.next().into_iter().flatten();
        next().zip(&batch.indices).for_each(|(w, v)| *w = *v as u32);
        next().zip(&batch.augment_params).for_each(|(w, v)| *w = *v);
        next().zip(&batch.labels).for_each(|(w, v)| *w = *v);
        next().zip(&batch.mixed_labels).for_each(|(w, v)| *w = *v);
        self.ring.write(self.sent as usize % SLOTS * words.len() * 4, &words);
        self.sent = self.sent.wrapping_add(1);
        Ok(())
    }
}

/// Results on their way out.
pub(super) struct Results {
    pub(super) ring: Pinned,
    pub(super) counter: Buffer,
    /// How many the host has read, modulo 2^32.
    pub(super) read: u32,
}

impl Results {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self { ring: Pinned::new(RESULTS * size_of::<Record>())?, counter: device.zeros(256)?, read: 0 })
    }

    /// Waits for the next result; `alive` is asked now and then whether it can still come.
    pub(super) fn wait<E: From<CudaError>>(
        &mut self,
        patience: Duration,
        alive: impl FnMut() -> Result<(), E>,
    ) -> Result<Record, E> {
        let at = self.read as usize % RESULTS * size_of::<Record>();
        let next = self.read.wrapping_add(1);
        wait_until(|| self.ring.load(at) == next, patience, alive)?;
        self.read = next;
        Ok(self.ring.read(at))
    }
}

/// Waits until `done`, which reads what the GPU writes into the host's memory.
pub(super) fn wait_until<E: From<CudaError>>(
    mut done: impl FnMut() -> bool,
    patience: Duration,
    mut alive: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    let began = Instant::now();
    let mut reads = 0u32;
    while !done() {
        reads += 1;
        // A short wait is met at once; a long one leaves the core to others.
        if reads < 2_000 {
            std::hint::spin_loop();
            continue;
        }
        std::thread::sleep(Duration::from_micros(20));
        if reads.is_multiple_of(256) {
            alive()?;
            if began.elapsed() > patience {
                return Err(CudaError::Hung { secs: began.elapsed().as_secs_f64(), what: "a step" }.into());
            }
        }
    }
    Ok(())
}

/// How the GPU takes the next micro-batch, of up to `batch` pictures, and what it keeps at the beginning of a step.
pub(super) fn fetch(batch: usize, keeps: Option<ops::Keep>) -> ops::Fetch {
    ops::Fetch {
        control: Operand::whole(Region::Control),
        ring: Operand::whole(Region::InputRing),
        counter: Operand::new(Region::InputCounter, 0, 4),
        taken: Operand::new(Region::InputsTaken, 0, 4),
        slots: SLOTS as u32,
        words: Inputs::words_for(batch) as u32,
        keeps,
    }
}

/// How the GPU reports the next result.
pub(super) fn record() -> ops::Record {
    ops::Record {
        ring: Operand::whole(Region::ResultRing),
        counter: Operand::new(Region::ResultCounter, 0, 4),
        slots: RESULTS as u32,
        totals: Operand::whole(Region::Totals),
        scaler: Operand::whole(Region::LossScale),
        stamps: Operand::new(Region::Stamps, 0, size_of::<[u64; 4]>()),
    }
}
