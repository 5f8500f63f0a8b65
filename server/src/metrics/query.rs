//! Queries for charts, from chunks and the newest events.

use super::{
    Metrics,
    chunk::{self, Bucket, LEVELS, SeriesKey, width},
    compaction, compaction_queue,
};
use crate::store::{MetricFilter, RankColumn, Result};
use lockstep_protocol::job::Job;
use std::collections::BTreeMap;

/// The data of a chart.
#[derive(Debug)]
pub(crate) struct ChartData {
    /// Number of the last event that is included.
    pub(crate) as_of: u64,
    /// Whether every bucket is a single point, and all points of the range are included.
    pub(crate) is_exact: bool,
    /// Steps per bucket. 1 if `is_exact`.
    pub(crate) bucket_steps: u64,
    pub(crate) series: BTreeMap<SeriesKey, Vec<Bucket>>,
}

/// The level to read, and the buckets to return.
struct Plan {
    level: u32,
    /// The step before the first bucket.
    base: u64,
    /// Number of steps of each bucket: a multiple of the width of the level's buckets.
    width: u64,
}

impl Plan {
    /// Plans at most `points` buckets from step `first` to `last`. The plan depends only on these three numbers, so the result does not
    /// depend on how points were reported and compacted.
    fn new(first: u64, last: u64, points: u64) -> Self {
        let before = first.saturating_sub(1);
        let wanted_width = last.saturating_sub(before).div_ceil(points).max(1);
        let level = (0..LEVELS).rev().find(|l| width(*l) <= wanted_width).unwrap_or(0);
        let base = before / width(level) * width(level);
        let width = last.saturating_sub(base).div_ceil(points).next_multiple_of(width(level)).max(1);
        Self { level, base, width }
    }

    fn index(&self, bucket: &Bucket) -> u64 {
        bucket.step.saturating_sub(self.base + 1) / self.width
    }
}

/// Reads a job's metrics, with at most `points` buckets per series.
pub(crate) async fn find(
    metrics: &Metrics,
    job: &Job,
    filter: &MetricFilter,
    points: usize,
) -> Result<ChartData> {
    // Reads again if a compaction has moved the watermark between two reads.
    loop {
        let (watermark, chunk_steps) = metrics.store.step_range_of_chunks(&job.id, filter).await?;
        // Reads the newest rows without a range, because a bucket that crosses an end of the range is returned whole. `is_inside` removes
        // the other points.
        let newest = MetricFilter { after: watermark, from: None, to: None, ..filter.clone() };
        let page = metrics.store.metrics(&job.id, &newest).await?;
        let (as_of, tail) = (page.as_of, page.columns);
        if page.cost > 2 * compaction_queue::batch_cost(job.ranks) {
            // So many rows should have been compacted. The queue is in memory, and a failed compaction is not queued again, so the job is
            // queued here.
            metrics.queue.add_cost(&job.id, job.ranks, compaction_queue::batch_cost(job.ranks));
        }
        let (from, to) = (filter.from.unwrap_or(0), filter.to.unwrap_or(u64::MAX));
        let tail_steps = tail.iter().filter_map(|points| points.column.step_range());
        let step_ranges = tail_steps.chain(chunk_steps);
        let Some((first, last)) = step_ranges.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) else {
            return Ok(ChartData { as_of, is_exact: true, bucket_steps: 1, series: BTreeMap::new() });
        };
        let plan = Plan::new(first.max(from), last.min(to).max(first.max(from)), points as u64);

        // Reads the series at a level; `None` if a compaction has moved the watermark.
        let read_level = async |level: u32| -> Result<Option<BTreeMap<SeriesKey, Vec<Bucket>>>> {
            // The range is extended to bucket boundaries. Buckets of `width` steps cover the steps `k * width + 1` to
            // `(k + 1) * width`. The first bucket also covers step 0.
            let width = width(level);
            let from = match from.saturating_sub(1) / width * width {
                _ if width == 1 => from,
                0 => 0,
                before => before + 1,
            };
            let to = to.div_ceil(width).saturating_mul(width);
            let aligned = MetricFilter { from: Some(from), to: Some(to), ..filter.clone() };
            let (watermark_now, chunks) = metrics.store.metric_chunks(&job.id, level, &aligned).await?;
            if watermark_now != watermark {
                return Ok(None);
            }
            let is_inside = |b: &Bucket| (from..=to).contains(&b.step);
            let mut series: BTreeMap<SeriesKey, Vec<Bucket>> = BTreeMap::new();
            for chunk in chunks {
                let buckets = compaction::decode_chunk_or_empty(level, &chunk);
                let buckets = buckets.into_iter().filter(is_inside);
                series.entry(SeriesKey::of(&chunk)).or_default().extend(buckets);
            }
            add_tail(&mut series, &tail, width, is_inside);
            series.retain(|_, buckets| !buckets.is_empty());
            Ok(Some(series))
        };
        let Some(mut series) = read_level(plan.level).await? else { continue };
        let fits = |series: &BTreeMap<SeriesKey, Vec<Bucket>>, slack: usize| {
            series.values().all(|b| b.iter().map(|b| b.points).sum::<u64>() <= (points + slack) as u64)
        };
        if plan.level == 0 && fits(&series, 0) {
            return Ok(ChartData { as_of, is_exact: true, bucket_steps: 1, series });
        }
        // Sparse points may fit although the range has too many steps. The slack is for points outside the range, in the buckets at the
        // ends of the range.
        if plan.level > 0 && fits(&series, 2 * width(plan.level) as usize) {
            let Some(all_points) = read_level(0).await? else { continue };
            if fits(&all_points, 0) {
                return Ok(ChartData { as_of, is_exact: true, bucket_steps: 1, series: all_points });
            }
        }
        series.values_mut().for_each(|buckets| chunk::join_neighbours(buckets, |bucket| plan.index(bucket)));
        return Ok(ChartData { as_of, is_exact: false, bucket_steps: plan.width, series });
    }
}

/// Adds the points of rows after the watermark to series of buckets of `width` steps.
fn add_tail(
    series: &mut BTreeMap<SeriesKey, Vec<Bucket>>,
    tail: &[RankColumn],
    width: u64,
    is_inside: impl Fn(&Bucket) -> bool,
) {
    for reported in tail {
        let buckets = series.entry(SeriesKey::of_points(reported)).or_default();
        let column = &reported.column;
        let points = column.steps.iter().zip(&column.values).map(|(step, value)| Bucket::of(*step, *value));
        let points = points.filter(&is_inside);
        match width {
            1 => *buckets = chunk::merge(std::mem::take(buckets), points),
            _ => buckets.extend(points),
        }
    }
    if width > 1 && !tail.is_empty() {
        for buckets in series.values_mut() {
            buckets.sort_by_key(|bucket| bucket.step);
            chunk::join_neighbours(buckets, |bucket| bucket.index(width));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_reads_few_buckets_and_returns_at_most_the_requested_points() {
        for (first, last, points) in [
            (1, 9, 9),
            (1, 1_000_000, 1000),
            (499_987, 512_345, 700),
            (3, 3, 1),
            (17, 5000, 1),
            (1, u64::MAX >> 1, 10),
        ] {
            let plan = Plan::new(first, last, points);
            let at = |step| plan.index(&Bucket::of(step, 0.0));
            assert!(at(last) < points, "{first}..{last} at {points}: {} buckets", at(last) + 1);
            assert!(plan.width.is_multiple_of(width(plan.level)) && plan.base < first);
            let read = (last - plan.base).div_ceil(width(plan.level));
            assert!(read <= points * 17 || plan.level == LEVELS - 1, "{read} buckets are read for {points}");
        }
    }
}
