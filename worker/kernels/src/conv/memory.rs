//! Scratch memory of the passes.

use super::{
    ConvShape,
    pieces::Pieces,
    tile::{Format, Instructions, Tap, Tiles},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// 16 floats: one 64-byte cache line, or one AVX-512 register.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A buffer of floats, aligned to 64 bytes. It only grows, and keeps the contents of earlier uses.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// The first `len` floats. The buffer grows if needed. The values are unspecified: write before you read.
    pub(super) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is 16 floats without padding, and there are at least `len.div_ceil(16)` lines.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

/// Buffers of one task.
#[derive(Debug, Default)]
pub(super) struct TaskBuffers {
    /// The task's packed source or, for the weight gradient, its packed input.
    pub(super) x: Buffer,
    /// The packed output gradient, for the weight gradient.
    pub(super) dy: Buffer,
    /// The taps of all output positions, in order.
    pub(super) taps: Vec<Tap>,
    /// `starts[i]..starts[i + 1]` are the taps of output position `i`.
    pub(super) starts: Vec<usize>,
    /// The products of a segment, see [`winograd`](super::winograd): `[point][picture][block of channels][16]`.
    pub(super) products: Buffer,
    /// Sums of the output channels, if requested.
    pub(super) sums: Buffer,
}

/// Scratch memory of the passes, which grows as needed. All layers should use the same scratch memory.
#[derive(Debug)]
pub struct Scratch {
    pub(super) tiles: &'static Tiles,
    /// How the weight gradient divides the output, for each shape.
    pub(super) plans: HashMap<ConvShape, Arc<Pieces>>,
    /// Packed weights, or partial sums of their gradient.
    pub(super) weights: Buffer,
    /// Weights of merged groups, or their gradient.
    pub(super) merged: Buffer,
    /// The gradient of transformed weights, see [`winograd`](super::winograd).
    pub(super) transformed: Buffer,
    /// For the weight gradient: the packed input of all pictures, if tasks divide the weights.
    pub(super) x: Buffer,
    /// For the weight gradient: the packed output gradient of all pictures, if tasks divide the weights.
    pub(super) dy: Buffer,
    /// One per concurrent task.
    pub(super) task_buffers: TaskBufferPool,
}

impl Default for Scratch {
    /// Scratch memory for float32 and the fastest instructions of this machine.
    fn default() -> Self {
        Self::new(Format::Float32)
    }
}

impl Scratch {
    /// Scratch memory for the fastest instructions of this machine.
    pub fn new(format: Format) -> Self {
        let mut instruction_sets = Instructions::ALL.into_iter();
        let fastest = instruction_sets.find_map(|instructions| Self::with_instructions(instructions, format));
        fastest.unwrap_or_else(|| unreachable!("every machine supports the plain instructions"))
    }

    /// Scratch memory for these instructions, if this machine supports them for `format`.
    pub fn with_instructions(instructions: Instructions, format: Format) -> Option<Self> {
        Some(Scratch {
            tiles: Tiles::of(instructions, format)?,
            plans: HashMap::new(),
            weights: Buffer::default(),
            merged: Buffer::default(),
            transformed: Buffer::default(),
            x: Buffer::default(),
            dy: Buffer::default(),
            task_buffers: TaskBufferPool::default(),
        })
    }

    /// The number format in which the passes multiply.
    pub fn format(&self) -> Format {
        self.tiles.format
    }
}

#[derive(Debug, Default)]
pub(super) struct TaskBufferPool(Mutex<Vec<TaskBuffers>>);

impl TaskBufferPool {
    /// Runs a task with buffers that no other task uses.
    pub(super) fn with<T>(&self, task: impl FnOnce(&mut TaskBuffers) -> T) -> T {
        let mut buffers = self.lock().pop().unwrap_or_default();
        let result = task(&mut buffers);
        self.lock().push(buffers);
        result
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<TaskBuffers>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The start of a slice to which tasks write in disjoint ranges. Keeps neither the slice's length nor its lifetime.
#[derive(Clone, Copy)]
pub(super) struct SharedOutput(*mut f32);

// SAFETY: code that dereferences the pointer must ensure that ranges are disjoint.
unsafe impl Send for SharedOutput {}
// SAFETY: as above.
unsafe impl Sync for SharedOutput {}

impl SharedOutput {
    pub(super) fn of(slice: &mut [f32]) -> Self {
        Self(slice.as_mut_ptr())
    }

    pub(super) fn pointer(self) -> *mut f32 {
        self.0
    }
}
