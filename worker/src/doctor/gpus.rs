//! The doctor's findings about GPUs.

use super::{Finding, Grade, finding, ok};
use crate::planning::gigabytes;
use lockstep_engine::nvjpeg;
use lockstep_host::gpu::{
    devices::{self, Gpu, Link},
    libraries::{Libraries, Library},
};
use std::fs;

/// Findings about GPUs and the libraries that ranks on them need. If `quick`, checks that need a context on a GPU are skipped.
pub(super) fn findings(quick: bool) -> Vec<Finding> {
    let libraries = Libraries::find();
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    if driver.is_none() && libraries.get(Library::Driver).is_none() {
        let advice = "Jobs train on the CPU. For GPUs install NVIDIA's driver (nvidia-smi must work), and in a \
                      container pass them in (docker run --gpus all).";
        return vec![finding("GPUs", Grade::Note, "no NVIDIA driver found", advice)];
    }
    let all = match devices::all(&libraries) {
        Ok(all) if !all.is_empty() => all,
        other => {
            let found =
                other.err().unwrap_or_else(|| "NVIDIA's driver is installed, but shows no GPU".into());
            let advice = "Check whether nvidia-smi lists GPUs; in a container pass them in (docker run --gpus all). \
                          Until then jobs train on the CPU.";
            return vec![finding("GPUs", Grade::Note, found, advice)];
        }
    };
    let mut findings = vec![driver_finding(driver.as_deref())];
    findings.extend(all.iter().map(gpu_finding));
    findings.extend(visible_finding(&libraries, all.len()));
    if all.len() > 1 {
        findings.extend(link_findings(&libraries, &all));
    }
    let cuda = libraries.get(Library::Driver).and_then(|driver| driver.version().ok());
    for which in Library::ALL.into_iter().filter(|which| *which != Library::Nvml) {
        findings.push(library_finding(&libraries, which, all.len(), cuda.as_deref()));
    }
    if !quick && libraries.get(Library::Nvjpeg).is_some() {
        findings.push(jpeg_decoder_finding(nvjpeg::hardware()));
    }
    findings
}

/// Whether GPUs decode JPEG files. `decoder` describes the decoder of one GPU.
fn jpeg_decoder_finding(decoder: Result<String, String>) -> Finding {
    match decoder {
        Ok(decoder) => ok("JPEG decoder", format!("in each GPU: {decoder}")),
        Err(why) => {
            let advice = "JPEG files are decoded on CPU cores. A100, A30 and GPUs of the Ada, Hopper and Blackwell families \
                          have a decoder; it needs the driver's libnvcuvid.so.1, which a container gets with \
                          NVIDIA_DRIVER_CAPABILITIES=compute,utility,video.";
            finding("JPEG decoder", Grade::Note, why, advice)
        }
    }
}

/// `description` is the driver's description of itself, with the version in its first line.
fn driver_finding(description: Option<&str>) -> Finding {
    let line =
        description.and_then(|text| text.lines().next()).unwrap_or("").trim_start_matches("NVRM version:");
    let found = if line.trim().is_empty() { "version unknown" } else { line.trim() };
    ok("GPU driver", found)
}

fn gpu_finding(gpu: &Gpu) -> Finding {
    let Gpu { index, uuid, name, memory_bytes, memory_used_bytes, pci, is_divided } = gpu;
    let what = format!("GPU {index}");
    let [used, total] = [memory_used_bytes, memory_bytes].map(|bytes| gigabytes(*bytes as f64));
    let found = format!("{name}, {used} in use of {total}, {pci}, {uuid}");
    if *is_divided {
        let advice = "This GPU is divided (MIG), and Lockstep uses only undivided GPUs: `nvidia-smi -mig 0` as root ends the division.";
        return finding(&what, Grade::Note, found, advice);
    }
    if *memory_used_bytes > memory_bytes / 10 {
        let advice = "Other programs use this GPU's memory (nvidia-smi shows them): jobs may run out of memory or slow down.";
        return finding(&what, Grade::Note, found, advice);
    }
    ok(&what, found)
}

fn visible_finding(libraries: &Libraries, gpu_count: usize) -> Option<Finding> {
    let value = std::env::var_os(devices::VISIBLE_DEVICES)?;
    let shown = format!("{}={}", devices::VISIBLE_DEVICES, value.to_string_lossy());
    Some(match devices::visible(libraries) {
        Ok(gpus) if gpus.is_empty() => {
            let advice = "Unset the variable, or jobs train on the CPU.";
            finding("visible", Grade::Note, format!("{shown} hides all GPUs"), advice)
        }
        Ok(gpus) => {
            let indices: Vec<_> = gpus.iter().map(|gpu| gpu.index.to_string()).collect();
            let found = format!("{} of {gpu_count}: {} ({shown})", gpus.len(), indices.join(", "));
            ok("visible", found)
        }
        Err(error) => {
            let advice = "Correct the variable, or unset it to use all GPUs.";
            finding("visible", Grade::Problem, error, advice)
        }
    })
}

fn link_findings(libraries: &Libraries, gpus: &[Gpu]) -> Vec<Finding> {
    let links = match devices::links(libraries, gpus) {
        Ok(links) => links,
        Err(error) => {
            let advice = "`nvidia-smi topo -m` may show the reason. Training works, but may be slow.";
            return vec![finding("links", Grade::Note, error, advice)];
        }
    };
    // Connections of the same kind are combined in one finding: kind, peer access, and pairs of GPUs.
    let mut kinds: Vec<(&str, bool, Vec<String>)> = Vec::new();
    for Link { between: (one, other), by, peer_access } in &links {
        let pair = format!("{one}-{other}");
        match kinds.iter_mut().find(|(kind, access, _)| kind == by && access == peer_access) {
            Some((.., pairs)) => pairs.push(pair),
            None => kinds.push((by, *peer_access, vec![pair])),
        }
    }
    let are_all_equal = kinds.len() == 1;
    kinds
        .into_iter()
        .map(|(by, peer_access, pairs)| {
            let pairs = if are_all_equal { "every pair".to_owned() } else { format!("pairs {}", pairs.join(", ")) };
            if peer_access {
                return ok("links", format!("{pairs}: {by}, with peer access"));
            }
            let advice = "Data between these GPUs goes through the host's memory, which is slower. Consumer GPUs offer \
                          no peer access; in a virtual machine, the host may block it (ACS).";
            finding("links", Grade::Note, format!("{pairs}: {by}, no peer access"), advice)
        })
        .collect()
}

/// A finding about a library. `driver_cuda` is the CUDA version that the driver supports, such as `13.0`.
fn library_finding(
    libraries: &Libraries,
    which: Library,
    gpu_count: usize,
    driver_cuda: Option<&str>,
) -> Finding {
    let Some(library) = libraries.get(which) else {
        // One GPU does not need NCCL.
        let needed = Library::needed(u32::try_from(gpu_count).unwrap_or(u32::MAX)).contains(&which);
        let grade = if needed { Grade::Problem } else { Grade::Note };
        return finding(which.name(), grade, "not found", which.advice());
    };
    let path = library.path.display();
    let version = match library.version() {
        Ok(version) => version,
        Err(error) => return finding(which.name(), Grade::Problem, error, which.advice()),
    };
    let found = match which {
        Library::Driver => format!("supports CUDA {version}: {path}"),
        _ => format!("{version}: {path}"),
    };
    let major = |version: &str| version.split('.').next().and_then(|n| n.parse::<u32>().ok());
    if which == Library::Nvrtc && driver_cuda.is_some_and(|cuda| major(&version) > major(cuda)) {
        let advice =
            "NVRTC is newer than the driver: update the driver, or pip install nvidia-cuda-nvrtc-cu12.";
        return finding(which.name(), Grade::Problem, found, advice);
    }
    ok(which.name(), found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_gpus_gets_one_note() {
        let found: Vec<_> = findings(false);
        if found.len() == 1 {
            assert_eq!((found[0].what.as_str(), found[0].grade), ("GPUs", Grade::Note));
            assert!(found[0].advice.as_ref().is_some_and(|a| a.contains("CPU")), "{found:?}");
        }
    }

    #[test]
    fn a_missing_library_is_a_problem_with_advice() {
        let nothing = Libraries::default();
        let cudnn = library_finding(&nothing, Library::Cudnn, 1, Some("13.0"));
        assert_eq!((cudnn.what.as_str(), cudnn.grade), ("cuDNN", Grade::Problem));
        assert!(cudnn.advice.unwrap().contains("pip install nvidia-cudnn"));
        assert_eq!(library_finding(&nothing, Library::Nccl, 1, None).grade, Grade::Note);
        assert_eq!(library_finding(&nothing, Library::Nccl, 2, None).grade, Grade::Problem);
    }

    #[test]
    fn a_missing_jpeg_decoder_is_a_note_that_names_the_cpu() {
        assert_eq!(library_finding(&Libraries::default(), Library::Nvjpeg, 1, None).grade, Grade::Note);
        let without = jpeg_decoder_finding(Err("this GPU has no JPEG decoder".into()));
        assert_eq!(without.grade, Grade::Note);
        assert!(without.advice.unwrap().contains("on CPU cores"));
        assert_eq!(jpeg_decoder_finding(Ok("8 engines".into())).grade, Grade::Ok);
    }
}
