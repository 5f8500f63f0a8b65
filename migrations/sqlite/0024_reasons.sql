-- Reasons as a code and facts (JSON; see protocol/src/reason.rs), kept with every attempt for ever. `jobs.reason` stays:
-- the words of `jobs.cause`.
ALTER TABLE jobs ADD COLUMN cause TEXT;
-- What a fork began from. No reference: the other job may be deleted.
ALTER TABLE jobs ADD COLUMN parent_job TEXT;
ALTER TABLE jobs ADD COLUMN parent_checkpoint TEXT;

-- How it ended: a state of its own, why, and at which step. NULL while it runs.
ALTER TABLE attempts ADD COLUMN state TEXT;
ALTER TABLE attempts ADD COLUMN reason TEXT;
ALTER TABLE attempts ADD COLUMN step INTEGER;
