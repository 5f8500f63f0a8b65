//! The machines of a launch and their slots, with checks before the launch starts.

use super::{
    super::{
        access::{is_loopback, with_scheme},
        file, output,
        rank_table::RankTable,
        usage_error,
    },
    Args, LauncherKind, MAX_SLOTS,
    bundle::BUNDLE_BYTES,
    hosts::{self, Host},
};
use lockstep_protocol::{JobSpec, numbers::plural};

/// Returns the machines that the arguments name. Machines that Slurm or Kubernetes chooses have no name.
pub(super) fn from_args(args: &Args) -> anyhow::Result<Vec<Host>> {
    let has_list = args.hostfile.is_some() || args.hosts.is_some() || args.rank_table.is_some();
    if args.with == LauncherKind::Kubernetes && has_list {
        return Err(usage_error("Kubernetes chooses the machines: give --nodes N instead of a list"));
    }
    let mut hosts = match (&args.hostfile, &args.hosts, &args.rank_table) {
        (Some(path), _, _) => hosts::read(path)?,
        (None, Some(list), _) => hosts::parse_list(list).map_err(|e| usage_error(format!("--host: {e}")))?,
        (None, None, Some(path)) => hosts::from_rank_table(&RankTable::read(path)?)
            .map_err(|e| usage_error(format!("--rank-table: {e}")))?,
        (None, None, None) if args.with.chooses_machines() => {
            vec![Host::default(); args.nodes.unwrap_or(1) as usize]
        }
        (None, None, None) => {
            return Err(usage_error(
                "no machines are named: give --hostfile FILE, -H host1:4,host2:4 or --rank-table FILE",
            ));
        }
    };
    if args.nodes.is_some() && !args.with.chooses_machines() {
        return Err(usage_error(
            "--nodes is for Slurm and Kubernetes, which choose the machines; name them with --hostfile or -H",
        ));
    }
    if args.with == LauncherKind::Slurm && hosts.iter().any(|host| !host.env.is_empty()) {
        return Err(usage_error(
            "--hostfile: `env:NAME=VALUE` works only with ssh and mpirun; with Slurm, pass an option to sbatch: -- --export=NAME=VALUE",
        ));
    }
    for host in &mut hosts {
        host.slots = host.slots.or(args.slots);
    }
    Ok(hosts)
}

/// Sets the slots of machines for which no list gives slots: `default`, or the remaining ranks divided evenly.
pub(super) fn fill_in_slots(hosts: &mut [Host], default: Option<u32>, spec: &JobSpec) -> anyhow::Result<()> {
    let ranks = spec.parallel.ranks;
    let listed: u32 = hosts.iter().filter_map(|host| host.slots).sum();
    let without_slots = hosts.iter().filter(|host| host.slots.is_none()).count() as u32;
    if without_slots > 0 {
        let share = ranks.saturating_sub(listed).div_ceil(without_slots).clamp(1, MAX_SLOTS);
        hosts.iter_mut().for_each(|host| host.slots = host.slots.or(default).or(Some(share)));
    }
    let slots: u32 = hosts.iter().filter_map(|host| host.slots).sum();
    if slots < ranks {
        return Err(usage_error(format!(
            "the job has {}, but these machines have {}: add machines or slots, or lower parallel.ranks",
            plural(ranks.into(), "rank"),
            plural(slots.into(), "slot")
        )));
    }
    Ok(())
}

/// Checks that other machines can reach the server at the given address.
pub(super) fn check_reachable(args: &Args, hosts: &[Host]) -> anyhow::Result<()> {
    let server = &args.agent_server.clone().unwrap_or_else(|| args.server.address());
    let url = reqwest::Url::parse(&with_scheme(server))
        .map_err(|e| usage_error(format!("--agent-server {server}: {e}")))?;
    if !is_loopback(url.host_str().unwrap_or_default()) {
        return Ok(());
    }
    // If a machine has no name, Slurm or Kubernetes chooses it, and it may be this machine.
    if hosts.iter().any(|host| host.name.is_empty()) {
        output::warn(format_args!(
            "warning: only this machine can reach the server at {server}: give --agent-server an address at which other machines reach it"
        ));
    }
    let is_this_machine = |name: &str| is_loopback(name.rsplit_once('@').map_or(name, |(_, host)| host));
    match hosts.iter().find(|host| !host.name.is_empty() && !is_this_machine(&host.name)) {
        None => Ok(()),
        Some(Host { name, .. }) => Err(usage_error(format!(
            "{name} cannot reach the server at {server}: give --agent-server an address at which other machines reach it"
        ))),
    }
}

/// Returns the CA certificates that agents trust in addition to the system's.
pub(super) fn read_ca(args: &Args) -> anyhow::Result<Option<String>> {
    let Some(path) = &args.server.ca_file else { return Ok(None) };
    let failed = |detail: &str| usage_error(format!("--ca-file {}: {detail}", path.display()));
    let too_large =
        "is larger than 1 MiB, the limit of agents: give a file with only the server's CA certificate";
    let bytes = file::read(path, BUNDLE_BYTES, too_large).map_err(|detail| failed(&detail))?;
    String::from_utf8(bytes).map(Some).map_err(|_| failed("is not text (UTF-8)"))
}

/// Checks that a program is on the PATH.
pub(super) fn check_on_path(program: &str) -> anyhow::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|dir| dir.join(program).is_file()) {
        return Ok(());
    }
    let package = match program {
        "ssh" => "OpenSSH's client (openssh-client)",
        "mpirun" => "Open MPI (openmpi-bin)",
        _ => "Slurm's commands (slurm-client), on a machine that may submit to the cluster",
    };
    Err(usage_error(format!("there is no {program} on the PATH: install {package}")))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::parse, *};
    use std::fs;

    #[test]
    fn a_ca_file_larger_than_a_mebibyte_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.crt");
        let args = parse(&["job.toml", "--with", "ssh", "--ca-file", path.to_str().unwrap(), "-H", "a"]);
        fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
        assert_eq!(read_ca(&args).unwrap().map(|text| text.len()), Some(1 << 20));
        fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
        let message = read_ca(&args).unwrap_err().to_string();
        assert!(
            message.contains("ca.crt: is larger than 1 MiB")
                && message.contains("only the server's CA certificate"),
            "{message}"
        );
    }
}
