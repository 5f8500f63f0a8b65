//! The server of the key-value store. It runs in the process of rank 0.

use super::{
    MAX_SERVER_WAIT, RendezvousConfig, RendezvousError, bind,
    message::{Reply, Request, receive, send},
    taken_port,
};
use crate::handshake::HandshakeTerms;
use lockstep_host::lock;
use std::{
    collections::BTreeMap,
    io,
    net::{TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

/// The values that ranks have set, and the notification of threads that wait for a value.
#[derive(Debug, Default)]
struct SharedValues {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
}

/// Whether `address` is a name other than `localhost` that resolves to a loopback address on this machine.
fn is_own_name(address: &str, socket: &TcpListener) -> bool {
    let is_name = address.parse::<std::net::IpAddr>().is_err() && !address.eq_ignore_ascii_case("localhost");
    is_name && socket.local_addr().is_ok_and(|at| at.ip().is_loopback())
}

/// Serves the store until the returned socket is shut down.
pub(super) fn listen(config: &RendezvousConfig) -> Result<TcpListener, RendezvousError> {
    let RendezvousConfig { addr, port, .. } = config;
    let listen_error = |error: io::Error| {
        RendezvousError::Failed(match error.kind() {
            io::ErrorKind::AddrInUse => taken_port(addr, *port),
            _ => format!("rank 0 cannot listen on {addr}:{port}: {error}"),
        })
    };
    let socket = match bind(addr, *port) {
        // Debian maps a machine's own name to a loopback address, which other machines cannot reach.
        Ok(socket) if is_own_name(addr, &socket) => {
            drop(socket);
            TcpListener::bind(("0.0.0.0", *port))
        }
        other => other,
    }
    .map_err(&listen_error)?;
    let listener = socket.try_clone().map_err(&listen_error)?;
    let shared = Arc::new(SharedValues::default());
    let secret: Arc<[u8]> = config.secret.as_slice().into();
    let serve = move || {
        for stream in socket.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                // The socket has been shut down.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
                Err(_) => continue,
            };
            let (shared, secret) = (shared.clone(), secret.clone());
            // One thread per rank. If no thread can be started, the connection is closed, and the rank tries again.
            let _ = std::thread::Builder::new()
                .name("rendezvous".into())
                .stack_size(128 << 10)
                .spawn(move || serve_rank(stream, &secret, &shared));
        }
    };
    std::thread::Builder::new().name("rendezvous".into()).spawn(serve).map_err(&listen_error)?;
    Ok(listener)
}

fn serve_rank(mut stream: TcpStream, secret: &[u8], shared: &SharedValues) {
    let terms = HandshakeTerms { secret, purpose: "store" };
    if terms.answer(&mut stream).is_err() {
        return;
    }
    // Ends when the rank closes the connection.
    while let Ok(request) = receive::<Request>(&mut stream) {
        let reply = shared.answer(request);
        if send(&mut stream, &reply).is_err() {
            return;
        }
    }
}

impl SharedValues {
    fn answer(&self, request: Request) -> Reply {
        let mut values = lock(&self.values);
        match request {
            Request::Set { key, value } => {
                values.insert(key, value);
                self.changed.notify_all();
                Reply::new()
            }
            Request::Get { keys, wait_ms } => {
                let wait = Duration::from_millis(wait_ms.min(MAX_SERVER_WAIT.as_millis() as u64));
                let is_incomplete =
                    |values: &mut BTreeMap<String, Vec<u8>>| keys.iter().any(|key| !values.contains_key(key));
                let (values, _) = self
                    .changed
                    .wait_timeout_while(values, wait, is_incomplete)
                    .unwrap_or_else(PoisonError::into_inner);
                keys.iter().map(|key| values.get(key).cloned()).collect()
            }
        }
    }
}
