//! Access control on every route: tokens, sessions, identities of agents, and the audit log.

mod agents;
mod audit;
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

use crate::{agent::Agent, test_server::TestServer};
use reqwest::Client;

/// Clients of people, each with a token of the greatest scope that the role allows.
struct People {
    vera: Client,
    mona: Client,
    otto: Client,
    ada: Client,
    /// Secrets of the tokens of Mona's and Otto's clients.
    mona_secret: String,
    otto_secret: String,
}

/// Adds a viewer, two members and an admin.
async fn add_people(server: &TestServer) -> People {
    for (name, role) in [("vera", "viewer"), ("mona", "member"), ("otto", "member"), ("ada", "admin")] {
        server.add_person(name, role).await;
    }
    let (vera, _) = server.client_of("vera", "read").await;
    let (mona, mona_secret) = server.client_of("mona", "submit").await;
    let (otto, otto_secret) = server.client_of("otto", "submit").await;
    let (ada, _) = server.client_of("ada", "admin").await;
    People { vera, mona, otto, ada, mona_secret, otto_secret }
}

/// Starts a server with an agent and people. Members may register datasets only below a root, so every folder is below one.
async fn server_with_people() -> (TestServer, Agent, People) {
    let server = TestServer::with(|config| config.dataset_roots = vec!["/".into()]).await;
    let agent = Agent::join_with_dataset(&server, 2).await;
    let people = add_people(&server).await;
    (server, agent, people)
}
