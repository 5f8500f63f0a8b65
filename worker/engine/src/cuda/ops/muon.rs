//! Muon over flat buffers; `muon.cu`.

use super::{Arg, CONTROL, FlatParameters, Kernel, Operand, Ops, Rates, SCALER, kernel, plain};
use crate::cuda::layout::Filter;
use lockstep_kernels::orthogonal::STEPS;

/// Number of rows, and of columns, of a tile of a product.
const TILE: usize = 64;
/// Number of threads that compute a tile.
const THREADS: u32 = 128;

/// One step of all weights. Filters are updated by orthogonalised momentum, all other weights by SGD with Nesterov momentum.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Muon<'a> {
    /// Operands of the whole flat buffers: `muon.cu` addresses them by the offsets in `filters` and segments.
    pub(in crate::cuda) flat: FlatParameters,
    /// The momentum buffers.
    pub(in crate::cuda) velocity: Operand,
    pub(in crate::cuda) momentum: f32,
    pub(in crate::cuda) filter_momentum: f32,
    /// The segments of all parameters, and memory for filters' norms.
    pub(in crate::cuda) rates: Rates,
    /// Array of `Filter` of `muon.cu`.
    pub(in crate::cuda) filters: Operand,
    /// Array of `Policy` of `muon.cu`, one for each parameter.
    pub(in crate::cuda) policies: Operand,
    /// The same filters on the host, for the grids.
    pub(in crate::cuda) host_filters: &'a [Filter],
    /// bfloat16, at the offsets of the matrices in the flat buffers: the filters before and after an iteration.
    pub(in crate::cuda) iterates: [Operand; 2],
    /// bfloat16: Gram matrices, and polynomials of them.
    pub(in crate::cuda) grams: [Operand; 2],
}

impl Ops {
    /// One step of all weights by Muon. Runs after [`Ops::gradient_norm`]. Traffic: weights and velocity twice, gradients once, and in each
    /// iteration the filters in 16 bits about four times.
    pub(in crate::cuda) fn muon(&self, p: Muon<'_>) -> Vec<Kernel> {
        let (flat, rates, scaler) = (p.flat, p.rates, Arg::In(SCALER));
        let (filters, count) = (Arg::In(p.filters), p.host_filters.len() as u32);
        // One block per tile of the largest filter's matrix, for each filter.
        let tiles = |sides: &dyn Fn(&Filter) -> [usize; 2]| {
            let of_filter =
                |filter: &Filter| sides(filter).map(|side| side.div_ceil(TILE)).iter().product::<usize>();
            plain([p.host_filters.iter().map(of_filter).max().unwrap_or(0) as u32, count, 1], [THREADS, 1, 1])
        };
        let of_gram = tiles(&|filter| [filter.side(); 2]);
        let of_matrix = tiles(&|filter| [filter.rows, filter.columns]);
        let [gram, polynomial] = p.grams;

        let mut args = vec![Arg::In(flat.weights), Arg::InOut(p.velocity), Arg::Out(p.iterates[0])];
        args.extend(flat.gradients.args());
        args.extend([scaler, Arg::F32(p.filter_momentum), filters, Arg::Out(rates.squares)]);
        let blocks = rates.norm_blocks()[0];
        let mut kernels = vec![kernel("muon_prepare", plain([blocks, count, 1], [256, 1, 1]), args)];
        let args = [scaler, Arg::In(rates.squares), filters, Arg::U32(count), Arg::Out(rates.per_parameter)];
        kernels.push(kernel("muon_norms", plain([count.div_ceil(128).max(1), 1, 1], [128, 1, 1]), args));
        for step in 0..STEPS {
            let [from, to] = [step, step + 1].map(|number| p.iterates[number % 2]);
            let (is_first, norms) = (Arg::U32(u32::from(step == 0)), Arg::In(rates.per_parameter));
            let args = [scaler, Arg::In(from), filters, norms, is_first, Arg::Out(gram)];
            kernels.push(kernel("muon_gram", of_gram, args));
            let args = [scaler, Arg::In(gram), filters, Arg::Out(polynomial)];
            kernels.push(kernel("muon_polynomial", of_gram, args));
            let args = [scaler, Arg::In(from), Arg::In(polynomial), filters, norms, is_first, Arg::Out(to)];
            kernels.push(kernel("muon_multiply", of_matrix, args));
        }

        let [weights, low_precision] = flat.weights_args();
        let mut args = vec![weights, Arg::InOut(p.velocity), low_precision];
        args.extend(flat.gradients.args());
        args.extend([Arg::In(CONTROL), scaler, Arg::F32(p.momentum)]);
        args.extend([Arg::In(rates.segments), Arg::U32(rates.count)]);
        args.extend([p.policies, rates.per_parameter, p.iterates[STEPS % 2]].map(Arg::In));
        kernels.push(kernel("muon_update", self.per_item(flat.gradients.length / 8, 6), args));
        kernels
    }
}
