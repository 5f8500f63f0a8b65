//! One way through the network and back. Without a base address nothing is started: that way tells how
//! much memory there must be.

use super::*;
use std::collections::VecDeque;

mod backward;
mod forward;
mod fused;
mod update;

pub(super) struct Walk<'a> {
    p: &'a Program,
    base: Option<Ptr>,
    pub(super) arena: Arena,
    /// Whether weight gradients run beside the way back: kernels of small tensors leave most of the GPU idle.
    beside: bool,
    /// By weight gradient that may still run, oldest first: its number, and what it reads and nothing needs after it.
    read: VecDeque<(usize, Vec<Place>)>,
    /// Weight gradients so far.
    weight_gradients: usize,
    /// By tensor.
    activations: Vec<Option<Place>>,
    /// By tensor: convolutions whose weight gradient still needs it.
    readers: Vec<usize>,
    /// By batch norm: the signs of its output, or the winners of its pooling.
    marks: Vec<Option<Place>>,
    /// By tensor: gradients from its readers.
    gradients: Vec<Vec<Gradient>>,
    /// Places that are given back twice before they are free.
    shared: Vec<Place>,
    /// Buckets of gradients that are complete.
    sent: usize,
    /// The convolution output whose sums are known.
    summed: Option<TensorId>,
    /// Convolution outputs whose statistics were taken when they were made.
    taken: Vec<TensorId>,
    /// The end of a block that the convolution after it makes.
    unfinished: Option<&'a NormNode>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(p: &'a Program, base: Option<Ptr>, beside: bool) -> Self {
        let tensors = p.network.tensors.len();
        let mut readers = vec![0; tensors];
        for node in &p.nodes {
            if let Node::Conv { input, .. } | Node::Linear { input, .. } = node {
                readers[*input] += 1;
            }
        }
        Self {
            p,
            base,
            arena: Arena::default(),
            beside,
            read: VecDeque::new(),
            weight_gradients: 0,
            activations: vec![None; tensors],
            readers,
            marks: vec![None; p.norms.len()],
            gradients: vec![Vec::new(); tensors],
            shared: Vec::new(),
            sent: 0,
            summed: None,
            taken: Vec::new(),
            unfinished: None,
        }
    }

    pub(super) fn network(&mut self, phase: Phase, input: Input) -> Result<(), EngineError> {
        self.begin(input)?;
        for index in 0..self.p.nodes.len() {
            self.forward(index, phase)?;
        }
        match phase {
            Phase::Evaluate => self.evaluate(),
            Phase::Train(accumulation) => {
                self.loss(accumulation)?;
                self.fork()?;
                for index in (0..self.p.nodes.len()).rev() {
                    self.backward(index, accumulation)?;
                }
                self.finish(accumulation)
            }
        }
    }

    fn main(&self) -> Stream {
        self.p.main.0
    }

    /// Where a place is, if this way starts anything.
    fn at(&self, place: Place) -> Ptr {
        self.base.map_or(0, |base| base + place.offset as u64)
    }

    fn starts(&self) -> bool {
        self.base.is_some()
    }

    /// Room for the activation `tensor` of the whole batch. Before more memory is taken for it, the way back waits for
    /// the weight gradients that are far behind, and takes over what they have read.
    fn take(&mut self, tensor: TensorId) -> Result<Place, EngineError> {
        let bytes = self.p.config.batch_size * self.values(tensor) * self.p.dtype.size();
        if self.read.len() > BEHIND && !self.arena.fits(bytes) {
            let done: Vec<_> = self.read.drain(..self.read.len() - BEHIND).collect();
            if let (Some((number, _)), true) = (done.last(), self.starts()) {
                self.main().wait(&self.p.side_done[*number])?;
            }
            for place in done.into_iter().flat_map(|(_, read)| read) {
                self.give(place);
            }
        }
        Ok(self.arena.take(bytes))
    }

    /// Values of a picture as they lie in memory.
    fn values(&self, tensor: TensorId) -> usize {
        let shape = self.p.network.tensors[tensor];
        if self.p.folded && tensor == self.p.network.input() {
            return (shape.height / 2 + 3) * (shape.width / 2 + 3) * 4 * self.p.padded_input;
        }
        let channels = match tensor {
            t if t == self.p.network.input() => self.p.padded_input,
            t if t == self.p.network.logits() => self.p.padded_classes,
            _ => shape.channels,
        };
        shape.pixels() * channels
    }

    fn activation(&self, tensor: TensorId) -> Result<Place, EngineError> {
        self.activations[tensor]
            .ok_or_else(|| EngineError::Parameters(format!("tensor {tensor} is read before it is made")))
    }

    /// Gives back an activation that nothing needs any more.
    fn drop_activation(&mut self, tensor: TensorId) {
        if let Some(place) = self.activations[tensor].take() {
            self.arena.give(place);
        }
    }
}
