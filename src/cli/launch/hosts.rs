//! Lists of machines: hostfiles, `-H` and rank tables.

use super::{
    super::{
        file,
        rank_table::{MAX_NAME_BYTES, RankTable},
        usage_error,
    },
    MAX_HOSTS, MAX_SLOTS,
};
use std::{collections::BTreeMap, path::Path};

/// Maximum size of a hostfile.
const HOSTFILE_BYTES: u64 = 1 << 20;
/// Maximum number of a machine's variables.
const MAX_VARIABLES: usize = 32;
/// Maximum total size of a machine's variables. The variables of 256 machines fit into one environment variable.
const MAX_VARIABLE_BYTES: usize = 2048;

/// A machine on which a launch starts an agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Host {
    /// Name or address, with `user@` before it if SSH needs a user. Empty if Slurm or Kubernetes chooses the machine.
    pub(crate) name: String,
    /// Number of ranks on the machine. `None` until `machines::fill_in_slots` if no list gives the number.
    pub(crate) slots: Option<u32>,
    /// Indexes of the GPUs to use. If empty, the first GPUs are used.
    pub(crate) devices: Vec<u32>,
    /// Environment variables of the agent and its ranks.
    pub(crate) env: BTreeMap<String, String>,
}

/// Reads a hostfile.
///
/// # Errors
/// Exit status 2. The message has the line number of the mistake.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Host>> {
    let failed = |detail: String| usage_error(format!("--hostfile {}: {detail}", path.display()));
    let too_large = "is larger than 1 MiB, the maximum size of a hostfile";
    let bytes = file::read(path, HOSTFILE_BYTES, too_large).map_err(failed)?;
    let text = String::from_utf8(bytes).map_err(|_| failed("is not text (UTF-8)".into()))?;
    parse(&text).map_err(failed)
}

fn parse(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let with_line = |e: String| format!("line {number}: {e}");
        // Words in a shell's syntax, in which `#` begins a comment.
        let words = shlex::split(line).ok_or_else(|| with_line("a quotation mark is not closed".into()))?;
        if let [name, rest @ ..] = &words[..] {
            parse_line(name, rest).and_then(|host| add(&mut hosts, host)).map_err(with_line)?;
        }
    }
    if hosts.is_empty() { Err("names no machine".into()) } else { Ok(hosts) }
}

fn parse_line(name: &str, words: &[String]) -> Result<Host, String> {
    let (name, slots) = split_slots(name)?;
    let mut host = Host { name: check_name(name)?, slots, ..Host::default() };
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key.strip_prefix("env:") {
            Some(name) => {
                let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                    && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
                if !is_name || !word.contains('=') {
                    return Err(format!("{word:?} is not a variable: write env:NAME=VALUE"));
                }
                host.env.insert(name.into(), value.into());
            }
            None if key == "slots" && slots.is_some() => {
                return Err(format!("{name} has its slots twice: leave {word} out"));
            }
            None if key == "slots" => host.slots = Some(parse_slots(value)?),
            None => {
                return Err(format!(
                    "{word:?} is not known: after the machine there may be slots=N and env:NAME=VALUE"
                ));
            }
        }
    }
    if host.env.len() > MAX_VARIABLES {
        return Err(format!("a machine may have at most {MAX_VARIABLES} variables"));
    }
    if host.env.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > MAX_VARIABLE_BYTES {
        return Err(format!(
            "the variables of a machine may have at most {MAX_VARIABLE_BYTES} bytes together"
        ));
    }
    Ok(host)
}

/// Splits a machine and its slots at the colon: `node1:4`. An IPv6 address with slots needs brackets.
fn split_slots(entry: &str) -> Result<(&str, Option<u32>), String> {
    let is_bare_ipv6 = !entry.contains('[') && entry.matches(':').count() > 1;
    match entry.rsplit_once(':') {
        Some((name, count)) if !is_bare_ipv6 && !count.ends_with(']') => {
            Ok((name, Some(parse_slots(count)?)))
        }
        _ => Ok((entry, None)),
    }
}

/// Parses `node1:4,node2:4`.
///
/// # Errors
/// Describes the mistake in the list.
pub(crate) fn parse_list(list: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let (name, slots) = split_slots(entry)?;
        add(&mut hosts, Host { name: check_name(name)?, slots, ..Host::default() })?;
    }
    Ok(hosts)
}

/// Returns the machines of a rank table, the machine of rank 0 first, with their devices in the order of ranks.
///
/// # Errors
/// The table has too many machines, or the ranks of a machine are not consecutive: the server numbers ranks machine by machine.
pub(super) fn from_rank_table(table: &RankTable) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    let mut machines: Vec<_> = table.machines.iter().collect();
    machines.sort_by_key(|machine| machine.devices.first().map(|device| device.rank));
    let mut ranks = 0..table.world_size();
    for machine in machines {
        if let Some(device) = machine.devices.iter().find(|device| ranks.next() != Some(device.rank)) {
            return Err(format!(
                "rank {} is on {}, but the ranks before and after it are on other machines: a launch numbers ranks machine by \
                 machine; renumber the table, or start `lockstep train --rank-table` on each machine",
                device.rank, machine.address
            ));
        }
        let devices: Vec<u32> = machine.devices.iter().map(|device| device.device).collect();
        let slots = parse_slots(&devices.len().to_string())?;
        add(
            &mut hosts,
            Host { name: machine.address.clone(), slots: Some(slots), devices, ..Host::default() },
        )?;
    }
    Ok(hosts)
}

fn add(hosts: &mut Vec<Host>, host: Host) -> Result<(), String> {
    if hosts.iter().any(|other| other.name == host.name) {
        return Err(format!("{} is named twice: give it more slots instead", host.name));
    }
    if hosts.len() == MAX_HOSTS {
        return Err(format!("a launch may have at most {MAX_HOSTS} machines"));
    }
    hosts.push(host);
    Ok(())
}

fn parse_slots(text: &str) -> Result<u32, String> {
    let slots = text.trim().parse().ok().filter(|slots| (1..=MAX_SLOTS).contains(slots));
    slots.ok_or_else(|| format!("slots={text}: must be 1 to {MAX_SLOTS}"))
}

/// Checks that a name cannot be mistaken for an option of a program, and needs no quotes in a shell.
fn check_name(name: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.@:[]%".contains(c);
    let is_name = !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.chars().all(is_plain);
    if is_name && !name.starts_with('-') && !name.contains("@-") {
        Ok(name.to_owned())
    } else {
        Err(format!(
            "{name:?} is not a machine's name or address (at most {MAX_NAME_BYTES} letters, digits and characters of -_.@:[]%)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::super::rank_table::{Device, Machine},
        *,
    };

    #[test]
    fn a_hostfile_names_machines() {
        let text = "# the two big ones\nnode1 slots=4\n\n  user@node2\tslots=2 env:NCCL_SOCKET_IFNAME=eth1 env:NOTE=\"a b # c\" # here\nnode3\n";
        let hosts = parse(text).unwrap();
        let names: Vec<_> = hosts.iter().map(|host| (host.name.as_str(), host.slots)).collect();
        assert_eq!(names, [("node1", Some(4)), ("user@node2", Some(2)), ("node3", None)]);
        let env: Vec<_> = hosts[1].env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(env, [("NCCL_SOCKET_IFNAME", "eth1"), ("NOTE", "a b # c")]);
    }

    #[test]
    fn mistakes_name_their_line() {
        for (text, message) in [
            ("", "names no machine"),
            ("a:x", "must be 1 to 1024"),
            ("a:4 slots=4", "line 1: a has its slots twice: leave slots=4 out"),
            ("a slots=0", "line 1: slots=0: must be 1 to 1024"),
            ("a slots=1025", "must be 1 to 1024"),
            ("a slots=x", "must be 1 to 1024"),
            ("a\n\na slots=2", "line 3: a is named twice"),
            ("a max_slots=4", "line 1: \"max_slots=4\" is not known"),
            ("a env:1X=2", "write env:NAME=VALUE"),
            ("a env:X", "write env:NAME=VALUE"),
            ("a env:X=\"b", "not closed"),
            ("-oProxyCommand=x", "not a machine's name"),
            ("me@-x", "not a machine's name"),
            ("a;b", "not a machine's name"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn hostfiles_beyond_their_limits_are_refused() {
        let file = |n: usize| (0..n).map(|n| format!("n{n} slots=1024\n")).collect::<String>();
        assert_eq!(parse(&file(MAX_HOSTS)).unwrap().len(), MAX_HOSTS);
        assert!(parse(&file(MAX_HOSTS + 1)).unwrap_err().contains("at most 256 machines"));
        let variables = |n: usize| (0..n).fold("a".to_owned(), |line, n| format!("{line} env:V{n}=1"));
        assert!(parse(&variables(MAX_VARIABLES)).is_ok());
        assert!(parse(&variables(MAX_VARIABLES + 1)).unwrap_err().contains("at most 32 variables"));
        let value = |bytes: usize| format!("a env:V={}", "x".repeat(bytes - 1));
        assert!(parse(&value(MAX_VARIABLE_BYTES)).is_ok());
        assert!(parse(&value(MAX_VARIABLE_BYTES + 1)).unwrap_err().contains("at most 2048 bytes"));
        assert!(parse(&"n".repeat(MAX_NAME_BYTES)).is_ok());
        assert!(parse(&"n".repeat(MAX_NAME_BYTES + 1)).is_err());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        std::fs::write(&path, format!("a{}", "\n".repeat((1 << 20) - 1))).unwrap();
        assert_eq!(read(&path).unwrap().len(), 1);
        std::fs::write(&path, format!("a{}", "\n".repeat(1 << 20))).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("larger than 1 MiB"));
    }

    #[test]
    fn a_rank_table_s_machines_and_devices_are_in_the_order_of_its_ranks() {
        // The machines in reverse order of ranks, with each machine's devices in reverse order, too.
        let table = |machines: u32, devices: u32| {
            let machine = |m: u32| Machine {
                address: format!("host-{}", m + 1),
                devices: (0..devices)
                    .map(|d| Device { rank: (machines - 1 - m) * devices + d, device: devices - 1 - d })
                    .collect(),
            };
            RankTable { machines: (0..machines).map(machine).collect() }
        };
        for (machines, devices) in [(1, 2), (2, 1), (1, 8), (2, 8), (12, 1)] {
            let hosts = from_rank_table(&table(machines, devices)).unwrap();
            let names: Vec<_> = hosts.iter().map(|host| host.name.clone()).collect();
            assert_eq!(names, (1..=machines).rev().map(|m| format!("host-{m}")).collect::<Vec<_>>());
            let backwards: Vec<_> = (0..devices).rev().collect();
            assert!(hosts.iter().all(|host| host.devices == backwards && host.slots == Some(devices)));
        }
        let mut alternating = table(2, 2);
        for (machine, first) in alternating.machines.iter_mut().zip(0..) {
            for (device, n) in machine.devices.iter_mut().zip(0..) {
                device.rank = 2 * n + first;
            }
        }
        let error = from_rank_table(&alternating).unwrap_err();
        assert!(error.contains("rank 2 is on host-1") && error.contains("train --rank-table"), "{error}");
    }

    #[test]
    fn a_list_on_the_command_line_is_parsed() {
        for (list, expected) in [
            ("a:4,b", ["a Some(4)", "b None"]),
            ("[fd00::1]:2,[fd00::2]", ["[fd00::1] Some(2)", "[fd00::2] None"]),
            ("me@node_1:1,fe80::1%eth0", ["me@node_1 Some(1)", "fe80::1%eth0 None"]),
        ] {
            // The same as a line of a hostfile.
            for hosts in [parse_list(list), parse(&list.replace(',', "\n"))] {
                let hosts = hosts.unwrap().into_iter().map(|host| format!("{} {:?}", host.name, host.slots));
                assert_eq!(hosts.collect::<Vec<_>>(), expected, "{list}");
            }
        }
        assert!(parse_list("a:,b").is_err() && parse_list("").is_err() && parse_list("a,a").is_err());
    }
}
