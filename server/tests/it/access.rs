//! Who may do what, on every route; tokens, sessions, agents' identities, and the audit log.

mod agents;
mod audit;
mod guessing;
mod owners;
mod panels;
mod people;
mod private_lists;
mod private_queue;
mod roles;
mod routes;
mod sessions;
mod tokens;
