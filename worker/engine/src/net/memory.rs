//! Number of values per picture that a network keeps from the forward to the backward pass.

use super::{Network, Op};
use std::iter;

impl Network {
    /// Number of values kept for one picture without recomputation: the picture itself, and the outputs of convolutions,
    /// ReLUs and poolings. The input of a ReLU is not kept in addition to the ReLU's output.
    pub fn kept_values(&self) -> u64 {
        let is_kept =
            |op: &&Op| matches!(op, Op::Conv { .. } | Op::Relu { .. } | Op::Gelu { .. } | Op::MaxPool { .. });
        let outputs = self.ops.iter().filter(is_kept).map(Op::output);
        let tensors = iter::once(self.input()).chain(outputs);
        tensors.map(|tensor| self.tensors[tensor].len() as u64).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use crate::net::resnet;
    use lockstep_protocol::spec::Arch;

    #[test]
    fn kept_values_grow_with_the_number_of_pixels() {
        let network = |side: usize| resnet::of(Arch::ResNet20, side, 10);
        // By hand: 1 + 6 convolutions of 16 channels at 32 x 32, 6 and a shortcut of 32 channels at 16 x 16, 6 and a shortcut of
        // 64 channels at 8 x 8; a ReLU after each convolution that is not a shortcut.
        let convolutions = 7 * 16 * 1024 + 7 * 32 * 256 + 7 * 64 * 64;
        let relus = 7 * 16 * 1024 + 6 * 32 * 256 + 6 * 64 * 64;
        let values = 3 * 1024 + convolutions + relus;
        assert_eq!(network(32).kept_values(), values);
        assert_eq!(network(64).kept_values(), 4 * values);
    }
}
