//! The nearest neighbours of vectors, by their dot products.

use crate::linear;
use rayon::prelude::*;

/// Number of queries that a thread compares with the vectors of one [`Nearest::add`] at a time.
const BLOCK: usize = 512;

/// A vector that is near to a query.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Neighbour {
    /// The dot product with the query: the cosine, if both have length 1.
    pub similarity: f32,
    pub label: u32,
}

/// The nearest neighbours of each query among the vectors that were added. The vectors are not kept.
#[derive(Debug)]
pub struct Nearest {
    /// `[queries, width]`.
    queries: Vec<f32>,
    width: usize,
    k: usize,
    neighbours: Vec<Vec<Neighbour>>,
}

impl Nearest {
    /// Prepares a search for the `k` (at least 1) nearest neighbours of each of `queries`, `[queries, width]`, among the vectors of later
    /// calls of [`Nearest::add`].
    #[must_use]
    pub fn new(queries: Vec<f32>, width: usize, k: usize) -> Self {
        let neighbours = vec![Vec::new(); queries.len() / width];
        Self { queries, width, k, neighbours }
    }

    /// At most `k` neighbours of each query, the most similar first. Equally similar neighbours are in the order in
    /// which they were added.
    #[must_use]
    pub fn neighbours(&self) -> &[Vec<Neighbour>] {
        &self.neighbours
    }

    /// Compares all queries with `vectors` `[labels, width]`.
    pub fn add(&mut self, vectors: &[f32], labels: &[u32]) {
        let k = self.k;
        let blocks = self.queries.par_chunks(BLOCK * self.width).zip(self.neighbours.par_chunks_mut(BLOCK));
        blocks.for_each(|(queries, neighbours)| {
            let mut similarities = vec![0.0; labels.len() * neighbours.len()];
            linear::forward(vectors, queries, &vec![0.0; neighbours.len()], &mut similarities);
            for (row, label) in similarities.chunks_exact(neighbours.len()).zip(labels) {
                for (neighbours, similarity) in neighbours.iter_mut().zip(row) {
                    insert(neighbours, k, Neighbour { similarity: *similarity, label: *label });
                }
            }
        });
    }
}

fn insert(neighbours: &mut Vec<Neighbour>, k: usize, new: Neighbour) {
    if neighbours.len() == k && neighbours.last().is_none_or(|last| last.similarity >= new.similarity) {
        return;
    }
    neighbours.truncate(k - 1);
    let index = neighbours.partition_point(|neighbour| neighbour.similarity >= new.similarity);
    neighbours.insert(index, new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_vectors_are_found_and_earlier_ones_precede_equals() {
        let mut nearest = Nearest::new(vec![1.0, 0.0, 0.0, 1.0], 2, 3);
        nearest.add(&[0.6, 0.8, 0.0, 1.0, 1.0, 0.0], &[3, 7, 7]);
        nearest.add(&[-1.0, 0.0, 0.8, 0.6], &[9, 3]);
        for neighbours in nearest.neighbours() {
            let found: Vec<_> = neighbours.iter().map(|n| (n.similarity, n.label)).collect();
            assert_eq!(found, [(1.0, 7), (0.8, 3), (0.6, 3)]);
        }
        // Also across the blocks of a larger number of queries.
        let mut nearest = Nearest::new([1.0, 0.0].repeat(2 * BLOCK + 1), 2, 1);
        nearest.add(&[0.0, 1.0, 1.0, 0.0], &[1, 2]);
        nearest.add(&[1.0, 0.0], &[3]);
        assert!(nearest.neighbours().iter().all(|found| *found == [Neighbour { similarity: 1.0, label: 2 }]));
    }
}
