-- As migrations/sqlite/0022_log_index.sql, which explains it.
CREATE INDEX events_log ON events (job_id, kind, seq) WHERE kind = 'log';
-- The newest report of a rank. In SQLite events_by_kind has the number as its last column already.
CREATE INDEX events_rank ON events (job_id, rank, seq) WHERE kind = 'rank';
