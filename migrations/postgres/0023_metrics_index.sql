-- As migrations/sqlite/0023_metrics_index.sql, which explains it.
CREATE INDEX events_metrics ON events (job_id, kind, seq) WHERE kind = 'metrics';
