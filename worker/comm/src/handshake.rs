//! Mutual authentication of a new TCP connection. Both ends prove that they know the attempt's secret, by HMAC-SHA256 over
//! random numbers of both ends. A recorded handshake therefore cannot be replayed.
//!
//! The messages in order: the caller sends magic, nonce and rank; the listener nonce and proof; the caller its proof; the
//! listener one byte.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use socket2::{SockRef, TcpKeepalive};
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::Duration,
};

const MAGIC: &[u8; 8] = b"lockstp2";
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
/// Time limit for each read and write of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without data after which the kernel probes the other machine, and the interval between probes.
const KEEPALIVE: Duration = Duration::from_secs(1);
/// Number of unanswered probes after which the connection is lost.
const KEEPALIVE_RETRIES: u32 = 8;

/// The values that must be equal at both ends of a connection.
#[derive(Debug, Clone, Copy)]
pub struct HandshakeTerms<'a> {
    pub secret: &'a [u8],
    /// The purpose of the connection, such as `store` or `ring/gradients`.
    pub purpose: &'a str,
}

impl HandshakeTerms<'_> {
    /// The HMAC, over both nonces and the caller's rank, by which `side` (`caller` or `listener`) proves that it knows the secret.
    fn proof(&self, side: &str, caller: &[u8], listener: &[u8], rank: u32) -> Hmac<Sha256> {
        // HMAC accepts keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret).unwrap_or_else(|_| unreachable!());
        for part in [side.as_bytes(), self.purpose.as_bytes(), caller, listener, &rank.to_le_bytes()] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    /// Runs the handshake as the caller with rank `rank`. Afterwards the stream has no time-outs.
    ///
    /// # Errors
    /// `PermissionDenied` if the listener has another secret or purpose.
    pub fn initiate(&self, stream: &mut TcpStream, rank: u32) -> io::Result<()> {
        set_options(stream)?;
        let own_nonce = nonce();
        let mut hello = Vec::from(MAGIC);
        hello.extend_from_slice(&own_nonce);
        hello.extend_from_slice(&rank.to_le_bytes());
        stream.write_all(&hello)?;
        let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
        stream.read_exact(&mut answer)?;
        let (their_nonce, proof) = answer.split_at(NONCE_BYTES);
        self.proof("listener", &own_nonce, their_nonce, rank)
            .verify_slice(proof)
            .map_err(|_| wrong_secret())?;
        let proof = self.proof("caller", &own_nonce, their_nonce, rank).finalize().into_bytes();
        stream.write_all(&proof)?;
        let mut accepted = [0];
        stream.read_exact(&mut accepted)?;
        set_timeouts(stream, None)
    }

    /// Runs the handshake as the listener, and returns the caller's rank. Afterwards the stream has no time-outs.
    ///
    /// # Errors
    /// `PermissionDenied` if the caller has another secret or purpose. `InvalidData` if the caller uses another protocol.
    pub fn answer(&self, stream: &mut TcpStream) -> io::Result<u32> {
        set_options(stream)?;
        let (mut magic, mut their_nonce, mut rank) = ([0; MAGIC.len()], [0; NONCE_BYTES], [0; 4]);
        stream.read_exact(&mut magic)?;
        stream.read_exact(&mut their_nonce)?;
        stream.read_exact(&mut rank)?;
        if magic != *MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the caller is not a rank of Lockstep"));
        }
        let (rank, own_nonce) = (u32::from_le_bytes(rank), nonce());
        let mut answer = Vec::from(own_nonce);
        answer.extend_from_slice(
            &self.proof("listener", &their_nonce, &own_nonce, rank).finalize().into_bytes(),
        );
        stream.write_all(&answer)?;
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof)?;
        self.proof("caller", &their_nonce, &own_nonce, rank)
            .verify_slice(&proof)
            .map_err(|_| wrong_secret())?;
        stream.write_all(&[1])?;
        set_timeouts(stream, None)?;
        Ok(rank)
    }
}

fn wrong_secret() -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        "the other side belongs to another attempt (wrong secret or purpose)",
    )
}

/// Sets the time-outs of the handshake, and options that remain set after the handshake. Keepalive detects a machine that
/// was lost soon after its rank ended, before the machine could send the end of the connection.
fn set_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    SockRef::from(stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_RETRIES))?;
    set_timeouts(stream, Some(HANDSHAKE_TIMEOUT))
}

fn set_timeouts(stream: &TcpStream, timeout: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(timeout)?;
    stream.set_write_timeout(timeout)
}

/// Two version 4 UUIDs: 244 random bits.
fn nonce() -> [u8; NONCE_BYTES] {
    bytemuck::must_cast([(); 2].map(|()| uuid::Uuid::new_v4().into_bytes()))
}
