//! The fault matrix: injects faults into the real program and checks its guarantees.
//!
//! `processes.rs`, `crash_points.rs`, `databases.rs`, `machine.rs` and `network.rs` hold a test a row of the matrix; `judge.rs` is what every one of
//! them must pass. The fast rows run with all other tests. The rows that take long, the soak and the repeated kills
//! are marked `ignored` and have commands of their own; `bash tests/run full` runs those of `slow`:
//!
//! ```sh
//! cargo test --workspace --test faults -- --ignored slow       # minutes away, leases that run out
//! cargo test --workspace --test faults -- --ignored kill_50    # kill -9 under load, 50 times each
//! cargo test --workspace --test faults -- --ignored soak       # 200 jobs, a random fault every few seconds
//! cargo test --workspace --test faults -- --ignored root       # what only root can do to a machine
//! cargo test --release --workspace --test faults -- --ignored measure    # from a kill to training again, five times each
//! ```
//!
//! With `LOCKSTEP_FAULTS_REPORT=FILE` every row appends what it measured as a line of JSON.
#![allow(dead_code, unreachable_pub)] // Modules are shared with the acceptance tests.

#[path = "../it/pictures.rs"]
mod pictures;
#[path = "../../server/tests/it/postgres.rs"]
mod postgres;
#[path = "../it/server.rs"]
mod server;
#[path = "../it/socket.rs"]
mod socket;
#[path = "../it/specs.rs"]
mod specs;

mod judge;

mod crash_points;
mod databases;
mod machine;
mod measure;
mod network;
mod processes;
mod soak;
