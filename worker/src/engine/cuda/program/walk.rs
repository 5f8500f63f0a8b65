//! One way through the network and back. Without a base address nothing is started: that way tells how
//! much memory there must be.

use super::*;
use crate::engine::cpu::sgd::LARS_TRUST;
use lockstep_protocol::spec::OptimizerKind;
use std::collections::VecDeque;

pub(super) struct Walk<'a> {
    p: &'a Program,
    base: Option<Ptr>,
    pub(super) arena: Arena,
    /// Whether weight gradients run beside the way back: kernels of small tensors leave most of the GPU idle.
    beside: bool,
    /// And how many of them may be behind it.
    behind: usize,
    /// By weight gradient that may still run, oldest first: what it reads and nothing needs after it.
    read: VecDeque<Vec<Place>>,
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
    /// Buckets of gradients that are complete.
    sent: usize,
    /// The convolution output whose sums are known.
    summed: Option<TensorId>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(p: &'a Program, base: Option<Ptr>, behind: usize) -> Self {
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
            beside: behind > 0,
            behind,
            read: VecDeque::new(),
            weight_gradients: 0,
            activations: vec![None; tensors],
            readers,
            marks: vec![None; p.norms.len()],
            gradients: vec![Vec::new(); tensors],
            sent: 0,
            summed: None,
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

    /// Room for the activation `tensor` of the whole batch.
    fn take(&mut self, tensor: TensorId) -> Place {
        let bytes = self.p.config.batch_size * self.values(tensor) * self.p.dtype.size();
        self.arena.take(bytes)
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

    // ------------------------------------------------------------------ forward

    /// Takes the next micro-batch in and makes its pictures the network's input.
    fn begin(&mut self, input: Input) -> Result<(), EngineError> {
        let tensor = self.p.network.input();
        let place = self.take(tensor);
        self.activations[tensor] = Some(place);
        if !self.starts() {
            return Ok(());
        }
        let (p, main) = (self.p, self.main());
        p.ops.fetch(main, p.inputs.fetch())?;
        p.ops.stamp(main, p.stamps.ptr)?;
        let shape = p.network.tensors[tensor];
        let (control, pictures, to) = (p.inputs.control.ptr, p.config.batch_size as u32, self.at(place));
        let (side, channels, padded) = (shape.height as u32, shape.channels as u32, p.padded_input as u32);
        let folded = p.folded;
        if folded {
            p.ops.fold_border(main, to, pictures, side)?;
        }
        let (source, height, width, which, scales) = match input {
            Input::Staged { at: from, form: Form::Normalised | Form::Draws } => {
                let pad = ops::PadChannels { from, to, control, pictures, side, channels, padded, folded };
                return Ok(p.ops.pad_channels(main, pad)?);
            }
            Input::Staged { at, form: Form::Bytes } => (at, side, side, ops::Which::InOrder, &[][..]),
            Input::Dataset { pictures, height, width, crop_padding, training } => {
                let drawn = ops::Which::Drawn { crop_padding: crop_padding as u32 };
                let which = if training { drawn } else { ops::Which::Indexed };
                (pictures, height as u32, width as u32, which, &p.scalings[..])
            }
        };
        let scaling = match scales {
            [rows, columns] => Some(ops::Scaling {
                rows: &rows.table,
                rows_at: rows.at.ptr,
                columns: &columns.table,
                columns_at: columns.at.ptr,
            }),
            _ => None,
        };
        let table = p.normalisation.ptr;
        let gather = ops::Gather {
            source,
            height,
            width,
            channels,
            which,
            scaling,
            control,
            pictures,
            side,
            table,
            to,
            padded,
            folded,
        };
        Ok(p.ops.gather(main, gather)?)
    }

    fn forward(&mut self, index: usize, phase: Phase) -> Result<(), EngineError> {
        let p = self.p;
        let training = matches!(phase, Phase::Train(_));
        match &p.nodes[index] {
            node @ (Node::Conv { name, input, output, .. } | Node::Linear { name, input, output }) => {
                let (x, y) = (self.activation(*input)?, self.take(*output));
                self.activations[*output] = Some(y);
                if let Some((convolution, _)) = p.convolution(node)
                    && self.starts()
                {
                    let sums = p.reducer.as_ref().and_then(|r| r.sums()).unwrap_or(p.channel_sums.ptr);
                    let tensors = Tensors { x: self.at(x), w: p.state.wide(name), y: self.at(y), sums };
                    let with_sums = Convolution { sums: true, ..convolution };
                    let whole = matches!(phase, Phase::Train(Accumulation { whole: true, .. }));
                    let convolution = if whole && p.tuner.has(&with_sums) {
                        self.summed = Some(*output);
                        with_sums
                    } else {
                        convolution
                    };
                    self.convolve(self.main(), convolution, tensors)?;
                }
                if !training {
                    self.readers[*input] -= 1;
                    self.drop_after_evaluation(*input);
                }
            }
            Node::Norm(node) if training => self.norm_forward(node)?,
            Node::Norm(node) => self.norm_evaluate(node)?,
            Node::GlobalAveragePool { input, output } => {
                let (x, y) = (self.activation(*input)?, self.take(*output));
                self.activations[*output] = Some(y);
                if self.starts() {
                    let shape = p.network.tensors[*input];
                    let average = ops::GlobalAverage {
                        x: self.at(x),
                        y: self.at(y),
                        pictures: p.config.batch_size as u32,
                        pixels: shape.pixels() as u32,
                        channels: shape.channels as u32,
                    };
                    p.ops.global_average(self.main(), average)?;
                }
                // Backward does not look at it again.
                self.drop_activation(*input);
            }
        }
        Ok(())
    }

    /// Statistics of a convolution's output, and what they are applied to.
    fn norm_forward(&mut self, node: &NormNode) -> Result<(), EngineError> {
        let p = self.p;
        let x = self.activation(node.input)?;
        if node.deferred {
            return if self.starts() { self.statistics(self.norm(node, x, 0, 0)?, node) } else { Ok(()) };
        }
        let y = self.take(node.output);
        self.activations[node.output] = Some(y);
        let values = p.config.batch_size * self.values(node.output);
        // A byte a value says which of a window won; a bit, whether the ReLU let it through.
        let marks = match (node.pooled, node.shortcut) {
            (true, _) => Some(self.arena.take(values)),
            (false, Shortcut::None) => None,
            (false, _) => Some(self.arena.take(values / 8)),
        };
        self.marks[node.norm] = marks;
        if !self.starts() {
            return Ok(());
        }
        let marks = marks.map_or(0, |m| self.at(m));
        let norm = self.norm(node, x, self.at(y), marks)?;
        if node.pooled {
            self.statistics(norm, node)?;
            return Ok(p.ops.max_pool(self.main(), self.pooling(node, x, self.at(y), marks))?);
        }
        if matches!(norm.reduce, ops::Reduce::Leave { .. }) || self.summed == Some(node.input) {
            self.statistics(norm, node)?;
            return Ok(p.ops.norm_apply(self.main(), norm.into())?);
        }
        Ok(p.ops.norm_forward(self.main(), norm)?)
    }

    /// Statistics alone, unless the convolution took them along; over all ranks if they are synchronised.
    fn statistics(&self, norm: ops::NormForward, node: &NormNode) -> Result<(), EngineError> {
        let (p, main) = (self.p, self.main());
        let channels = p.network.tensors[node.input].channels;
        let summed = self.summed == Some(node.input);
        if !summed {
            p.ops.norm_statistics(main, norm)?;
        }
        let (sums, norm) = match (norm.reduce, &p.reducer) {
            (ops::Reduce::Leave { sums }, Some(reducer)) => {
                reducer.add_statistics(main, 2 * channels)?;
                (sums, ops::NormForward { reduce: ops::Reduce::Local, ..norm })
            }
            _ if summed => (p.channel_sums.ptr, norm),
            _ => return Ok(()),
        };
        Ok(p.ops.norm_finish(main, sums, sums + 4 * channels as u64, norm)?)
    }

    /// Running statistics instead of the batch's.
    fn norm_evaluate(&mut self, node: &NormNode) -> Result<(), EngineError> {
        let p = self.p;
        let x = self.activation(node.input)?;
        if self.starts() {
            let site = &p.norms[node.norm];
            let fold = ops::NormFold {
                gamma: site.gamma,
                beta: site.beta,
                running_mean: site.running_mean,
                running_var: site.running_var,
                scale: site.scale,
                bias: site.bias,
                channels: p.network.tensors[node.input].channels as u32,
            };
            p.ops.norm_fold(self.main(), fold)?;
        }
        if node.deferred {
            return Ok(());
        }
        let y = self.take(node.output);
        self.activations[node.output] = Some(y);
        if self.starts() {
            if node.pooled {
                p.ops.max_pool(self.main(), self.pooling(node, x, self.at(y), 0))?;
            } else {
                p.ops.norm_apply(self.main(), self.norm(node, x, self.at(y), 0)?.into())?;
            }
        }
        self.drop_activation(node.input);
        match node.shortcut {
            Shortcut::Tensor(tensor) => self.drop_after_evaluation(tensor),
            Shortcut::Norm(norm) => {
                let input = self.node_of(norm).input;
                self.drop_activation(input);
            }
            Shortcut::None => {}
        }
        Ok(())
    }

    /// A batch norm with what is fused with it.
    fn norm(&self, node: &NormNode, x: Place, y: Ptr, mask: Ptr) -> Result<ops::NormForward, EngineError> {
        let p = self.p;
        let shortcut = match node.shortcut {
            Shortcut::None => ops::Shortcut::None,
            Shortcut::Tensor(tensor) => ops::Shortcut::Plain(self.at(self.activation(tensor)?)),
            Shortcut::Norm(norm) => ops::Shortcut::Norm {
                x: self.at(self.activation(self.node_of(norm).input)?),
                scale: p.norms[norm].scale,
                bias: p.norms[norm].bias,
            },
        };
        Ok(ops::NormForward {
            x: self.at(x),
            y,
            shortcut,
            relu: node.relu,
            mask,
            control: p.inputs.control.ptr,
            shape: self.shape(node.input),
            site: p.norms[node.norm],
            reduce: self.reduction(node, false),
        })
    }

    fn shape(&self, tensor: TensorId) -> ops::Shape {
        let shape = self.p.network.tensors[tensor];
        ops::Shape {
            pictures: self.p.config.batch_size as u32,
            pixels: shape.pixels() as u32,
            channels: shape.channels as u32,
        }
    }

    /// How a batch norm's sums are added over ranks.
    fn reduction(&self, node: &NormNode, backward: bool) -> ops::Reduce {
        let Some(reducer) = &self.p.reducer else { return ops::Reduce::Local };
        match (reducer.meeting(node.norm, backward), reducer.sums()) {
            (Some(m), _) => ops::Reduce::Exchange { peers: m.peers, at: m.offset, sequence: m.sequence },
            (None, Some(sums)) => ops::Reduce::Leave { sums },
            (None, None) => ops::Reduce::Local,
        }
    }

    /// The stem's pooling, through its batch norm.
    fn pooling(&self, node: &NormNode, x: Place, y: Ptr, taps: Ptr) -> ops::MaxPool {
        let site = &self.p.norms[node.norm];
        let norm = (site.scale, site.bias);
        ops::MaxPool { x: self.at(x), norm, y, taps, pool: self.pool(node.input) }
    }

    fn pool(&self, tensor: TensorId) -> ops::Pool {
        let shape = self.p.network.tensors[tensor];
        ops::Pool {
            pictures: self.p.config.batch_size as u32,
            height: shape.height as u32,
            width: shape.width as u32,
            channels: shape.channels as u32,
        }
    }

    /// Gives back what only evaluation's readers needed; a shortcut may still read it.
    fn drop_after_evaluation(&mut self, tensor: TensorId) {
        let done = self.p.nodes.iter().all(|node| match node {
            Node::Norm(NormNode { shortcut: Shortcut::Tensor(read), output, .. }) if *read == tensor => {
                self.activations[*output].is_some()
            }
            _ => true,
        });
        if self.readers[tensor] == 0 && done {
            self.drop_activation(tensor);
        }
    }

    // ----------------------------------------------------------------- the loss

    fn loss(&mut self, Accumulation { first, .. }: Accumulation) -> Result<(), EngineError> {
        let p = self.p;
        let logits = p.network.logits();
        let (place, gradient) = (self.activation(logits)?, self.take(logits));
        if self.starts() {
            let dbias = self.narrow_gradient(self.linear_name(), "bias");
            let dlogits = self.at(gradient);
            let loss = ops::CrossEntropy { dlogits, dbias, accumulate: !first, ..self.cross_entropy(place) };
            p.ops.cross_entropy(self.main(), loss)?;
        }
        self.drop_activation(logits);
        self.gradients[logits].push(Gradient::Whole(gradient));
        Ok(())
    }

    fn evaluate(&mut self) -> Result<(), EngineError> {
        let p = self.p;
        let place = self.activation(p.network.logits())?;
        if self.starts() {
            let loss = ops::CrossEntropy { smoothing: 0.0, ..self.cross_entropy(place) };
            p.ops.cross_entropy(self.main(), loss)?;
            let logits = ops::BiasedLogits {
                logits: loss.logits,
                bias: loss.bias,
                to: p.evaluated_logits.ptr,
                pictures: loss.pictures,
                classes: loss.classes,
                padded: loss.padded,
            };
            p.ops.biased_logits(self.main(), logits)?;
        }
        Ok(())
    }

    /// The loss without gradients.
    fn cross_entropy(&self, logits: Place) -> ops::CrossEntropy {
        let p = self.p;
        ops::CrossEntropy {
            logits: self.at(logits),
            bias: p.state.narrow(self.linear_name(), "bias"),
            control: p.inputs.control.ptr,
            pictures: p.config.batch_size as u32,
            classes: p.network.classes as u32,
            padded: p.padded_classes as u32,
            smoothing: p.config.label_smoothing,
            loss_scale: p.state.scaling.ptr,
            dlogits: 0,
            dbias: 0,
            totals: p.totals.ptr,
            accumulate: false,
        }
    }

    fn linear_name(&self) -> &'a str {
        self.p
            .nodes
            .iter()
            .find_map(|n| if let Node::Linear { name, .. } = n { Some(&name[..]) } else { None })
            .unwrap_or("fc")
    }

    // ----------------------------------------------------------------- backward

    fn backward(&mut self, index: usize, accumulation: Accumulation) -> Result<(), EngineError> {
        let p = self.p;
        match &p.nodes[index] {
            node @ (Node::Conv { name, input, output, .. } | Node::Linear { name, input, output }) => {
                let Some((convolution, first)) = p.convolution(node) else { return Ok(()) };
                let dy = self.only_gradient(*output)?;
                let x = self.activation(*input)?;
                if self.starts() {
                    let dw = self.wide_gradient(name);
                    let tensors = Tensors { x: self.at(x), w: dw, y: self.at(dy), sums: 0 };
                    let convolution = Convolution { direction: Direction::Weight, ..convolution };
                    let stream = self.weight_gradient(convolution, tensors)?;
                    if first && p.folded {
                        let values = p.state.layout.slot(name, "weight").range.len();
                        p.ops.fold_gradient(stream, dw, values as u32)?;
                    }
                    self.send_buckets(name, accumulation)?;
                }
                self.readers[*input] -= 1;
                if !first {
                    let dx = self.take(*input);
                    if self.starts() {
                        let tensors =
                            Tensors { x: self.at(dx), w: p.state.wide(name), y: self.at(dy), sums: 0 };
                        let convolution = Convolution { direction: Direction::Input, ..convolution };
                        self.convolve(self.main(), convolution, tensors)?;
                    }
                    self.gradients[*input].push(Gradient::Whole(dx));
                }
                // Batch norm's input is where its gradient is, which is given back.
                let mut read = vec![dy];
                if self.readers[*input] == 0 {
                    read.extend(self.activations[*input].take());
                }
                self.give_back(read)?;
            }
            Node::Norm(node) => self.norm_backward(node, accumulation)?,
            Node::GlobalAveragePool { input, output } => {
                let dy = self.only_gradient(*output)?;
                self.gradients[*input].push(Gradient::Pooled(dy));
            }
        }
        Ok(())
    }

    /// The gradient of an activation with one reader.
    fn only_gradient(&mut self, tensor: TensorId) -> Result<Place, EngineError> {
        match self.gradients[tensor].pop() {
            Some(gradient) => Ok(gradient.place()),
            None => Err(EngineError::Parameters(format!("nothing reads tensor {tensor}"))),
        }
    }

    /// Through ReLU and batch norm; the gradient of the input is left where the input was.
    fn norm_backward(
        &mut self,
        node: &NormNode,
        Accumulation { first, .. }: Accumulation,
    ) -> Result<(), EngineError> {
        let p = self.p;
        let x = self.activation(node.input)?;
        let mut incoming = std::mem::take(&mut self.gradients[node.output]).into_iter();
        let (Some(dy), more, None) = (incoming.next(), incoming.next(), incoming.next()) else {
            return Err(EngineError::Parameters(format!("{} has no gradient, or more than two", node.name)));
        };
        // The gradient of what comes after the addition is the shortcut's, too.
        let dz = match node.shortcut {
            Shortcut::None => None,
            _ => Some(self.take(node.output)),
        };
        if self.starts() {
            let at = |gradient: Option<Gradient>| gradient.map_or(0, |g| self.at(g.place()));
            let (mask, pooled) =
                (self.marks[node.norm].map_or(0, |m| self.at(m)), matches!(dy, Gradient::Pooled(_)));
            let (dy, more, dz) = (at(Some(dy)), at(more), dz.map_or(0, |d| self.at(d)));
            if node.pooled {
                self.norm_backward_pooled(node, x, dy, more, mask, first)?;
            } else {
                let gradient = match (node.relu, mask, pooled) {
                    (false, ..) => ops::Gradient::All { dy },
                    (true, 0, _) => ops::Gradient::Relu { dy, more },
                    (true, mask, false) => ops::Gradient::Mask { dy, more, mask },
                    (true, mask, true) => ops::Gradient::MaskPooled { dy, mask },
                };
                let backward = ops::NormBackward {
                    x: self.at(x),
                    gradient,
                    dz,
                    dx: self.at(x),
                    control: p.inputs.control.ptr,
                    shape: self.shape(node.input),
                    site: p.norms[node.norm],
                    accumulate: !first,
                    reduce: self.reduction(node, true),
                };
                p.ops.norm_backward(self.main(), backward)?;
                if let Some(sums) = self.added_sums(node)? {
                    let local = ops::NormBackward { reduce: ops::Reduce::Local, ..backward };
                    p.ops.norm_backward_finish(self.main(), sums, local)?;
                    p.ops.norm_backward_apply(self.main(), local)?;
                }
            }
        }
        for gradient in [Some(dy), more].into_iter().flatten() {
            self.arena.give(gradient.place());
        }
        if let Some(marks) = self.marks[node.norm].take() {
            self.arena.give(marks);
        }
        self.activations[node.input] = None;
        self.gradients[node.input].push(Gradient::Whole(x));
        if let Some(dz) = dz {
            let shortcut = match node.shortcut {
                Shortcut::Norm(norm) => self.node_of(norm).output,
                Shortcut::Tensor(tensor) => tensor,
                Shortcut::None => node.output,
            };
            self.gradients[shortcut].push(Gradient::Whole(dz));
        }
        Ok(())
    }

    /// The same for the stem, from the gradient of its pooling.
    fn norm_backward_pooled(
        &self,
        node: &NormNode,
        x: Place,
        dy: Ptr,
        more: Ptr,
        taps: Ptr,
        first: bool,
    ) -> Result<(), EngineError> {
        let (p, main) = (self.p, self.main());
        if more != 0 {
            let values = p.config.batch_size * self.values(node.output);
            p.ops.add(main, dy, more, values as u64)?;
        }
        let backward = ops::NormBackwardMaxPool {
            x: self.at(x),
            dy,
            taps,
            dx: self.at(x),
            control: p.inputs.control.ptr,
            pool: self.pool(node.input),
            site: p.norms[node.norm],
            accumulate: !first,
            reduce: self.reduction(node, true),
        };
        p.ops.norm_backward_max_pool(main, backward)?;
        if let Some(sums) = self.added_sums(node)? {
            let local = ops::NormBackward {
                x: self.at(x),
                gradient: ops::Gradient::All { dy },
                dz: 0,
                dx: self.at(x),
                control: backward.control,
                shape: self.shape(node.input),
                site: backward.site,
                accumulate: backward.accumulate,
                reduce: ops::Reduce::Local,
            };
            p.ops.norm_backward_finish(main, sums, local)?;
            p.ops.norm_backward_apply_max_pool(main, backward)?;
        }
        Ok(())
    }

    /// Backward's sums over all ranks, where kernels leave them to NCCL.
    fn added_sums(&self, node: &NormNode) -> Result<Option<Ptr>, EngineError> {
        let (Some(reducer), ops::Reduce::Leave { sums }) = (&self.p.reducer, self.reduction(node, true))
        else {
            return Ok(None);
        };
        reducer.add_statistics(self.main(), 2 * self.p.network.tensors[node.input].channels)?;
        Ok(Some(sums))
    }

    fn node_of(&self, norm: usize) -> &'a NormNode {
        let found = self.p.nodes.iter().find_map(|node| match node {
            Node::Norm(n) if n.norm == norm => Some(n),
            _ => None,
        });
        // Numbers are those of nodes.
        found.unwrap_or_else(|| unreachable!("no batch norm {norm}"))
    }

    /// Gives back what a weight gradient reads once it is done: here that of the oldest one that the main stream has
    /// not waited for yet.
    fn give_back(&mut self, read: Vec<Place>) -> Result<(), EngineError> {
        if !self.beside {
            read.into_iter().for_each(|place| self.arena.give(place));
            return Ok(());
        }
        let waits = self.behind == BEHIND;
        if self.starts() && waits {
            self.p.side_done[self.weight_gradients % BEHIND].record(self.p.side.0)?;
        }
        self.read.push_back(read);
        self.weight_gradients += 1;
        if self.read.len() >= self.behind {
            // The oldest one's event, which the next one records anew.
            if self.starts() && waits {
                self.main().wait(&self.p.side_done[self.weight_gradients % BEHIND])?;
            }
            for place in self.read.pop_front().unwrap_or_default() {
                self.arena.give(place);
            }
        }
        Ok(())
    }

    /// A convolution's weight gradient: on the way, or beside it. Gives the stream that it is on.
    fn weight_gradient(&self, convolution: Convolution, tensors: Tensors) -> Result<Stream, EngineError> {
        let stream = if self.beside { self.p.side.0 } else { self.main() };
        if self.beside {
            self.p.side_begin.record(self.main())?;
            stream.wait(&self.p.side_begin)?;
        }
        self.convolve_with(stream, convolution, tensors, self.p.side_workspace.ptr)?;
        Ok(stream)
    }

    fn convolve(
        &self,
        stream: Stream,
        convolution: Convolution,
        tensors: Tensors,
    ) -> Result<(), EngineError> {
        self.convolve_with(stream, convolution, tensors, self.p.workspace.ptr)
    }

    fn convolve_with(
        &self,
        stream: Stream,
        convolution: Convolution,
        tensors: Tensors,
        workspace: Ptr,
    ) -> Result<(), EngineError> {
        let plan = self.p.tuner.plan(&convolution)?;
        let run = || Ok(self.p.tuner.cudnn().run(stream, plan, tensors, workspace)?);
        self.p.ops.profile().around(stream, || convolution.to_string(), run)
    }

    /// Has the side stream follow the main one from here on.
    fn fork(&self) -> Result<(), EngineError> {
        if self.starts() && self.beside {
            self.p.side_begin.record(self.main())?;
            self.p.side.0.wait(&self.p.side_begin)?;
        }
        Ok(())
    }

    // ------------------------------------------------------- gradients and update

    /// Starts adding the gradients that are complete with `name`'s.
    fn send_buckets(&mut self, name: &str, accumulation: Accumulation) -> Result<(), EngineError> {
        let p = self.p;
        let (Some(reducer), true, None) = (&p.reducer, accumulation.last, &p.accumulated) else {
            return Ok(());
        };
        let Some(bucket) = p.state.layout.buckets.get(self.sent) else { return Ok(()) };
        // Slots are in the order of backward: the last one of a bucket ends it.
        if p.state.layout.slot(name, "weight").range.end.next_multiple_of(1024) < bucket.end {
            return Ok(());
        }
        let producer = if self.beside && !reducer.is_ordered() { p.side.0 } else { self.main() };
        if self.beside && reducer.is_ordered() {
            p.side_end.record(p.side.0)?;
            self.main().wait(&p.side_end)?;
        }
        let at = p.wide_gradients.ptr + (bucket.start * p.dtype.size()) as u64;
        reducer.start(self.sent, producer, at, bucket.len(), p.dtype)?;
        self.sent += 1;
        Ok(())
    }

    /// Adds what is left over ranks, updates the weights and tells the result.
    fn finish(&mut self, Accumulation { first, last, .. }: Accumulation) -> Result<(), EngineError> {
        if !self.starts() {
            return Ok(());
        }
        let (p, main) = (self.p, self.main());
        if self.beside {
            p.side_end.record(p.side.0)?;
            main.wait(&p.side_end)?;
        }
        let layout = &p.state.layout;
        if let Some(sums) = &p.accumulated {
            p.ops.accumulate_gradients(main, sums.ptr, p.wide_gradients.ptr, layout.wide as u64, first)?;
        }
        if !last {
            return Ok(());
        }
        p.ops.stamp(main, p.stamps.ptr + 8)?;
        if let Some(reducer) = &p.reducer {
            if let Some(sums) = &p.accumulated {
                for (number, bucket) in layout.buckets.iter().enumerate() {
                    reducer.start(
                        number,
                        main,
                        sums.ptr + 4 * bucket.start as u64,
                        bucket.len(),
                        DType::F32,
                    )?;
                }
            }
            let narrow = layout.len - layout.wide;
            reducer.start(layout.buckets.len(), main, p.narrow_gradients.ptr, narrow, DType::F32)?;
            reducer.finish(main)?;
        }
        p.ops.stamp(main, p.stamps.ptr + 16)?;
        let (first, wide) = match &p.accumulated {
            Some(sums) => (sums.ptr, true),
            None => (p.wide_gradients.ptr, p.dtype == DType::F32),
        };
        let gradients = ops::Gradients {
            first,
            second: p.narrow_gradients.ptr,
            first_length: layout.wide as u64,
            length: layout.len as u64,
            wide,
        };
        let (weights, scaler) = (p.state.weights.ptr, p.state.scaling.ptr);
        let dynamic = p.dynamic_scale.unwrap_or(false);
        p.ops.gradient_norm(main, ops::GradientNorm { gradients, scaler, dynamic })?;
        let (segments, rates, count) = (p.segments.ptr, p.rates.ptr, layout.slots.len() as u32);
        let update = match p.config.optimizer {
            OptimizerKind::Momentum => ops::Update::Momentum,
            OptimizerKind::Nesterov => ops::Update::Nesterov,
            OptimizerKind::Lars => {
                let (trust, decay) = (LARS_TRUST, p.config.weight_decay);
                let rates =
                    ops::LarsRates { weights, gradients, segments, count, scaler, trust, decay, rates };
                p.ops.lars_rates(main, rates)?;
                ops::Update::Lars { segments, rates: p.rates.ptr, count }
            }
        };
        let sgd = ops::Sgd {
            update,
            weights,
            velocity: p.state.momentum.ptr,
            shadow: p.state.shadow().unwrap_or(0),
            gradients,
            control: p.inputs.control.ptr,
            scaler,
            momentum: p.config.momentum,
            decay: p.config.weight_decay,
        };
        p.ops.sgd(main, sgd)?;
        p.ops.stamp(main, p.stamps.ptr + 24)?;
        p.ops.record(main, p.results.record(p.totals.ptr, scaler, p.stamps.ptr))?;
        Ok(())
    }

    fn wide_gradient(&self, name: &str) -> Ptr {
        let at = self.p.state.layout.slot(name, "weight").range.start;
        self.p.wide_gradients.ptr + (at * self.p.dtype.size()) as u64
    }

    fn narrow_gradient(&self, name: &str, suffix: &str) -> Ptr {
        let layout = &self.p.state.layout;
        self.p.narrow_gradients.ptr + 4 * (layout.slot(name, suffix).range.start - layout.wide) as u64
    }
}
