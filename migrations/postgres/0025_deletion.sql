-- A deleted job is not found any more from one moment to the next; its rows are removed bit by bit after that.
ALTER TABLE jobs ADD COLUMN deleted_at BIGINT;
CREATE INDEX jobs_deleted ON jobs (deleted_at) WHERE deleted_at IS NOT NULL;
