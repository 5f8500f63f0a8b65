//! Evaluates embeddings by k nearest neighbours, as Wu et al. 2018 (arXiv 1805.01978) and DINO do: each validation picture gets the class
//! for which its `k` most similar training pictures vote. Similarity is the cosine of embeddings. A vote counts `exp(similarity / 0.07)`, or 1.

use super::{
    evaluate::{compare, open_dataset},
    model::{BATCH, Model, Output},
};
use lockstep_data::{DataError, loader::Batch};
use lockstep_kernels::linear;
use lockstep_protocol::inspect::{EvaluateModel, NearestNeighbours};
use rayon::prelude::*;
use std::{path::Path, time::Instant};

/// The temperature of weighted votes.
const TEMPERATURE: f64 = 0.07;
/// Validation pictures that a thread compares with a batch of training pictures at a time.
const BLOCK: usize = 512;

pub(super) fn evaluate(request: &EvaluateModel, k: u32) -> Result<NearestNeighbours, String> {
    let start = Instant::now();
    let mut model = Model::open(Path::new(&request.model), Output::Embedding)?;
    let (data, listed) = open_dataset(request, &model)?;
    let (mut queries, mut classes) = (Vec::new(), Vec::new());
    for batch in data.validation(0, 1, BATCH, 1) {
        let (embeddings, labels) = embed(&mut model, batch, "validation")?;
        queries.extend(embeddings);
        classes.extend(labels);
    }
    let mut search = Search::new(queries, model.width, k.max(1) as usize);
    let mut gallery = 0;
    for batch in data.gallery(BATCH, 1) {
        let (embeddings, labels) = embed(&mut model, batch, "training")?;
        search.add(&embeddings, &labels);
        gallery += labels.len() as u64;
    }
    let accuracy = |weight: fn(f32) -> f64| {
        let voted = search.nearest.iter().map(|nearest| vote(nearest, weight));
        voted.zip(&classes).filter(|(voted, class)| *voted == Some(**class)).count() as f64
            / classes.len().max(1) as f64
    };
    let (validation, _, note) = compare(Path::new(&request.model), &data, &request.spec.data);
    Ok(NearestNeighbours {
        k,
        gallery,
        samples: classes.len() as u64,
        validation,
        listed,
        note,
        weighted: accuracy(|similarity| (f64::from(similarity) / TEMPERATURE).exp()),
        majority: accuracy(|_| 1.0),
        secs: start.elapsed().as_secs_f64(),
    })
}

/// The embeddings of a batch, each of length 1, and the labels.
fn embed(
    model: &mut Model,
    batch: Result<Batch, DataError>,
    split: &str,
) -> Result<(Vec<f32>, Vec<u32>), String> {
    let mut batch = batch.map_err(|e| e.to_string())?;
    let none = vec![0; batch.labels.len()];
    let labels = std::mem::replace(&mut batch.labels, none);
    let mut all = Vec::with_capacity(labels.len() * model.width);
    for (embedding, index) in model.outputs(&batch)?.into_iter().zip(&batch.indices) {
        let embedding = embedding.map_err(|e| format!("{split} picture {index} {e}"))?;
        let norm = embedding.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let scale = if norm > 0.0 { 1.0 / norm } else { 0.0 };
        all.extend(embedding.iter().map(|v| (f64::from(*v) * scale) as f32));
    }
    Ok((all, labels))
}

/// A training picture, as a validation picture sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Neighbour {
    similarity: f32,
    label: u32,
}

/// The nearest neighbours of all queries among the training pictures so far. Training pictures are not kept.
struct Search {
    /// Embeddings, one after another.
    queries: Vec<f32>,
    width: usize,
    k: usize,
    /// By query: at most `k`, the most similar first; of equals, the earlier one first.
    nearest: Vec<Vec<Neighbour>>,
}

impl Search {
    fn new(queries: Vec<f32>, width: usize, k: usize) -> Self {
        let nearest = vec![Vec::new(); queries.len() / width];
        Self { queries, width, k, nearest }
    }

    /// Compares all queries with the `embeddings` of pictures that have these `labels`.
    fn add(&mut self, embeddings: &[f32], labels: &[u32]) {
        let k = self.k;
        let blocks = self.queries.par_chunks(BLOCK * self.width).zip(self.nearest.par_chunks_mut(BLOCK));
        blocks.for_each(|(queries, nearest)| {
            let mut similarities = vec![0.0; labels.len() * nearest.len()];
            linear::forward(embeddings, queries, &vec![0.0; nearest.len()], &mut similarities);
            for (row, label) in similarities.chunks_exact(nearest.len()).zip(labels) {
                for (nearest, similarity) in nearest.iter_mut().zip(row) {
                    insert(nearest, k, Neighbour { similarity: *similarity, label: *label });
                }
            }
        });
    }
}

fn insert(nearest: &mut Vec<Neighbour>, k: usize, new: Neighbour) {
    if nearest.len() == k && nearest.last().is_none_or(|last| last.similarity >= new.similarity) {
        return;
    }
    nearest.truncate(k - 1);
    let place = nearest.partition_point(|of| of.similarity >= new.similarity);
    nearest.insert(place, new);
}

/// The class with the largest sum of votes; of equals, the class of the nearer neighbour.
fn vote(nearest: &[Neighbour], weight: impl Fn(f32) -> f64) -> Option<u32> {
    let mut votes: Vec<(u32, f64)> = Vec::new();
    for Neighbour { similarity, label } in nearest {
        match votes.iter_mut().find(|(class, _)| class == label) {
            Some((_, sum)) => *sum += weight(*similarity),
            None => votes.push((*label, weight(*similarity))),
        }
    }
    votes.into_iter().rev().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(class, _)| class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_vote_by_similarity_or_by_number() {
        // Of the first query: class 7 at a cosine of 1, class 3 at 0.8 and 0.6, class 7 at 0 and class 9 at -1.
        let queries = vec![1.0, 0.0, 0.0, 1.0];
        let mut search = Search::new(queries, 2, 3);
        search.add(&[0.6, 0.8, 0.0, 1.0, 1.0, 0.0], &[3, 7, 7]);
        search.add(&[-1.0, 0.0, 0.8, 0.6], &[9, 3]);
        let found: Vec<Vec<_>> =
            search.nearest.iter().map(|of| of.iter().map(|n| (n.similarity, n.label)).collect()).collect();
        assert_eq!(found[0], [(1.0, 7), (0.8, 3), (0.6, 3)]);
        assert_eq!(found[1], [(1.0, 7), (0.8, 3), (0.6, 3)]);
        let weight = |similarity: f32| (f64::from(similarity) / TEMPERATURE).exp();
        // e^14.29 = 1,600,000 for class 7; e^11.43 + e^8.57 = 97,000 for class 3.
        assert_eq!(vote(&search.nearest[0], weight), Some(7));
        assert_eq!(vote(&search.nearest[0], |_| 1.0), Some(3));
        assert_eq!(vote(&search.nearest[0][..2], |_| 1.0), Some(7), "of equals, the nearer one");
        assert_eq!(vote(&[], |_| 1.0), None);
        // Of equals the earlier one stays, also across the blocks of a larger number of queries.
        let mut search = Search::new([1.0, 0.0].repeat(2 * BLOCK + 1), 2, 1);
        search.add(&[0.0, 1.0, 1.0, 0.0], &[1, 2]);
        search.add(&[1.0, 0.0], &[3]);
        assert!(search.nearest.iter().all(|of| *of == [Neighbour { similarity: 1.0, label: 2 }]));
    }
}
