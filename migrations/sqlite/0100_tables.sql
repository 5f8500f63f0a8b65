-- Every table of version 0.1.0.
--
-- Times are milliseconds since 1970, UTC. Columns named after a JSON shape hold that shape.

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    -- Why, as a code and facts (JSON; see protocol/src/reason.rs), and the words of that.
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
    -- When it went back to the queue; NULL while it has not.
    waiting_since INTEGER,
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
    -- Fencing token of the attempt that may write, its number and its secret (hexadecimal); NULL when none may.
    fencing_token INTEGER,
    fencing_secret TEXT,
    -- What a fork began from. No reference: the other job may be deleted.
    parent_job TEXT,
    parent_checkpoint TEXT,
    -- Whether a fork that others see began from a job that they do not see: then its `parent_job` is shown to those
    -- alone who see that job.
    parent_private INTEGER NOT NULL DEFAULT 0,
    -- Who submitted it: a person, or a token by its name. A private one is seen by its owner and admins alone.
    owner TEXT,
    private INTEGER NOT NULL DEFAULT 0,
    -- What only a run from elsewhere has (JSON; see `External` in protocol/src/job.rs).
    external TEXT,
    -- Of a trial: the sweep that started it, and its number from 1. No reference: a backup restores tables by name.
    sweep TEXT,
    trial INTEGER,
    -- A deleted job is not found any more from one moment to the next; its rows are removed bit by bit after that.
    deleted_at INTEGER
) STRICT;
CREATE INDEX jobs_waiting ON jobs (state, priority DESC, created_at);
-- Those that hold slots, which a job of higher priority may need.
CREATE INDEX jobs_live ON jobs (priority) WHERE fencing_token IS NOT NULL;
-- Of these, those that end or may be preempted: dispatch asks for them when a job does not fit.
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
    -- Grows with every attempt of any job, also past deleted ones.
    fencing_token INTEGER PRIMARY KEY AUTOINCREMENT,
    -- 128 random bits that only the attempt's agents know; NULL in rows of earlier versions, whose attempts are over.
    fencing_secret TEXT,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    -- [{agent_id, agent, ranks: [[rank, slot]]}]: one entry an agent; a job over several machines has several.
    places TEXT NOT NULL,
    -- Ids of those of its agents that keep its checkpoints on a disk of their own and not on the server's: a JSON list.
    own_disks TEXT NOT NULL DEFAULT '[]',
    -- The checkpoint it continues from: `<epoch>-<step>`.
    resume TEXT,
    started_at INTEGER NOT NULL,
    ended_at INTEGER,
    -- How it ended: a state of its own, why, and at which step. NULL while it runs.
    state TEXT,
    reason TEXT,
    step INTEGER,
    UNIQUE (job_id, attempt)
) STRICT;

-- A row is one event, or the points that a rank reported at once (`kind` is 'metrics'): bytes in `points`
-- (server/src/store/points.rs) and an empty `body`. To readers these are an event a column; the last has the row's number.
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
-- The newest report of a rank.
CREATE INDEX events_rank ON events (job_id, rank, seq) WHERE kind = 'rank';
-- Points that are in no chunk yet: found by their number without a look at the log lines between.
CREATE INDEX events_metrics ON events (job_id, seq) WHERE kind = 'metrics';
-- Log lines stand between a run's many points: found by their number without a look at those.
CREATE INDEX events_log ON events (job_id, seq) WHERE kind = 'log';
-- Changes of state, of which a job has few: its history.
CREATE INDEX events_state ON events (job_id, seq) WHERE kind = 'state';

-- How many records of each source of an attempt are stored; written with the events themselves.
CREATE TABLE acknowledged (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    -- A rank's number; -1, -2, ... for the agents, one each, as `places` orders them.
    source INTEGER NOT NULL,
    records INTEGER NOT NULL,
    PRIMARY KEY (job_id, attempt, source)
) STRICT, WITHOUT ROWID;

-- Metrics at scale: the points of `events`, again, as binary columns and as buckets of 16, 256, ... steps, so that
-- a chart reads at most a few buckets a pixel. The newest chunk of a series and level grows until it is full; the
-- others never change.
CREATE TABLE metric_chunks (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    rank INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    -- 0: every point; k: buckets of 16^k steps.
    level INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    -- See server/src/metrics/chunk.rs.
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX metric_chunks_by_series ON metric_chunks (job_id, name, level, rank, attempt, first_step, last_step);

CREATE TABLE metric_compaction (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    -- Metric events up to this number are in chunks.
    watermark INTEGER NOT NULL,
    -- Points of events up to this number are in chunks alone; a stream begins after it.
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
    -- JSON: the validation pictures that the accuracy and the loss are of.
    validation TEXT,
    UNIQUE (job_id, epoch, step)
) STRICT;

-- The copies of checkpoints. No references: the row of an object store outlives its checkpoint until its objects are deleted, so one
-- without a checkpoint says what is left to delete. A folder appears on the server's disk whole or not at all; that it is there, the disk
-- says, so the server has a row only for one that is damaged.
CREATE TABLE checkpoint_copies (
    checkpoint_id TEXT NOT NULL,
    -- `server`; `agent:` and the id of an agent that has written it whole, in the attempt that the checkpoint is of; or the address of an
    -- object store (`serve --artifacts`).
    location TEXT NOT NULL,
    -- `copying`, `complete`, or `damaged`: what is there is missing or not what was written.
    state TEXT NOT NULL,
    -- Of an object store: SHA-256 of the MANIFEST.json of a complete copy.
    manifest TEXT,
    -- Of an object store: the upload of a file in parts that was begun and has not ended: the object's path, a blank and the store's id of it.
    parts TEXT,
    PRIMARY KEY (checkpoint_id, location)
) STRICT, WITHOUT ROWID;

-- The object stores that are known, and by what each is known again.
CREATE TABLE artifact_stores (
    -- As in `checkpoint_copies.location`.
    store TEXT PRIMARY KEY,
    -- What its LOCKSTEP.json names.
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

-- What people write on jobs, and machines that take no new work.
CREATE TABLE annotations (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    notes TEXT NOT NULL,
    -- ["tag", ...]
    tags TEXT NOT NULL
) STRICT;

-- Charts that somebody put together: of a job, and of a project for those of its jobs that have none of their own. Lists of panels
-- as protocol/src/panels.rs has them.
CREATE TABLE job_panels (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    panels TEXT NOT NULL
) STRICT;

CREATE TABLE project_panels (
    project TEXT PRIMARY KEY,
    panels TEXT NOT NULL
) STRICT;

-- Histograms of weights and gradients, of at most 200 steps of a job.
CREATE TABLE histograms (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    layer TEXT NOT NULL,
    -- `weight` or `gradient`.
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    -- Where it stands among the histograms of its step: in the network's order.
    place INTEGER NOT NULL,
    min REAL NOT NULL,
    max REAL NOT NULL,
    -- 64 numbers of 32 bits, little-endian.
    counts BLOB NOT NULL,
    PRIMARY KEY (job_id, layer, kind, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX histograms_by_step ON histograms (job_id, step);

-- The layers of a job's network, as its newest attempt described them (protocol/src/network.rs).
CREATE TABLE networks (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    description TEXT NOT NULL
) STRICT;

CREATE TABLE draining (
    agent_id TEXT PRIMARY KEY
) STRICT;

-- Means of what machines measured, a row a minute, kept for a day.
CREATE TABLE machine_minutes (
    agent_id TEXT NOT NULL,
    -- Minutes since 1970.
    minute INTEGER NOT NULL,
    -- See server/src/agents/machines/point.rs.
    data BLOB NOT NULL,
    PRIMARY KEY (agent_id, minute)
) STRICT, WITHOUT ROWID;
CREATE INDEX machine_minutes_by_minute ON machine_minutes (minute);

-- Who may do what. A token is 256 random bits, shown once; the table has its SHA-256 (hexadecimal).
CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    -- Of the scope `agent`: the agent's name and, once it is known, its id.
    agent TEXT,
    agent_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    -- To the minute.
    last_used_at INTEGER,
    -- The person whose token it is; NULL for programs' and machines'.
    owner TEXT,
    -- Id of the person's token that it was made with, and that it ends with.
    made_with TEXT
) STRICT;

-- People who sign in, by name and password or by an account at an OpenID provider.
CREATE TABLE people (
    name TEXT PRIMARY KEY,
    -- Of the password: argon2id, as a PHC string. NULL: the person has none.
    hash TEXT,
    role TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    disabled_at INTEGER
) STRICT;

-- Accounts at OpenID providers, by what never changes of them, and as whom they sign in.
CREATE TABLE identities (
    issuer TEXT NOT NULL,
    subject TEXT NOT NULL,
    -- NULL: an admin removed the person, and the account signs in again only when an admin binds it to somebody.
    person TEXT UNIQUE,
    PRIMARY KEY (issuer, subject)
) STRICT;

-- Browsers that are signed in: what the cookie holds, hashed, and the token that it stands for.
CREATE TABLE sessions (
    hash TEXT PRIMARY KEY,
    token_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;

-- Who did what: every request that may change something, and sign-ins. Ids sort by time.
CREATE TABLE audit (
    id TEXT PRIMARY KEY,
    at INTEGER NOT NULL,
    -- Name and id of the token; both empty for nobody.
    who TEXT NOT NULL,
    token_id TEXT NOT NULL,
    address TEXT NOT NULL,
    -- Method and route, or `sign in`.
    action TEXT NOT NULL,
    -- The address that was asked for.
    object TEXT NOT NULL,
    status INTEGER NOT NULL,
    request_id TEXT NOT NULL
) STRICT;
CREATE INDEX audit_by_time ON audit (at);

-- Where messages about jobs go (https://www.standardwebhooks.com).
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    url TEXT NOT NULL,
    -- `standard`, `slack`, ...
    form TEXT NOT NULL,
    -- Only jobs of this project; NULL for all.
    project TEXT,
    -- ["job.failed", ...]
    events TEXT NOT NULL,
    enabled INTEGER NOT NULL,
    -- What messages are signed with: `whsec_` and base64. Signing takes the secret itself, so it is no hash.
    secret TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

-- Messages: queued in the transaction that moves the job, kept for a while after their last attempt. No references: a backup restores
-- tables by name, and this one comes before `webhooks`.
CREATE TABLE webhook_deliveries (
    -- The header `webhook-id`. Ids sort by time.
    id TEXT PRIMARY KEY,
    webhook_id TEXT NOT NULL,
    -- NULL for a test.
    job_id TEXT,
    event TEXT NOT NULL,
    -- The body in the standard form.
    payload TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- When the next attempt is due; NULL when none follows.
    next_at INTEGER,
    -- [{at, status, error, secs}, ...]
    attempts TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX webhook_deliveries_over ON webhook_deliveries (webhook_id, id) WHERE next_at IS NULL;
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook_id, next_at, id) WHERE next_at IS NOT NULL;
CREATE INDEX webhook_deliveries_job ON webhook_deliveries (job_id) WHERE job_id IS NOT NULL;

-- Versions of registered models: names for checkpoints. A row never changes but for `deleted_at`: a number is not given again. No
-- references: a job is not deleted while it has versions, and rows of removed versions outlive it.
CREATE TABLE model_versions (
    model TEXT NOT NULL,
    -- From 1.
    version INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    checkpoint_id TEXT NOT NULL,
    -- JSON: the dataset's content at the job's first start; NULL if it is not known.
    dataset_fingerprint TEXT,
    -- JSON: versions of the programs that wrote the checkpoint, by name.
    programs TEXT NOT NULL,
    description TEXT NOT NULL,
    -- A person's or a token's name.
    registered_by TEXT,
    registered_at INTEGER NOT NULL,
    deleted_at INTEGER,
    PRIMARY KEY (model, version)
) STRICT, WITHOUT ROWID;
CREATE INDEX model_versions_by_job ON model_versions (job_id) WHERE deleted_at IS NULL;

-- Names that move from version to version of a model.
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
