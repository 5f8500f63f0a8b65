-- Times are milliseconds since 1970, UTC. Columns named after a JSON shape hold that shape.

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    priority INTEGER NOT NULL,
    spec TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    ranks INTEGER NOT NULL,
    agents TEXT NOT NULL DEFAULT '[]',
    step INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    total_steps INTEGER NOT NULL DEFAULT 0,
    steps_per_epoch INTEGER NOT NULL DEFAULT 0,
    images_per_second REAL,
    eta_secs REAL,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    best TEXT,
    last TEXT NOT NULL DEFAULT '{}',
    -- The newest event's number; events are numbered from 1 without a gap.
    last_seq INTEGER NOT NULL DEFAULT 0,
    -- What the sparkline and the newest values are computed from.
    progress TEXT NOT NULL DEFAULT '{}',
    -- Why its ranks are being stopped at somebody's wish.
    stop TEXT,
    -- Failed or lost attempts since it was last submitted or retried.
    restarts INTEGER NOT NULL DEFAULT 0,
    -- Fencing token of the attempt that may write; NULL when none may.
    token INTEGER
) STRICT;
CREATE INDEX jobs_waiting ON jobs (state, priority DESC, created_at);
CREATE INDEX jobs_newest ON jobs (created_at DESC, id DESC);

CREATE TABLE attempts (
    -- Grows with every attempt of any job, also past deleted ones.
    token INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    -- [{agent_id, agent, ranks: [[rank, slot]]}]: a gang may one day span agents.
    places TEXT NOT NULL,
    -- The checkpoint it continues from: `<epoch>-<step>`.
    resume TEXT,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    UNIQUE (job_id, attempt)
) STRICT;

CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    rank INTEGER,
    name TEXT,
    first_step INTEGER,
    last_step INTEGER,
    body TEXT NOT NULL,
    PRIMARY KEY (job_id, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX events_by_kind ON events (job_id, kind, name, rank);

-- How many records of each source of an attempt are stored; written with the events themselves.
CREATE TABLE acknowledged (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    -- A rank's number, or -1 for the agent.
    source INTEGER NOT NULL,
    records INTEGER NOT NULL,
    PRIMARY KEY (job_id, attempt, source)
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    val_accuracy REAL,
    val_loss REAL,
    best INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (job_id, epoch, step)
) STRICT;

CREATE TABLE datasets (
    name TEXT PRIMARY KEY,
    path TEXT NOT NULL,
    info TEXT NOT NULL,
    added_at INTEGER NOT NULL
) STRICT;

CREATE TABLE agents (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    machine TEXT NOT NULL,
    slots TEXT NOT NULL,
    last_seen_at INTEGER NOT NULL
) STRICT;

CREATE TABLE idempotency (
    key TEXT PRIMARY KEY,
    -- SHA-256 of the request's body.
    request TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    created_at INTEGER NOT NULL
) STRICT;
