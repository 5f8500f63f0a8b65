//! The server as its users meet it: a real port, a real SQLite file, real websockets, and an agent that speaks
//! the protocol but trains nothing. With `LOCKSTEP_TEST_DATABASE=postgres` everything is on a real Postgres.
#![allow(unreachable_pub)] // Everything here is for the tests of this one binary.

mod agent;
mod agent_requests;
mod postgres;
mod preemption;
mod test_server;

mod access;
mod artifacts;
mod cursors;
mod damaged_files;
mod databases;
mod dataset_files;
mod dataset_roots;
mod datasets;
mod deletion;
mod dispatching;
mod document;
mod earlier_uploads;
mod fair_share;
mod fewer_ranks;
mod fits;
mod gangs;
mod groups;
mod history;
mod ingest;
mod job_page;
mod layers;
mod life;
mod limits;
mod list_columns;
mod listening;
mod lists;
mod log_pages;
mod lost_contact;
mod machines;
mod many_agents;
mod metrics;
mod metrics_query;
mod notes;
mod oidc;
mod problems;
mod proxies;
mod quarantine;
mod queue;
mod reasons;
mod refusals;
mod safety;
mod starting;
mod store;
mod store_lists;
mod streams;
mod submission;
mod tls;
mod uploads;
