//! The GPUs of this machine, and which of them to use.
//! GPUs are listed by NVML. It creates no context and allocates no GPU memory, so an agent may list GPUs at any time.
//! The CUDA driver lists GPUs instead if NVML is missing, or if NVML's order of GPUs cannot be matched with CUDA's.
#![allow(unsafe_code)] // The driver's calls; each follows `libraries::check_loadable`.

use super::libraries::{self, Libraries, Library};
use cudarc::driver::{DriverError, result};
use nvml_wrapper::{
    Device, Nvml,
    enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel},
    error::NvmlError,
};

/// The environment variable that restricts the GPUs of a process and sets their order.
pub const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// The environment variable for the order of GPUs. Unless it is `PCI_BUS_ID`, CUDA puts the fastest GPU first.
const DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// Maximum number of NVLink connections of a GPU (an H200 has 18).
const MAX_NVLINKS: u32 = 36;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The index among all GPUs of this machine in the order of their PCI addresses, as in `nvidia-smi`.
    pub index: u32,
    /// For example, `GPU-8932f937-d72c-4106-c12f-20bd9faed9f6`.
    pub uuid: String,
    /// For example, `NVIDIA H200`.
    pub name: String,
    pub memory_bytes: u64,
    /// Memory in use by any process.
    pub memory_used_bytes: u64,
    /// For example, `00000000:0F:00.0`. Empty if unknown.
    pub pci: String,
    /// Whether the GPU is divided into instances (MIG). Lockstep does not use divided GPUs.
    pub is_divided: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The indices of the two GPUs ([`Gpu::index`]).
    pub between: (u32, u32),
    /// For example, `NVLink x18`, `one PCIe switch` or `PCIe across CPUs`.
    pub by: String,
    /// Whether each GPU can read and write the other's memory directly.
    pub peer_access: bool,
}

/// All GPUs of this machine, in the order of `nvidia-smi`.
///
/// # Errors
/// A sentence that says why the GPUs cannot be listed. If there is no driver, the list is empty.
pub fn all(libraries: &Libraries) -> Result<Vec<Gpu>, String> {
    if let Some(nvml) = libraries.get(Library::Nvml) {
        let listed =
            Nvml::builder().lib_path(nvml.path.as_os_str()).init().and_then(|nvml| list_by_nvml(&nvml));
        match listed {
            Ok(gpus) => return Ok(gpus),
            // Reported by some machines on which the driver works nevertheless.
            Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => {}
            Err(NvmlError::NotFound) => return Ok(Vec::new()),
            Err(error) => {
                return Err(format!("NVIDIA's driver does not list its GPUs: {error}"));
            }
        }
    }
    match libraries.get(Library::Driver) {
        Some(_) => list_by_driver(),
        None => Ok(Vec::new()),
    }
}

fn list_by_nvml(nvml: &Nvml) -> Result<Vec<Gpu>, NvmlError> {
    let mut gpus = Vec::new();
    for index in 0..nvml.device_count()? {
        let device = match nvml.device_by_index(index) {
            Ok(device) => device,
            // The GPU belongs to another container, or is broken.
            Err(NvmlError::NoPermission | NvmlError::GpuLost) => continue,
            Err(error) => return Err(error),
        };
        let memory = device.memory_info()?;
        gpus.push(Gpu {
            index,
            uuid: device.uuid()?,
            name: device.name()?,
            memory_bytes: memory.total,
            memory_used_bytes: memory.used,
            pci: device.pci_info().map(|pci| pci.bus_id).unwrap_or_default(),
            is_divided: device.mig_mode().is_ok_and(|mode| mode.current == 1),
        });
    }
    Ok(gpus)
}

/// The devices that CUDA shows to this process, in CUDA's order and numbering.
///
/// # Errors
/// A sentence that says why the devices cannot be listed.
fn list_by_driver() -> Result<Vec<Gpu>, String> {
    libraries::check_loadable(&[Library::Driver])?;
    let ask = || -> Result<Vec<Gpu>, DriverError> {
        result::init()?;
        let mut gpus = Vec::new();
        for ordinal in 0..result::device::get_count()? {
            let device = result::device::get(ordinal)?;
            let uuid = result::device::get_uuid(device)?;
            gpus.push(Gpu {
                index: ordinal.cast_unsigned(),
                uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
                name: result::device::get_name(device)?,
                // SAFETY: the driver has just returned `device`.
                memory_bytes: unsafe { result::device::total_mem(device)? } as u64,
                memory_used_bytes: 0,
                pci: String::new(),
                is_divided: false,
            });
        }
        Ok(gpus)
    };
    match ask() {
        Ok(gpus) => Ok(gpus),
        Err(DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(Vec::new()),
        Err(error) => Err(format!("the CUDA driver does not list its GPUs: {error}")),
    }
}

fn uuid_text(bytes: [u8; 16]) -> String {
    format!("GPU-{}", uuid::Uuid::from_bytes(bytes).hyphenated())
}

/// The GPUs that this process may use, in CUDA's numbering: the GPUs in [`VISIBLE_DEVICES`] in that order, or all.
///
/// # Errors
/// A sentence that says why the GPUs cannot be determined.
pub fn visible(libraries: &Libraries) -> Result<Vec<Gpu>, String> {
    let gpus = all(libraries)?;
    let variable = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
    let have_same_name = gpus.windows(2).all(|pair| pair[0].name == pair[1].name);
    if !have_same_name && variable(DEVICE_ORDER).as_deref() != Some("PCI_BUS_ID") {
        // CUDA puts the fastest GPU first, and only CUDA knows how it ranks GPUs.
        let order = list_by_driver()?;
        return Ok(order
            .iter()
            .filter_map(|seen| gpus.iter().find(|gpu| gpu.uuid == seen.uuid).cloned())
            .collect());
    }
    restrict(gpus, variable(VISIBLE_DEVICES).as_deref())
}

/// Restricts `gpus` (in CUDA's order) to the GPUs in `visible`, the value of [`VISIBLE_DEVICES`].
///
/// # Errors
/// An entry names no GPU, or a GPU is named twice. CUDA would silently show fewer GPUs.
fn restrict(gpus: Vec<Gpu>, visible: Option<&str>) -> Result<Vec<Gpu>, String> {
    let Some(visible) = visible else { return Ok(gpus) };
    // As in CUDA, a negative number ends the list.
    let entries: Vec<_> =
        visible.split(',').map(str::trim).take_while(|e| !e.is_empty() && !e.starts_with('-')).collect();
    choose(&gpus, &entries).map_err(|e| format!("{VISIBLE_DEVICES}={visible}: {e}"))
}

/// The GPUs that `list` names, in that order. An entry is a number, a UUID or the beginning of a UUID. Without a
/// list, all `gpus`.
///
/// # Errors
/// An entry names no GPU, or several. The sentence names the existing GPUs.
pub fn select(gpus: &[Gpu], list: Option<&str>) -> Result<Vec<Gpu>, String> {
    let Some(list) = list else { return Ok(gpus.to_vec()) };
    let entries: Vec<_> = list.split(',').map(str::trim).collect();
    choose(gpus, &entries)
}

fn choose(gpus: &[Gpu], entries: &[&str]) -> Result<Vec<Gpu>, String> {
    let mut chosen: Vec<Gpu> = Vec::new();
    for entry in entries {
        let gpu = match entry.parse::<usize>() {
            Ok(index) => gpus.get(index).ok_or_else(|| match gpus.len() {
                0 => "there is no GPU".to_owned(),
                1 => format!("no GPU {entry}; there is one, number 0"),
                n => format!("no GPU {entry}; there are {n}, 0 to {}", n - 1),
            })?,
            Err(_) => find_by_uuid(gpus, entry)?,
        };
        if chosen.iter().any(|other| other.uuid == gpu.uuid) {
            return Err(format!("GPU {entry} is named twice"));
        }
        chosen.push(gpu.clone());
    }
    Ok(chosen)
}

fn find_by_uuid<'a>(gpus: &'a [Gpu], entry: &str) -> Result<&'a Gpu, String> {
    if entry.starts_with("MIG-") {
        return Err(format!("{entry}: instances of a divided GPU (MIG) are not supported"));
    }
    if !entry.starts_with("GPU-") {
        return Err(format!("`{entry}` is neither a GPU's number nor its UUID (GPU-...)"));
    }
    let mut matching = gpus.iter().filter(|gpu| gpu.uuid.starts_with(entry));
    match (matching.next(), matching.next()) {
        (Some(gpu), None) => Ok(gpu),
        (Some(_), Some(_)) => Err(format!("{entry} is the beginning of several GPUs' UUIDs")),
        (None, _) => {
            let known: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
            Err(format!("no GPU {entry}; there are: {}", known.join(", ")))
        }
    }
}

/// The GPUs on which ranks can run, or the reason why there are none.
#[derive(Debug, Clone)]
pub struct Usable {
    pub gpus: Vec<Gpu>,
    /// Why `gpus` is empty, and what to do. `None` if it is not empty, or if the machine has no GPU.
    pub why_no_gpus: Option<String>,
}

/// The GPUs that an agent can offer: visible, selected by `list` (as for [`select`]) and not divided. If a library that ranks
/// need is missing, no GPU can be offered.
///
/// # Errors
/// `list` names a GPU that does not exist.
pub fn usable(list: Option<&str>) -> Result<Usable, String> {
    let libraries = Libraries::find();
    let seen = match visible(&libraries) {
        Ok(seen) => seen,
        Err(error) if list.is_some() => return Err(error),
        Err(error) => return Ok(Usable { gpus: Vec::new(), why_no_gpus: Some(error) }),
    };
    let (divided, gpus): (Vec<_>, Vec<_>) = select(&seen, list)?.into_iter().partition(|gpu| gpu.is_divided);
    if gpus.is_empty() {
        let why_no_gpus = (!divided.is_empty())
            .then(|| "the GPUs are divided (MIG); `nvidia-smi -mig 0` as root ends the division".to_owned());
        return Ok(Usable { gpus, why_no_gpus });
    }
    let needed = Library::needed(u32::try_from(gpus.len()).unwrap_or(u32::MAX));
    let why_no_gpus = libraries::check_found(&libraries, needed).err();
    Ok(Usable { gpus: if why_no_gpus.is_some() { Vec::new() } else { gpus }, why_no_gpus })
}

/// The connection between each pair of `gpus`.
///
/// # Errors
/// NVML is missing or fails. The error is a sentence.
pub fn links(libraries: &Libraries, gpus: &[Gpu]) -> Result<Vec<Link>, String> {
    let nvml = libraries.get(Library::Nvml).ok_or("NVML was not found")?;
    let ask = || -> Result<Vec<Link>, NvmlError> {
        let nvml = Nvml::builder().lib_path(nvml.path.as_os_str()).init()?;
        let devices = gpus
            .iter()
            .map(|gpu| nvml.device_by_uuid(gpu.uuid.as_str()))
            .collect::<Result<Vec<Device<'_>>, _>>()?;
        let mut links = Vec::new();
        for (i, one) in devices.iter().enumerate() {
            for (j, other) in devices.iter().enumerate().skip(i + 1) {
                let can = |what| one.p2p_status(other, what).is_ok_and(|s| matches!(s, P2pStatus::Ok));
                let by = if can(P2pCapabilitiesIndex::NvLink) {
                    // All active NVLink connections of the GPU, including those to other GPUs.
                    let active_nvlinks = (0..MAX_NVLINKS)
                        .filter(|link| one.link_wrapper_for(*link).is_active().unwrap_or(false))
                        .count();
                    if active_nvlinks > 0 { format!("NVLink x{active_nvlinks}") } else { "NVLink".into() }
                } else {
                    match nvml
                        .device_by_uuid(gpus[j].uuid.as_str())
                        .and_then(|other| one.topology_common_ancestor(other))
                    {
                        Ok(TopologyLevel::Internal) => "one board",
                        Ok(TopologyLevel::Single) => "one PCIe switch",
                        Ok(TopologyLevel::Multiple) => "PCIe switches",
                        Ok(TopologyLevel::HostBridge) => "one PCIe host bridge",
                        Ok(TopologyLevel::Node) => "PCIe across host bridges",
                        Ok(TopologyLevel::System) => "PCIe across CPUs",
                        Err(_) => "PCIe",
                    }
                    .to_owned()
                };
                let peer_access = can(P2pCapabilitiesIndex::Read) && can(P2pCapabilitiesIndex::Write);
                links.push(Link { between: (gpus[i].index, gpus[j].index), by, peer_access });
            }
        }
        Ok(links)
    };
    ask().map_err(|error| format!("NVML: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Vec<Gpu> {
        (0..4)
            .map(|index| Gpu {
                index,
                uuid: format!("GPU-{index}a{index}b0000-d72c-4106-c12f-20bd9faed9f6"),
                name: "NVIDIA H200".into(),
                memory_bytes: 150 << 30,
                memory_used_bytes: 0,
                pci: String::new(),
                is_divided: false,
            })
            .collect()
    }

    fn numbers(gpus: Result<Vec<Gpu>, String>) -> Result<Vec<u32>, String> {
        gpus.map(|gpus| gpus.iter().map(|gpu| gpu.index).collect())
    }

    fn restricted(value: &str) -> Result<Vec<u32>, String> {
        numbers(restrict(machine(), Some(value)))
    }

    #[test]
    fn visible_devices_are_numbered_as_by_cuda() {
        assert_eq!(numbers(restrict(machine(), None)).unwrap(), [0, 1, 2, 3]);
        assert_eq!(restricted("2,3").unwrap(), [2, 3]);
        assert_eq!(restricted("3,2").unwrap(), [3, 2]);
        assert_eq!(restricted(" 1 , 0 ").unwrap(), [1, 0]);
        assert_eq!(restricted("").unwrap(), [0u32; 0]);
        assert_eq!(restricted("-1").unwrap(), [0u32; 0]);
        assert_eq!(restricted("1,-1,2").unwrap(), [1]);
        // UUIDs, also abbreviated, mixed with numbers.
        assert_eq!(restricted("GPU-3a3b,0").unwrap(), [3, 0]);
        let whole = machine()[2].uuid.clone();
        assert_eq!(restricted(&whole).unwrap(), [2]);
    }

    #[test]
    fn unknown_gpus_are_named_in_the_error() {
        let error = restricted("2,7").unwrap_err();
        assert!(error.contains("CUDA_VISIBLE_DEVICES=2,7") && error.contains("0 to 3"), "{error}");
        assert!(restricted("0,0").unwrap_err().contains("twice"));
        assert!(restricted("GPU-").unwrap_err().contains("several"));
        assert!(restricted("GPU-9").unwrap_err().contains("GPU-0a0b"));
        assert!(restricted("MIG-1").unwrap_err().contains("MIG"));
        assert!(restricted("first").unwrap_err().contains("neither"));
        assert!(numbers(select(&[], Some("0"))).unwrap_err().contains("no GPU"));
    }

    #[test]
    fn a_list_selects_among_the_visible_gpus() {
        let seen = restrict(machine(), Some("3,2")).unwrap();
        assert_eq!(numbers(select(&seen, None)).unwrap(), [3, 2]);
        assert_eq!(numbers(select(&seen, Some("1"))).unwrap(), [2]);
        assert_eq!(numbers(select(&seen, Some("GPU-3a"))).unwrap(), [3]);
        assert!(numbers(select(&seen, Some("2"))).unwrap_err().contains("there are 2, 0 to 1"));
        // A GPU that is not visible cannot be selected by its UUID either.
        assert!(numbers(select(&seen, Some("GPU-1a"))).is_err());
    }

    #[test]
    fn uuids_of_the_driver_have_nvml_s_format() {
        let bytes = *uuid::Uuid::parse_str("8932f937-d72c-4106-c12f-20bd9faed9f6").unwrap().as_bytes();
        assert_eq!(uuid_text(bytes), "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6");
    }

    #[test]
    fn without_a_driver_the_list_is_empty() {
        assert_eq!(all(&Libraries::default()).unwrap(), []);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_devices_have_cuda_s_numbers() {
        let libraries = Libraries::find();
        let listed: Vec<_> = visible(&libraries).unwrap().into_iter().map(|gpu| gpu.uuid).collect();
        let cuda: Vec<_> = list_by_driver().unwrap().into_iter().map(|gpu| gpu.uuid).collect();
        assert!(!listed.is_empty());
        assert_eq!(listed, cuda);
        for library in libraries.found.iter().filter(|library| library.which != Library::Nvml) {
            let version = library.version().unwrap();
            assert!(version.contains('.') && !version.starts_with("0."), "{library:?}: {version}");
        }
        libraries::check_loadable(Library::needed(2)).unwrap();
    }
}
