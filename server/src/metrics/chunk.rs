//! The encoding of a series as bytes.
//!
//! Level 0 contains points: the difference to the previous point's step (LEB128), and the value (float32, little endian). Level `k`
//! contains buckets of `16^k` steps, counted from step 1. A bucket contains the difference between its first step and the previous bucket's
//! first step, the number of points, the number of finite points (all LEB128), and the minimum, maximum (float32) and sum (float64) of the
//! finite points.

use crate::{
    store::{MetricChunk, RankColumn, error::StoreError},
    util::leb128::{Reader, put_number},
};

/// Number of levels. Buckets of the last level are about a million steps wide.
pub(crate) const LEVELS: u32 = 6;
/// Number of points in a full chunk of level 0. Every compaction rewrites the newest chunk of each series. Larger chunks would keep the
/// database's only writer busy for a job of hundreds of ranks. Smaller chunks would be too many rows for a job of a million steps.
const CHUNK_POINTS: usize = 1024;
/// Number of buckets in a full chunk of the other levels. Such a chunk has about as many bytes as a full chunk of level 0.
const CHUNK_BUCKETS: usize = 256;

/// Number of steps of a bucket at `level`.
pub(crate) fn width(level: u32) -> u64 {
    1 << (4 * level)
}

/// Number of entries in a full chunk at `level`.
pub(crate) fn capacity(level: u32) -> usize {
    if level == 0 { CHUNK_POINTS } else { CHUNK_BUCKETS }
}

/// A series of a job's points.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SeriesKey {
    pub(crate) name: String,
    pub(crate) attempt: u32,
    pub(crate) rank: u32,
}

impl SeriesKey {
    pub(super) fn of(chunk: &MetricChunk) -> Self {
        Self { name: chunk.name.clone(), attempt: chunk.attempt, rank: chunk.rank }
    }

    pub(super) fn of_points(points: &RankColumn) -> Self {
        Self { name: points.column.name.clone(), attempt: points.attempt, rank: points.rank }
    }
}

/// Statistics of the points of consecutive steps. A single point is a bucket with one point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bucket {
    /// The first step with a point.
    pub(crate) step: u64,
    /// Number of points.
    pub(crate) points: u64,
    /// Number of points with a finite value. The fields below are computed from these points only.
    pub(crate) finite_points: u64,
    pub(crate) min: f32,
    pub(crate) max: f32,
    pub(crate) sum: f64,
}

impl Bucket {
    pub(crate) fn of(step: u64, value: f32) -> Self {
        let finite = value.is_finite();
        Self {
            step,
            points: 1,
            finite_points: finite.into(),
            min: if finite { value } else { f32::INFINITY },
            max: if finite { value } else { f32::NEG_INFINITY },
            sum: if finite { value.into() } else { 0.0 },
        }
    }

    pub(crate) fn join(&mut self, other: &Self) {
        self.step = self.step.min(other.step);
        self.points += other.points;
        self.finite_points += other.finite_points;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
    }

    /// The index of the bucket of `width` steps to which this bucket belongs.
    pub(crate) fn index(&self, width: u64) -> u64 {
        self.step.saturating_sub(1) / width
    }
}

/// Joins neighbours that have the same `index`.
pub(crate) fn join_neighbours(buckets: &mut Vec<Bucket>, index: impl Fn(&Bucket) -> u64) {
    buckets.dedup_by(|later, earlier| {
        let is_same = index(later) == index(earlier);
        if is_same {
            earlier.join(later);
        }
        is_same
    });
}

/// Merges points in any order into a series with ascending steps. If a step has several points, the last point replaces the others.
pub(crate) fn merge(mut series: Vec<Bucket>, points: impl IntoIterator<Item = Bucket>) -> Vec<Bucket> {
    series.extend(points);
    // This sort is stable, and fast for a few ascending runs.
    series.sort_by_key(|point| point.step);
    series.dedup_by(|later, earlier| {
        let is_same = later.step == earlier.step;
        if is_same {
            *earlier = *later;
        }
        is_same
    });
    series
}

/// Encodes buckets of a series at `level`. The steps must ascend.
pub(crate) fn encode(level: u32, buckets: &[Bucket]) -> Vec<u8> {
    let mut out = Vec::with_capacity(buckets.len() * if level == 0 { 5 } else { 20 });
    let mut last_step = 0;
    for bucket in buckets {
        put_number(&mut out, bucket.step - last_step);
        last_step = bucket.step;
        if level == 0 {
            let value = if bucket.finite_points == 1 { bucket.min } else { f32::NAN };
            out.extend(value.to_le_bytes());
            continue;
        }
        put_number(&mut out, bucket.points);
        put_number(&mut out, bucket.finite_points);
        out.extend(bucket.min.to_le_bytes());
        out.extend(bucket.max.to_le_bytes());
        out.extend(bucket.sum.to_le_bytes());
    }
    out
}

/// Decodes the output of [`encode`].
pub(crate) fn decode(level: u32, data: &[u8]) -> Result<Vec<Bucket>, StoreError> {
    let mut reader = Reader(data);
    let mut buckets = Vec::with_capacity(data.len() / if level == 0 { 5 } else { 20 });
    let mut step = 0u64;
    while !reader.0.is_empty() {
        let bucket = (|| {
            step = step.checked_add(reader.number()?)?;
            if level == 0 {
                return Some(Bucket::of(step, f32::from_le_bytes(reader.bytes()?)));
            }
            Some(Bucket {
                step,
                points: reader.number()?,
                finite_points: reader.number()?,
                min: f32::from_le_bytes(reader.bytes()?),
                max: f32::from_le_bytes(reader.bytes()?),
                sum: f64::from_le_bytes(reader.bytes()?),
            })
        })();
        buckets.push(bucket.ok_or_else(|| StoreError::Corrupt("a chunk of metrics".into()))?);
    }
    Ok(buckets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_reverses_encode_and_refuses_damaged_bytes() {
        let mut points: Vec<_> =
            [(1, 2.5), (2, f32::NAN), (300, -1.0), (1 << 40, 1e-30)].map(|(s, v)| Bucket::of(s, v)).into();
        assert_eq!(decode(0, &encode(0, &points)).unwrap(), points);
        points[0].join(&Bucket::of(2, 3.0));
        assert_eq!(decode(1, &encode(1, &points)).unwrap(), points);
        let mut truncated = encode(1, &points);
        truncated.pop();
        assert!(decode(1, &truncated).is_err());
        assert!(decode(0, &[0xff; 12]).is_err());
    }
}
