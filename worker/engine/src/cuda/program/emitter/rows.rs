//! Rows of pictures that several ranks share. Before each convolution and pooling, ranks exchange the rows that the operation's windows
//! reach. The backward pass sends the gradients of these rows back. After the global pooling, all ranks that share a picture have the
//! features of the whole picture and compute the same values. The gradients of these values are multiplied by 1 / ranks (`grad_scale` of
//! the control block), because gradients are summed over all ranks.

use super::*;
use crate::net::Rows;

/// The rows of an activation before and after a [`FusedOp::Halo`], by rank.
struct Halo<'a> {
    own: &'a Rows,
    reached: &'a Rows,
    rank: usize,
}

impl Halo<'_> {
    /// For each other rank: the rows that it receives from this rank in the forward pass, and the rows that this rank receives from it.
    fn peers(&self) -> impl Iterator<Item = (u32, [Range<isize>; 2])> {
        let sent = |from: usize, to: usize| self.own.rows_to_send(from, self.reached, to);
        let with_peer = move |peer: usize| (peer as u32, [sent(self.rank, peer), sent(peer, self.rank)]);
        (0..self.own.of_rank.len()).filter(|peer| *peer != self.rank).map(with_peer)
    }
}

/// A range of rows of an activation, the same range for each picture, or of the activation's gradient, in memory.
struct Lines {
    at: Operand,
    rows: Range<isize>,
    row_bytes: usize,
}

impl Lines {
    fn operand(&self, pictures: usize) -> Operand {
        self.at.part(0, pictures * self.rows.len() * self.row_bytes)
    }

    /// The memory of some of the rows of each picture, as messages to or from `peer`.
    fn pieces(
        &self,
        peer: u32,
        rows: &Range<isize>,
        pictures: usize,
    ) -> impl Iterator<Item = (u32, Operand)> {
        let pictures = if rows.is_empty() { 0 } else { pictures };
        let (first, bytes) = (rows.start - self.rows.start, rows.len() * self.row_bytes);
        let offset = move |picture: usize| (picture * self.rows.len() + first as usize) * self.row_bytes;
        (0..pictures).map(move |picture| (peer, self.at.part(offset(picture), bytes)))
    }
}

impl<'a> GraphEmitter<'a> {
    /// Reads whole pictures of the next micro-batch, and copies this rank's rows.
    pub(super) fn begin_with_own_rows(&mut self, phase: Phase, input: Input) -> Result {
        let (plan, tensor) = (self.plan, self.plan.network.input());
        let side = plan.network.image_size;
        let row_bytes = self.row_bytes(tensor);
        let at = self.alloc_bytes(plan.batch * side * row_bytes, Content::Rows);
        self.read_pictures(phase, input, at);
        let own = self.alloc_activation(tensor);
        let whole = Lines { at, rows: 0..side as isize, row_bytes };
        let own = self.lines(tensor, own)?;
        self.take_rows(&whole, &own, 0.0);
        self.free_now(at);
        Ok(())
    }

    /// Extends an activation by the rows of other ranks that windows reach.
    pub(super) fn halo_forward(&mut self, input: TensorId, output: TensorId, lowest: bool) -> Result {
        let (x, y) = (self.activation(input)?, self.alloc_activation(output));
        let (x, y, halo) = (self.lines(input, x)?, self.lines(output, y)?, self.halo(input, output)?);
        self.take_rows(&x, &y, if lowest { f32::NEG_INFINITY } else { 0.0 });
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (peer, [rows_for_peer, rows_of_peer]) in halo.peers() {
            sends.extend(x.pieces(peer, &rows_for_peer, self.plan.batch));
            receives.extend(y.pieces(peer, &rows_of_peer, self.plan.batch));
        }
        self.exchange_rows(sends, receives);
        Ok(())
    }

    /// In training: frees the inputs and outputs of [`FusedOp::Halo`] that operation `index` is the last to read, if the backward pass does
    /// not read them: activations before their extension, and inputs of poolings.
    pub(super) fn drop_rows(&mut self, index: usize) {
        let ops = &self.plan.ops;
        // The next operation computes this batch norm, and then reads the batch norm's inputs.
        if matches!(&ops[index], FusedOp::Norm(norm) if norm.forward != NormForward::Here) {
            return;
        }
        let is_of_halo = |tensor: TensorId| {
            let of_halo = |op: &FusedOp| matches!(op, FusedOp::Halo { input, output, .. } if [*input, *output].contains(&tensor));
            ops.iter().any(of_halo)
        };
        let is_read_later = |tensor: TensorId| ops[index + 1..].iter().any(|op| op.reads().contains(&tensor));
        for tensor in ops[index].reads() {
            if self.remaining_readers[tensor] == 0 && is_of_halo(tensor) && !is_read_later(tensor) {
                self.drop_activation(tensor);
            }
        }
    }

    /// The gradient of this rank's rows: the sum of the gradients from this rank's windows and from other ranks' windows.
    pub(super) fn halo_backward(&mut self, input: TensorId, output: TensorId) -> Result {
        let batch = self.plan.batch;
        let (from, to) = (self.gradient(output)?, self.alloc_gradient(input));
        let (dy, dx, halo) = (self.lines(output, from)?, self.lines(input, to)?, self.halo(input, output)?);
        self.take_rows(&dy, &dx, 0.0);
        let (mut sends, mut receives, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for (peer, [rows_for_peer, rows_of_peer]) in halo.peers() {
            sends.extend(dy.pieces(peer, &rows_of_peer, batch));
            if !rows_for_peer.is_empty() {
                let at = self.alloc_bytes(batch * rows_for_peer.len() * dx.row_bytes, Content::Rows);
                let part = Lines { at, rows: rows_for_peer.clone(), ..dx };
                receives.extend(part.pieces(peer, &rows_for_peer, batch));
                parts.push(part);
            }
        }
        self.exchange_rows(sends, receives);
        for part in parts {
            let add = ops::AddRows {
                part: part.operand(batch),
                to,
                pictures: batch,
                length: dx.row_bytes / self.plan.dtype.size(),
                rows: part.rows.len(),
                to_rows: dx.rows.len(),
                first: (part.rows.start - dx.rows.start) as usize,
            };
            self.push(self.facts.ops.add_rows(add));
            self.free_now(part.at);
        }
        self.free(from);
        Ok(())
    }

    /// The mean over all rows, from each rank's mean over its own rows.
    pub(super) fn mean_of_rows_forward(&mut self, input: TensorId, output: TensorId) -> Result {
        let (x, y) = (self.activation(input)?, self.alloc_activation(output));
        let (dtype, values) = (self.plan.dtype, self.plan.batch * self.plan.values_per_picture(input));
        let share = self.plan.network.share_of_rows(input);
        self.push(self.facts.ops.scale_values([x, y], values as u64, share));
        let mean = y.part(0, values * dtype.size());
        self.commands.push(Command::all_reduce(StreamId::Main, Group::Height, mean, dtype));
        Ok(())
    }

    /// The gradient of this rank's mean, from this rank's part (1 / ranks) of the gradient of the mean over all rows.
    pub(super) fn mean_of_rows_backward(&mut self, input: TensorId, output: TensorId) -> Result {
        let (dy, dx) = (self.gradient(output)?, self.alloc_gradient(input));
        let ranks = self.plan.network.rows(self.plan.network.input()).map_or(1, |rows| rows.of_rank.len());
        let factor = self.plan.network.share_of_rows(input) * ranks as f32;
        let values = (self.plan.batch * self.plan.values_per_picture(input)) as u64;
        self.push(self.facts.ops.scale_values([dy, dx], values, factor));
        self.free(dy);
        Ok(())
    }

    /// The rows of a tensor that each rank has, and this rank's index in the height group.
    fn rows(&self, tensor: TensorId) -> Result<(&'a Rows, usize)> {
        let network = &self.plan.network;
        match (network.rows(tensor), &network.part) {
            (Some(rows), Some(part)) => Ok((rows, part.height_rank)),
            _ => Err(EngineError::Parameters(format!("ranks do not share the rows of tensor {tensor}"))),
        }
    }

    fn halo(&self, input: TensorId, output: TensorId) -> Result<Halo<'a>> {
        let ((own, rank), (reached, _)) = (self.rows(input)?, self.rows(output)?);
        Ok(Halo { own, reached, rank })
    }

    /// An activation of `tensor`, or its gradient.
    fn lines(&self, tensor: TensorId, at: Operand) -> Result<Lines> {
        let (rows, rank) = self.rows(tensor)?;
        Ok(Lines { at, rows: rows.of_rank[rank].clone(), row_bytes: self.row_bytes(tensor) })
    }

    fn row_bytes(&self, tensor: TensorId) -> usize {
        let rows = self.plan.network.tensors[tensor].height.max(1);
        self.plan.values_per_picture(tensor) / rows * self.plan.dtype.size()
    }

    /// Copies the rows of `to` that `from` has, and fills the remaining rows.
    fn take_rows(&mut self, from: &Lines, to: &Lines, fill: f32) {
        let take = ops::TakeRows {
            from: from.at,
            to: to.at,
            pictures: self.plan.batch,
            length: to.row_bytes / self.plan.dtype.size(),
            from_rows: from.rows.len(),
            to_rows: to.rows.len(),
            offset: to.rows.start - from.rows.start,
            fill,
        };
        self.push(self.facts.ops.take_rows(take));
    }

    fn exchange_rows(&mut self, sends: Messages, receives: Messages) {
        if !sends.is_empty() || !receives.is_empty() {
            self.exchange(Group::Height, sends, receives, self.plan.dtype);
        }
    }
}
