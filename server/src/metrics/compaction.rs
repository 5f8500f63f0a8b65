//! Compaction: a background task turns rows of events into chunks and rollups. A chart of a million points then reads as little data as
//! a chart of a thousand points.

use super::{
    Metrics,
    chunk::{self, Bucket, LEVELS, SeriesKey, capacity, width},
    compaction_queue::batch_cost,
};
use crate::store::{MetricChunk, MetricFilter, RankColumn, Result, Store, StoreError, unreadable};
use lockstep_protocol::job::JobId;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

/// Pause between two compactions of a job, in which the database's only writer can store reports of training.
const COMPACTION_PAUSE: Duration = Duration::from_millis(20);

/// Compacts the points of queued jobs. Runs until dropped.
pub(crate) async fn run(metrics: Arc<Metrics>) {
    // The queue is in memory, so every unfinished job is queued once at the server's start.
    match metrics.store.unfinished_jobs().await {
        Ok(jobs) => {
            jobs.iter().for_each(|job| metrics.queue.add_cost(&job.id, job.ranks, batch_cost(job.ranks)))
        }
        Err(error) => tracing::warn!(%error, "metrics are not compacted until their jobs report more points"),
    }
    loop {
        let Some((job, cost)) = metrics.queue.take_batch() else {
            metrics.queue.wake.notified().await;
            continue;
        };
        loop {
            match compact(metrics.store.as_ref(), &job, cost, Rest::Wait).await {
                Ok(true) => tokio::time::sleep(COMPACTION_PAUSE).await,
                // The job may have been deleted meanwhile. A failed compaction is retried after the next reports.
                Ok(false) | Err(StoreError::NotFound(_)) => break,
                Err(error) => {
                    tracing::warn!(%error, %job, "metrics could not be compacted into chunks");
                    break;
                }
            }
        }
    }
}

/// What happens to the last rows of a job, which cost less than a batch.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rest {
    /// The last rows wait for further rows.
    Wait,
    Compact,
}

/// Compacts the next rows of a job, up to `max_cost` (`EventRow::cost`), and moves the job's watermark. Returns false if nothing was
/// compacted, because there were too few rows, or another compaction moved the watermark first.
pub(super) async fn compact(store: &dyn Store, job: &JobId, max_cost: u64, rest: Rest) -> Result<bool> {
    let (watermark, newest) = store.newest_metric_chunks(job).await?;
    let filter = MetricFilter { after: watermark, max_cost: Some(max_cost), ..MetricFilter::default() };
    let page = store.metrics(job, &filter).await?;
    if !page.is_full && (rest == Rest::Wait || page.last_seq <= watermark) {
        return Ok(false);
    }
    let stored = read_rewritten_series(store, job, &newest, &page.columns).await?;
    store
        .put_metric_chunks(job, watermark, page.last_seq, &changed_chunks(newest, page.columns, stored))
        .await
}

/// Reads all stored points of the series to which `columns` add points at or before the last stored step. Only runs from elsewhere have
/// such points.
async fn read_rewritten_series(
    store: &dyn Store,
    job: &JobId,
    newest: &[MetricChunk],
    columns: &[RankColumn],
) -> Result<BTreeMap<SeriesKey, Vec<Bucket>>> {
    let last_steps: HashMap<SeriesKey, u64> = newest
        .iter()
        .filter(|chunk| chunk.level == 0)
        .map(|chunk| (SeriesKey::of(chunk), chunk.last_step))
        .collect();
    let mut stored = BTreeMap::new();
    for points in columns {
        let key = SeriesKey::of_points(points);
        let (Some(last), Some((first, _))) = (last_steps.get(&key), points.column.step_range()) else {
            continue;
        };
        if first > *last || stored.contains_key(&key) {
            continue;
        }
        let filter =
            MetricFilter { name: Some(key.name.clone()), ranks: vec![key.rank], ..MetricFilter::default() };
        let (_, chunks) = store.metric_chunks(job, 0, &filter).await?;
        let chunks = chunks.iter().filter(|chunk| chunk.attempt == key.attempt);
        let buckets = chunks.flat_map(|chunk| decode_chunk_or_empty(0, chunk)).collect();
        stored.insert(key, buckets);
    }
    Ok(stored)
}

/// Returns the chunks that change when `columns` are added to the series whose newest chunks are `newest`. All chunks of the series in
/// `stored` (see [`read_rewritten_series`]) are replaced. If a step has several points, the last point counts.
fn changed_chunks(
    newest: Vec<MetricChunk>,
    columns: Vec<RankColumn>,
    stored: BTreeMap<SeriesKey, Vec<Bucket>>,
) -> Vec<MetricChunk> {
    let replaced: BTreeSet<SeriesKey> = stored.keys().cloned().collect();
    let mut added: BTreeMap<SeriesKey, Vec<Bucket>> = BTreeMap::new();
    for points in columns {
        let series = added.entry(SeriesKey::of_points(&points)).or_default();
        let (steps, values) = (points.column.steps, points.column.values);
        series.extend(steps.into_iter().zip(values).map(|(step, value)| Bucket::of(step, value)));
    }
    let mut points = stored;
    for (key, new) in added {
        let series = points.entry(key).or_default();
        *series = chunk::merge(std::mem::take(series), new);
    }
    let newest = newest.into_iter().map(|chunk| ((SeriesKey::of(&chunk), chunk.level), chunk));
    let mut newest: HashMap<(SeriesKey, u32), MetricChunk> =
        newest.filter(|((key, _), _)| !replaced.contains(key)).collect();
    let mut changed = Vec::new();
    for (key, points) in points {
        let Some(last) = points.last().map(|point| point.step) else { continue };
        for level in 0..LEVELS {
            let old = newest.remove(&(key.clone(), level));
            let mut buckets = old.as_ref().map(|old| decode_chunk_or_empty(level, old)).unwrap_or_default();
            let old_len = buckets.len();
            buckets.extend(&points);
            if level > 0 {
                chunk::join_neighbours(&mut buckets, |bucket| bucket.index(width(level)));
            }
            // A full chunk of points does not change. At higher levels, the last bucket of a full chunk may have grown.
            let is_unchanged = old_len == capacity(level) && level == 0;
            for (i, part) in buckets.chunks(capacity(level)).enumerate() {
                if i == 0 && is_unchanged {
                    continue;
                }
                let is_last = (i + 1) * capacity(level) >= buckets.len();
                let first_step = part.first().map_or(0, |b| b.step);
                // An unreadable chunk counts as empty, so the points begin a new chunk.
                let replaces_chunk = i == 0 && old.as_ref().is_some_and(|old| old.first_step == first_step);
                let bucket_end = part.last().map_or(0, |b| (b.index(width(level)) + 1) * width(level));
                changed.push(MetricChunk {
                    name: key.name.clone(),
                    rank: key.rank,
                    attempt: key.attempt,
                    level,
                    first_step,
                    last_step: if is_last { last } else { bucket_end.min(last) },
                    data: chunk::encode(level, part),
                    replaces_chunk,
                    replaces_series: replaced.contains(&key),
                });
            }
        }
    }
    changed
}

/// The buckets of a chunk. A damaged chunk is logged and counts as empty, so that other chunks are still compacted.
pub(crate) fn decode_chunk_or_empty(level: u32, chunk: &MetricChunk) -> Vec<Bucket> {
    chunk::decode(level, &chunk.data).unwrap_or_else(|error| {
        let MetricChunk { name, rank, attempt, first_step, .. } = chunk;
        unreadable::log_once(&format!(
            "a chunk of {name} of rank {rank}, attempt {attempt}, level {level}, from step {first_step}: {error}"
        ));
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::metric::MetricColumn;

    fn points(steps: Vec<u64>, values: Vec<f32>) -> RankColumn {
        RankColumn { rank: 0, attempt: 1, column: MetricColumn { name: "loss".into(), steps, values } }
    }

    fn column(steps: std::ops::Range<u64>) -> RankColumn {
        let values = steps.clone().map(|s| s as f32).collect();
        points(steps.collect(), values)
    }

    #[test]
    fn chunks_do_not_depend_on_how_points_arrive() {
        let mut whole = changed_chunks(Vec::new(), vec![column(1..20_001)], BTreeMap::new());
        let mut stored: BTreeMap<(u32, u64), MetricChunk> = BTreeMap::new();
        for first in (1..20_001).step_by(700) {
            let newest: BTreeMap<u32, MetricChunk> = stored.values().map(|c| (c.level, c.clone())).collect();
            let columns = vec![column(first..(first + 700).min(20_001))];
            for chunk in changed_chunks(newest.into_values().collect(), columns, BTreeMap::new()) {
                stored.insert((chunk.level, chunk.first_step), chunk);
            }
        }
        let mut stored: Vec<_> = stored.into_values().collect();
        assert!(stored.iter().any(|c| c.replaces_chunk) && !whole.iter().any(|c| c.replaces_chunk));
        stored.iter_mut().chain(&mut whole).for_each(|c| c.replaces_chunk = false);
        assert_eq!(stored, whole);
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
    fn the_last_point_of_a_repeated_step_counts() {
        let first = changed_chunks(Vec::new(), vec![column(1..11)], BTreeMap::new());
        let key = SeriesKey::of(&first[0]);
        let stored = BTreeMap::from([(key, decode_chunk_or_empty(0, &first[0]))]);
        let newer = points(vec![7, 0, 7], vec![1.0, 2.0, 3.5]);
        let again = changed_chunks(first, vec![column(5..13), newer], stored);
        let points = chunk::decode(0, &again[0].data).unwrap();
        let steps: Vec<u64> = points.iter().map(|point| point.step).collect();
        assert_eq!(steps, (0..13).collect::<Vec<_>>());
        assert_eq!((points[0].min, points[6].min, points[7].min), (2.0, 6.0, 3.5), "the last one counts");
        assert!(again.iter().all(|chunk| chunk.replaces_series && !chunk.replaces_chunk));
    }
}
