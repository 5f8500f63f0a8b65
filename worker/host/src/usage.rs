//! Usage of this machine's CPUs, memory, disks and network, read from `/proc`.

use super::cgroup::{ControlGroups, value};
use jiff::Timestamp;
use lockstep_protocol::agent::MachineSample;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

/// The unit of `/proc/diskstats`, whatever the disk's own sector size is.
const SECTOR_BYTES: u64 = 512;
/// Prefixes of the names of block devices that are not disks, or whose data is also counted at the disks below them (device mapper, RAID).
const NOT_DISKS: [&str; 7] = ["loop", "ram", "zram", "dm-", "md", "sr", "fd"];

/// Monotonic counters, and the time at which they were read.
#[derive(Debug, Clone, Copy)]
struct Counters {
    at: Instant,
    /// Busy and total time of the CPUs that this process may use, in clock ticks.
    cpu: Option<(u64, u64)>,
    /// CPU time of the control group that limits this process. `None` without such a limit.
    group_cpu_secs: Option<f64>,
    /// Bytes read and written.
    disk: Option<(u64, u64)>,
    /// Bytes received and sent.
    network: Option<(u64, u64)>,
}

/// Measures usage, and keeps the counters of the previous measurement.
#[derive(Debug)]
pub struct UsageSampler {
    groups: ControlGroups,
    /// The CPUs that this process may use. Empty if the system does not report them.
    allowed: Vec<usize>,
    disk_dir: PathBuf,
    last: Option<Counters>,
}

impl UsageSampler {
    /// A sampler for this machine or container. Disk space is measured at `disk_dir`.
    pub fn new(disk_dir: &Path) -> Self {
        let allowed = sched_getaffinity(None)
            .map_or_else(|_| Vec::new(), |set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect());
        let groups = ControlGroups::of_this_process();
        Self { groups, allowed, disk_dir: disk_dir.to_owned(), last: None }
    }

    /// A measurement without GPUs. Rates are relative to the previous measurement, so the first has none.
    pub fn sample(&mut self) -> MachineSample {
        let stat = read("/proc/stat");
        let host_cpus = stat.lines().filter(|line| cpu_line(line).is_some()).count();
        let usable_cpus = if self.allowed.is_empty() { host_cpus } else { self.allowed.len() }.max(1) as f64;
        let limit = self.groups.cpus().filter(|limit| *limit < usable_cpus);
        let now = Counters {
            at: Instant::now(),
            cpu: busy_and_total(&stat, &self.allowed),
            group_cpu_secs: limit.and_then(|_| self.groups.cpu_secs()),
            disk: disks(&read("/proc/diskstats"), &whole_disks()),
            network: network(&read("/proc/net/dev"), |name| {
                Path::new("/sys/class/net").join(name).join("device").exists()
            }),
        };
        let before = self.last.replace(now);
        let cpus = limit.unwrap_or(usable_cpus);
        let (disk_used_bytes, disk_bytes) = disk_space(&self.disk_dir);
        let (memory_used_bytes, memory_bytes, host_memory_bytes) = memory(&self.groups);
        let rate = |bytes_of: fn(&Counters) -> Option<u64>| rate(&before?, &now, bytes_of);
        MachineSample {
            at: Timestamp::now(),
            cpus: cpus as f32,
            host_cpus: u32::try_from(host_cpus).unwrap_or(u32::MAX),
            cpu_utilization: before
                .and_then(|before| utilization(&before, &now, cpus))
                .map(|share| share as f32),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()),
            memory_used_bytes,
            memory_bytes,
            host_memory_bytes,
            disk_used_bytes,
            disk_bytes,
            disk_read_bytes_per_second: rate(|counters| counters.disk.map(|(read, _)| read)),
            disk_written_bytes_per_second: rate(|counters| counters.disk.map(|(_, written)| written)),
            network_received_bytes_per_second: rate(|counters| {
                counters.network.map(|(received, _)| received)
            }),
            network_sent_bytes_per_second: rate(|counters| counters.network.map(|(_, sent)| sent)),
            gpus: Vec::new(),
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// CPU utilization between two readings, as a fraction of `cpus` CPUs, 0 to 1. If a control group limits this process, only the time of
/// the control group counts.
fn utilization(before: &Counters, now: &Counters, cpus: f64) -> Option<f64> {
    let share = match (before.group_cpu_secs, now.group_cpu_secs) {
        (Some(before_secs), Some(now_secs)) => {
            (now_secs - before_secs) / (now.at - before.at).as_secs_f64() / cpus
        }
        _ => {
            let ((busy_before, all_before), (busy, all)) = (before.cpu?, now.cpu?);
            busy.saturating_sub(busy_before) as f64 / all.checked_sub(all_before)? as f64
        }
    };
    // The interval may be zero.
    share.is_finite().then(|| share.clamp(0.0, 1.0))
}

/// Bytes per second by which the counter that `bytes_of` selects has increased.
fn rate(before: &Counters, now: &Counters, bytes_of: fn(&Counters) -> Option<u64>) -> Option<u64> {
    // `None` if a disk or an interface has disappeared, which reduces the sum.
    let bytes = bytes_of(now)?.checked_sub(bytes_of(before)?)?;
    let per_second = bytes as f64 / (now.at - before.at).as_secs_f64();
    per_second.is_finite().then_some(per_second as u64)
}

/// The number and the times in a line `cpu7 ...` of `/proc/stat`.
fn cpu_line(line: &str) -> Option<(usize, &str)> {
    let (number, times) = line.strip_prefix("cpu")?.split_once(' ')?;
    Some((number.parse().ok()?, times))
}

/// Busy and total time of the CPUs in `allowed`. An empty list means all CPUs.
fn busy_and_total(stat: &str, allowed: &[usize]) -> Option<(u64, u64)> {
    let counted = |cpu: usize| allowed.is_empty() || allowed.contains(&cpu);
    let of_cpu = |(_, times): (usize, &str)| {
        // user nice system idle iowait irq softirq steal. The time of guests is included in user.
        let times: Vec<u64> = times.split_whitespace().take(8).map_while(|t| t.parse().ok()).collect();
        let (all, idle) = (times.iter().sum::<u64>(), times.iter().skip(3).take(2).sum::<u64>());
        (all - idle, all)
    };
    stat.lines().filter_map(cpu_line).filter(|(cpu, _)| counted(*cpu)).map(of_cpu).reduce(add)
}

fn add(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0 + b.0, a.1 + b.1)
}

/// The value of an entry of `/proc/meminfo` or `/proc/self/status`, in bytes.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    value(text, key)?.checked_mul(1024)
}

/// Three numbers of bytes: the memory in use and the memory of this machine or container, and the memory of the machine.
fn memory(groups: &ControlGroups) -> (u64, u64, u64) {
    let text = read("/proc/meminfo");
    let bytes = |key: &str| meminfo(&text, key).unwrap_or(0);
    let (host_bytes, available) = (bytes("MemTotal:"), bytes("MemAvailable:"));
    match groups.memory().filter(|(limit, _)| *limit < host_bytes) {
        Some((limit, used)) => (used.min(limit), limit, host_bytes),
        None => (host_bytes.saturating_sub(available), host_bytes, host_bytes),
    }
}

/// Memory that this process can still allocate if the kernel reclaims cached files. `None` if the system does not
/// report it.
pub fn memory_available() -> Option<u64> {
    let of_machine = meminfo(&read("/proc/meminfo"), "MemAvailable:")?;
    let groups = ControlGroups::of_this_process();
    let of_group = groups.memory().map(|(limit, used)| {
        limit.saturating_sub(used.saturating_sub(groups.active_file_bytes().unwrap_or(0)))
    });
    Some(of_group.map_or(of_machine, |of_group| of_group.min(of_machine)))
}

/// The limit of memory and swap of processes on this machine or in this container. `None` if the system does not
/// report it.
pub fn memory_and_swap() -> Option<u64> {
    let text = read("/proc/meminfo");
    let swap_bytes = meminfo(&text, "SwapTotal:").unwrap_or(0);
    let of_machine = meminfo(&text, "MemTotal:")?.saturating_add(swap_bytes);
    let of_group = ControlGroups::of_this_process().memory_and_swap(swap_bytes);
    Some(of_group.map_or(of_machine, |of_group| of_group.min(of_machine)))
}

/// Free and total memory of this machine or container, in bytes. Cached files of a control group count as used; [`memory_available`] is what
/// a process can allocate.
pub fn memory_free_and_total() -> (u64, u64) {
    let (used, bytes, _) = memory(&ControlGroups::of_this_process());
    (bytes.saturating_sub(used), bytes)
}

/// The largest size of this process's memory so far, in bytes. `None` if the system does not report it.
pub fn peak_memory_bytes() -> Option<u64> {
    meminfo(&read("/proc/self/status"), "VmHWM:")
}

/// The bytes that this account can still use on a folder's file system.
///
/// # Errors
/// The folder cannot be read.
pub fn disk_free(dir: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(dir)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Used bytes of a folder's file system, and the sum of used bytes and bytes available to this account.
fn disk_space(dir: &Path) -> (u64, u64) {
    rustix::fs::statvfs(dir).map_or((0, 0), |s| {
        let used = s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize;
        (used, used + s.f_bavail * s.f_frsize)
    })
}

/// The disks of this machine, without partitions.
fn whole_disks() -> Vec<String> {
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_disk(name)).collect()
}

fn is_disk(name: &str) -> bool {
    // `nvme0c0n1` is a path to `nvme0n1`, and not another disk.
    let is_path = name.strip_prefix("nvme").is_some_and(|rest| rest.contains('c'));
    !is_path && !NOT_DISKS.iter().any(|prefix| name.starts_with(prefix))
}

/// Bytes read from and written to the disks with these names.
fn disks(diskstats: &str, names: &[String]) -> Option<(u64, u64)> {
    let of_disk = |line: &str| {
        // Fields: major minor name reads merged sectors ms writes merged sectors ...
        let fields: Vec<&str> = line.split_whitespace().take(10).collect();
        let [_, _, name, _, _, read, _, _, _, written] = fields[..] else { return None };
        let bytes = |sectors: &str| Some(sectors.parse::<u64>().ok()? * SECTOR_BYTES);
        if names.iter().any(|known| known == name) { bytes(read).zip(bytes(written)) } else { None }
    };
    diskstats.lines().filter_map(of_disk).reduce(add)
}

/// Bytes received and sent by network interfaces with a device: bridges and tunnels would count the same traffic again. If no interface
/// has a device, as in a container, all interfaces except loopback are counted.
fn network(dev: &str, is_device: impl Fn(&str) -> bool) -> Option<(u64, u64)> {
    let interface = |line: &str| {
        let (name, counters) = line.split_once(':')?;
        let counters: Vec<u64> = counters.split_whitespace().map_while(|c| c.parse().ok()).collect();
        Some((name.trim().to_owned(), *counters.first()?, *counters.get(8)?))
    };
    let all: Vec<_> = dev.lines().filter_map(interface).filter(|(name, ..)| name != "lo").collect();
    let any_device = all.iter().any(|(name, ..)| is_device(name));
    let counted = all.iter().filter(|(name, ..)| !any_device || is_device(name));
    counted.map(|(_, received, sent)| (*received, *sent)).reduce(add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        time::Duration,
    };

    #[test]
    fn usage_of_this_machine_is_plausible_and_a_busy_loop_raises_cpu_utilization() {
        let mut sampler = UsageSampler::new(Path::new("/"));
        let first = sampler.sample();
        assert!(first.cpus > 0.0 && first.cpus <= first.host_cpus as f32, "{first:?}");
        assert!(first.memory_used_bytes > 0 && first.memory_used_bytes < first.memory_bytes, "{first:?}");
        assert!(first.memory_bytes <= first.host_memory_bytes, "{first:?}");
        assert!(memory_and_swap().is_some_and(|bytes| bytes >= first.memory_bytes), "{first:?}");
        assert!(first.disk_used_bytes > 0 && first.disk_used_bytes < first.disk_bytes, "{first:?}");
        assert_eq!(
            (first.cpu_utilization, first.disk_read_bytes_per_second, first.network_sent_bytes_per_second),
            (None, None, None),
            "there is no previous measurement"
        );
        let stop = AtomicBool::new(false);
        let spin = || {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        // One thread per CPU keeps the machine busy.
        let busiest = std::thread::scope(|scope| {
            (0..first.cpus.ceil() as usize).for_each(|_| drop(scope.spawn(spin)));
            let began = Instant::now();
            let mut busiest = 0.0;
            while busiest < 0.8 && began.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(300));
                busiest = sampler.sample().cpu_utilization.unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            busiest
        });
        assert!((0.8..=1.0).contains(&busiest), "{busiest}");
    }

    #[test]
    fn rates_and_utilization_follow_from_two_readings() {
        let at = Instant::now();
        let before = Counters {
            at,
            cpu: Some((100, 1000)),
            group_cpu_secs: None,
            disk: Some((5000, 7000)),
            network: None,
        };
        let now = Counters {
            at: at + Duration::from_secs(2),
            cpu: Some((150, 1200)),
            group_cpu_secs: None,
            disk: Some((5000, 9000)),
            network: Some((1, 1)),
        };
        assert_eq!(utilization(&before, &now, 4.0), Some(0.25));
        let written: fn(&Counters) -> Option<u64> = |counters| counters.disk.map(|(_, written)| written);
        assert_eq!(rate(&before, &now, written), Some(1000));
        assert_eq!(rate(&before, &now, |counters| counters.network.map(|(_, sent)| sent)), None);
        // A disk was removed, or two measurements have the same time.
        assert_eq!(rate(&now, &Counters { disk: Some((0, 0)), ..now }, written), None);
        assert_eq!(utilization(&now, &now, 4.0), None);
        // A container with a limit of one and a half CPUs.
        let limited = |at, secs| Counters { at, group_cpu_secs: Some(secs), ..before };
        let (one, two) = (limited(at, 10.0), limited(at + Duration::from_secs(2), 11.5));
        assert_eq!(utilization(&one, &two, 1.5), Some(0.5));
    }

    #[test]
    fn only_allowed_cpus_are_counted() {
        let stat =
            "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 10 70 10 0 0 0 0 0\ncpu1 50 0 0 50 0 0 0 0 5 0\nintr 7\n";
        assert_eq!(busy_and_total(stat, &[0]), Some((20, 100)));
        assert_eq!(busy_and_total(stat, &[]), Some((70, 200)));
        assert_eq!(busy_and_total(stat, &[9]), None);
        assert_eq!(busy_and_total("", &[]), None);
    }

    #[test]
    fn partitions_and_bridges_are_not_counted() {
        let stats = "   7  0 loop0 1 2 3 4 5 6 7 8 9 0 0\n 259 0 nvme0n1 9 9 10 9 9 9 20 9 0 0 0\n\
            259 1 nvme0n1p1 9 9 10 9 9 9 20 9 0 0 0\n";
        assert_eq!(disks(stats, &["nvme0n1".into(), "sda".into()]), Some((10 * 512, 20 * 512)));
        assert_eq!(disks(stats, &[]), None);
        for (name, expected) in
            [("sda", true), ("nvme0n1", true), ("nvme0c0n1", false), ("dm-0", false), ("vda", true)]
        {
            assert_eq!(is_disk(name), expected, "{name}");
        }
        let dev = "Inter-| Receive | Transmit\n face |bytes\n lo: 5 0 0 0 0 0 0 0 5 0\n\
            eth0: 100 1 0 0 0 0 0 0 40 1\ndocker0:90 0 0 0 0 0 0 0 30 0\n";
        assert_eq!(network(dev, |name| name == "eth0"), Some((100, 40)));
        assert_eq!(network(dev, |_| false), Some((190, 70)));
        assert_eq!(network("", |_| false), None);
    }
}
