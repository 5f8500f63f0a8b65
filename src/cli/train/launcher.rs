//! Finds the rank of this process, if torchrun, Open MPI, Slurm or MindSpore's launcher started it, or a rank table assigns it.

mod mindspore;
mod nodelist;
mod table;

pub(super) use mindspore::is_scheduler;
pub(super) use table::{MachineRanks, RANK_TABLE, rank_of_table, ranks_of_machine};

use lockstep_protocol::agent::StartAttempt;
use nodelist::{first_node, tasks_of};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The rank of this process, if a launcher started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LaunchedRank {
    /// Name of the launcher.
    pub(super) launcher: &'static str,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    /// Index of the rank among the ranks on this machine.
    pub(super) local_rank: u32,
    /// Number of ranks on this machine.
    pub(super) local_ranks: u32,
    /// The index of the rank's GPU on the machine, if the launcher gives an index that may differ from `local_rank`.
    pub(super) device: Option<u32>,
    pub(super) rendezvous: Rendezvous,
}

/// How the ranks of a run find and recognise each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rendezvous {
    /// The address at which rank 0 listens.
    pub(super) addr: String,
    pub(super) port: u16,
    pub(super) secret: String,
}

impl Rendezvous {
    /// Creates a rendezvous whose secret is `LOCKSTEP_SECRET`. Without this variable, the secret is the address with `run`, a text that is
    /// the same for all ranks of the run.
    fn new(variable: &impl Fn(&str) -> Option<String>, run: &str, addr: String, port: u16) -> Self {
        let secret = variable("LOCKSTEP_SECRET").unwrap_or_else(|| format!("{run}/{addr}/{port}"));
        Self { addr, port, secret }
    }

    pub(super) fn write_into(&self, start: &mut StartAttempt) {
        start.master_addr.clone_from(&self.addr);
        start.master_port = self.port;
        start.secret.clone_from(&self.secret);
    }
}

/// Reads the launcher's environment variables. `None` without such variables.
///
/// The ranks recognise each other by `LOCKSTEP_SECRET`. Without this variable they use the launcher's name of the job, which other
/// processes on the network could guess.
///
/// # Errors
/// Some variables are missing or are not numbers. The error is a sentence.
pub(super) fn detect(variable: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchedRank>, String> {
    let number = |name: &str| read_number(&variable, name);
    // `job` is the launcher's name of the job. `port_shift` is added to `MASTER_PORT`.
    let (launcher, rank, world_size, local_rank, local_ranks, job, port_shift);
    // The machine of rank 0 in Slurm's list.
    let mut first_machine = None;
    if let (Some(r), Some(w)) = (number("RANK")?, number("WORLD_SIZE")?) {
        launcher = "torchrun";
        (rank, world_size) = (r, w);
        (local_rank, local_ranks) = (number("LOCAL_RANK")?, number("LOCAL_WORLD_SIZE")?);
        job = variable("TORCHELASTIC_RUN_ID");
        // torchrun itself may be listening at MASTER_PORT.
        port_shift = u16::from(variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True"));
    } else if variable("MS_ROLE").is_some() {
        return mindspore::detect(&variable).map(Some);
    } else if let (Some(r), Some(w)) = (number("OMPI_COMM_WORLD_RANK")?, number("OMPI_COMM_WORLD_SIZE")?) {
        launcher = "mpirun";
        (rank, world_size) = (r, w);
        (local_rank, local_ranks) =
            (number("OMPI_COMM_WORLD_LOCAL_RANK")?, number("OMPI_COMM_WORLD_LOCAL_SIZE")?);
        job = variable("PMIX_NAMESPACE").or_else(|| variable("OMPI_MCA_ess_base_jobid"));
        port_shift = 0;
    } else if let (Some(r), Some(w), Some(step)) =
        (number("SLURM_PROCID")?, number("SLURM_NTASKS")?, variable("SLURM_STEP_ID"))
    {
        // Without a step id, this process is the batch script itself, which srun has not started.
        launcher = "srun";
        (rank, world_size) = (r, w);
        local_rank = number("SLURM_LOCALID")?;
        let machine = number("SLURM_NODEID")?.unwrap_or(0);
        local_ranks = variable("SLURM_STEP_TASKS_PER_NODE").and_then(|list| tasks_of(&list, machine));
        job = variable("SLURM_JOB_ID").map(|job| format!("{job}.{step}"));
        first_machine = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]
            .iter()
            .find_map(|name| first_node(&variable(name)?));
        port_shift = 0;
    } else {
        return Ok(None);
    }
    check_rank(launcher, rank, world_size)?;
    let local_ranks = local_ranks.unwrap_or(1).clamp(1, world_size);
    let addr = match variable("MASTER_ADDR") {
        Some(addr) if addr.trim().is_empty() => {
            return Err("MASTER_ADDR is empty: set it to the name or address of rank 0's machine".into());
        }
        Some(addr) => addr.trim().to_owned(),
        None if local_ranks == world_size => "127.0.0.1".into(),
        None => first_machine.ok_or_else(|| {
            format!(
                "{launcher} has started ranks on several machines: set MASTER_ADDR to rank 0's machine and \
                 MASTER_PORT to a free port of that machine"
            )
        })?,
    };
    let job = job.unwrap_or_default();
    let port = match read_port(&variable, "MASTER_PORT")? {
        Some(port) => port
            .checked_add(port_shift)
            .ok_or_else(|| format!("MASTER_PORT={port} is not a port for {launcher}"))?,
        None => port_for(&job),
    };
    let rendezvous = Rendezvous::new(&variable, &format!("{launcher}/{job}"), addr, port);
    let (local_rank, device) = (local_rank.unwrap_or(0), None);
    Ok(Some(LaunchedRank { launcher, rank, world_size, local_rank, local_ranks, device, rendezvous }))
}

fn check_rank(launcher: &str, rank: u32, world_size: u32) -> Result<(), String> {
    if rank < world_size {
        return Ok(());
    }
    Err(format!("{launcher} says that this is rank {rank} of {world_size}; ranks begin at 0"))
}

/// Reads a variable with a number.
pub(super) fn read_number(
    variable: &impl Fn(&str) -> Option<String>,
    name: &str,
) -> Result<Option<u32>, String> {
    variable(name).map(|v| v.trim().parse().map_err(|_| format!("{name}={v:?} is not a number"))).transpose()
}

/// Reads a variable with a port.
fn read_port(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<u16>, String> {
    let port = read_number(variable, name)?;
    port.map(|port| u16::try_from(port).map_err(|_| format!("{name}={port} is not a port"))).transpose()
}

/// Returns the port to use without `MASTER_PORT`. The port is the same for all ranks of the job, usually differs between jobs, and is below
/// the ephemeral ports (from 32768 on Linux).
fn port_for(job: &str) -> u16 {
    let mut hash = DefaultHasher::new();
    job.hash(&mut hash);
    20_000 + (hash.finish() % 10_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn detect_with(variables: &[(&str, &str)]) -> Result<Option<LaunchedRank>, String> {
        let map: HashMap<_, _> = variables.iter().copied().collect();
        detect(|name| map.get(name).map(ToString::to_string))
    }

    #[test]
    fn torchrun_is_detected_and_its_own_port_is_not_used() {
        let variables = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.7"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let launched = detect_with(&variables).unwrap().unwrap();
        assert_eq!(
            (launched.rank, launched.world_size, launched.local_rank, launched.local_ranks),
            (5, 8, 1, 4)
        );
        assert_eq!((launched.rendezvous.addr.as_str(), launched.rendezvous.port), ("10.0.0.7", 29501));
    }

    #[test]
    fn mpirun_on_one_machine_needs_no_address() {
        let rank = |r| {
            detect_with(&[
                ("OMPI_COMM_WORLD_RANK", r),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", r),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ("PMIX_NAMESPACE", "prterun-a-1"),
            ])
            .unwrap()
            .unwrap()
            .rendezvous
        };
        assert_eq!(rank("0").addr, "127.0.0.1");
        assert_eq!(rank("0"), rank("1"));
    }

    #[test]
    fn slurm_on_several_machines_needs_an_address() {
        let step = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
        ];
        assert!(detect_with(&step).unwrap_err().contains("MASTER_ADDR"));
        let mut addressed = step.to_vec();
        addressed.extend([("MASTER_ADDR", "node1"), ("MASTER_PORT", "4000"), ("LOCKSTEP_SECRET", "s")]);
        let launched = detect_with(&addressed).unwrap().unwrap();
        assert_eq!((launched.rank, launched.local_ranks, launched.rendezvous.secret.as_str()), (3, 2, "s"));
        // Some machines have fewer ranks than others.
        let local_ranks = |node: &str| {
            let mut variables = addressed.clone();
            variables[4].1 = "2(x2),1";
            variables.push(("SLURM_NODEID", node));
            detect_with(&variables).unwrap().unwrap().local_ranks
        };
        assert_eq!([local_ranks("0"), local_ranks("1"), local_ranks("2")], [2, 2, 1]);
        // Without MASTER_ADDR, rank 0 is on the first machine of the step.
        let mut listed = step.to_vec();
        listed.push(("SLURM_STEP_NODELIST", "gpu[007-008],gpu10"));
        listed.push(("SLURM_JOB_ID", "12"));
        let Rendezvous { addr, secret, .. } = detect_with(&listed).unwrap().unwrap().rendezvous;
        assert_eq!((addr.as_str(), secret.contains("12.0")), ("gpu007", true));
        // A batch script is not a step.
        assert_eq!(detect_with(&step[..3]).unwrap(), None);
    }

    #[test]
    fn an_empty_master_addr_is_an_error() {
        let torchrun =
            [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_PORT", "4000")];
        for empty in ["", " "] {
            let variables = [&torchrun[..], &[("MASTER_ADDR", empty)]].concat();
            let error = detect_with(&variables).unwrap_err();
            assert!(error.starts_with("MASTER_ADDR is empty"), "{error}");
        }
    }

    #[test]
    fn invalid_values_are_named() {
        assert_eq!(detect_with(&[]).unwrap(), None);
        assert!(detect_with(&[("RANK", "x"), ("WORLD_SIZE", "2")]).unwrap_err().contains("RANK"));
        assert!(detect_with(&[("RANK", "2"), ("WORLD_SIZE", "2")]).unwrap_err().contains("rank 2 of 2"));
    }
}
