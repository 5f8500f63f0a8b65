//! Batch normalisation with the shortcut's addition and the ReLU; see `norm_forward.cu`, `norm_backward.cu`.
//!
//! Two ways, picked by size ([`Ops::small`]): one launch for statistics and application together, where a
//! cluster of up to 8 blocks owns 16 channels and keeps its rows in registers or the first-level cache; or two
//! launches, each at the memory's speed.
//!
//! Past 400 lines because the operations of one layer and their fields stay together.

use super::{Arg, CudaError, Geometry, Ops, Ptr, Stream, plain};

/// An activation: rows = pictures x pixels.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct Shape {
    pub(in crate::engine::cuda) pictures: u32,
    /// Of one picture: height x width.
    pub(in crate::engine::cuda) pixels: u32,
    /// A multiple of 8.
    pub(in crate::engine::cuda) channels: u32,
}

impl Shape {
    pub(super) fn rows(self) -> u32 {
        self.pictures * self.pixels
    }
}

/// One batch norm's memory: float32, a value a channel each. All multiples of 16 bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct NormSite {
    pub(in crate::engine::cuda) gamma: Ptr,
    pub(in crate::engine::cuda) beta: Ptr,
    /// May be 0: then the running statistics stay as they are.
    pub(in crate::engine::cuda) running_mean: Ptr,
    pub(in crate::engine::cuda) running_var: Ptr,
    /// Written by the forward pass, read by backward.
    pub(in crate::engine::cuda) mean: Ptr,
    pub(in crate::engine::cuda) inv_std: Ptr,
    /// y = scale x + bias; written by the forward pass, read by its application and by backward.
    pub(in crate::engine::cuda) scale: Ptr,
    pub(in crate::engine::cuda) bias: Ptr,
    /// Gradients of gamma and beta: this rank's sums, whatever is synchronised.
    pub(in crate::engine::cuda) dgamma: Ptr,
    pub(in crate::engine::cuda) dbeta: Ptr,
    /// Between backward's two passes: dx = scale g + slope x + offset.
    pub(in crate::engine::cuda) slope: Ptr,
    pub(in crate::engine::cuda) offset: Ptr,
}

/// What becomes of a rank's channel sums.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) enum Reduce {
    /// The statistics are of this rank's pictures.
    Local,
    /// The pass stops with the sums, float32 `[2, C]`, in `sums`; `norm_finish` or `norm_backward_finish`
    /// goes on from there.
    Leave { sums: Ptr },
    /// Ranks add theirs through each other's memory inside the kernel (`peers.cu`). `peers`: struct
    /// Peers in device memory. `at`: this site's byte offset in every rank's exchange buffer, with room for
    /// 2 slots x ranks x 2 C values of 8 bytes. `sequence`: `u32 [2 C]`. Buffers and sequences are zeros at first and are
    /// never reset; forward and backward of a site may share them. All ranks launch the same shapes.
    Exchange { peers: Ptr, at: u64, sequence: Ptr },
}

impl Reduce {
    fn args(self) -> [Arg; 5] {
        let (mode, peers, at, sequence, sums) = match self {
            Reduce::Local => (0, 0, 0, 0, 0),
            Reduce::Leave { sums } => (1, 0, 0, 0, sums),
            Reduce::Exchange { peers, at, sequence } => (2, peers, at, sequence, 0),
        };
        [Arg::U32(mode), Arg::Ptr(peers), Arg::U64(at), Arg::Ptr(sequence), Arg::Ptr(sums)]
    }
}

/// What is added before the ReLU.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) enum Shortcut {
    None,
    /// T, of the same shape.
    Plain(Ptr),
    /// A projection's convolution output, through its batch norm's scale and bias (float32 a channel each).
    Norm {
        x: Ptr,
        scale: Ptr,
        bias: Ptr,
    },
}

impl Shortcut {
    pub(super) fn args(self) -> [Arg; 3] {
        let (x, scale, bias) = match self {
            Shortcut::None => (0, 0, 0),
            Shortcut::Plain(x) => (x, 0, 0),
            Shortcut::Norm { x, scale, bias } => (x, scale, bias),
        };
        [Arg::Ptr(x), Arg::Ptr(scale), Arg::Ptr(bias)]
    }
}

/// y = relu(batch_norm(x) + shortcut).
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct NormForward {
    pub(in crate::engine::cuda) x: Ptr,
    pub(in crate::engine::cuda) y: Ptr,
    pub(in crate::engine::cuda) shortcut: Shortcut,
    pub(in crate::engine::cuda) relu: bool,
    /// One bit a value, y > 0, bit k of byte `[row, group]` for channel 8 group + k; may be 0.
    pub(in crate::engine::cuda) mask: Ptr,
    pub(in crate::engine::cuda) control: Ptr,
    pub(in crate::engine::cuda) shape: Shape,
    pub(in crate::engine::cuda) site: NormSite,
    pub(in crate::engine::cuda) reduce: Reduce,
}

/// [`NormForward`] with scale and bias known: inference, or the second pass.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct NormApply {
    pub(in crate::engine::cuda) x: Ptr,
    pub(in crate::engine::cuda) scale: Ptr,
    pub(in crate::engine::cuda) bias: Ptr,
    pub(in crate::engine::cuda) y: Ptr,
    pub(in crate::engine::cuda) shortcut: Shortcut,
    pub(in crate::engine::cuda) relu: bool,
    /// As in [`NormForward`]; may be 0.
    pub(in crate::engine::cuda) mask: Ptr,
    pub(in crate::engine::cuda) shape: Shape,
}

/// Scale and bias from running statistics.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct NormFold {
    pub(in crate::engine::cuda) gamma: Ptr,
    pub(in crate::engine::cuda) beta: Ptr,
    pub(in crate::engine::cuda) running_mean: Ptr,
    pub(in crate::engine::cuda) running_var: Ptr,
    pub(in crate::engine::cuda) scale: Ptr,
    pub(in crate::engine::cuda) bias: Ptr,
    /// One batch norm's, or all of them where each of the buffers is contiguous over them.
    pub(in crate::engine::cuda) channels: u32,
}

/// The gradient of y, all T `[rows, C]` unless said otherwise, and what the ReLU does to it.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) enum Gradient {
    /// No ReLU.
    All { dy: Ptr },
    /// A ReLU right after the batch norm: what passed is computed again. `more` is added; may be 0.
    Relu { dy: Ptr, more: Ptr },
    /// A ReLU behind an addition: its mask. `more` is added; may be 0.
    Mask { dy: Ptr, more: Ptr, mask: Ptr },
    /// The same, from a global average pooling's gradient: `dy` is T `[pictures, C]`.
    MaskPooled { dy: Ptr, mask: Ptr },
}

/// Backward of [`NormForward`].
#[derive(Debug, Clone, Copy)]
pub(in crate::engine::cuda) struct NormBackward {
    /// The forward pass's input.
    pub(in crate::engine::cuda) x: Ptr,
    pub(in crate::engine::cuda) gradient: Gradient,
    /// The gradient before the ReLU, which the shortcut needs too; may be 0, may be dy's memory.
    pub(in crate::engine::cuda) dz: Ptr,
    /// The gradient of x; may be dy's memory.
    pub(in crate::engine::cuda) dx: Ptr,
    pub(in crate::engine::cuda) control: Ptr,
    pub(in crate::engine::cuda) shape: Shape,
    pub(in crate::engine::cuda) site: NormSite,
    /// Adds to dgamma and dbeta instead of replacing them.
    pub(in crate::engine::cuda) accumulate: bool,
    pub(in crate::engine::cuda) reduce: Reduce,
}

/// Kernel names by kind of gradient: (sums, apply, both at once).
impl Gradient {
    fn names(self) -> [&'static str; 3] {
        match self {
            Gradient::All { .. } => {
                ["norm_backward_sums_all", "norm_backward_apply_all", "norm_backward_small_all"]
            }
            Gradient::Relu { more: 0, .. } => [
                "norm_backward_sums_recompute",
                "norm_backward_apply_recompute",
                "norm_backward_small_recompute",
            ],
            Gradient::Relu { .. } => [
                "norm_backward_sums_recompute_added",
                "norm_backward_apply_recompute_added",
                "norm_backward_small_recompute_added",
            ],
            Gradient::Mask { more: 0, .. } => {
                ["norm_backward_sums_bits", "norm_backward_apply_bits", "norm_backward_small_bits"]
            }
            Gradient::Mask { .. } => [
                "norm_backward_sums_bits_added",
                "norm_backward_apply_bits_added",
                "norm_backward_small_bits_added",
            ],
            Gradient::MaskPooled { .. } => [
                "norm_backward_sums_bits_pooled",
                "norm_backward_apply_bits_pooled",
                "norm_backward_small_bits_pooled",
            ],
        }
    }

    fn args(self) -> [Arg; 3] {
        let (dy, more, mask) = match self {
            Gradient::All { dy } => (dy, 0, 0),
            Gradient::Relu { dy, more } => (dy, more, 0),
            Gradient::Mask { dy, more, mask } => (dy, more, mask),
            Gradient::MaskPooled { dy, mask } => (dy, 0, mask),
        };
        [Arg::Ptr(dy), Arg::Ptr(more), Arg::Ptr(mask)]
    }
}

impl NormSite {
    pub(super) fn forward_args(&self) -> [Arg; 8] {
        [
            self.gamma,
            self.beta,
            self.running_mean,
            self.running_var,
            self.mean,
            self.inv_std,
            self.scale,
            self.bias,
        ]
        .map(Arg::Ptr)
    }

    pub(super) fn backward_args(&self, accumulate: bool) -> [Arg; 9] {
        let [mean, inv_std, scale, bias, dgamma, dbeta, slope, offset] = [
            self.mean,
            self.inv_std,
            self.scale,
            self.bias,
            self.dgamma,
            self.dbeta,
            self.slope,
            self.offset,
        ]
        .map(Arg::Ptr);
        [mean, inv_std, scale, bias, dgamma, dbeta, Arg::U32(accumulate.into()), slope, offset]
    }
}

/// `control`, pixels, rows, channels: how kernels are told an activation's shape.
pub(super) fn shape_args(control: Ptr, shape: Shape) -> [Arg; 4] {
    [Arg::Ptr(control), Arg::U32(shape.pixels), Arg::U32(shape.rows()), Arg::U32(shape.channels)]
}

/// Most rows a thread walks on the one-launch way. Longer, and two launches on all multiprocessors win: on an
/// H200 ResNet-50's step at 224 pixels and batch 32 takes 5.13 ms with 4 or 8 here and 5.43 ms with 16.
const SMALL_ROWS_PER_THREAD: u32 = 4;
/// Groups of 8 channels of a block there, at most; `SMALL_GROUPS` of `norm_forward.cu`.
const SMALL_GROUPS: u32 = 4;
/// Multiprocessors that a launch leaves free while it waits for other ranks, so that a collective on
/// another stream can run to its end beside it: NCCL uses up to 32 blocks.
const LEFT_FREE: u32 = 32;

impl Ops {
    /// The launch of the one-launch way, when it is the faster one.
    ///
    /// A cluster of `k` blocks owns 16 channels (32 where there would be too many blocks); a thread walks
    /// rows / (256 k) rows. With `waits` (ranks exchange inside the kernel) every cluster has to be resident
    /// at once, which a grid of fewer blocks than multiprocessors is, with [`LEFT_FREE`] spared.
    fn small(&self, shape: Shape, waits: bool) -> Option<Geometry> {
        let (rows, groups) = (shape.rows(), shape.channels / 8);
        let all = self.kernels.multiprocessors();
        let room = if waits { all.saturating_sub(LEFT_FREE) } else { all };
        let x = match groups {
            0 => return None,
            1 => 1,
            _ if groups.div_ceil(2) <= room => 2,
            _ => SMALL_GROUPS,
        };
        let (columns, tall) = (groups.div_ceil(x), 512 / x);
        let walked = |k: u32| rows.div_ceil(tall * k);
        let mut k = 1;
        while self.clusters && k < 8 && walked(k) > self.in_flight() && columns * k * 2 <= room {
            k *= 2;
        }
        if rows == 0 || columns * k > room || walked(k) > SMALL_ROWS_PER_THREAD {
            return None;
        }
        // At least the threads that a block's sums need: two a channel.
        let y = rows.div_ceil(k).next_power_of_two().clamp(32 / x, tall).max(16);
        Some(Geometry { cluster: k, ..plain([k, columns, 1], [x, y, 1]) })
    }

    /// Whether [`Ops::norm_forward`] takes statistics and applies them in one launch. `waits`: for other ranks, inside.
    pub(in crate::engine::cuda) fn norm_is_small(&self, shape: Shape, waits: bool) -> bool {
        self.small(shape, waits).is_some()
    }

    /// Batch norm forward by whichever way suits the shape; with [`Reduce::Leave`] only its statistics.
    ///
    /// Moves: small, x and the shortcut once, y and mask once. Otherwise x twice.
    pub(in crate::engine::cuda) fn norm_forward(
        &self,
        stream: Stream,
        p: NormForward,
    ) -> Result<(), CudaError> {
        let leave = matches!(p.reduce, Reduce::Leave { .. });
        let waits = matches!(p.reduce, Reduce::Exchange { .. });
        let Some(geometry) = self.small(p.shape, waits).filter(|_| !leave) else {
            self.norm_statistics(stream, p)?;
            if leave {
                return Ok(());
            }
            return self.norm_apply(stream, p.into());
        };
        let name = match p.shortcut {
            Shortcut::None => "norm_forward_small",
            Shortcut::Plain(_) => "norm_forward_small_add",
            Shortcut::Norm { .. } => "norm_forward_small_add_norm",
        };
        let mut args = vec![Arg::Ptr(p.x)];
        args.extend(p.shortcut.args());
        args.extend([Arg::Ptr(p.y), Arg::Ptr(p.mask), Arg::U32(p.relu.into())]);
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.forward_args());
        args.extend(p.reduce.args());
        self.launch(stream, name, geometry, &args)
    }

    /// The first pass alone: statistics of x, then what `reduce` says. Only `x`, `control`, `shape`, `site`
    /// and `reduce` are looked at. For a projection's batch norm that [`Shortcut::Norm`] applies, and where
    /// the application comes later. Moves: x once.
    pub(in crate::engine::cuda) fn norm_statistics(
        &self,
        stream: Stream,
        p: NormForward,
    ) -> Result<(), CudaError> {
        let mut args = vec![Arg::Ptr(p.x)];
        args.extend(shape_args(p.control, p.shape));
        args.extend([Arg::Ptr(self.partials()), Arg::Ptr(self.counters())]);
        args.extend(p.site.forward_args());
        args.extend(p.reduce.args());
        self.launch(stream, "norm_statistics", self.sums(p.shape.rows(), p.shape.channels), &args)
    }

    /// Goes on from sums of x and of x * x, float32 `[C]` each, over the real pictures: after an all-reduce,
    /// or from a convolution that took them along.
    pub(in crate::engine::cuda) fn norm_finish(
        &self,
        stream: Stream,
        sum: Ptr,
        square: Ptr,
        p: NormForward,
    ) -> Result<(), CudaError> {
        let mut args = vec![Arg::Ptr(sum), Arg::Ptr(square)];
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.forward_args());
        args.extend(p.reduce.args());
        self.launch(stream, "norm_finish", per_channel(p.shape.channels), &args)
    }

    /// [`Ops::norm_finish`] and [`Ops::norm_apply`] in one, where no other rank's sums are waited for. Moves: x and the
    /// shortcut once, y and mask once.
    pub(in crate::engine::cuda) fn norm_finish_apply(
        &self,
        stream: Stream,
        sum: Ptr,
        square: Ptr,
        p: NormForward,
    ) -> Result<(), CudaError> {
        let (name, resident) = match p.shortcut {
            Shortcut::None => ("norm_finish_apply", 3),
            Shortcut::Plain(_) => ("norm_finish_apply_add", 3),
            Shortcut::Norm { .. } => ("norm_finish_apply_add_norm", 2),
        };
        let mut args = vec![Arg::Ptr(p.x), Arg::Ptr(sum), Arg::Ptr(square)];
        args.extend(p.shortcut.args());
        args.extend([Arg::Ptr(p.y), Arg::Ptr(p.mask), Arg::U32(p.relu.into())]);
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.forward_args());
        let geometry = self.walk(p.shape.rows(), p.shape.channels, 256, resident);
        self.launch(stream, name, geometry, &args)
    }

    /// The second pass alone. Moves: x and the shortcut once, y and mask once.
    pub(in crate::engine::cuda) fn norm_apply(&self, stream: Stream, p: NormApply) -> Result<(), CudaError> {
        let (name, resident) = match p.shortcut {
            Shortcut::None => ("norm_apply", 3),
            Shortcut::Plain(_) => ("norm_apply_add", 3),
            Shortcut::Norm { .. } => ("norm_apply_add_norm", 2),
        };
        let mut args = vec![Arg::Ptr(p.x), Arg::Ptr(p.scale), Arg::Ptr(p.bias)];
        args.extend(p.shortcut.args());
        args.extend([
            Arg::Ptr(p.y),
            Arg::Ptr(p.mask),
            Arg::U32(p.relu.into()),
            Arg::U32(p.shape.rows()),
            Arg::U32(p.shape.channels),
        ]);
        let geometry = self.walk(p.shape.rows(), p.shape.channels, 256, resident);
        self.launch(stream, name, geometry, &args)
    }

    /// Scale and bias for inference.
    pub(in crate::engine::cuda) fn norm_fold(&self, stream: Stream, p: NormFold) -> Result<(), CudaError> {
        let args = [
            Arg::Ptr(p.gamma),
            Arg::Ptr(p.beta),
            Arg::Ptr(p.running_mean),
            Arg::Ptr(p.running_var),
            Arg::Ptr(p.scale),
            Arg::Ptr(p.bias),
            Arg::U32(p.channels),
        ];
        self.launch(stream, "norm_fold", plain([p.channels.div_ceil(256), 1, 1], [256, 1, 1]), &args)
    }

    /// Batch norm backward by whichever way suits the shape; with [`Reduce::Leave`] only its sums (and dz).
    ///
    /// Moves: small, x, dy and more once, dx (and dz) once. Otherwise x and the gradient twice; with dz, the
    /// second time dz alone.
    pub(in crate::engine::cuda) fn norm_backward(
        &self,
        stream: Stream,
        p: NormBackward,
    ) -> Result<(), CudaError> {
        let leave = matches!(p.reduce, Reduce::Leave { .. });
        let waits = matches!(p.reduce, Reduce::Exchange { .. });
        let Some(geometry) = self.small(p.shape, waits).filter(|_| !leave) else {
            self.norm_backward_sums(stream, p)?;
            if leave {
                return Ok(());
            }
            return self.norm_backward_apply(stream, p);
        };
        let [_, _, name] = p.gradient.names();
        let mut args = vec![Arg::Ptr(p.x)];
        args.extend(p.gradient.args());
        args.extend([Arg::Ptr(p.dz), Arg::Ptr(p.dx)]);
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.backward_args(p.accumulate));
        args.extend(p.reduce.args());
        self.launch(stream, name, geometry, &args)
    }

    /// The first pass alone: the sums, dgamma and dbeta, dz, then what `reduce` says. Moves: x, dy and more
    /// once, dz once if it is wanted.
    pub(in crate::engine::cuda) fn norm_backward_sums(
        &self,
        stream: Stream,
        p: NormBackward,
    ) -> Result<(), CudaError> {
        let [name, _, _] = p.gradient.names();
        let mut args = vec![Arg::Ptr(p.x)];
        args.extend(p.gradient.args());
        args.push(Arg::Ptr(p.dz));
        args.extend(shape_args(p.control, p.shape));
        args.extend([Arg::Ptr(self.partials()), Arg::Ptr(self.counters())]);
        args.extend(p.site.backward_args(p.accumulate));
        args.extend(p.reduce.args());
        self.launch(stream, name, self.sums(p.shape.rows(), p.shape.channels), &args)
    }

    /// Goes on from the sums that [`Reduce::Leave`] left, float32 `[2, C]`, after an all-reduce.
    pub(in crate::engine::cuda) fn norm_backward_finish(
        &self,
        stream: Stream,
        sums: Ptr,
        p: NormBackward,
    ) -> Result<(), CudaError> {
        let mut args = vec![Arg::Ptr(sums)];
        args.extend(shape_args(p.control, p.shape));
        args.extend(p.site.backward_args(p.accumulate));
        args.extend(p.reduce.args());
        self.launch(stream, "norm_backward_finish", per_channel(p.shape.channels), &args)
    }

    /// The second pass alone. Moves: x and the gradient (dz, if there is one) once, dx once.
    pub(in crate::engine::cuda) fn norm_backward_apply(
        &self,
        stream: Stream,
        p: NormBackward,
    ) -> Result<(), CudaError> {
        let gradient = if p.dz == 0 { p.gradient } else { Gradient::All { dy: p.dz } };
        let [_, name, _] = gradient.names();
        let mut args = vec![Arg::Ptr(p.x)];
        args.extend(gradient.args());
        args.extend([p.site.scale, p.site.bias, p.site.slope, p.site.offset, p.dx].map(Arg::Ptr));
        args.extend(shape_args(p.control, p.shape));
        self.launch(stream, name, self.walk(p.shape.rows(), p.shape.channels, 256, 2), &args)
    }
}

impl From<NormForward> for NormApply {
    fn from(p: NormForward) -> Self {
        Self {
            x: p.x,
            scale: p.site.scale,
            bias: p.site.bias,
            y: p.y,
            shortcut: p.shortcut,
            relu: p.relu,
            mask: p.mask,
            shape: p.shape,
        }
    }
}

impl Reduce {
    pub(super) fn site_args(self) -> [Arg; 5] {
        self.args()
    }
}

/// Blocks of 64 channels, two threads each, for kernels that only finish sums.
fn per_channel(channels: u32) -> Geometry {
    plain([1, channels.div_ceil(64), 1], [8, 16, 1])
}
