//! Access control on every route: tokens, sessions, identities of agents, and the audit log.

mod agents;
mod audit;
mod guessing;
mod owners;
mod panels;
mod people;
mod private_ids;
mod private_lists;
mod private_parents;
mod private_queue;
mod roles;
mod routes;
mod sessions;
mod tokens;

use crate::test_server::TestServer;
use reqwest::Client;

/// Clients of people, each with a token of the greatest scope that the role allows.
struct People {
    vera: Client,
    mona: Client,
    otto: Client,
    ada: Client,
}

/// Adds a viewer, two members and an admin.
async fn add_people(server: &TestServer) -> People {
    for (name, role) in [("vera", "viewer"), ("mona", "member"), ("otto", "member"), ("ada", "admin")] {
        server.add_person(name, role).await;
    }
    let client = async |name: &str, scope: &str| server.client_of(name, scope).await.0;
    People {
        vera: client("vera", "read").await,
        mona: client("mona", "submit").await,
        otto: client("otto", "submit").await,
        ada: client("ada", "admin").await,
    }
}
