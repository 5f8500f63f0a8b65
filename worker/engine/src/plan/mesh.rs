//! The mesh of ranks: data x model.

/// Sizes of the axes. Ranks are numbered with `model` fastest, so that the ranks of a model group are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// Copies of the network.
    pub data: usize,
    /// Ranks that share one copy.
    pub model: usize,
}

impl Mesh {
    pub fn ranks(self) -> usize {
        self.data * self.model
    }

    /// The place of a rank on the axis `model`.
    pub fn model_rank(self, rank: usize) -> usize {
        rank % self.model
    }
}

/// The bounds of `parts` ranges that divide `count`, each a multiple of `unit`; the first ones are longer where it does not come out even.
pub(super) fn bounds(count: usize, unit: usize, parts: usize) -> Vec<usize> {
    let units = count / unit;
    (0..=parts).map(|part| (units / parts * part + part.min(units % parts)) * unit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remainders_go_to_the_first_ranks() {
        assert_eq!(bounds(10, 1, 4), [0, 3, 6, 8, 10]);
        assert_eq!(bounds(12, 4, 2), [0, 8, 12]);
        assert_eq!(bounds(8, 1, 2), [0, 4, 8]);
    }
}
