-- What people write on jobs, and machines that take no new work.

CREATE TABLE annotations (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    note TEXT NOT NULL,
    -- ["tag", ...]
    tags TEXT NOT NULL
) STRICT;

CREATE TABLE draining (
    agent_id TEXT PRIMARY KEY
) STRICT;
