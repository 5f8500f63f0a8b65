-- Log lines stand between a run's many points: found by their number without a look at those.
CREATE INDEX events_log ON events (job_id, kind, seq) WHERE kind = 'log';
