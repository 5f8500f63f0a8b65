//! Who may do what, on every route; tokens, sessions, agents' identities, and the audit log.

mod agents;
mod audit;
mod people;
mod routes;
mod sessions;
mod tokens;
