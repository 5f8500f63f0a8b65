//! The main job, end to end: these tests start the real `lockstep` binary and use it as people and
//! programs do, over REST, websockets and the command line, on real pictures.
//!
//! `server.rs`, `socket.rs`, `pages.rs`, `pictures.rs` and `specs.rs` are what the tests share; every other file
//! is one theme. Tests that train take turns (`server::turn`), so that none is starved of cores and
//! a deadline means what it says. With `LOCKSTEP_TEST_DATABASE=postgres` every server keeps what it knows in Postgres.

#![allow(unreachable_pub)] // A module is shared with the server's tests.

mod cluster;
mod pages;
mod pictures;
#[path = "../../server/tests/it/postgres.rs"]
mod postgres;
// Some of what it can do is for the fault matrix alone.
#[allow(dead_code)]
mod server;
mod socket;
mod specs;

mod access;
mod addresses;
mod artifacts;
mod backup;
mod bad_datasets;
mod bad_requests;
mod bad_starts;
mod commands;
mod dataset_copies;
mod datasets;
mod differing_copies;
mod edges;
mod elsewhere;
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
mod manners;
mod models;
mod mutual_tls;
mod network;
mod opens;
mod pause;
mod people;
mod plan;
mod progressive;
mod projects;
mod queue;
mod recipes;
mod reference;
mod second_account;
mod sharded;
mod spare;
mod streams;
mod sweeps;
mod tls;
mod train;
mod watch;
mod webhooks;
mod world_size;
