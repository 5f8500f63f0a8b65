//! Number of values per picture that a network keeps from the forward to the backward pass.

use super::{Network, Op};

impl Network {
    /// Number of values of all convolutions' outputs for one picture. Every engine keeps them for batch norm's backward pass.
    pub(crate) fn convolution_values(&self) -> u64 {
        self.values_of(|op| matches!(op, Op::Conv { .. }))
    }

    /// Number of values kept for one picture without recomputation: the picture itself, and the outputs of convolutions,
    /// ReLUs and poolings. The input of a ReLU is not kept in addition to the ReLU's output.
    pub fn kept_values(&self) -> u64 {
        let picture = self.tensors[self.input()].len() as u64;
        let outputs = self.values_of(|op| {
            matches!(op, Op::Conv { .. } | Op::Relu { .. } | Op::Gelu { .. } | Op::MaxPool { .. })
        });
        picture.saturating_add(outputs)
    }

    fn values_of(&self, counted: impl Fn(&Op) -> bool) -> u64 {
        let outputs = self.ops.iter().filter(|op| counted(op)).map(Op::output);
        outputs.map(|tensor| self.tensors[tensor].len() as u64).fold(0, u64::saturating_add)
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
        assert_eq!(network(32).convolution_values(), convolutions);
        let relus = 7 * 16 * 1024 + 6 * 32 * 256 + 6 * 64 * 64;
        assert_eq!(network(32).kept_values(), 3 * 1024 + convolutions + relus);
        assert_eq!(network(64).convolution_values(), 4 * convolutions);
    }
}
