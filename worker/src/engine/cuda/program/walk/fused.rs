//! What is fused across a convolution, one without groups: the largest tensors of a bottleneck network are then written
//! and read less often. Which convolutions are, follows from the network and the number format alone.

use super::*;

/// Input and output of a convolution that multiplies each pixel with one matrix: 1x1, stride 1, no groups.
fn pointwise(node: &Node) -> Option<[TensorId; 2]> {
    match *node {
        Node::Conv { kernel: 1, stride: 1, groups: 1, input, output, .. } => Some([input, output]),
        _ => None,
    }
}

impl<'a> Walk<'a> {
    /// Whether the gradient of a convolution's input is left to the batch norm before it: of a 1x1 one behind a block's
    /// addition.
    pub(super) fn goes_through(&self, node: &Node) -> bool {
        let Some([input, output]) = pointwise(node) else { return false };
        let (inner, channels) = (self.channels(output), self.channels(input));
        let behind_an_addition =
            self.norm_of(input).is_some_and(|n| n.relu && !n.pooled && n.shortcut != Shortcut::None);
        // Of two such gradients one would have to be in memory.
        let alone = self.readers_of(input).filter(|n| pointwise(n).is_some()).count();
        behind_an_addition && alone == 1 && self.p.ops.goes_through(inner, channels)
    }

    /// Whether the batch norm behind a convolution is left to that convolution's backward.
    pub(super) fn is_bottleneck(&self, node: &Node) -> bool {
        let Some([input, output]) = pointwise(node) else { return false };
        // What comes back to that batch norm has to be past its ReLU.
        let past = |norm: &NormNode| norm.input == output && (!norm.relu || norm.shortcut != Shortcut::None);
        self.p.ops.is_bottleneck(self.channels(input), self.channels(output))
            && self.p.nodes.iter().any(|node| matches!(node, Node::Norm(norm) if past(norm)))
    }

    /// The same, by the convolution's output.
    pub(super) fn makes_bottleneck(&self, tensor: TensorId) -> bool {
        self.p.nodes.iter().any(|node| {
            matches!(node, Node::Conv { output, .. } if *output == tensor) && self.is_bottleneck(node)
        })
    }

    /// Whether a batch norm is applied by the convolution that alone reads it.
    pub(super) fn is_left_to_bottleneck(&self, node: &NormNode) -> bool {
        self.readers_of(node.output).any(|reader| self.is_bottleneck(reader))
            && self.norm_before(node.output).is_some()
    }

    /// Such a convolution, forward; `input` and `output` are its tensors.
    pub(super) fn bottleneck_forward(
        &mut self,
        name: &str,
        [input, output]: [TensorId; 2],
    ) -> Result<(), EngineError> {
        let p = self.p;
        let before = self.norm_before(input);
        let (from, y) = (self.activation(before.map_or(input, |n| n.input))?, self.take(output)?);
        self.activations[output] = Some(y);
        self.taken.push(output);
        let behind = self.norm_behind(name, output)?;
        if self.starts() {
            let bottleneck = ops::BottleneckForward {
                from: self.at(from),
                before: before.map(|n| p.norms[n.norm]),
                weights: p.state.wide(name),
                y: self.at(y),
                control: p.inputs.control.ptr,
                shape: self.shape(input),
                behind: p.norms[behind.norm],
                reduce: self.reduction(behind, false),
            };
            p.ops.bottleneck_forward(self.main(), bottleneck)?;
            self.statistics_left(self.norm_alone(behind)?)?;
        }
        Ok(())
    }

    /// Whether the end of a block is made by the convolution right after it.
    pub(super) fn is_left_to_next(&self, node: &NormNode) -> bool {
        let mut after =
            self.p.nodes.iter().skip_while(|n| !matches!(n, Node::Norm(norm) if norm.norm == node.norm));
        let Some([input, output]) = after.nth(1).and_then(pointwise) else { return false };
        input == node.output
            && node.relu
            && node.shortcut != Shortcut::None
            && self.p.ops.ends_block(self.channels(input), self.channels(output))
    }

    /// The end of a block and the convolution after it.
    pub(super) fn block_end(
        &mut self,
        name: &str,
        [input, output]: [TensorId; 2],
    ) -> Result<(), EngineError> {
        let p = self.p;
        let Some(end) = self.unfinished.take() else {
            return Err(EngineError::Parameters(format!("{name} has no block before it")));
        };
        let (x, y, z) = (self.activation(end.input)?, self.activation(input)?, self.take(output)?);
        self.activations[output] = Some(z);
        self.taken.push(output);
        let behind = self.norm_behind(name, output)?;
        if self.starts() {
            let mask = self.marks[end.norm].map_or(0, |m| self.at(m));
            let norm = self.norm(end, x, self.at(y), mask)?;
            let block_end = ops::BlockEnd {
                x: norm.x,
                site: norm.site,
                shortcut: norm.shortcut,
                y: norm.y,
                mask,
                weights: p.state.wide(name),
                z: self.at(z),
                control: p.inputs.control.ptr,
                shape: self.shape(input),
                behind: p.norms[behind.norm],
                reduce: self.reduction(behind, false),
            };
            p.ops.block_end(self.main(), block_end)?;
            self.statistics_left(self.norm_alone(behind)?)?;
        }
        Ok(())
    }

    /// The batch norm of a convolution's output.
    pub(super) fn norm_behind(&self, name: &str, output: TensorId) -> Result<&'a NormNode, EngineError> {
        let found = self.p.nodes.iter().find_map(|node| match node {
            Node::Norm(norm) if norm.input == output => Some(norm),
            _ => None,
        });
        found.ok_or_else(|| EngineError::Parameters(format!("no batch norm follows {name}")))
    }

    /// The batch norm with a ReLU whose output `tensor` is, where one convolution alone reads that.
    fn norm_before(&self, tensor: TensorId) -> Option<&'a NormNode> {
        let added = self.p.nodes.iter().any(|node| match node {
            Node::Norm(norm) => norm.shortcut == Shortcut::Tensor(tensor),
            _ => false,
        });
        self.norm_of(tensor)
            .filter(|n| n.relu && !n.pooled && !n.deferred && n.shortcut == Shortcut::None)
            .filter(|_| self.readers_of(tensor).count() == 1 && !added)
    }

    /// Such a convolution, backward; `input` and `output` are its tensors.
    pub(super) fn bottleneck_backward(
        &mut self,
        name: &str,
        [input, output]: [TensorId; 2],
        accumulation: Accumulation,
    ) -> Result<(), EngineError> {
        let p = self.p;
        let Some(Gradient::Unapplied { g, x, norm }) = self.gradients[output].pop() else {
            return Err(EngineError::Parameters(format!("{name} has no gradient")));
        };
        let before = self.norm_before(input);
        let from = self.activation(before.map_or(input, |n| n.input))?;
        let dfrom = self.take(input)?;
        if self.starts() {
            let bottleneck = ops::Bottleneck {
                x: self.at(x),
                g: self.at(g),
                behind: p.norms[norm],
                weights: p.state.wide(name),
                from: self.at(from),
                dfrom: self.at(dfrom),
                dweights: self.wide_gradient(name),
                control: p.inputs.control.ptr,
                shape: self.shape(input),
                before: before.map(|n| ops::Before {
                    site: p.norms[n.norm],
                    accumulate: !accumulation.first,
                    reduce: self.reduction(n, true),
                }),
                room: p.workspace.ptr,
            };
            p.ops.bottleneck_backward(self.main(), bottleneck)?;
            if p.reducer.is_some() {
                // Gradients are sent from where the others are made.
                self.fork()?;
                self.send_buckets(name, accumulation)?;
            }
        }
        self.gradients[input].push(match before {
            Some(_) => Gradient::Summed(dfrom),
            None => Gradient::Whole(dfrom),
        });
        self.give(g);
        self.give(x);
        self.readers[input] -= 1;
        if self.readers[input] == 0
            && let Some(place) = self.activations[input].take()
        {
            match before {
                // Nothing else has read it.
                Some(_) => self.give(place),
                None => self.give_with_newest(place),
            }
        }
        Ok(())
    }

    /// Gives back what a weight gradient on the other stream may still read: with what the newest one reads.
    pub(super) fn give_with_newest(&mut self, place: Place) {
        match self.read.back_mut() {
            Some((_, read)) => read.push(place),
            None => self.give(place),
        }
    }

    /// Gives back a place, which may have two readers that do so.
    pub(super) fn give(&mut self, place: Place) {
        match self.shared.iter().position(|shared| *shared == place) {
            Some(index) => drop(self.shared.swap_remove(index)),
            None => self.arena.give(place),
        }
    }

    /// Convolutions that read `tensor`.
    fn readers_of(&self, tensor: TensorId) -> impl Iterator<Item = &'a Node> {
        self.p.nodes.iter().filter(move |node| matches!(node, Node::Conv { input, .. } if *input == tensor))
    }

    fn channels(&self, tensor: TensorId) -> usize {
        self.p.network.tensors[tensor].channels
    }

    fn norm_of(&self, tensor: TensorId) -> Option<&'a NormNode> {
        self.p.nodes.iter().find_map(|node| match node {
            Node::Norm(norm) if norm.output == tensor => Some(norm),
            _ => None,
        })
    }
}
