//! Starts rank processes of an attempt with a configuration file, and adopts rank processes of an earlier supervisor.
//! A rank outlives its agent. The rank's identity is stored on disk next to its records: process id, start time and
//! boot id. Process ids are reused, but not together with the same start time.

use super::{
    proc_fs::find_rank,
    process::{Identity, RankProcess},
    spare::{self, Spare},
};
use crate::rank::{RankConfig, STOP_WITHIN_SECS};
use lockstep_host::{
    NCCL_INTERFACE_VARIABLE, boot_id, cores, gpu::RankGpu, nccl_variable, with_path, write_atomically,
    write_private,
};
use lockstep_protocol::agent::StartAttempt;
use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The file of `rank` with `extension` in an attempt's folder.
pub fn rank_file(attempt_dir: &Path, rank: u32, extension: &str) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.{extension}"))
}

/// The environment variables of a rank's process, in addition to inherited variables.
fn environment(config: &RankConfig) -> io::Result<Vec<(OsString, OsString)>> {
    let mut variables = config.device().backend.environment(config.gpu.as_ref())?;
    let interface = config.start.network.as_ref().and_then(|network| network.interface.as_ref());
    if let Some(interface) = interface.filter(|_| nccl_variable().is_none()) {
        // Without `=`, NCCL treats the name as a prefix.
        variables.push((NCCL_INTERFACE_VARIABLE.into(), format!("={interface}").into()));
    }
    Ok(variables)
}

/// Writes `rank.<r>.json` and creates `rank.<r>.stderr`. Returns the path of the configuration and the file of the output.
fn write_files(config: &RankConfig) -> io::Result<(PathBuf, File)> {
    let dir = config.attempt_dir();
    let config_path = rank_file(&dir, config.rank, "json");
    write_private(&config_path, &serde_json::to_vec_pretty(config)?)?;
    let stderr_path = rank_file(&dir, config.rank, "stderr");
    let stderr = File::create(&stderr_path).map_err(|e| with_path(&stderr_path, e))?;
    Ok((config_path, stderr))
}

/// The configurations of the ranks of `start` on this machine, which share its cores evenly. `devices` contains a device for
/// each rank, in rank order, or nothing if ranks run on CPU cores; every rank sees all devices. `lease` is the file with the
/// deadline of the agent's lease.
pub fn configs(
    start: &StartAttempt,
    devices: &[String],
    lease: Option<&Path>,
    job_dir: &Path,
) -> Vec<RankConfig> {
    let local_ranks = u32::try_from(start.ranks.len()).unwrap_or(u32::MAX);
    (0..)
        .zip(&start.ranks)
        .map(|(ordinal, &(rank, slot))| RankConfig {
            start: start.clone(),
            rank,
            slot,
            local_ranks,
            threads: (cores() / local_ranks.max(1)).max(1),
            gpu: (!devices.is_empty()).then(|| RankGpu { ordinal, visible: devices.to_vec() }),
            lease: lease.map(Path::to_owned),
            job_dir: job_dir.to_owned(),
            stop_within_secs: STOP_WITHIN_SECS,
        })
        .collect()
}

impl RankProcess {
    /// Writes `rank.<r>.json` and starts the rank with it. The output of the rank goes to `rank.<r>.stderr`. If the rank's slot has a
    /// `spare`, the spare becomes the rank. If a new process would differ from the spare, the spare is killed and a new process
    /// is started.
    ///
    /// # Errors
    /// The error names the file or program that could not be used.
    pub fn start(program: &Path, config: &RankConfig, spare: Option<Spare>) -> io::Result<Self> {
        if let Some(spare) = spare
            && let Some(process) = Self::from_spare(program, config, spare)?
        {
            return Ok(process);
        }
        let (config_path, stderr) = write_files(config)?;
        let stdout = stderr.try_clone()?;
        let attempt = &config.start.attempt;
        let mut command = Command::new(program);
        command
            .envs(environment(config)?)
            .arg("rank")
            .arg(&config_path)
            .args(["--job", attempt.job.as_str()])
            .args(["--attempt", &attempt.attempt.to_string()])
            .args(["--rank", &config.rank.to_string()])
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr);
        let mut process = Self::spawn(config.rank, &mut command).map_err(|e| with_path(program, e))?;
        process.record(&config.attempt_dir())?;
        Ok(process)
    }

    /// Turns a spare process into the rank. `None` if a new process would differ from the spare, or if the spare has
    /// ended.
    fn from_spare(program: &Path, config: &RankConfig, mut spare: Spare) -> io::Result<Option<Self>> {
        // The spare sees all GPUs of the agent, so its GPU may have another ordinal than in `config`.
        let config = RankConfig { gpu: Some(spare.gpu.clone()), ..config.clone() };
        if !spare.is_usable_as(program, &environment(&config)?) {
            spare.end();
            return Ok(None);
        }
        let (config_path, _) = write_files(&config)?;
        let Some(mut process) = spare.into_process(config.rank) else { return Ok(None) };
        let dir = config.attempt_dir();
        // Recorded before the process becomes the rank, because its arguments do not name the rank. If this agent dies
        // before it writes the path, the process ends by itself, and the next agent finds a rank that has ended.
        process.record(&dir)?;
        // The path fits into the pipe's buffer, so writing does not block.
        if process.write_to_stdin(config_path.as_os_str().as_bytes()).is_err() {
            spare::kill_and_wait(process);
            // Without this file, the new process is found by its arguments until it has its own file.
            fs::remove_file(rank_file(&dir, config.rank, "pid"))?;
            return Ok(None);
        }
        Ok(Some(process))
    }

    /// Writes the file by which a later agent finds the process. Kills the process if the file cannot be written.
    fn record(&mut self, attempt_dir: &Path) -> io::Result<()> {
        let path = rank_file(attempt_dir, self.rank, "pid");
        let written = write_atomically(&path, &serde_json::to_vec(&self.identity)?);
        if written.is_err() {
            self.kill_and_wait();
        }
        written
    }

    /// Whether an earlier agent was about to start a rank, or has started it.
    pub fn has_begun(attempt_dir: &Path, rank: u32) -> bool {
        rank_file(attempt_dir, rank, "json").exists()
    }

    /// Adopts a rank started by an earlier agent. It may have ended already, which [`RankProcess::poll`] shows.
    pub fn adopt(attempt_dir: &Path, rank: u32) -> Self {
        let recorded = fs::read(rank_file(attempt_dir, rank, "pid"))
            .ok()
            .and_then(|json| serde_json::from_slice::<Identity>(&json).ok())
            .filter(|identity| identity.boot_id == boot_id());
        // The agent may have died after it started the rank and before it wrote the file.
        let by_argument = || {
            let (pid, stat) = find_rank(&rank_file(attempt_dir, rank, "json"))?;
            Some(Identity { pid, start_time: stat.start_time, boot_id: boot_id() })
        };
        Self::from_identity(rank, recorded.or_else(by_argument))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Exit, proc_fs::stat},
        *,
    };
    use crate::{testkit::wait_until, toy};
    use lockstep_protocol::{agent::RankNetwork, spec::JobSpec};
    use rustix::process::Signal;

    /// Writes a shell script that replaces a rank's program: `rank <file> --job ...`.
    fn program(dir: &Path, script: &str) -> PathBuf {
        let path = dir.join("program");
        crate::testkit::write_script(&path, script);
        path
    }

    fn config(job_dir: &Path) -> RankConfig {
        let start = StartAttempt { master_port: 1, ..StartAttempt::local(JobSpec::default(), "/none", 1) };
        let config = configs(&start, &[], None, job_dir).remove(0);
        fs::create_dir_all(config.attempt_dir()).unwrap();
        config
    }

    fn wait(process: &mut RankProcess) -> Exit {
        wait_until("the process never ended", || process.poll().is_some());
        process.poll().unwrap()
    }

    /// Starts a rank. Returns how it ended, and what it printed.
    fn run(program: &Path, config: &RankConfig) -> (Exit, String) {
        let mut process = RankProcess::start(program, config, None).unwrap();
        let exit = wait(&mut process);
        (exit, fs::read_to_string(rank_file(&config.attempt_dir(), 0, "stderr")).unwrap())
    }

    #[test]
    fn a_gpu_rank_sees_its_attempt_s_gpus_and_finds_libraries() {
        let dir = tempfile::tempdir().unwrap();
        let script = program(dir.path(), "echo \"$CUDA_VISIBLE_DEVICES|$LD_LIBRARY_PATH|$HOME\"");
        let mut config = config(dir.path());
        config.gpu = Some(RankGpu { ordinal: 0, visible: vec!["GPU-b".into(), "GPU-a".into()] });
        let (_, output) = run(&script, &config);
        assert!(output.starts_with("GPU-b,GPU-a|"), "{output}");
        // The rest of the environment is inherited from the launcher.
        let home = std::env::var("HOME").unwrap_or_default();
        assert!(output.trim_end().ends_with(&format!("|{home}")), "{output}");
        // A job on CPU cores gets no GPU.
        config.start.spec.parallel.device = lockstep_protocol::spec::Device::Cpu;
        assert!(!run(&script, &config).1.contains("GPU-b"));
    }

    /// A script that prints whether it was started as a spare process.
    const SPARE_OR_NEW: &str = "if [ \"$2\" = --spare ]; then\npath=$(cat)\n[ \"$path\" ] || exit 9\nexec >\"${path%json}stderr\"\n\
        echo spare\nelse echo new\nfi\nexec sleep 1000";

    #[test]
    fn a_spare_becomes_the_rank_unless_a_new_process_would_differ() {
        let dir = tempfile::tempdir().unwrap();
        let script = program(dir.path(), SPARE_OR_NEW);
        let gpu = RankGpu { ordinal: 1, visible: vec![toy::device("a"), toy::device("b")] };
        let spare = || Spare::start(&script, &gpu).unwrap();
        let mut orphan = spare();
        orphan.process().write_to_stdin(b"").unwrap();
        assert_eq!(wait(orphan.process()), Exit::Status(9), "the spare's agent has ended");

        type Change = fn(&mut Spare, &mut RankConfig, &Path);
        let cases: [(Change, &str); 4] = [
            (|_, _, _| {}, "spare"),
            (|spare, _, _| spare.process().kill_and_wait(), "new"),
            (
                |_, config, _| {
                    let (address, interface) = ("127.0.0.1".into(), Some("lo".into()));
                    config.start.network = Some(RankNetwork { address, interface, named_by: None });
                },
                "new",
            ),
            // The program was replaced by another version.
            (|_, _, script| crate::testkit::write_script(script, SPARE_OR_NEW), "new"),
        ];
        for (change, printed) in cases {
            let dir = tempfile::tempdir().unwrap();
            let mut config = config(dir.path());
            config.gpu = Some(RankGpu { ordinal: 0, visible: vec![toy::device("b")] });
            let mut spare = spare();
            change(&mut spare, &mut config, &script);
            let mut process = RankProcess::start(&script, &config, Some(spare)).unwrap();
            let file = |extension| rank_file(&config.attempt_dir(), 0, extension);
            let output = || fs::read_to_string(file("stderr")).unwrap();
            wait_until("the rank printed nothing", || !output().is_empty());
            assert_eq!(output().trim_end(), printed);
            let written: RankConfig = serde_json::from_slice(&fs::read(file("json")).unwrap()).unwrap();
            let expected = if printed == "spare" { Some(gpu.clone()) } else { config.gpu.clone() };
            assert_eq!(written.gpu, expected);
            // The next agent adopts the rank in either case.
            let mut adopted = RankProcess::adopt(&config.attempt_dir(), 0);
            assert_eq!(adopted.poll(), None);
            adopted.signal(Signal::KILL);
            assert_eq!(wait(&mut process), Exit::Signal(9));
        }
    }

    #[test]
    fn a_later_agent_finds_a_rank_with_and_without_its_pid_file() {
        for is_file_lost in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let config = config(dir.path());
            let mut started =
                RankProcess::start(&program(dir.path(), "while :; do :; done"), &config, None).unwrap();
            if is_file_lost {
                fs::remove_file(rank_file(&config.attempt_dir(), 0, "pid")).unwrap();
            }
            let mut adopted = RankProcess::adopt(&config.attempt_dir(), 0);
            if is_file_lost {
                // The arguments of a process appear a moment after its start.
                wait_until("the rank is not found", || {
                    adopted = RankProcess::adopt(&config.attempt_dir(), 0);
                    adopted.poll().is_none()
                });
            }
            assert_eq!(adopted.poll(), None);
            assert!(!adopted.is_suspended());
            adopted.signal(Signal::STOP);
            wait_until("the rank is not suspended", || adopted.is_suspended());
            adopted.signal(Signal::KILL);
            assert_eq!(wait(&mut started), Exit::Signal(9));
            assert_eq!(wait(&mut adopted), Exit::Unseen);
        }
    }

    #[test]
    fn a_process_with_a_reused_id_is_not_the_rank() {
        let dir = tempfile::tempdir().unwrap();
        let own = stat(std::process::id().cast_signed()).unwrap();
        let identity = Identity {
            pid: std::process::id().cast_signed(),
            start_time: own.start_time + 1,
            boot_id: boot_id(),
        };
        fs::write(rank_file(dir.path(), 0, "pid"), serde_json::to_vec(&identity).unwrap()).unwrap();
        let mut process = RankProcess::adopt(dir.path(), 0);
        // If the process were taken for the rank, this would end the test.
        process.signal(Signal::KILL);
        assert_eq!(process.poll(), Some(Exit::Unseen));
    }
}
