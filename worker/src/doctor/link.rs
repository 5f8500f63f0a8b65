//! Measures the network link from one machine to another: whether ranks can connect, the round trip time, the
//! throughput, and the difference of the clocks.
//! Each machine listens on a port chosen by its kernel, as ranks do. A caller connects from another machine and
//! authenticates with the shared secret. Then the caller sends one byte for each request.

use lockstep_comm::handshake::HandshakeTerms;
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

const PURPOSE: &str = "doctor";
/// Request: the listener's clock, in nanoseconds.
const CLOCK: u8 = b'c';
/// Request: data until the caller closes the connection.
const DATA: u8 = b'd';
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for each read.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ROUND_TRIPS: usize = 200;
const MAX_ROUND_TRIPS_TIME: Duration = Duration::from_secs(1);
/// Time for TCP's slow start, excluded from the measurement.
const WARM_UP: Duration = Duration::from_millis(400);
const MEASURE_TIME: Duration = Duration::from_millis(600);
const BLOCK_BYTES: usize = 256 << 10;
/// Maximum number of concurrent callers. A measurement needs only one.
const MAX_CALLERS: usize = 8;
/// Maximum time to serve one caller.
const MAX_SERVE_TIME: Duration = Duration::from_secs(60);

/// A measurement of a link from one end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasurement {
    pub connect_ms: f64,
    /// The median round trip time, including the wake-up of a thread at each end.
    pub round_trip_ms: f64,
    /// The throughput from the called machine to the caller.
    pub bytes_per_second: f64,
    /// How far the called machine's clock is ahead of the caller's clock.
    pub clock_ahead_ms: f64,
    /// The uncertainty of `clock_ahead_ms`.
    pub clock_within_ms: f64,
}

impl LinkMeasurement {
    /// Combines two measurements of the same link, using the better value of each kind. A machine that is busy makes
    /// a link seem slower than it is, never faster.
    #[must_use]
    pub fn best(self, other: Self) -> Self {
        let clock = if other.clock_within_ms < self.clock_within_ms { &other } else { &self };
        let (clock_ahead_ms, clock_within_ms) = (clock.clock_ahead_ms, clock.clock_within_ms);
        Self {
            connect_ms: self.connect_ms.min(other.connect_ms),
            round_trip_ms: self.round_trip_ms.min(other.round_trip_ms),
            bytes_per_second: self.bytes_per_second.max(other.bytes_per_second),
            clock_ahead_ms,
            clock_within_ms,
        }
    }
}

/// Listens at `ip` on a port chosen by the kernel, for callers that know `secret`, until the process ends.
///
/// # Errors
/// The address does not belong to this machine, or no thread can be started.
pub fn listen(ip: IpAddr, secret: Vec<u8>) -> io::Result<u16> {
    let listener = TcpListener::bind((ip, 0))?;
    let port = listener.local_addr()?.port();
    let secret = Arc::new(secret);
    std::thread::Builder::new().name("listener".into()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // For example, no file descriptor is available.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            // The thread of each caller has a clone of the secret.
            if Arc::strong_count(&secret) > MAX_CALLERS {
                continue;
            }
            let secret = secret.clone();
            // A caller that has disconnected reports the reason itself. Without a thread, the connection is closed.
            let _ = std::thread::Builder::new().name("caller".into()).spawn(move || serve(stream, &secret));
        }
    })?;
    Ok(port)
}

fn serve(mut stream: TcpStream, secret: &[u8]) -> io::Result<()> {
    HandshakeTerms { secret, purpose: PURPOSE }.answer(&mut stream)?;
    stream.set_read_timeout(Some(MAX_SERVE_TIME))?;
    stream.set_write_timeout(Some(MAX_SERVE_TIME))?;
    let began = Instant::now();
    let mut request = [0];
    loop {
        stream.read_exact(&mut request)?;
        match request[0] {
            CLOCK => stream.write_all(&now_ns().to_le_bytes())?,
            DATA => {
                let block = vec![0x5a; BLOCK_BYTES];
                while began.elapsed() < MAX_SERVE_TIME {
                    stream.write_all(&block)?;
                }
                return Ok(());
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Connects to the machine that listens at `target`, and measures the link.
///
/// # Errors
/// The connection fails, or no data arrives. The message begins with what was attempted.
pub fn probe(target: SocketAddr, secret: &[u8]) -> Result<LinkMeasurement, String> {
    let began = Instant::now();
    let mut stream = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT).map_err(|e| match e.kind() {
        io::ErrorKind::TimedOut => {
            format!("connecting to {target}: no answer in {} s", CONNECT_TIMEOUT.as_secs())
        }
        _ => format!("connecting to {target}: {e}"),
    })?;
    let connect_ms = millis(began.elapsed());
    HandshakeTerms { secret, purpose: PURPOSE }
        .initiate(&mut stream, 0)
        .map_err(|e| format!("connected to {target}, which does not answer as Lockstep does: {e}"))?;
    stream.set_read_timeout(Some(READ_TIMEOUT)).map_err(|e| e.to_string())?;
    let [round_trip_ms, clock_ahead_ms, clock_within_ms] = measure_clock(&mut stream)
        .map_err(|e| format!("connected to {target}, but then {}", describe_read_error(&e)))?;
    let bytes_per_second = measure_throughput(&mut stream).map_err(|e| {
        format!(
            "connected to {target}; short messages pass, but {} during a bulk transfer",
            describe_read_error(&e)
        )
    })?;
    Ok(LinkMeasurement { connect_ms, round_trip_ms, bytes_per_second, clock_ahead_ms, clock_within_ms })
}

fn describe_read_error(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("no data arrived for {} s", READ_TIMEOUT.as_secs())
        }
        _ => error.to_string(),
    }
}

/// Measures [`LinkMeasurement::round_trip_ms`], [`LinkMeasurement::clock_ahead_ms`] and [`LinkMeasurement::clock_within_ms`].
fn measure_clock(stream: &mut TcpStream) -> io::Result<[f64; 3]> {
    let began = Instant::now();
    let mut trips = Vec::new();
    let (mut clock_ahead_ms, mut clock_within_ms) = (0.0, f64::MAX);
    while trips.len() < MAX_ROUND_TRIPS && (began.elapsed() < MAX_ROUND_TRIPS_TIME || trips.len() < 2) {
        let own_clock = now_ns();
        let sent_at = Instant::now();
        stream.write_all(&[CLOCK])?;
        let mut other_clock = [0; 8];
        stream.read_exact(&mut other_clock)?;
        let trip_ms = millis(sent_at.elapsed());
        trips.push(trip_ms);
        // The shortest round trip determines the other end's clock most precisely.
        if trip_ms / 2.0 < clock_within_ms {
            clock_within_ms = trip_ms / 2.0;
            let other_clock = u64::from_le_bytes(other_clock);
            clock_ahead_ms = (i128::from(other_clock) - i128::from(own_clock)) as f64 / 1e6 - clock_within_ms;
        }
    }
    trips.sort_by(f64::total_cmp);
    Ok([trips[trips.len() / 2], clock_ahead_ms, clock_within_ms])
}

/// The throughput in bytes per second, after TCP has adapted its speed.
fn measure_throughput(stream: &mut TcpStream) -> io::Result<f64> {
    stream.write_all(&[DATA])?;
    let mut block = vec![0; BLOCK_BYTES];
    // The measurement begins after the first bytes have arrived.
    if stream.read(&mut block)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let began = Instant::now();
    let mut warm_since = None;
    let mut bytes = 0;
    loop {
        let received = stream.read(&mut block)?;
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let elapsed = began.elapsed();
        match warm_since {
            None if elapsed >= WARM_UP => warm_since = Some(elapsed),
            None => {}
            Some(since) => {
                bytes += received;
                if elapsed >= since + MEASURE_TIME {
                    return Ok(bytes as f64 / (elapsed - since).as_secs_f64());
                }
            }
        }
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn loopback_has_a_short_round_trip_and_equal_clocks() {
        let port = listen(LOOPBACK, b"secret".into()).unwrap();
        let link = probe((LOOPBACK, port).into(), b"secret").unwrap();
        assert!(link.round_trip_ms > 0.0 && link.bytes_per_second > 1e6, "{link:?}");
        assert!(link.clock_ahead_ms.abs() <= link.clock_within_ms + 0.5, "{link:?}");
    }

    #[test]
    fn best_takes_the_better_value_of_each_kind() {
        let link = |round_trip_ms, bytes_per_second, clock_ahead_ms, clock_within_ms| LinkMeasurement {
            connect_ms: round_trip_ms,
            round_trip_ms,
            bytes_per_second,
            clock_ahead_ms,
            clock_within_ms,
        };
        let (slow, far) = (link(0.1, 1e6, 5.0, 0.05), link(3.0, 9e6, -7.0, 1.5));
        let best = link(0.1, 9e6, 5.0, 0.05);
        assert_eq!(slow.clone().best(far.clone()), best);
        assert_eq!(far.best(slow), best);
    }

    #[test]
    fn a_wrong_secret_and_a_closed_port_have_different_errors() {
        let port = listen(LOOPBACK, b"secret".into()).unwrap();
        let error = probe((LOOPBACK, port).into(), b"other").unwrap_err();
        assert!(error.contains("does not answer as Lockstep does"), "{error}");
        let closed = TcpListener::bind((LOOPBACK, 0)).unwrap().local_addr().unwrap();
        let error = probe(closed, b"secret").unwrap_err();
        assert!(error.contains("refused"), "{error}");
    }

    #[test]
    fn a_caller_above_the_limit_is_refused_until_another_leaves() {
        let port = listen(LOOPBACK, b"secret".into()).unwrap();
        let target = SocketAddr::from((LOOPBACK, port));
        let call = || {
            let mut stream = TcpStream::connect(target).unwrap();
            HandshakeTerms { secret: b"secret", purpose: PURPOSE }.initiate(&mut stream, 0).map(|()| stream)
        };
        let mut callers: Vec<_> = (0..MAX_CALLERS).map(|_| call().unwrap()).collect();
        assert!(call().is_err(), "a caller above the limit");
        callers.pop();
        crate::testkit::wait_until("no place becomes free", || call().is_ok());
    }
}
