//! `lockstep launched`: a launcher starts it on each machine, and it becomes the agent.

use super::{
    super::{file, usage_error},
    bundle::{BUNDLE_BYTES, Bundle, Node},
    kill_wait,
};
use lockstep_host::{own_program, write_private};
use std::{
    fs::{self, DirBuilder},
    io::{self, Read as _},
    os::unix::{
        fs::{DirBuilderExt as _, MetadataExt as _},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Environment variable with the bundle, for a launcher that passes on environments (mpirun).
pub(super) const BUNDLE_VARIABLE: &str = "LOCKSTEP_LAUNCH";
/// Environment variables with the index of this process. The first variable that is set is used.
const INDEX_VARIABLES: [&str; 5] =
    ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];
/// Environment variable with the name that Slurm gives this machine.
const SLURM_NODE: &str = "SLURMD_NODENAME";
/// Environment variables that are removed from the agent's environment: the agent reads server, CA and token only from its files.
const REMOVED_VARIABLES: [&str; 5] =
    [BUNDLE_VARIABLE, "LOCKSTEP_SERVER", "LOCKSTEP_CA_FILE", "LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE"];

/// Become an agent from a bundle that `lockstep launch` has made (started by launchers)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Source of the bundle: - (standard input), env (LOCKSTEP_LAUNCH) or a file
    source: String,
}

/// Replaces this process by an agent.
///
/// # Errors
/// The bundle cannot be read or has no entry for this process, or a folder cannot be written.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    let bytes = read_bundle(&args.source)?;
    let bundle: Bundle = serde_json::from_slice(&bytes).map_err(|e| {
        usage_error(format!(
            "the bundle from `lockstep launch` cannot be read ({e}): run the same version on both machines"
        ))
    })?;
    let index = find_index(&bundle, |name| std::env::var(name).ok()).map_err(usage_error)?;
    let node = &bundle.nodes[index];
    let folder = home_dir().join(&bundle.dir).join(bundle.job.as_str()).join(&node.name);
    let failed = |e: io::Error| usage_error(format!("the agent's folder {}: {e}", folder.display()));
    let mut command = agent_command(&bundle, node, &folder, has_gpus()).map_err(failed)?;
    if let Some(secs) = kill_wait::read() {
        command.args(["--killed-after", &secs.to_string()]);
    }
    // Returns only if the program cannot be started.
    Err(anyhow::Error::from(command.exec())
        .context(format!("{} cannot be started", own_program()?.display())))
}

/// Reads the bundle from its source, which is described in [`Args`].
fn read_bundle(source: &str) -> anyhow::Result<Vec<u8>> {
    let too_large = "is larger than 1 MiB";
    let bytes = match source {
        "-" => {
            let mut bytes = Vec::new();
            io::stdin().take(BUNDLE_BYTES + 1).read_to_end(&mut bytes)?;
            bytes
        }
        "env" => std::env::var(BUNDLE_VARIABLE)
            .map_err(|_| {
                usage_error(format!(
                    "{BUNDLE_VARIABLE} is not set: only `lockstep launch` starts this command"
                ))
            })?
            .into_bytes(),
        path => file::read(Path::new(path), BUNDLE_BYTES, too_large).map_err(|e| {
            usage_error(format!("{path}: {e}; with Slurm, --dir must be a folder that all machines share"))
        })?,
    };
    if bytes.len() as u64 > BUNDLE_BYTES {
        return Err(usage_error(format!("{source}: {too_large}")));
    }
    Ok(bytes)
}

/// Returns the index of this process's node.
fn find_index(bundle: &Bundle, variable: impl Fn(&str) -> Option<String>) -> Result<usize, String> {
    let nodes = bundle.nodes.len();
    if nodes == 1 {
        return Ok(0);
    }
    // Slurm numbers machines in its own order, which may differ from the order of the list.
    if let Some(host) = variable(SLURM_NODE)
        && let Some(index) = bundle.nodes.iter().position(|node| node.host == host)
    {
        return Ok(index);
    }
    let found = INDEX_VARIABLES.iter().find_map(|name| Some((*name, variable(name)?)));
    let Some((name, value)) = found else {
        return Err(format!(
            "the launch has {nodes} agents, and no environment variable selects the agent of this process: set one of {}",
            INDEX_VARIABLES.join(", ")
        ));
    };
    let index = value.trim().parse().ok().filter(|index| *index < nodes);
    index.ok_or_else(|| format!("{name}={value:?} must be the index of one of the launch's {nodes} agents"))
}

/// Writes the agent's files and returns the agent's command.
fn agent_command(bundle: &Bundle, node: &Node, folder: &Path, has_gpus: bool) -> io::Result<Command> {
    make_private_dir(folder)?;
    let (token, ca) = (folder.join("token"), folder.join("ca.crt"));
    write_private(&folder.join("agent_id"), node.agent_id.as_bytes())?;
    write_private(&token, node.token.as_bytes())?;
    let mut command = Command::new(own_program()?);
    command.args(["agent", "--server", &bundle.server, "--name", &node.name, "--job", bundle.job.as_str()]);
    command.arg("--token-file").arg(&token).arg("--data-dir").arg(folder);
    if let Some(text) = &bundle.ca {
        write_private(&ca, text.as_bytes())?;
        command.arg("--ca-file").arg(&ca);
    }
    let on_gpus = node.device.kind().map_or(has_gpus, |kind| kind.is_accelerator);
    if on_gpus {
        let first_gpus = || (0..node.slots).collect();
        let gpus: Vec<u32> = if node.gpus.is_empty() { first_gpus() } else { node.gpus.clone() };
        let gpus: Vec<_> = gpus.iter().map(ToString::to_string).collect();
        command.args(["--gpus", &gpus.join(",")]);
    } else {
        command.args(["--cpu-slots", &node.slots.to_string()]);
    }
    if bundle.in_pod {
        command.arg("--in-pod");
    }
    REMOVED_VARIABLES.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.envs(&node.env).stdin(Stdio::null());
    Ok(command)
}

fn has_gpus() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// Returns the home directory, to which relative paths refer.
pub(super) fn home_dir() -> PathBuf {
    std::env::var_os("HOME").filter(|home| !home.is_empty()).map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// Creates a folder with mode 0700. An existing folder must belong to this account, and other accounts must not be able to write into it.
///
/// # Errors
/// The folder cannot be created or used.
pub(super) fn make_private_dir(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            // If other accounts could write into the folder, they could replace its files.
            let metadata = fs::symlink_metadata(path)?;
            let is_own = metadata.is_dir() && metadata.uid() == rustix::process::getuid().as_raw();
            let is_private = metadata.mode() & 0o022 == 0;
            (is_own && is_private).then_some(()).ok_or_else(|| {
                io::Error::other(
                    "another account owns the folder or may write to it: remove the folder, or name another folder with --dir",
                )
            })
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::spec::Device;
    use std::{collections::BTreeMap, os::unix::fs::PermissionsExt as _};

    fn bundle(nodes: usize) -> Bundle {
        let node = |n: usize| Node {
            name: format!("node-{n}"),
            host: format!("host-{n}"),
            agent_id: format!("id-{n}"),
            token: "secret-token".into(),
            slots: 2,
            device: Device::Auto,
            gpus: Vec::new(),
            env: BTreeMap::from([("NCCL_SOCKET_IFNAME".into(), "eth1".into())]),
        };
        Bundle {
            server: "https://10.0.0.5:7070".into(),
            ca: Some("PEM".into()),
            job: lockstep_protocol::JobId::generate(),
            dir: "x".into(),
            nodes: (0..nodes).map(node).collect(),
            in_pod: false,
        }
    }

    #[test]
    fn a_process_finds_its_node() {
        let index_with = |name: &'static str, value: &'static str| {
            find_index(&bundle(3), move |variable| (variable == name).then(|| value.to_owned()))
        };
        assert_eq!(index_with("OMPI_COMM_WORLD_RANK", "2"), Ok(2));
        assert_eq!(index_with("SLURM_PROCID", "0"), Ok(0));
        assert_eq!(index_with("JOB_COMPLETION_INDEX", "1"), Ok(1));
        // Found by the machine's name, even if Slurm has sorted the list.
        assert_eq!(index_with("SLURMD_NODENAME", "host-2"), Ok(2));
        assert!(index_with("SLURMD_NODENAME", "host-9").unwrap_err().contains("set one of"));
        assert!(index_with("SLURM_PROCID", "3").unwrap_err().contains("3 agents"));
        assert!(index_with("OTHER", "1").unwrap_err().contains("set one of"));
        assert_eq!(find_index(&bundle(1), |_| None), Ok(0));
    }

    #[test]
    fn the_token_is_in_a_private_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let bundle = bundle(1);
        let command = agent_command(&bundle, &bundle.nodes[0], &path, false).unwrap();
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
        assert!(arguments.iter().all(|a| !a.contains("secret-token")), "{arguments:?}");
        assert!(arguments.windows(2).any(|a| a == ["--cpu-slots", "2"]), "{arguments:?}");
        assert!(arguments.windows(2).any(|a| a[0] == "--ca-file"), "{arguments:?}");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join("token"))), (0o700, 0o600));
        assert_eq!(fs::read_to_string(path.join("token")).unwrap(), "secret-token");
        assert_eq!(fs::read_to_string(path.join("agent_id")).unwrap(), "id-0");
        let environment: Vec<_> = command.get_envs().collect();
        assert!(environment.contains(&(BUNDLE_VARIABLE.as_ref(), None)));
        assert!(environment.contains(&("NCCL_SOCKET_IFNAME".as_ref(), Some("eth1".as_ref()))));
        // GPUs if the machine has any: the first GPUs, or the GPUs of the rank table.
        let gpus = |gpus: &[u32]| {
            let node = Node { gpus: gpus.to_vec(), ..bundle.nodes[0].clone() };
            let command = agent_command(&bundle, &node, &path, true).unwrap();
            command.get_args().last().unwrap().to_string_lossy().into_owned()
        };
        assert_eq!([gpus(&[]), gpus(&[5, 4])], ["0,1", "5,4"]);
    }

    #[test]
    fn a_bundle_larger_than_a_mebibyte_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bundle.json");
        let text = path.to_str().unwrap();
        fs::write(&path, vec![b' '; BUNDLE_BYTES as usize]).unwrap();
        assert_eq!(read_bundle(text).unwrap().len() as u64, BUNDLE_BYTES);
        fs::write(&path, vec![b' '; BUNDLE_BYTES as usize + 1]).unwrap();
        assert!(read_bundle(text).unwrap_err().to_string().contains("larger than 1 MiB"));
    }
}
