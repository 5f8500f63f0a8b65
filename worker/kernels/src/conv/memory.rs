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

/// One cache line, one register.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A buffer of floats, aligned to 64 bytes. It only grows, and keeps the contents of earlier uses.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// The first `len` floats.
    pub(super) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is 16 floats without padding, and there are at least `len / 16` lines.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

/// Buffers of one task.
#[derive(Debug, Default)]
pub(super) struct Bench {
    pub(super) x: Buffer,
    pub(super) dy: Buffer,
    pub(super) taps: Vec<Tap>,
    pub(super) starts: Vec<usize>,
    pub(super) sums: Buffer,
}

/// Scratch memory of the passes, which grows as needed. Reuse one for all layers.
#[derive(Debug)]
pub struct Scratch {
    pub(super) tiles: &'static Tiles,
    /// By shape: how the weight gradient divides the output.
    pub(super) plans: HashMap<ConvShape, Arc<Pieces>>,
    /// Packed weights, or partial sums of their gradient.
    pub(super) weights: Buffer,
    /// Weights of merged groups, or their gradient.
    pub(super) merged: Buffer,
    pub(super) x: Buffer,
    pub(super) dy: Buffer,
    /// One per concurrent task.
    pub(super) benches: Benches,
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
        let mut all = Instructions::ALL.into_iter();
        let fastest = all.find_map(|instructions| Self::with_instructions(instructions, format));
        fastest.unwrap_or_else(|| unreachable!("every machine supports the plain instructions"))
    }

    /// Scratch memory for these instructions, if this machine supports them for `format`.
    pub fn with_instructions(instructions: Instructions, format: Format) -> Option<Self> {
        Some(Scratch {
            tiles: Tiles::of(instructions, format)?,
            plans: HashMap::new(),
            weights: Buffer::default(),
            merged: Buffer::default(),
            x: Buffer::default(),
            dy: Buffer::default(),
            benches: Benches::default(),
        })
    }

    /// The number format in which the passes multiply.
    pub fn format(&self) -> Format {
        self.tiles.format
    }
}

#[derive(Debug, Default)]
pub(super) struct Benches(Mutex<Vec<Bench>>);

impl Benches {
    /// Runs a task with a bench that no other task uses.
    pub(super) fn with<T>(&self, task: impl FnOnce(&mut Bench) -> T) -> T {
        let mut bench = self.lock().pop().unwrap_or_default();
        let result = task(&mut bench);
        self.lock().push(bench);
        result
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Bench>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A slice to which tasks write in disjoint ranges.
#[derive(Clone, Copy)]
pub(super) struct Shared(*mut f32);

// SAFETY: code that dereferences the pointer must ensure that ranges are disjoint.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn of(slice: &mut [f32]) -> Self {
        Self(slice.as_mut_ptr())
    }

    pub(super) fn pointer(self) -> *mut f32 {
        self.0
    }
}
