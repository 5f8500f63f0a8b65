//! The fault matrix: injects faults into the real program and checks its guarantees.
//!
//! `processes.rs`, `crash_points.rs`, `databases.rs`, `machine.rs` and `network.rs` contain a test for each row of the matrix; `judge.rs` has the
//! checks after each fault. The fast rows run with all other tests. Slow rows, the soak and the repeated kills are marked
//! `ignored` and have their own commands; `bash tests/run full` also runs the tests of `slow`:
//!
//! ```sh
//! cargo test --workspace --test faults -- --ignored slow       # long outages, leases that expire
//! cargo test --workspace --test faults -- --ignored kill_50    # kill -9 under load, 50 times each
//! cargo test --workspace --test faults -- --ignored soak       # 200 jobs, a random fault every few seconds
//! cargo test --workspace --test faults -- --ignored root       # faults that need root
//! cargo test --release --workspace --test faults -- --ignored measure    # time from a kill to training again, five times each
//! ```
//!
//! With `LOCKSTEP_FAULTS_REPORT=FILE` every row appends its measurements to the file as a line of JSON.
#![allow(dead_code, unreachable_pub, unused_imports)] // Modules are shared with `tests/it`.

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
