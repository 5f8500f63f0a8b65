//! Faults between an agent and its server: a tunnel (`ssh -L`) is cut, or the server is away until the agent's spool is full.

use crate::{
    judge::{
        ReportRow, SHORT_LEASE, SLOW_STEPS, STEPS, assert_undisturbed_result, register_pictures,
        submit_and_train, undisturbed_weights, variables,
    },
    server::{Agents, Server, free_port, training_permit},
};
use std::time::{Duration, Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
};

/// A tunnel from its own port to the server.
struct Tunnel {
    port: u16,
    server_address: String,
    /// While this is false, bytes wait.
    is_flowing: watch::Sender<bool>,
    listening: Option<JoinHandle<()>>,
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut is_flowing: watch::Receiver<bool>) {
    let mut block = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut block).await {
        if is_flowing.wait_for(|is_flowing| *is_flowing).await.is_err()
            || to.write_all(&block[..length]).await.is_err()
        {
            return;
        }
    }
}

impl Tunnel {
    async fn open(server: &Server) -> Self {
        let server_address = server.url.trim_start_matches("http://").to_owned();
        let mut tunnel =
            Self { port: free_port(), server_address, is_flowing: watch::channel(true).0, listening: None };
        tunnel.listen().await;
        tunnel
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    async fn listen(&mut self) {
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await.expect("the tunnel's port");
        let (server_address, is_flowing) = (self.server_address.clone(), self.is_flowing.subscribe());
        self.listening = Some(tokio::spawn(async move {
            // When this task is aborted, its connections close.
            let mut directions = tokio::task::JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&server_address).await else { continue };
                let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                directions.spawn(forward(near_in, far_out, is_flowing.clone()));
                directions.spawn(forward(far_in, near_out, is_flowing.clone()));
            }
        }));
    }

    /// Closes all connections and refuses new ones, as when `ssh` ends.
    async fn close(&mut self) {
        let listening = self.listening.take().expect("an open tunnel");
        listening.abort();
        let _ = listening.await;
    }
}

#[tokio::test]
#[ignore = "slow: leases run out"]
async fn slow_an_attempt_survives_a_brief_disconnection_and_is_fenced_after_a_long_one() {
    let _permit = training_permit().await;
    let steps = 4 * STEPS;
    let model = undisturbed_weights(steps).await;
    let environment = variables([SHORT_LEASE, SLOW_STEPS]);
    let mut server = Server::start_on(Agents::None, None, environment).await;
    let mut tunnel = Tunnel::open(&server).await;
    server.start_agent_with(&tunnel.url(), 2, &[]);
    server.until("the agent is online", async |s: &Server| s.slots().await > 0).await;
    let server = register_pictures(server).await;

    // No bytes pass, for less than the lease.
    let id = submit_and_train(&server, steps).await;
    let mut row = ReportRow::begin("the network between agent and server is cut for 3 s");
    tunnel.is_flowing.send_replace(false);
    tokio::time::sleep(Duration::from_secs(3)).await;
    tunnel.is_flowing.send_replace(true);
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, steps, &model, &[]).await;
    assert_eq!(attempts, 1);
    row.passed("same attempt, nothing lost");

    // The tunnel is closed: the agent's connections are refused while the server runs.
    let id = submit_and_train(&server, steps).await;
    let mut row = ReportRow::begin("the SSH tunnel between agent and server is closed for 16 s");
    tunnel.close().await;
    let began = Instant::now();
    let have_ended = async |s: &Server| s.ranks(&id).is_empty();
    server.until("the ranks end by themselves", have_ended).await;
    let ranks_gone = began.elapsed();
    assert!(ranks_gone < Duration::from_secs(12), "ranks ended {ranks_gone:?} after the cut");
    server
        .until("the server restarts the job", async |s: &Server| s.job(&id).await["state"] == "restarting")
        .await;
    assert!(server.ranks(&id).is_empty(), "no restart before the ranks have ended");
    tokio::time::sleep(Duration::from_secs(16).saturating_sub(began.elapsed())).await;
    tunnel.listen().await;
    row.wait_until_recovered(&server, &id, 1).await;
    let attempts = assert_undisturbed_result(&server, &id, steps, &model, &[1]).await;
    assert_eq!(attempts, 2);
    row.passed(&format!("ranks ended themselves after {:.1} s, within the lease", ranks_gone.as_secs_f64()));
    server.stop().await;
}

#[tokio::test]
#[ignore = "slow: a spool fills up"]
async fn slow_ranks_write_a_checkpoint_and_end_when_the_spool_is_full() {
    let _permit = training_permit().await;
    let steps = 8 * STEPS;
    let model = undisturbed_weights(steps).await;
    let mut server = Server::start_with(Agents::None).await;
    let url = server.url.clone();
    server.start_agent_with(&url, 2, &["--spool-mib", "0.05"]);
    server.until("the agent is online", async |s: &Server| s.slots().await > 0).await;
    let mut server = register_pictures(server).await;
    let id = submit_and_train(&server, steps).await;
    let mut row = ReportRow::begin("the server is down until the agent's spool (--spool-mib 0.05) is full");
    server.kill_serve();
    let have_ended = async |s: &Server| s.ranks(&id).is_empty();
    server.until("the ranks write a checkpoint and end", have_ended).await;
    server.start_serve().await;
    row.wait_until_recovered(&server, &id, 1).await;
    assert_undisturbed_result(&server, &id, steps, &model, &[]).await;
    let events = crate::socket::stored(&server, &id).await;
    let reason = events.iter().find_map(|e| (e["state"] == "restarting").then(|| e["reason"].to_string()));
    let reason = reason.expect("a restart");
    assert!(reason.contains("the spool of agent") && reason.contains("--spool-mib"), "{reason}");
    row.passed("ranks wrote a checkpoint and ended, the reason says so; training continues from it");
    server.stop().await;
}
