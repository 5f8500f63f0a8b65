-- Points that are in no chunk yet: found by their number without a look at the log lines between.
CREATE INDEX events_metrics ON events (job_id, kind, seq) WHERE kind = 'metrics';
