//! IDX files, the format of MNIST and similar datasets (LeCun, Cortes, Burges), optionally compressed with gzip.
//! Pictures have one channel.

use super::{Catalog, DataError, Samples, Split, names_from, packed};
use flate2::bufread::MultiGzDecoder;
use lockstep_host::files;
use std::{
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read},
    path::{Path, PathBuf},
};

/// Magic numbers: type 8 (unsigned byte) with three dimensions (pictures) or one (labels).
const PICTURES_MAGIC: u32 = 0x0803;
const LABELS_MAGIC: u32 = 0x0801;
/// Limit of a file's size and of its decompressed size, whatever its header says.
const MAX_BYTES: u64 = 8 << 30;
/// Number of bytes read at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Finds the IDX files in `dir`; `None` if there are none.
pub(super) fn find(dir: &Path) -> Option<Result<Catalog, DataError>> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .ok()?
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|n| n.contains("idx"))
        .collect();
    names.sort();
    let file = |split: &[&str], what: &str| -> Option<PathBuf> {
        let fits = |n: &&String| split.iter().any(|s| n.contains(s)) && n.contains(what);
        names.iter().find(fits).map(|n| dir.join(n))
    };
    let mut found = Vec::new();
    for (name, words) in [("train", &["train"][..]), ("test", &["t10k", "test"][..])] {
        if let Some(pictures) = file(words, "images") {
            found.push((name, pictures, file(words, "labels")));
        }
    }
    if found.is_empty() { None } else { Some(read(dir, found)) }
}

fn read(dir: &Path, found: Vec<(&str, PathBuf, Option<PathBuf>)>) -> Result<Catalog, DataError> {
    let mut splits: Vec<Split> = Vec::new();
    for (name, pictures, labels) in found {
        let Some(labels) = labels else {
            return Err(DataError::Invalid(format!("{} has no labels file next to it", pictures.display())));
        };
        // Both headers are compared before the data is decompressed.
        let mut pictures = IdxFile::open(&pictures, PICTURES_MAGIC)?;
        let mut labels = IdxFile::open(&labels, LABELS_MAGIC)?;
        if pictures.shape[0] != labels.shape[0] {
            return Err(DataError::Invalid(format!(
                "{} has {} pictures, but {} has {} labels: they do not belong together",
                pictures.path.display(),
                pictures.shape[0],
                labels.path.display(),
                labels.shape[0]
            )));
        }
        let (height, width) = (pictures.shape[1] as u32, pictures.shape[2] as u32);
        if let Some(Samples::Memory { height: train_height, width: train_width, .. }) =
            splits.first().map(|s| &s.samples)
            && (*train_height, *train_width) != (height, width)
        {
            return Err(DataError::Invalid(format!(
                "{} has pictures of {width} x {height}, but the training split has pictures of {train_width} x {train_height}: \
                 they do not belong together",
                pictures.path.display()
            )));
        }
        // Each label has one byte in the file and four in memory.
        let labels = labels.read_all(5)?;
        let pixels = pictures.read_all(1)?;
        splits.push(Split {
            name: name.into(),
            labels: labels.into_iter().map(u32::from).collect(),
            samples: Samples::Memory { pixels, height, width, channels: 1 },
            broken: Vec::new(),
        });
    }
    let classes = splits.iter().flat_map(|s| &s.labels).max().map_or(0, |m| *m as usize + 1);
    let classes = names_from(&dir.join("classes.txt"), classes)?;
    Ok(Catalog { format: "idx", classes, splits, ..Catalog::default() })
}

/// A file whose header has been read.
struct IdxFile {
    path: PathBuf,
    shape: Vec<usize>,
    /// The data after the header.
    data: Box<dyn Read>,
}

impl IdxFile {
    fn open(path: &Path, magic: u32) -> Result<Self, DataError> {
        let broken = |detail: String| DataError::file(path, detail);
        let (file, size) = files::open(path).map_err(broken)?;
        if size > MAX_BYTES {
            return Err(broken(format!("has {size} bytes; at most {MAX_BYTES} are allowed")));
        }
        let mut file = BufReader::with_capacity(BUFFER_BYTES, file);
        let first_bytes = file.fill_buf().map_err(|e| broken(files::cannot_be_read(e)))?;
        let mut data: Box<dyn Read> = if first_bytes.starts_with(&[0x1f, 0x8b]) {
            Box::new(MultiGzDecoder::new(file).take(MAX_BYTES))
        } else {
            Box::new(file.take(MAX_BYTES))
        };
        let dimensions = (magic & 0xff) as usize;
        let mut header = Vec::new();
        let read = data.by_ref().take(4 * (dimensions as u64 + 1)).read_to_end(&mut header);
        read.map_err(|e| broken(describe_read_error(e)))?;
        let word =
            |i: usize| header.get(4 * i..4 * i + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
        let found = word(0).ok_or_else(|| broken("is too short for an IDX file".into()))?;
        if found != magic {
            return Err(broken(format!(
                "starts with {found:#010x}; an IDX file of {} starts with {magic:#010x}",
                if magic == PICTURES_MAGIC { "pictures" } else { "labels" }
            )));
        }
        let shape: Option<Vec<usize>> = (1..=dimensions).map(|i| word(i).map(|n| n as usize)).collect();
        let shape = shape.ok_or_else(|| broken("is cut off in its header".into()))?;
        Ok(Self { path: path.to_owned(), shape, data })
    }

    fn broken(&self, detail: String) -> DataError {
        DataError::file(&self.path, detail)
    }

    /// All data after the header. Each byte of the file needs `memory_bytes` bytes of memory.
    /// Fails if the memory does not suffice for the data that the header announces, or if the file has other data.
    fn read_all(&mut self, memory_bytes: u64) -> Result<Vec<u8>, DataError> {
        let announced = self.shape.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).unwrap_or(usize::MAX);
        let needed_bytes = (announced as u64).saturating_mul(memory_bytes);
        packed::check_fits(needed_bytes).map_err(|detail| self.broken(detail))?;
        let mut bytes = Vec::new();
        // One byte more than announced shows that the file has other data.
        let read = self.data.by_ref().take((announced as u64).saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| self.broken(describe_read_error(error)))?;
        if bytes.len() == announced && !self.shape.contains(&0) {
            return Ok(bytes);
        }
        let follow = if bytes.len() > announced { "more".to_owned() } else { bytes.len().to_string() };
        Err(self.broken(format!(
            "has a header for {:?} bytes, but {follow} follow it: it is cut off or damaged; download it again",
            self.shape
        )))
    }
}

/// The reason why reading or decompressing failed, as a phrase to follow the file's name.
fn describe_read_error(error: io::Error) -> String {
    match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
            format!("cannot be decompressed: {error}; download it again")
        }
        _ => files::cannot_be_read(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_catalog::assert_contains;
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write;

    const SIDE: usize = 64;

    fn write_file(dir: &Path, name: &str, magic: u32, shape: &[usize], data: &[u8]) {
        let header: Vec<u8> = std::iter::once(magic)
            .chain(shape.iter().map(|n| *n as u32))
            .flat_map(u32::to_be_bytes)
            .collect();
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(&header).and_then(|()| packed.write_all(data)).unwrap();
        fs::write(dir.join(format!("{name}.gz")), packed.finish().unwrap()).unwrap();
    }

    fn write_split(dir: &Path, shape: [usize; 3], pixels: &[u8], labels: usize) {
        write_file(dir, "train-images-idx3-ubyte", PICTURES_MAGIC, &shape, pixels);
        let classes: Vec<u8> = (0..labels).map(|i| (i % 3) as u8).collect();
        write_file(dir, "train-labels-idx1-ubyte", LABELS_MAGIC, &[labels], &classes);
    }

    fn open_error(dir: &Path) -> String {
        find(dir).unwrap().unwrap_err().to_string()
    }

    #[test]
    fn files_that_exceed_memory_are_refused_before_decompression() {
        let dir = tempfile::tempdir().unwrap();
        let pixels = vec![0; SIDE * SIDE];
        // The file is also truncated, which would be an error only after decompression.
        write_split(dir.path(), [1500, SIDE, SIDE], &pixels, 7);
        assert_contains(open_error(dir.path()), &["has 1500 pictures", "has 7 labels"]);
        write_split(dir.path(), [7, SIDE, SIDE], &pixels, 7);
        assert_contains(open_error(dir.path()), &["[7, 64, 64] bytes, but 4096 follow"]);
        // More than the memory of any machine.
        let max = u32::MAX as usize;
        write_split(dir.path(), [7, max, 1 << 31], &pixels, 7);
        assert!(open_error(dir.path()).contains("are free on this machine"));
        write_file(dir.path(), "train-images-idx3-ubyte", PICTURES_MAGIC, &[max, 1, 1], &pixels);
        write_file(dir.path(), "train-labels-idx1-ubyte", LABELS_MAGIC, &[max], &pixels);
        let why = open_error(dir.path());
        assert!(why.contains("4096 follow") || why.contains("are free on this machine"), "{why}");
    }
}
