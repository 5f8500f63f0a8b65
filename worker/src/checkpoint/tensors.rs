//! Tensors in safetensors files (<https://github.com/huggingface/safetensors#format>). Writing is implemented here,
//! because the order of the `safetensors` crate's header varies from run to run, and equal jobs must write identical
//! bytes.

use super::{
    ManifestFile,
    header::{self, Header, NoHeader},
};
use lockstep_host::{
    files,
    tensors::{HostTensor, NamedTensors},
};
use lockstep_protocol::pickle;
use safetensors::{Dtype, tensor::TensorInfo};
use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, BufWriter, Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The counter of batches in PyTorch's batch norm, which `load_state_dict(strict=True)` requires.
const BATCHES_TRACKED: &str = "num_batches_tracked";

/// Maximum size of all tensors to read from a file.
const MAX_TENSOR_BYTES: u64 = 256 << 30;

const SUPPORTED_TYPES: &str = "supported are float32, float64, bfloat16 and float16";

struct TensorData<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

/// Writes `tensors` in the order of their names. If `batches` is given, each batch norm gets it as its `num_batches_tracked`. Equal
/// arguments give identical bytes.
pub(crate) fn write(
    path: &Path,
    tensors: &NamedTensors,
    batches: Option<u64>,
    metadata: &BTreeMap<String, String>,
) -> io::Result<ManifestFile> {
    let float32 = tensors.iter().map(|(name, HostTensor { shape, values })| {
        let bytes = Cow::Borrowed(bytemuck::cast_slice(values));
        (name.clone(), TensorData { dtype: Dtype::F32, shape: shape.clone(), bytes })
    });
    let mut all: BTreeMap<String, TensorData<'_>> = float32.collect();
    if let Some(batches) = batches {
        for norm in tensors.keys().filter_map(|name| name.strip_suffix("running_mean")) {
            let bytes = Cow::Owned((batches as i64).to_le_bytes().to_vec());
            all.insert(
                format!("{norm}{BATCHES_TRACKED}"),
                TensorData { dtype: Dtype::I64, shape: Vec::new(), bytes },
            );
        }
    }
    write_all(path, &all, metadata)
}

fn write_all(
    path: &Path,
    all: &BTreeMap<String, TensorData<'_>>,
    metadata: &BTreeMap<String, String>,
) -> io::Result<ManifestFile> {
    // Writing wider types first keeps every tensor aligned, as the format requires.
    let mut ordered: Vec<_> = all.iter().collect();
    ordered.sort_by_key(|(_, data)| Reverse(data.dtype.bitsize()));
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!(metadata));
    let mut offset = 0;
    for (name, TensorData { dtype, shape, bytes }) in &ordered {
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes.len()]});
        header.insert((*name).clone(), entry);
        offset += bytes.len();
    }
    let mut json = serde_json::to_vec(&Value::Object(header))?;
    json.resize(json.len().next_multiple_of(8), b' ');

    let mut out = HashingWriter::create(path)?;
    out.write_all(&(json.len() as u64).to_le_bytes())?;
    out.write_all(&json)?;
    for (_, data) in ordered {
        out.write_all(&data.bytes)?;
    }
    out.finish()
}

/// Joins the tensors of `files`, the parts of a checkpoint, in a new file with the same bytes as [`write`] produces
/// from all tensors. All tensors are in memory meanwhile.
///
/// # Errors
/// As [`read`], or the new file cannot be written.
pub fn join(files: &[PathBuf], path: &Path) -> Result<ManifestFile, String> {
    let (mut all, mut metadata) = (BTreeMap::new(), BTreeMap::new());
    for file in files {
        let (opened, file_bytes) = open(file)?;
        let header = read_checked_header(file, &opened, file_bytes)?;
        metadata.extend(header.metadata);
        for (name, entry) in header.tensors {
            let (begin, end) = entry.data_offsets;
            let mut bytes = vec![0; end - begin];
            let read = opened.read_exact_at(&mut bytes, header.data_begin + begin as u64);
            read.map_err(|e| format!("{}: {name}: {e}", file.display()))?;
            all.insert(name, TensorData { dtype: entry.dtype, shape: entry.shape, bytes: bytes.into() });
        }
    }
    write_all(path, &all, &metadata).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes a file of JSON, and returns its manifest entry.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<ManifestFile> {
    let mut out = HashingWriter::create(path)?;
    out.write_all(&serde_json::to_vec_pretty(value)?)?;
    out.write_all(b"\n")?;
    out.finish()
}

/// A new file whose size and checksum are computed while it is written.
struct HashingWriter {
    file: BufWriter<File>,
    hash: Sha256,
    size: u64,
}

impl HashingWriter {
    fn create(path: &Path) -> io::Result<Self> {
        let file = BufWriter::with_capacity(1 << 20, File::create_new(path)?);
        Ok(Self { file, hash: Sha256::new(), size: 0 })
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn finish(self) -> io::Result<ManifestFile> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(ManifestFile { size_bytes: self.size, sha256: hex::encode(self.hash.finalize()) })
    }
}

/// Reads a file of tensors in float32. Tensors in float64, bfloat16 and float16 are converted. `num_batches_tracked`
/// is left out.
///
/// # Errors
/// The file cannot be read, is not a safetensors file, or has unsupported types. For a PyTorch pickle, the error tells
/// how to convert the file.
pub fn read(path: &Path) -> Result<NamedTensors, String> {
    let every_tensor = |_: &str| true;
    read_opened(path, open(path)?, &every_tensor)
}

/// As [`read`], for an opened file with its size, and only the tensors whose names `select` accepts. Other tensors are not
/// read, so they may be larger than the memory.
pub(crate) fn read_opened(
    path: &Path,
    (file, file_bytes): (File, u64),
    select: &dyn Fn(&str) -> bool,
) -> Result<NamedTensors, String> {
    let with_path = |e: String| format!("{}: {e}", path.display());
    let mut header = read_checked_header(path, &file, file_bytes)?;
    header.tensors.retain(|name, _| !name.ends_with(BATCHES_TRACKED) && select(name));
    let bytes: u64 = header.tensors.values().map(size_bytes).sum();
    if bytes > MAX_TENSOR_BYTES {
        return Err(with_path(format!(
            "has {bytes} bytes of tensors; at most {MAX_TENSOR_BYTES} are allowed"
        )));
    }
    let mut tensors = NamedTensors::new();
    for (name, TensorInfo { dtype, shape, data_offsets: (begin, end) }) in header.tensors {
        let read = |data: &mut [u8]| {
            let read = file.read_exact_at(data, header.data_begin + begin as u64);
            read.map_err(|e| with_path(format!("{name}: {e}")))
        };
        if dtype == Dtype::F32 {
            // Read without a second copy, because tensors may be large.
            let mut values = vec![0f32; (end - begin) / 4];
            read(bytemuck::cast_slice_mut(&mut values[..]))?;
            tensors.insert(name, HostTensor { shape, values });
            continue;
        }
        let mut data = vec![0; end - begin];
        read(&mut data)?;
        let values: Vec<f32> = match dtype {
            Dtype::F64 => {
                bytemuck::pod_collect_to_vec::<u8, f64>(&data).into_iter().map(|v| v as f32).collect()
            }
            Dtype::BF16 => halves(&data).map(|bits| half::bf16::from_bits(bits).to_f32()).collect(),
            Dtype::F16 => halves(&data).map(|bits| half::f16::from_bits(bits).to_f32()).collect(),
            other => return Err(with_path(format!("{name} is of type {other}; {SUPPORTED_TYPES}"))),
        };
        tensors.insert(name, HostTensor { shape, values });
    }
    Ok(tensors)
}

/// The 16-bit values in `data`.
fn halves(data: &[u8]) -> impl Iterator<Item = u16> {
    bytemuck::pod_collect_to_vec::<u8, u16>(data).into_iter()
}

fn read_header(path: &Path, file: impl Read, file_bytes: u64) -> Result<Header, String> {
    header::read(file, file_bytes).map_err(|why| match why {
        NoHeader::Pickled => {
            format!("{}: {}", path.display(), pickle::conversion_advice(&path.to_string_lossy()))
        }
        NoHeader::Other(detail) => format!("{}: not a whole safetensors file: {detail}", path.display()),
    })
}

/// Reads the header of a file, and checks that [`read`] supports its types.
fn read_checked_header(path: &Path, file: impl Read, file_bytes: u64) -> Result<Header, String> {
    let header = read_header(path, file, file_bytes)?;
    let is_readable = |(name, entry): &(&String, &TensorInfo)| {
        name.ends_with(BATCHES_TRACKED)
            || matches!(entry.dtype, Dtype::F32 | Dtype::F64 | Dtype::BF16 | Dtype::F16)
    };
    if let Some((name, entry)) = header.tensors.iter().find(|tensor| !is_readable(tensor)) {
        return Err(format!("{}: {name} is of type {}; {SUPPORTED_TYPES}", path.display(), entry.dtype));
    }
    Ok(header)
}

fn size_bytes(info: &TensorInfo) -> u64 {
    (info.data_offsets.1 - info.data_offsets.0) as u64
}

/// Names and shapes of the tensors that [`read`] would read, from the file's header only.
///
/// # Errors
/// As [`read`], except for errors in the values.
pub fn shapes(path: &Path) -> Result<BTreeMap<String, Vec<usize>>, String> {
    shapes_opened(path, open(path)?)
}

/// As [`shapes`], for an opened file with its size.
pub(crate) fn shapes_opened(
    path: &Path,
    (file, file_bytes): (File, u64),
) -> Result<BTreeMap<String, Vec<usize>>, String> {
    let tensors = read_checked_header(path, file, file_bytes)?.tensors;
    let mut shapes: BTreeMap<_, _> = tensors.into_iter().map(|(name, entry)| (name, entry.shape)).collect();
    shapes.retain(|name, _| !name.ends_with(BATCHES_TRACKED));
    Ok(shapes)
}

/// The size of each tensor of a file in bytes, from its header only.
pub(super) fn sizes(path: &Path) -> Result<BTreeMap<String, u64>, String> {
    let (file, file_bytes) = open(path)?;
    let tensors = read_header(path, file, file_bytes)?.tensors;
    Ok(tensors.into_iter().map(|(name, info)| (name, size_bytes(&info))).collect())
}

/// The metadata of a file, from its header only.
///
/// # Errors
/// The file cannot be read, or is not a safetensors file.
pub fn metadata(path: &Path) -> Result<HashMap<String, String>, String> {
    let (file, file_bytes) = open(path)?;
    Ok(read_header(path, file, file_bytes)?.metadata)
}

/// Opens a file, and also returns its size in bytes.
pub(super) fn open(path: &Path) -> Result<(File, u64), String> {
    files::open(path).map_err(|detail| format!("{} {detail}", path.display()))
}
