//! What a pass does to memory, as text: each operation with what it allocates and frees.

use super::{Allocation, TensorId};
use std::fmt::Write;

/// What an allocation holds at first. A batch norm's backward pass leaves the gradient of its input where that was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine::cuda::program) enum Content {
    Activation(TensorId),
    Gradient(TensorId),
    /// By batch norm: a bit a value.
    ReluMask(usize),
    /// By batch norm or by tensor: a byte a value.
    Argmax(usize),
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Content::Activation(tensor) => write!(f, "t{tensor}"),
            Content::Gradient(tensor) => write!(f, "gradient of t{tensor}"),
            Content::ReluMask(norm) => write!(f, "relu_mask of norm {norm}"),
            Content::Argmax(number) => write!(f, "argmax {number}"),
        }
    }
}

/// Lines of text, and what is allocated now.
#[derive(Debug, Default)]
pub(in crate::engine::cuda::program) struct Trace {
    pub(in crate::engine::cuda::program) text: String,
    live: Vec<(Allocation, Content)>,
}

impl Trace {
    pub(super) fn step(&mut self, line: String) {
        let _ = writeln!(self.text, "{line}");
    }

    pub(super) fn alloc(&mut self, content: Content, allocation: Allocation) {
        let Allocation { offset, bytes } = allocation;
        let overlaps =
            |other: Allocation| offset < other.offset + other.bytes && other.offset < offset + bytes;
        if let Some((_, other)) = self.live.iter().find(|(other, _)| overlaps(*other)) {
            let _ = writeln!(self.text, "  !! {content} overlaps {other}");
        }
        let _ = writeln!(self.text, "  alloc {content}: {} at {}", kib(bytes), kib(offset));
        self.live.push((allocation, content));
    }

    pub(super) fn free(&mut self, allocation: Allocation) {
        match self.live.iter().position(|(live, _)| *live == allocation) {
            Some(at) => {
                let (_, content) = self.live.swap_remove(at);
                let _ = writeln!(self.text, "  free {content}");
            }
            None => self.step(format!("  !! freed twice: {allocation:?}")),
        }
    }

    pub(super) fn wait(&mut self, weight_gradient: usize) {
        self.step(format!("  wait for weight gradient {weight_gradient}"));
    }

    /// What was never freed.
    #[cfg(test)]
    pub(super) fn live(&self) -> impl Iterator<Item = Content> + '_ {
        self.live.iter().map(|(_, content)| *content)
    }
}

fn kib(bytes: usize) -> String {
    if bytes.is_multiple_of(1024) { format!("{} KiB", bytes >> 10) } else { format!("{bytes} B") }
}
