-- All tables of version 0.1.0.
--
-- Times are in milliseconds since 1970, UTC. Columns for structured values contain JSON.

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    -- The reason of the state, as a code with facts (JSON; see protocol/src/reason.rs), and as text.
    cause TEXT,
    reason TEXT,
    priority INTEGER NOT NULL,
    -- As in the specification.
    preemptible INTEGER NOT NULL DEFAULT 0,
    -- As in the specification.
    project TEXT NOT NULL DEFAULT 'default',
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
    -- When the job last returned to the queue; NULL if it never did.
    waiting_since INTEGER,
    best TEXT,
    last TEXT NOT NULL DEFAULT '{}',
    -- Sequence number of the newest event. Events are numbered from 1 without gaps.
    last_seq INTEGER NOT NULL DEFAULT 0,
    -- Data from which the sparkline and the newest values are computed (JSON).
    progress TEXT NOT NULL DEFAULT '{}',
    -- The reason why the ranks are being stopped (JSON); NULL if they are not.
    stop TEXT,
    -- Number of failed or lost attempts since the job was submitted or last retried.
    restarts INTEGER NOT NULL DEFAULT 0,
    -- Fencing token of the attempt that may write: number and secret (hexadecimal). NULL if no attempt may write.
    fencing_token INTEGER,
    fencing_secret TEXT,
    -- The job and checkpoint from which a fork began. Not a foreign key, because the other job may be deleted.
    parent_job TEXT,
    parent_checkpoint TEXT,
    -- Whether a visible fork began from a private job. Then `parent_job` is shown only to people who see that job.
    parent_private INTEGER NOT NULL DEFAULT 0,
    -- Name of the person or token that submitted the job. Only the owner and admins see a private job.
    owner TEXT,
    private INTEGER NOT NULL DEFAULT 0,
    -- Additional fields of a run from elsewhere (JSON; see `External` in protocol/src/job.rs).
    external TEXT,
    -- Of a trial: the sweep that started it, and its number from 1. No reference: a backup restores tables by name.
    sweep TEXT,
    trial INTEGER,
    -- When the job was deleted. It is no longer found from then on, and its rows are removed in small steps.
    deleted_at INTEGER
) STRICT;
CREATE INDEX jobs_waiting ON jobs (state, priority DESC, created_at);
-- Jobs that hold slots.
CREATE INDEX jobs_live ON jobs (priority) WHERE fencing_token IS NOT NULL;
-- Jobs that hold slots and are ending or may be preempted. Dispatch reads them for jobs that do not fit.
CREATE INDEX jobs_yielding ON jobs (priority) WHERE fencing_token IS NOT NULL
    AND (preemptible <> 0 OR stop IS NOT NULL OR state NOT IN ('starting', 'running'));
CREATE INDEX jobs_newest ON jobs (created_at DESC, id DESC);
CREATE INDEX jobs_project ON jobs (project, created_at DESC, id DESC);
-- Forks of a job.
CREATE INDEX jobs_forks ON jobs (parent_job) WHERE parent_job IS NOT NULL;
-- Trials of a sweep, each once.
CREATE UNIQUE INDEX jobs_trials ON jobs (sweep, trial) WHERE sweep IS NOT NULL;
CREATE INDEX jobs_deleted ON jobs (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE TABLE attempts (
    -- Increases with every attempt of any job. Numbers of deleted attempts are not reused.
    fencing_token INTEGER PRIMARY KEY AUTOINCREMENT,
    -- 128 random bits (hexadecimal) that only the attempt's agents know.
    fencing_secret TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    -- [{agent_id, agent, ranks: [[rank, slot]]}], one entry per agent.
    places TEXT NOT NULL,
    -- Ids of the attempt's agents that keep checkpoints on their own disks, not the server's (a JSON list).
    own_disks TEXT NOT NULL DEFAULT '[]',
    -- The checkpoint from which the attempt continues: `<epoch>-<step>`.
    resume TEXT,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    -- The attempt's end: its final state, the reason, and the step. NULL while the attempt runs.
    state TEXT,
    reason TEXT,
    step INTEGER,
    UNIQUE (job_id, attempt)
) STRICT;

-- A row is one event, or the points that a rank reported together (`kind` is 'metrics'): bytes in `points`
-- (server/src/store/points.rs) and an empty `body`. Readers see one event per column of points; the last event has the row's `seq`.
CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    rank INTEGER,
    body TEXT NOT NULL,
    points BLOB,
    PRIMARY KEY (job_id, seq)
) STRICT, WITHOUT ROWID;
-- For the newest report of a rank.
CREATE INDEX events_rank ON events (job_id, rank, seq) WHERE kind = 'rank';
-- For points that are in no chunk yet, without reading other events.
CREATE INDEX events_metrics ON events (job_id, seq) WHERE kind = 'metrics';
-- For log lines, without reading the many points between them.
CREATE INDEX events_log ON events (job_id, seq) WHERE kind = 'log';
-- For changes of state and alerts, which are few, in a job's history.
CREATE INDEX events_history ON events (job_id, seq) WHERE kind IN ('state', 'alert');

-- The number of stored records of each source of an attempt, written in the same transaction as the events.
CREATE TABLE acknowledged (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    -- A rank's number, or -1, -2, ... for the agents in the order of `places`.
    source INTEGER NOT NULL,
    records INTEGER NOT NULL,
    PRIMARY KEY (job_id, attempt, source)
) STRICT, WITHOUT ROWID;

-- The points of `events` in another form: as binary columns, and as buckets of 16, 256, ... steps, so that a chart
-- reads at most a few buckets per pixel. The newest chunk of a series and level grows until it is full; the other
-- chunks never change.
CREATE TABLE metric_chunks (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    rank INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    -- 0: points; k: buckets of 16^k steps.
    level INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    -- Encoded by server/src/metrics/chunk.rs.
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX metric_chunks_by_series ON metric_chunks (job_id, name, level, rank, attempt, first_step, last_step);

CREATE TABLE metric_compaction (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    -- Metric events up to this number are in chunks.
    watermark INTEGER NOT NULL,
    -- Points of events up to this number are only in chunks. A stream begins after it.
    removed INTEGER NOT NULL DEFAULT 0
) STRICT;

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
    -- The validation pictures on which accuracy and loss were measured (JSON).
    validation TEXT,
    UNIQUE (job_id, epoch, step)
) STRICT;

-- Copies of checkpoints. No foreign keys: the row of an object store outlives the checkpoint until the objects are deleted, so a row
-- without a checkpoint is a copy that is still to be deleted. Complete copies on the server's disk have no rows, because a folder
-- appears there complete or not at all. The server's disk has a row only for a damaged copy.
CREATE TABLE checkpoint_copies (
    checkpoint_id TEXT NOT NULL,
    -- `server`; `agent:` and the id of an agent that has written a complete copy, in the checkpoint's attempt; or the address of an object
    -- store (`serve --artifacts`).
    location TEXT NOT NULL,
    -- `copying`, `complete`, or `damaged`: files are missing or differ from what was written.
    state TEXT NOT NULL,
    -- For an object store: SHA-256 of the MANIFEST.json of a complete copy.
    manifest TEXT,
    -- For an object store: an unfinished multipart upload of a file, as the object's path, a space, and the upload's id.
    parts TEXT,
    PRIMARY KEY (checkpoint_id, location)
) STRICT, WITHOUT ROWID;

-- Known object stores, and the markers that identify them.
CREATE TABLE artifact_stores (
    -- As in `checkpoint_copies.location`.
    store TEXT PRIMARY KEY,
    -- The marker in the store's LOCKSTEP.json.
    marker TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE datasets (
    name TEXT PRIMARY KEY,
    path TEXT NOT NULL,
    info TEXT NOT NULL,
    added_at INTEGER NOT NULL,
    owner TEXT,
    private INTEGER NOT NULL DEFAULT 0
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

-- Notes and tags of jobs.
CREATE TABLE annotations (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    notes TEXT NOT NULL,
    -- ["tag", ...]
    tags TEXT NOT NULL
) STRICT;

-- Custom panels of charts: of a job, and of a project for its jobs without their own panels. Lists of `Panel` (JSON; see
-- protocol/src/panels.rs).
CREATE TABLE job_panels (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    panels TEXT NOT NULL
) STRICT;

CREATE TABLE project_panels (
    project TEXT PRIMARY KEY,
    panels TEXT NOT NULL
) STRICT;

-- Histograms of weights and gradients, at most 200 steps per job.
CREATE TABLE histograms (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    layer TEXT NOT NULL,
    -- `weight` or `gradient`.
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    -- Index among the histograms of the step, in the network's order.
    place INTEGER NOT NULL,
    min REAL NOT NULL,
    max REAL NOT NULL,
    -- 64 integers of 32 bits, little-endian.
    counts BLOB NOT NULL,
    PRIMARY KEY (job_id, layer, kind, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX histograms_by_step ON histograms (job_id, step);

-- The layers of a job's network, as described by the newest attempt (JSON; see protocol/src/network.rs).
CREATE TABLE networks (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    description TEXT NOT NULL
) STRICT;

-- Drained agents, which take no new work.
CREATE TABLE draining (
    agent_id TEXT PRIMARY KEY
) STRICT;

-- Means of machines' measurements, one row per minute, kept for a day.
CREATE TABLE machine_minutes (
    agent_id TEXT NOT NULL,
    -- Minutes since 1970.
    minute INTEGER NOT NULL,
    -- Encoded by server/src/agents/machines/point.rs.
    data BLOB NOT NULL,
    PRIMARY KEY (agent_id, minute)
) STRICT, WITHOUT ROWID;
CREATE INDEX machine_minutes_by_minute ON machine_minutes (minute);

-- Tokens. A token has 256 random bits and is shown once; `hash` is its SHA-256 (hexadecimal).
CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    -- For the scope `agent`: the agent's name and, once known, the agent's id.
    agent TEXT,
    agent_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    -- Accurate to the minute.
    last_used_at INTEGER,
    -- The person who owns the token; NULL for tokens of programs and machines.
    owner TEXT,
    -- Id of the person's token that created this token. Revoking that token also revokes this one.
    made_with TEXT
) STRICT;

-- People who sign in, by name and password or by an account at an OpenID provider.
CREATE TABLE people (
    name TEXT PRIMARY KEY,
    -- Argon2id hash of the password as a PHC string; NULL without a password.
    hash TEXT,
    role TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    disabled_at INTEGER
) STRICT;

-- Accounts at OpenID providers, by their permanent ids, and the people they sign in as.
CREATE TABLE identities (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    -- NULL: an admin removed the person. The account can sign in again only after an admin binds it to a person.
    person TEXT UNIQUE,
    PRIMARY KEY (issuer, subject)
) STRICT;

-- Sessions of signed-in browsers: the hash of the cookie's value, and the id of the token or the person's principal.
CREATE TABLE sessions (
    hash TEXT PRIMARY KEY,
    token_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;

-- The audit log: requests that may change something, and sign-ins. Ids sort by time.
CREATE TABLE audit (
    id TEXT PRIMARY KEY,
    at INTEGER NOT NULL,
    -- Name and id of the token; both empty if the caller is unknown.
    who TEXT NOT NULL,
    token_id TEXT NOT NULL,
    address TEXT NOT NULL,
    -- Method and route, or `sign in`.
    action TEXT NOT NULL,
    -- The requested path and, if the path does not name it, the object that was created or changed.
    object TEXT NOT NULL,
    status INTEGER NOT NULL,
    request_id TEXT NOT NULL
) STRICT;
CREATE INDEX audit_by_time ON audit (at);

-- Receivers of messages about jobs (https://www.standardwebhooks.com).
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    url TEXT NOT NULL,
    -- `standard`, `slack`, ...
    form TEXT NOT NULL,
    -- Only jobs of this project; NULL for all projects.
    project TEXT,
    -- ["job.failed", ...]
    events TEXT NOT NULL,
    enabled INTEGER NOT NULL,
    -- The secret that signs messages: `whsec_` and base64. It is not hashed, because signing needs the secret itself.
    secret TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

-- Messages, queued in the transaction that changes the job's state, and kept for a while after their last attempt. No foreign keys: a
-- backup restores tables by name, and this table comes before `webhooks`.
CREATE TABLE webhook_deliveries (
    -- Value of the header `webhook-id`. Ids sort by time.
    id TEXT PRIMARY KEY,
    webhook_id TEXT NOT NULL,
    -- NULL for a test.
    job_id TEXT,
    event TEXT NOT NULL,
    -- The body in the standard form.
    payload TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- When the next attempt is due; NULL if there is none.
    next_at INTEGER,
    -- [{at, status, error, secs}, ...]
    attempts TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX webhook_deliveries_over ON webhook_deliveries (webhook_id, id) WHERE next_at IS NULL;
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook_id, next_at, id) WHERE next_at IS NOT NULL;
CREATE INDEX webhook_deliveries_job ON webhook_deliveries (job_id) WHERE job_id IS NOT NULL;

-- Versions of registered models, which name checkpoints. Only `deleted_at` of a row changes, because numbers are not reused. No foreign
-- keys: a job is not deleted while it has versions, and rows of removed versions outlive the job.
CREATE TABLE model_versions (
    model TEXT NOT NULL,
    -- From 1.
    version INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    checkpoint_id TEXT NOT NULL,
    -- Fingerprint of the dataset at the job's first start (JSON); NULL if unknown.
    dataset_fingerprint TEXT,
    -- Versions of the programs that wrote the checkpoint, by name (JSON).
    programs TEXT NOT NULL,
    description TEXT NOT NULL,
    -- Name of a person or token.
    registered_by TEXT,
    registered_at INTEGER NOT NULL,
    deleted_at INTEGER,
    PRIMARY KEY (model, version)
) STRICT, WITHOUT ROWID;
CREATE INDEX model_versions_by_job ON model_versions (job_id) WHERE deleted_at IS NULL;

-- Aliases: names that can be moved from one version of a model to another.
CREATE TABLE model_aliases (
    model TEXT NOT NULL,
    alias TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (model, alias)
) STRICT, WITHOUT ROWID;

-- Sweeps: jobs that are submitted with several settings. Each trial is a job, which says what became of it.
CREATE TABLE sweeps (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    project TEXT NOT NULL,
    -- `running`, `paused`, `finished` or `cancelled`.
    state TEXT NOT NULL,
    -- The job file (JSON).
    spec TEXT NOT NULL,
    -- Why the server has paused it, in words.
    reason TEXT,
    -- [{"train.lr": 0.1, ...}, ...]: of each trial, in the order in which they start.
    settings TEXT NOT NULL,
    -- [1, 3, 9]: epochs after which trials are compared; the last is the end of training.
    rungs TEXT NOT NULL,
    -- The specifications of the trials, checked (JSON).
    specs TEXT NOT NULL,
    owner TEXT,
    private INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    -- When the last trial was over; NULL before that.
    finished_at INTEGER
) STRICT;
CREATE INDEX sweeps_unfinished ON sweeps (created_at) WHERE finished_at IS NULL;
