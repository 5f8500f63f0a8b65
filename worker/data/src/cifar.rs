//! CIFAR-10 and CIFAR-100 in the binary version (Krizhevsky 2009): records of one or two label bytes, then 3,072
//! bytes in red, green and blue planes.

use super::{Catalog, DataError, Samples, Split, broken_file, names_from, packed};
use lockstep_host::files::{self, FileKind};
use std::{
    fs,
    path::{Path, PathBuf},
};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
/// Size limit of a file. CIFAR's largest file has 154 MB.
const MAX_BYTES: u64 = 8 << 30;

/// One of the two datasets, and its files in a folder.
struct Layout {
    format: &'static str,
    /// Number of label bytes before the pixels. The last label byte is used.
    label_bytes: usize,
    classes: usize,
    names_file: &'static str,
    train: Vec<PathBuf>,
    test: Vec<PathBuf>,
}

/// Finds the CIFAR files in `dir`; `None` if there are none.
pub(super) fn find(dir: &Path) -> Option<Result<Catalog, DataError>> {
    let existing = |names: &[String]| -> Vec<PathBuf> {
        // Unreadable files are included, so that an error names them.
        names.iter().map(|n| dir.join(n)).filter(|p| fs::symlink_metadata(p).is_ok()).collect()
    };
    let batches: Vec<String> = (1..=99).map(|i| format!("data_batch_{i}.bin")).collect();
    let ten = Layout {
        format: "cifar10",
        label_bytes: 1,
        classes: 10,
        names_file: "batches.meta.txt",
        train: existing(&batches),
        test: existing(&["test_batch.bin".into()]),
    };
    let hundred = Layout {
        format: "cifar100",
        label_bytes: 2,
        classes: 100,
        names_file: "fine_label_names.txt",
        train: existing(&["train.bin".into()]),
        test: existing(&["test.bin".into()]),
    };
    let layout = [ten, hundred].into_iter().find(|l| !l.train.is_empty())?;
    Some(read(dir, &layout))
}

fn read(dir: &Path, layout: &Layout) -> Result<Catalog, DataError> {
    let classes = names_from(&dir.join(layout.names_file), layout.classes)?;
    let mut splits = Vec::new();
    for (name, paths) in [("train", &layout.train), ("test", &layout.test)] {
        if paths.is_empty() {
            continue;
        }
        // Memory for all pixels, plus the largest file while it is read. Unreadable files are reported below.
        let size = |path: &PathBuf| match files::stat(path) {
            Ok(FileKind::File { size_bytes, .. }) => size_bytes,
            _ => 0,
        };
        let (sum, largest) =
            paths.iter().map(size).fold((0, 0), |(sum, largest), n| (sum + n, n.max(largest)));
        packed::check_fits(sum + largest)
            .map_err(|detail| DataError::Invalid(format!("{}: its split {name} {detail}", dir.display())))?;
        let (mut pixels, mut labels, mut broken) = (Vec::new(), Vec::new(), Vec::new());
        for file in paths {
            let read = files::read(file, MAX_BYTES)
                .and_then(|bytes| append(&bytes, layout, &mut pixels, &mut labels));
            broken.extend(read.err().map(|detail| broken_file(file, detail)));
        }
        splits.push(Split {
            name: name.into(),
            labels,
            samples: Samples::Memory { pixels, height: SIDE as u32, width: SIDE as u32, channels: 3 },
            broken,
        });
    }
    Ok(Catalog { format: layout.format, classes, splits, ..Catalog::default() })
}

/// Checks the whole file before appending any record.
fn append(bytes: &[u8], layout: &Layout, pixels: &mut Vec<u8>, labels: &mut Vec<u32>) -> Result<(), String> {
    let record_bytes = layout.label_bytes + 3 * PLANE;
    if bytes.is_empty() || !bytes.len().is_multiple_of(record_bytes) {
        return Err(format!(
            "has {} bytes, which is not a multiple of the {record_bytes} bytes of a record: it is cut off or not a CIFAR binary file; \
             download it again",
            bytes.len()
        ));
    }
    for (i, record) in bytes.chunks_exact(record_bytes).enumerate() {
        let label = usize::from(record[layout.label_bytes - 1]);
        if label >= layout.classes {
            return Err(format!("record {i} has label {label}; labels go from 0 to {}", layout.classes - 1));
        }
    }
    for record in bytes.chunks_exact(record_bytes) {
        labels.push(u32::from(record[layout.label_bytes - 1]));
        let planes = &record[layout.label_bytes..];
        let (red, rest) = planes.split_at(PLANE);
        let (green, blue) = rest.split_at(PLANE);
        pixels.extend(red.iter().zip(green).zip(blue).flat_map(|((r, g), b)| [*r, *g, *b]));
    }
    Ok(())
}
