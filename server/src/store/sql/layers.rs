//! Reports of ranks about their network: histograms of weights and gradients of layers, and the description of the network.

use super::{Connection, Db, DbRow, SqlStore, multi_row};
use crate::store::{
    Histogram, HistogramFilter, HistogramIndex, HistogramLayer, Result, StoreError,
    values::{from_json, int, json, strip_nul, to_u32, uint},
};
use lockstep_protocol::{
    agent::AttemptEvent,
    histograms::{HistogramKind, LayerHistogram, LayerHistograms},
    job::JobId,
    limits::MAX_HISTOGRAM_STEPS,
    network::NetworkDescription,
};
use sqlx::{QueryBuilder, Row};

/// Stores the histograms or the network of an event. A report that exceeds the limits comes from a faulty rank and is not stored.
pub(super) async fn put(db: &mut Connection, job: &JobId, attempt: u32, event: &AttemptEvent) -> Result<()> {
    let flaw = match event {
        AttemptEvent::Histograms(histograms) => match histograms.check() {
            Ok(()) => return put_histograms(db, job, attempt, histograms).await,
            Err(flaw) => flaw,
        },
        AttemptEvent::Network(network) => match network.check() {
            Ok(()) => return put_network(db, job, attempt, network).await,
            Err(flaw) => flaw,
        },
        _ => return Ok(()),
    };
    tracing::warn!(%job, attempt, flaw, "a rank's report about layers exceeds the limits and is not stored");
    Ok(())
}

async fn put_histograms(
    db: &mut Connection,
    job: &JobId,
    attempt: u32,
    histograms: &LayerHistograms,
) -> Result<()> {
    // A new attempt repeats the later steps of earlier attempts, and a step has one histogram per layer and kind.
    sqlx::query("DELETE FROM histograms WHERE job_id = $1 AND (step = $2 OR (step > $2 AND attempt < $3))")
        .bind(job.as_str())
        .bind(int(histograms.step))
        .bind(i64::from(attempt))
        .execute(&mut *db)
        .await?;
    let layers: Vec<(usize, &LayerHistogram)> = histograms.layers.iter().enumerate().collect();
    let text =
        "INSERT INTO histograms (job_id, layer, kind, step, attempt, place, min, max, counts) VALUES {}";
    multi_row::execute(db, text, 9, &layers, |query, (index, layer)| {
        Ok(query
            .bind(job.as_str())
            .bind(&layer.name)
            .bind(layer.kind.as_str())
            .bind(int(histograms.step))
            .bind(i64::from(attempt))
            .bind(int(*index as u64))
            .bind(f64::from(layer.min))
            .bind(f64::from(layer.max))
            .bind(layer.counts.iter().flat_map(|count| count.to_le_bytes()).collect::<Vec<u8>>()))
    })
    .await?;
    let mut steps = steps(db, job).await?;
    while let Some(index) = step_to_remove(&steps) {
        let text = "DELETE FROM histograms WHERE job_id = $1 AND step = $2";
        sqlx::query(text).bind(job.as_str()).bind(int(steps.remove(index))).execute(&mut *db).await?;
    }
    Ok(())
}

/// Index of the step to remove if there are too many: the step whose neighbours are closest to each other; of several such steps,
/// the oldest. So the remaining steps are about evenly spaced. The first and the newest step always stay.
fn step_to_remove(steps: &[u64]) -> Option<usize> {
    if steps.len() <= MAX_HISTOGRAM_STEPS {
        return None;
    }
    let gaps = steps.windows(3).map(|w| w[2] - w[0]).enumerate();
    gaps.min_by_key(|(_, gap)| *gap).map(|(index, _)| index + 1)
}

/// Query for the steps that have histograms, with one index look-up per step. DISTINCT would read a row for each layer of a step.
const STEPS: &str = "WITH RECURSIVE found (step) AS (\
    SELECT min(step) FROM histograms WHERE job_id = $1 \
    UNION ALL SELECT (SELECT min(h.step) FROM histograms h WHERE h.job_id = $1 AND h.step > found.step) \
    FROM found WHERE found.step IS NOT NULL) \
    SELECT step FROM found WHERE step IS NOT NULL ORDER BY step";

async fn steps(db: &mut Connection, job: &JobId) -> Result<Vec<u64>> {
    let steps: Vec<i64> = sqlx::query_scalar(STEPS).bind(job.as_str()).fetch_all(db).await?;
    Ok(steps.into_iter().map(uint).collect())
}

async fn put_network(
    db: &mut Connection,
    job: &JobId,
    attempt: u32,
    network: &NetworkDescription,
) -> Result<()> {
    let text = "INSERT INTO networks (job_id, attempt, description) VALUES ($1, $2, $3) \
        ON CONFLICT (job_id) DO UPDATE SET attempt = excluded.attempt, description = excluded.description";
    sqlx::query(text).bind(job.as_str()).bind(i64::from(attempt)).bind(json(network)?).execute(db).await?;
    Ok(())
}

fn parse_kind(text: &str) -> Result<HistogramKind> {
    text.parse().map_err(StoreError::Corrupt)
}

fn histogram(row: &DbRow) -> Result<Histogram> {
    let counts: Vec<u8> = row.try_get("counts")?;
    let (counts, _) = counts.as_chunks::<4>();
    Ok(Histogram {
        step: uint(row.try_get("step")?),
        attempt: to_u32(row.try_get("attempt")?),
        layer: row.try_get("layer")?,
        kind: parse_kind(row.try_get("kind")?)?,
        min: row.try_get::<f64, _>("min")? as f32,
        max: row.try_get::<f64, _>("max")? as f32,
        counts: counts.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect(),
    })
}

impl SqlStore {
    pub async fn histogram_index(&self, job: &JobId) -> Result<HistogramIndex> {
        let mut db = self.reader.acquire().await?;
        let steps = steps(&mut db, job).await?;
        let Some(newest) = steps.last() else { return Ok(HistogramIndex::default()) };
        let layers: Vec<(String, String)> = sqlx::query_as(
            "SELECT layer, kind FROM histograms WHERE job_id = $1 AND step = $2 ORDER BY place",
        )
        .bind(job.as_str())
        .bind(int(*newest))
        .fetch_all(&mut *db)
        .await?;
        let layer = |(name, text): (String, String)| Ok(HistogramLayer { name, kind: parse_kind(&text)? });
        Ok(HistogramIndex { layers: layers.into_iter().map(layer).collect::<Result<_>>()?, steps })
    }

    pub async fn histograms(&self, job: &JobId, filter: &HistogramFilter) -> Result<Vec<Histogram>> {
        let mut query = QueryBuilder::<Db>::new(
            "SELECT layer, kind, step, attempt, min, max, counts FROM histograms WHERE job_id = ",
        );
        query.push_bind(job.as_str());
        if let Some(layer) = &filter.layer {
            query.push(" AND layer = ").push_bind(strip_nul(layer));
        }
        if let Some(kind) = filter.kind {
            query.push(" AND kind = ").push_bind(kind.as_str());
        }
        if let Some(step) = filter.step {
            query.push(" AND step = ").push_bind(int(step));
        }
        query.push(" ORDER BY step, place");
        self.list(query.build(), histogram).await
    }

    pub async fn network(&self, job: &JobId) -> Result<Option<NetworkDescription>> {
        let query = sqlx::query("SELECT description FROM networks WHERE job_id = $1").bind(job.as_str());
        self.find(query, |row| from_json(row.try_get("description")?)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_step_is_removed_if_there_are_more_than_the_limit() {
        let steps: Vec<u64> = (1..=MAX_HISTOGRAM_STEPS as u64).collect();
        assert_eq!(step_to_remove(&steps), None);
        let steps: Vec<u64> = (1..=MAX_HISTOGRAM_STEPS as u64 + 1).collect();
        assert_eq!(step_to_remove(&steps), Some(1), "the second step");
    }

    #[test]
    fn the_remaining_steps_are_evenly_spread_and_include_both_ends() {
        let mut steps = Vec::new();
        for step in 1..=10_000 {
            steps.push(step);
            while let Some(index) = step_to_remove(&steps) {
                steps.remove(index);
            }
        }
        assert_eq!((steps.len(), steps[0], steps[MAX_HISTOGRAM_STEPS - 1]), (MAX_HISTOGRAM_STEPS, 1, 10_000));
        let gaps: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // 50 on average; the newest gap is still growing.
        let (smallest, largest) = (gaps[..gaps.len() - 1].iter().min().unwrap(), gaps.iter().max().unwrap());
        assert!(*largest <= 4 * smallest, "{smallest} to {largest}");
    }
}
