//! Finds the account that listens on a loopback port. A token for the user's own server must not be sent to a program
//! that another account has started in its place.

use std::{fs, net::IpAddr};

/// The value of `st` in `/proc/net/tcp` for a listening socket.
const LISTEN: &str = "0A";

/// The user ids of the processes that listen on `address` and `port`, according to `/proc/net/tcp` and `tcp6`. Empty
/// if nothing listens, or the system does not report it. A server in a container appears as the account that forwards
/// the port to it.
pub fn listener_owners(address: IpAddr, port: u16) -> Vec<u32> {
    let read = |name: &str| fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default();
    [read("tcp"), read("tcp6")].iter().flat_map(|table| owners(table, address, port)).collect()
}

/// As [`listener_owners`], according to one table.
fn owners(table: &str, address: IpAddr, port: u16) -> Vec<u32> {
    let row = |line: &str| -> Option<u32> {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (host, row_port) = columns.get(1)?.split_once(':')?;
        let includes_address = |host: IpAddr| host.to_canonical() == address || host.is_unspecified();
        let is_match = u16::from_str_radix(row_port, 16).ok()? == port && includes_address(parse(host)?);
        (is_match && *columns.get(3)? == LISTEN).then(|| columns.get(7)?.parse().ok())?
    };
    table.lines().skip(1).filter_map(row).collect()
}

/// Parses an address, which the kernel prints as 32-bit words in the machine's byte order.
fn parse(text: &str) -> Option<IpAddr> {
    let words = hex::decode(text).ok()?;
    let bytes: Vec<u8> =
        words.as_chunks::<4>().0.iter().flat_map(|word| u32::from_be_bytes(*word).to_ne_bytes()).collect();
    let v4 = <[u8; 4]>::try_from(bytes.as_slice()).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn a_listener_of_this_account_is_found_and_a_free_port_has_no_owner() {
        let own = rustix::process::getuid().as_raw();
        for (bound, address) in
            [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "::1")]
        {
            // Fails without IPv6.
            let Ok(listener) = TcpListener::bind(bound) else {
                assert!(bound.starts_with('['), "{bound}");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            assert_eq!(listener_owners(address.parse().unwrap(), port), [own], "{bound}");
            let other = if address == "::1" { "::2" } else { "127.0.0.2" };
            let takes_all = bound.starts_with('0') || bound.starts_with("[::]");
            assert_eq!(!listener_owners(other.parse().unwrap(), port).is_empty(), takes_all, "{bound}");
            drop(listener);
            assert_eq!(listener_owners(address.parse().unwrap(), port), [0; 0], "{bound}");
        }
    }

    #[test]
    fn only_listening_sockets_on_the_address_and_port_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
            0: 0100007F:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 100 1\n   \
            1: 0100007F:1B9E 0100007F:9999 01 00000000:00000000 00:00000000 00000000  1002        0 101 1\n   \
            2: 0200007F:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1003        0 102 1\n   \
            3: 00000000:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1004        0 103 1\n\
            torn\n";
        assert_eq!(owners(table, Ipv4Addr::LOCALHOST.into(), 7070), [1001, 1004]);
        assert_eq!(owners(table, Ipv4Addr::LOCALHOST.into(), 7071), [0; 0]);
    }
}
