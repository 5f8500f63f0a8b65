//! Compaction: a background task turns rows of events into chunks and rollups, so that a chart of a million points reads as
//! little as one of a thousand.

use super::{
    Metrics,
    chunk::{self, Bucket, LEVELS, capacity, width},
    compaction_queue::batch_cost,
};
use crate::store::{MetricChunk, MetricFilter, Result, Store, StoreError, quarantine};
use lockstep_protocol::{job::JobId, metric::MetricColumn};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

/// Pause between two compactions of a job: it leaves the one writer to reports of training.
const BETWEEN: Duration = Duration::from_millis(20);

/// Compacts until dropped.
pub(crate) async fn run(metrics: Arc<Metrics>) {
    // The queue is in memory: after a start, every unfinished job is queued once.
    match metrics.store.unfinished().await {
        Ok(jobs) => {
            jobs.iter().for_each(|job| metrics.queue.count(&job.id, job.ranks, batch_cost(job.ranks)))
        }
        Err(error) => tracing::warn!(%error, "metrics stay as events until more come"),
    }
    loop {
        let Some((job, cost)) = metrics.queue.take() else {
            metrics.queue.wake.notified().await;
            continue;
        };
        loop {
            match compact(metrics.store.as_ref(), &job, cost, false).await {
                Ok(true) => tokio::time::sleep(BETWEEN).await,
                // The job may have been deleted meanwhile. A failed compaction is retried after the next reports.
                Ok(false) | Err(StoreError::NotFound(_)) => break,
                Err(error) => {
                    tracing::warn!(%error, %job, "metrics could not be made into chunks");
                    break;
                }
            }
        }
    }
}

/// Compacts the next rows of a job, up to `cost`, and moves its watermark. With `rest` also fewer rows than that. False when
/// there was nothing to do: too few rows, or another compaction was first.
pub(super) async fn compact(store: &dyn Store, job: &JobId, cost: u64, rest: bool) -> Result<bool> {
    let (watermark, newest) = store.newest_metric_chunks(job).await?;
    let filter = MetricFilter { after: watermark, limit_cost: Some(cost), ..MetricFilter::default() };
    let page = store.metrics(job, &filter).await?;
    if !page.full && (!rest || page.last <= watermark) {
        return Ok(false);
    }
    store.put_metric_chunks(job, watermark, page.last, &grow(newest, page.columns)).await
}

type Key = (String, u32, u32);

/// The chunks that change when `columns` are appended to the series whose newest chunks are `newest`.
fn grow(newest: Vec<MetricChunk>, columns: Vec<(u32, u32, MetricColumn)>) -> Vec<MetricChunk> {
    let mut points: BTreeMap<Key, Vec<Bucket>> = BTreeMap::new();
    for (rank, attempt, column) in columns {
        let to = points.entry((column.name, rank, attempt)).or_default();
        to.extend(column.steps.into_iter().zip(column.values).map(|(s, v)| Bucket::of(s, v)));
    }
    let mut newest: HashMap<(Key, u32), MetricChunk> =
        newest.into_iter().map(|c| (((c.name.clone(), c.rank, c.attempt), c.level), c)).collect();
    let mut changed = Vec::new();
    for (key, mut points) in points {
        // Steps of a rank ascend. Points that do not are left out, and the others are kept.
        let known = newest.get(&(key.clone(), 0)).map_or(0, |c| c.last_step);
        let mut last = known;
        points.retain(|p| {
            p.step > last && {
                last = p.step;
                true
            }
        });
        if points.is_empty() {
            continue;
        }
        for level in 0..LEVELS {
            let old = newest.remove(&(key.clone(), level));
            let mut buckets = old.as_ref().map(|old| readable_chunk(level, old)).unwrap_or_default();
            let before = buckets.len();
            points.iter().for_each(|p| chunk::push(&mut buckets, p, width(level)));
            // A full chunk of points is not written again. At higher levels its last bucket may have grown.
            let full = before == capacity(level) && level == 0;
            for (i, part) in buckets.chunks(capacity(level)).enumerate() {
                if i == 0 && full {
                    continue;
                }
                let is_last = (i + 1) * capacity(level) >= buckets.len();
                let first_step = part.first().map_or(0, |b| b.step);
                // An unreadable chunk has no buckets: the points begin a new chunk.
                let grown = i == 0 && old.as_ref().is_some_and(|old| old.first_step == first_step);
                let next = part.last().map_or(0, |b| (b.index(width(level)) + 1) * width(level));
                changed.push(MetricChunk {
                    name: key.0.clone(),
                    rank: key.1,
                    attempt: key.2,
                    level,
                    first_step,
                    last_step: if is_last { last } else { next.min(last) },
                    data: chunk::encode(level, part),
                    grown,
                });
            }
        }
    }
    changed
}

/// The buckets of a chunk. A damaged chunk has none, so that it does not block the compaction of the others.
pub(crate) fn readable_chunk(level: u32, chunk: &MetricChunk) -> Vec<Bucket> {
    chunk::decode(level, &chunk.data).unwrap_or_else(|error| {
        let MetricChunk { name, rank, attempt, first_step, .. } = chunk;
        quarantine::log_once(&format!(
            "a chunk of {name} of rank {rank}, attempt {attempt}, level {level}, from step {first_step}: {error}"
        ));
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(steps: std::ops::Range<u64>) -> (u32, u32, MetricColumn) {
        let values = steps.clone().map(|s| s as f32).collect();
        (0, 1, MetricColumn { name: "loss".into(), steps: steps.collect(), values })
    }

    #[test]
    fn chunks_are_the_same_however_the_points_came() {
        let mut whole = grow(Vec::new(), vec![column(1..20_001)]);
        let mut kept: BTreeMap<(u32, u64), MetricChunk> = BTreeMap::new();
        for first in (1..20_001).step_by(700) {
            let newest: BTreeMap<u32, MetricChunk> = kept.values().map(|c| (c.level, c.clone())).collect();
            for chunk in grow(newest.into_values().collect(), vec![column(first..(first + 700).min(20_001))])
            {
                kept.insert((chunk.level, chunk.first_step), chunk);
            }
        }
        let mut kept: Vec<_> = kept.into_values().collect();
        assert!(kept.iter().any(|c| c.grown) && !whole.iter().any(|c| c.grown));
        kept.iter_mut().chain(&mut whole).for_each(|c| c.grown = false);
        assert_eq!(kept, whole);
        assert_eq!(whole.iter().filter(|c| c.level == 0).count(), 20);
        let level2: Vec<_> = whole.iter().filter(|c| c.level == 2).collect();
        assert_eq!((level2.len(), level2[0].first_step, level2[0].last_step), (1, 1, 20_000));
        let buckets = chunk::decode(2, &level2[0].data).unwrap();
        assert_eq!(
            (buckets[1].step, buckets[1].min, buckets[1].max, buckets[1].points),
            (257, 257.0, 512.0, 256)
        );
    }

    #[test]
    fn a_repeated_step_is_taken_once() {
        let first = grow(Vec::new(), vec![column(1..11)]);
        let again = grow(first, vec![column(5..13)]);
        assert_eq!(chunk::decode(0, &again[0].data).unwrap().len(), 12);
    }
}
