//! Resource limits of a container: the limits of the control groups (versions 1 and 2) of this process.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The limits of this process's control groups and their ancestors.
#[derive(Debug, Clone, Default)]
pub(crate) struct ControlGroups {
    cpu: Option<CpuLimit>,
    /// All limits of memory, because the tightest limit with swap may be another one than without swap.
    memory: Vec<MemoryLimit>,
}

#[derive(Debug, Clone)]
struct CpuLimit {
    cpus: f64,
    time_file: CpuTimeFile,
}

/// The file in which the kernel counts the CPU time of a group.
#[derive(Debug, Clone)]
enum CpuTimeFile {
    /// The line `usage_usec` of a `cpu.stat` file.
    Microseconds(PathBuf),
    /// A `cpuacct.usage` file.
    Nanoseconds(PathBuf),
}

#[derive(Debug, Clone)]
struct MemoryLimit {
    bytes: u64,
    /// The limit of swap. Version 1 does not limit swap separately from memory.
    swap_bytes: Option<u64>,
    /// The file with the number of bytes in use. Beside it, `memory.stat` has statistics.
    used_file: PathBuf,
    /// The key of `memory.stat` that counts the memory the kernel reclaims first.
    inactive_key: &'static str,
}

fn number(path: PathBuf) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number after the word `key` in text with lines such as `usage_usec 17` or `MemTotal: 17 kB`.
pub(crate) fn value(text: &str, key: &str) -> Option<u64> {
    let mut words =
        text.lines().map(str::split_whitespace).find(|words| words.clone().next() == Some(key))?;
    words.nth(1)?.parse().ok()
}

/// The folder of a control group and its ancestors. Only `root` is sure to exist: a container may see its own group as the root,
/// and `/proc/self/cgroup` then has another path.
fn folders(root: &Path, path: &str) -> Vec<PathBuf> {
    let inner = root.join(path.trim_start_matches('/'));
    inner.ancestors().take_while(|folder| folder.starts_with(root)).map(Path::to_owned).collect()
}

impl ControlGroups {
    pub(crate) fn of_this_process() -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::read(&groups, Path::new("/sys/fs/cgroup"))
    }

    /// Reads the limits. `groups` is the content of `/proc/self/cgroup`: lines `number:controllers:path`, in version
    /// 2 without controllers.
    fn read(groups: &str, root: &Path) -> Self {
        let mut found = Self::default();
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            if controllers.is_empty() {
                folders(root, path).iter().for_each(|folder| found.add_v2(folder));
            }
            for controller in controllers.split(',') {
                match controller {
                    "cpu" => folders(Path::new(""), path).iter().for_each(|f| found.add_v1_cpu(root, f)),
                    "memory" => {
                        folders(&root.join("memory"), path).iter().for_each(|f| found.add_v1_memory(f));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    fn add_v2(&mut self, folder: &Path) {
        let limit = fs::read_to_string(folder.join("cpu.max")).unwrap_or_default();
        // Without a limit the file has `max 100000`.
        let mut words = limit.split_whitespace().map(str::parse::<f64>);
        if let (Some(Ok(quota)), Some(Ok(period))) = (words.next(), words.next()) {
            self.add_cpu(quota / period, CpuTimeFile::Microseconds(folder.join("cpu.stat")));
        }
        if let Some(bytes) = number(folder.join("memory.max")) {
            self.memory.push(MemoryLimit {
                bytes,
                swap_bytes: number(folder.join("memory.swap.max")),
                used_file: folder.join("memory.current"),
                inactive_key: "inactive_file",
            });
        }
    }

    fn add_v1_cpu(&mut self, root: &Path, group: &Path) {
        let folder = root.join("cpu").join(group);
        // A quota of -1 means no limit.
        if let (Some(quota), Some(period)) =
            (number(folder.join("cpu.cfs_quota_us")), number(folder.join("cpu.cfs_period_us")))
        {
            let time_file = root.join("cpuacct").join(group).join("cpuacct.usage");
            self.add_cpu(quota as f64 / period as f64, CpuTimeFile::Nanoseconds(time_file));
        }
    }

    fn add_v1_memory(&mut self, folder: &Path) {
        if let Some(bytes) = number(folder.join("memory.limit_in_bytes")) {
            let (used_file, inactive_key) = (folder.join("memory.usage_in_bytes"), "total_inactive_file");
            self.memory.push(MemoryLimit { bytes, swap_bytes: None, used_file, inactive_key });
        }
    }

    fn add_cpu(&mut self, cpus: f64, time_file: CpuTimeFile) {
        if cpus > 0.0 && cpus.is_finite() && self.cpu.as_ref().is_none_or(|tightest| cpus < tightest.cpus) {
            self.cpu = Some(CpuLimit { cpus, time_file });
        }
    }

    fn tightest_memory(&self) -> Option<&MemoryLimit> {
        self.memory.iter().filter(|limit| limit.bytes > 0).min_by_key(|limit| limit.bytes)
    }

    /// The limit of memory and swap in bytes, on a machine with `swap_bytes` of swap.
    pub(crate) fn memory_and_swap(&self, swap_bytes: u64) -> Option<u64> {
        let with_swap = |limit: &MemoryLimit| {
            limit.bytes.saturating_add(limit.swap_bytes.unwrap_or(swap_bytes).min(swap_bytes))
        };
        self.memory.iter().map(with_swap).min()
    }

    /// The limit of CPU time, in CPUs.
    pub(crate) fn cpus(&self) -> Option<f64> {
        self.cpu.as_ref().map(|limit| limit.cpus)
    }

    /// The CPU time used by the group that has the tightest limit, in seconds.
    pub(crate) fn cpu_secs(&self) -> Option<f64> {
        match &self.cpu.as_ref()?.time_file {
            CpuTimeFile::Microseconds(path) => {
                Some(value(&fs::read_to_string(path).ok()?, "usage_usec")? as f64 / 1e6)
            }
            CpuTimeFile::Nanoseconds(path) => Some(number(path.clone())? as f64 / 1e9),
        }
    }

    /// The limit of memory, and the memory in use without files that the kernel reclaims first, in bytes. Without a limit,
    /// version 1 reports a number above the memory of any machine.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        let limit = self.tightest_memory()?;
        let stat = fs::read_to_string(limit.used_file.with_file_name("memory.stat")).unwrap_or_default();
        let used =
            number(limit.used_file.clone())?.saturating_sub(value(&stat, limit.inactive_key).unwrap_or(0));
        Some((limit.bytes, used))
    }

    /// Bytes of cached files that the kernel reclaims last.
    pub(crate) fn active_file_bytes(&self) -> Option<u64> {
        let limit = self.tightest_memory()?;
        let stat = fs::read_to_string(limit.used_file.with_file_name("memory.stat")).ok()?;
        value(&stat, &limit.inactive_key.replace("inactive", "active"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn version_2_limits_are_the_tightest_of_the_group_and_its_ancestors() {
        let root = tree(&[
            ("a/cpu.max", "200000 100000\n"),
            ("a/cpu.stat", "usage_usec 3500000\nuser_usec 1\n"),
            ("a/b/cpu.max", "max 100000\n"),
            ("a/b/memory.max", "4294967296\n"),
            ("a/b/memory.current", "1000000\n"),
            ("a/b/memory.stat", "anon 5\ninactive_file 250000\nactive_file 40\n"),
            ("a/b/memory.swap.max", "max\n"),
            ("a/memory.max", "4294967300\n"),
            ("a/memory.swap.max", "70\n"),
        ]);
        let found = ControlGroups::read("0::/a/b\n", root.path());
        assert_eq!((found.cpus(), found.cpu_secs()), (Some(2.0), Some(3.5)));
        assert_eq!((found.memory(), found.active_file_bytes()), (Some((4 << 30, 750_000)), Some(40)));
        for (swap_bytes, expected) in [(0, 4 << 30), (50, (4 << 30) + 50), (1000, (4 << 30) + 74)] {
            assert_eq!(found.memory_and_swap(swap_bytes), Some(expected), "{swap_bytes}");
        }
    }

    #[test]
    fn a_container_that_sees_its_own_group_as_the_root_finds_its_limits() {
        let root = tree(&[("cpu.max", "150000 100000\n"), ("memory.max", "1024\n"), ("memory.current", "7")]);
        for reported in ["0::/", "0::/docker/0123/of/the/host"] {
            let found = ControlGroups::read(reported, root.path());
            assert_eq!((found.cpus(), found.memory()), (Some(1.5), Some((1024, 7))), "{reported}");
        }
    }

    #[test]
    fn version_1_limits_are_read_from_each_controller_s_folder() {
        let root = tree(&[
            ("cpu/x/cpu.cfs_quota_us", "50000\n"),
            ("cpu/x/cpu.cfs_period_us", "100000\n"),
            ("cpuacct/x/cpuacct.usage", "1500000000\n"),
            ("cpu/cpu.cfs_quota_us", "-1\n"),
            ("cpu/cpu.cfs_period_us", "100000\n"),
            ("memory/y/memory.limit_in_bytes", "2048\n"),
            ("memory/y/memory.usage_in_bytes", "1000\n"),
            ("memory/y/memory.stat", "inactive_file 1\ntotal_inactive_file 400\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let found = ControlGroups::read("3:cpuset:/\n2:cpu,cpuacct:/x\n4:memory:/y\n0::/\n", root.path());
        assert_eq!((found.cpus(), found.cpu_secs()), (Some(0.5), Some(1.5)));
        assert_eq!((found.memory(), found.memory_and_swap(10)), (Some((2048, 600)), Some(2058)));
    }

    #[test]
    fn unlimited_or_invalid_files_give_no_limits() {
        let root = tree(&[("cpu.max", "x y\n"), ("memory.max", "\n"), ("z/cpu.max", "0 0")]);
        for groups in ["", "0::/", "0::/z", "nonsense", "::", "1:cpu", "4:memory:/../../etc"] {
            let found = ControlGroups::read(groups, root.path());
            assert_eq!((found.cpus(), found.memory()), (None, None), "{groups}");
        }
    }
}
