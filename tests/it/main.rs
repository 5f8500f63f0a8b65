//! End-to-end tests: they start the real `lockstep` binary and use it over REST, websockets and the command line,
//! with real pictures.
//!
//! All tests share `server.rs`, `socket.rs`, `pages.rs`, `pictures.rs`, `specs.rs` and `tensors.rs`; every other file tests one feature.
//! A semaphore (`server::training_permit`) limits how many tests train at the same time, so that each has enough cores
//! to keep its deadlines. With `LOCKSTEP_TEST_DATABASE=postgres` every server uses a Postgres database.

#![allow(unreachable_pub)] // The module `postgres` is shared with the server's tests.

mod cluster;
mod pages;
mod pictures;
#[path = "../../server/tests/it/postgres.rs"]
mod postgres;
// Only tests/faults uses some functions of `server`.
#[allow(dead_code)]
mod server;
mod socket;
mod specs;
mod tensors;

mod access;
mod addresses;
mod artifacts;
mod backup;
mod bad_datasets;
mod bad_starts;
mod browser;
mod cli_messages;
mod commands;
mod dataset_copies;
mod datasets;
mod differing_copies;
mod edges;
mod embeddings;
mod exports;
mod faults;
mod finetune;
mod first_hour;
mod full;
mod gangs;
mod held_out;
mod imports;
mod interrupted;
mod join;
mod life;
mod models;
mod mutual_tls;
mod network;
mod pause;
mod people;
mod plan;
mod progressive;
mod projects;
mod queue;
mod recipes;
mod reference;
mod second_account;
mod separate_disks;
mod sharded;
mod spare;
mod streams;
mod sweeps;
mod tls;
mod train;
mod watch;
mod webhooks;
mod world_size;
