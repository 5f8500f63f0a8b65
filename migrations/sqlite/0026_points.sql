-- The points of a report are one row of `events`, in bytes (server/src/metrics/row.rs); its `body` is empty. To readers it is
-- an event a column: the last of them has the row's number, and `events` may hold such rows beside those of earlier
-- versions, which have a column of points as JSON. Of new rows `name`, `first_step` and `last_step` say nothing.
ALTER TABLE events ADD COLUMN points BLOB;

-- Of the old index only the newest report of a rank was asked; the other two had the kind in every entry.
DROP INDEX events_by_kind;
CREATE INDEX events_rank ON events (job_id, rank, seq) WHERE kind = 'rank';
DROP INDEX events_metrics;
CREATE INDEX events_metrics ON events (job_id, seq) WHERE kind = 'metrics';
DROP INDEX events_log;
CREATE INDEX events_log ON events (job_id, seq) WHERE kind = 'log';

-- Points of events up to this number are in chunks alone; a stream begins after it.
ALTER TABLE metric_sealed ADD COLUMN removed INTEGER NOT NULL DEFAULT 0;
