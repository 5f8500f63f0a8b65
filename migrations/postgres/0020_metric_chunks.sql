-- As migrations/sqlite/0020_metric_chunks.sql, which explains it.

CREATE TABLE metric_chunks (
    job_id TEXT COLLATE "C" NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    name TEXT COLLATE "C" NOT NULL,
    rank BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    level BIGINT NOT NULL,
    first_step BIGINT NOT NULL,
    last_step BIGINT NOT NULL,
    data BYTEA NOT NULL
);
CREATE UNIQUE INDEX metric_chunks_by_series ON metric_chunks (job_id, name, level, rank, attempt, first_step, last_step);

-- Metric events up to this number are in chunks.
CREATE TABLE metric_sealed (
    job_id TEXT COLLATE "C" PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    seq BIGINT NOT NULL
);
