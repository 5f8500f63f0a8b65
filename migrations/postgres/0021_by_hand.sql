-- As migrations/sqlite/0021_by_hand.sql, which explains it.

CREATE TABLE annotations (
    job_id TEXT COLLATE "C" PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    note TEXT COLLATE "C" NOT NULL,
    tags TEXT COLLATE "C" NOT NULL
);

CREATE TABLE draining (
    agent_id TEXT COLLATE "C" PRIMARY KEY
);
