-- Metrics at scale: the points of `events`, again, as binary columns and as buckets of 16, 256, ... steps, so that
-- a chart reads at most a few buckets a pixel. The newest chunk of a series and level grows until it is full; the
-- others never change.

CREATE TABLE metric_chunks (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    rank INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    -- 0: every point; k: buckets of 16^k steps.
    level INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    -- See server/src/metrics/chunk.rs.
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX metric_chunks_by_series ON metric_chunks (job_id, name, level, rank, attempt, first_step, last_step);

-- Metric events up to this number are in chunks.
CREATE TABLE metric_sealed (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL
) STRICT;
