//! The mesh of ranks: data x height x model.

/// Sizes of the axes. Ranks are numbered with `model` fastest, so that the ranks of a model group are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// Copies of the network.
    pub data: usize,
    /// Ranks that share the rows of each picture.
    pub height: usize,
    /// Ranks that share one copy.
    pub model: usize,
}

impl Mesh {
    pub fn ranks(self) -> usize {
        self.data * self.height * self.model
    }

    /// The place of a rank on the axis `model`.
    pub fn model_rank(self, rank: usize) -> usize {
        rank % self.model
    }

    /// The place of a rank on the axis `height`.
    pub fn height_rank(self, rank: usize) -> usize {
        rank / self.model % self.height
    }

    /// The place of a rank on the axis `data`.
    pub fn data_rank(self, rank: usize) -> usize {
        rank / (self.model * self.height)
    }
}
