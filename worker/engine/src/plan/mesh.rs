//! The mesh of ranks: stage x data x height x model.

use std::fmt;

/// Sizes of the axes. In rank numbers, `model` varies fastest, so that the ranks of a model group are neighbours, and `stage` slowest,
/// because stages exchange the fewest bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// Number of pipeline stages; each rank computes one stage.
    pub stage: usize,
    /// Number of copies of the network.
    pub data: usize,
    /// Number of ranks that share the rows of each picture.
    pub height: usize,
    /// Number of ranks that share one copy of the network.
    pub model: usize,
}

impl Mesh {
    pub fn ranks(self) -> usize {
        self.stage * self.ranks_of_stage()
    }

    /// Number of ranks of one stage.
    pub fn ranks_of_stage(self) -> usize {
        self.data * self.height * self.model
    }

    /// Number of groups of ranks that read different pictures. Ranks that share rows, and the stages of a pipeline, read the same
    /// pictures.
    pub fn readers(self) -> usize {
        self.data * self.model
    }

    /// Index of `rank`'s group among the groups that [`Mesh::readers`] counts.
    pub fn reader(self, rank: usize) -> usize {
        self.data_rank(rank) * self.model + self.model_rank(rank)
    }

    /// Index of the model group of `rank`: the ranks that share one copy of the network.
    pub fn model_group(self, rank: usize) -> usize {
        rank / self.model
    }

    /// Index of the height group of `rank`: the ranks that share the rows of the same pictures.
    pub fn height_group(self, rank: usize) -> usize {
        rank / (self.height * self.model) * self.model + self.model_rank(rank)
    }

    /// Coordinate of a rank on the axis `model`.
    pub fn model_rank(self, rank: usize) -> usize {
        rank % self.model
    }

    /// Coordinate of a rank on the axis `height`.
    pub fn height_rank(self, rank: usize) -> usize {
        rank / self.model % self.height
    }

    /// Coordinate of a rank on the axis `data`.
    pub fn data_rank(self, rank: usize) -> usize {
        rank / (self.model * self.height) % self.data
    }

    /// Coordinate of a rank on the axis `stage`.
    pub fn stage_rank(self, rank: usize) -> usize {
        rank / self.ranks_of_stage()
    }
}

/// `2 (data) x 1 (height) x 2 (model) ranks`.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stage, data, height, model } = self;
        if *stage > 1 {
            write!(f, "{stage} (pipeline) x ")?;
        }
        write!(f, "{data} (data) x {height} (height) x {model} (model) ranks")
    }
}
