-- As migrations/sqlite/0026_points.sql, which explains it.
ALTER TABLE events ADD COLUMN points BYTEA;
DROP INDEX events_by_kind;
DROP INDEX events_metrics;
CREATE INDEX events_metrics ON events (job_id, seq) WHERE kind = 'metrics';
DROP INDEX events_log;
CREATE INDEX events_log ON events (job_id, seq) WHERE kind = 'log';
ALTER TABLE metric_sealed ADD COLUMN removed BIGINT NOT NULL DEFAULT 0;
