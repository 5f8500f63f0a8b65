//! Evaluates embeddings by k nearest neighbours, as Wu et al. 2018 (arXiv 1805.01978) and DINO do: each validation picture
//! gets the class for which its `k` most similar training pictures vote. Similarity is the cosine of embeddings. Votes are
//! weighted by `exp(similarity / 0.07)`, or counted.

use super::{
    evaluate::{describe_validation, open_dataset},
    model::{BATCH, Model, Output},
};
use lockstep_data::{DataError, loader::Batch};
use lockstep_kernels::nearest::{Nearest, Neighbour};
use lockstep_protocol::inspect::{EvaluateModel, NearestNeighbours};
use std::{path::Path, time::Instant};

const TEMPERATURE: f64 = 0.07;

pub(super) fn evaluate(request: &EvaluateModel, k: u32) -> Result<NearestNeighbours, String> {
    let start = Instant::now();
    let mut model = Model::open(Path::new(&request.model), Output::Embedding)?;
    let (data, listed) = open_dataset(request, &model)?;
    let (mut queries, mut query_labels) = (Vec::new(), Vec::new());
    let (rank, world_size, threads) = (0, 1, 1);
    for batch in data.validation(rank, world_size, BATCH, threads) {
        let (embeddings, labels) = embed(&mut model, batch, "validation")?;
        queries.extend(embeddings);
        query_labels.extend(labels);
    }
    let mut search = Nearest::new(queries, model.width, k.max(1) as usize);
    let mut gallery = 0;
    for batch in data.gallery(BATCH, threads) {
        let (embeddings, labels) = embed(&mut model, batch, "training")?;
        search.add(&embeddings, &labels);
        gallery += labels.len() as u64;
    }
    let accuracy = |weight: fn(f32) -> f64| {
        let voted = search.neighbours().iter().map(|nearest| vote(nearest, weight));
        voted.zip(&query_labels).filter(|(voted, label)| *voted == Some(**label)).count() as f64
            / query_labels.len().max(1) as f64
    };
    let (validation, _, note) = describe_validation(Path::new(&request.model), &data, &request.spec.data);
    Ok(NearestNeighbours {
        k,
        gallery,
        samples: query_labels.len() as u64,
        validation,
        listed,
        note,
        weighted: accuracy(|similarity| (f64::from(similarity) / TEMPERATURE).exp()),
        majority: accuracy(|_| 1.0),
        secs: start.elapsed().as_secs_f64(),
    })
}

/// The embeddings of a batch, each scaled to a Euclidean norm of 1, and the labels.
fn embed(
    model: &mut Model,
    batch: Result<Batch, DataError>,
    split: &str,
) -> Result<(Vec<f32>, Vec<u32>), String> {
    let mut batch = batch.map_err(|e| e.to_string())?;
    // See [`Model::outputs`].
    let zeros = vec![0; batch.labels.len()];
    let labels = std::mem::replace(&mut batch.labels, zeros);
    let mut all = Vec::with_capacity(labels.len() * model.width);
    for (embedding, index) in model.outputs(&batch)?.into_iter().zip(&batch.indices) {
        let embedding = embedding.map_err(|e| format!("{split} picture {index} {e}"))?;
        let norm = embedding.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let scale = if norm > 0.0 { 1.0 / norm } else { 0.0 };
        all.extend(embedding.iter().map(|v| (f64::from(*v) * scale) as f32));
    }
    Ok((all, labels))
}

/// The class with the largest sum of votes. If sums are equal, the class of the nearer neighbour.
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
    fn votes_are_weighted_by_similarity_or_counted() {
        let nearest =
            [(1.0, 7), (0.8, 3), (0.6, 3)].map(|(similarity, label)| Neighbour { similarity, label });
        let weight = |similarity: f32| (f64::from(similarity) / TEMPERATURE).exp();
        // e^14.29 = 1,600,000 for class 7; e^11.43 + e^8.57 = 97,000 for class 3.
        assert_eq!(vote(&nearest, weight), Some(7));
        assert_eq!(vote(&nearest, |_| 1.0), Some(3));
        assert_eq!(vote(&nearest[..2], |_| 1.0), Some(7), "of equal votes, the nearer class");
        assert_eq!(vote(&[], |_| 1.0), None);
    }
}
