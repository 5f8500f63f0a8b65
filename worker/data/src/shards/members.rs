//! The samples in a tar shard, with the offset of each picture.

use crate::{
    index::{Entry, Members, UnusableFile, describe},
    label::{MAX_LABEL_BYTES, class_name},
    picture,
};
use lockstep_host::files;
use lockstep_protocol::limits::{CLASS_NAME_BYTES, MEMBER_NAME_BYTES};
use rayon::prelude::*;
use std::{
    collections::HashSet,
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
};

/// The block size of tar.
const BLOCK_BYTES: u64 = 512;
/// Maximum size of a sample's description (`.json`).
const MAX_JSON_BYTES: u64 = 1 << 20;
/// Maximum number of bytes read after a tar's end, to find a second tar after a few blocks of zeros.
const MAX_TRAILING_BYTES: u64 = 1 << 20;

/// Appended to errors about members whose names have more than one dot.
const FIRST_DOT: &str = "; names that are the same up to their first dot are one sample, as in WebDataset: if these are several \
                         samples, rename them";
/// The first bytes of compressed files.
const COMPRESSED: [(&[u8], &str); 4] =
    [(b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2")];

pub(super) const NO_LABEL: &str = "has no class: put a member of the same name with .cls (a number or a name) or .json (with \
                                   \"label\") beside it";

/// Reads all members of the shard at `path`.
pub(super) fn read_members(path: &Path) -> Members {
    let (file, size) = match files::open(path) {
        Ok(found) => found,
        Err(detail) => return UnusableFile::transient(detail).into(),
    };
    let mut samples = Vec::new();
    let read = read_samples(&file, size, &mut samples);
    report_scattered(&mut samples);
    let entries = samples.into_par_iter().filter_map(|sample| sample.entry(&file)).collect();
    Members { entries, error: read.err() }
}

/// Consecutive members with the same basename.
#[derive(Default)]
struct Sample {
    key: Vec<u8>,
    /// Name, offset and size of the picture.
    picture: Option<(Vec<u8>, u64, u64)>,
    /// Whether the picture's name is the key and an extension (`000.jpg`). Such a picture takes precedence over others,
    /// such as `000.seg.png`.
    is_plain: bool,
    /// The error if there are several pictures and none takes precedence.
    second_picture_error: Option<String>,
    class: Option<String>,
    /// The class in the `.json` member, used if there is no `.cls`.
    json_class: Option<String>,
    /// The reason why the `.json` cannot be used.
    json_error: Option<String>,
    broken: Option<String>,
}

/// Adds the samples of a shard to `samples` until an error occurs.
fn read_samples(file: &File, size: u64, samples: &mut Vec<Sample>) -> Result<(), UnusableFile> {
    let damaged = |detail: String| Err(UnusableFile::permanent(detail));
    let mut archive = tar::Archive::new(file);
    let (mut end, mut count) = (0, 0u64);
    for member in archive.entries_with_seek()? {
        let mut member = match member {
            Ok(member) => member,
            Err(error) if error.raw_os_error().is_some() => return Err(error.into()),
            // The crate's message would quote bytes that are not text.
            Err(_) if count == 0 => return damaged(not_a_tar_detail(file)),
            Err(_) => return damaged(format!("is damaged after {count} members; get it again")),
        };
        let kind = member.header().entry_type();
        // For a sparse file, only the stored bytes count.
        let length =
            if kind.is_gnu_sparse() { member.header().entry_size().unwrap_or(0) } else { member.size() };
        let offset = member.raw_file_position();
        let name = member.path_bytes().into_owned();
        if name.len() > MEMBER_NAME_BYTES {
            return damaged(format!(
                "has a member whose name takes {} bytes, after {count} others; at most {MEMBER_NAME_BYTES} are allowed",
                name.len()
            ));
        }
        if offset.saturating_add(length) > size {
            // The sample of a truncated member is incomplete.
            let key = split_name(&name).map(|(key, ..)| key);
            samples.pop_if(|sample| Some(&sample.key) == key.as_ref());
            let name = String::from_utf8_lossy(&name);
            return damaged(format!("is cut off in the middle of {name}; get it again"));
        }
        end = (offset + length).next_multiple_of(BLOCK_BYTES);
        count += 1;
        let Some((key, extension, is_plain)) = split_name(&name) else { continue };
        if kind.is_dir() {
            continue;
        }
        let unusable = match kind {
            tar::EntryType::Regular | tar::EntryType::Continuous => None,
            tar::EntryType::Symlink => {
                Some("is a symbolic link inside its shard: pack with tar's --dereference")
            }
            tar::EntryType::Link => {
                Some("is a hard link inside its shard: pack with tar's --hard-dereference")
            }
            tar::EntryType::GNUSparse => Some("is stored as a sparse file: pack without tar's -S"),
            _ => Some("is not a regular file"),
        };
        if samples.last().is_none_or(|sample| sample.key != key) {
            samples.push(Sample { key, ..Sample::default() });
        }
        if let Some(sample) = samples.last_mut() {
            let read = |limit: u64| read_text(&mut member, length, limit);
            sample.add((&name, &extension, is_plain), (offset, length), unusable, read)?;
        }
    }
    if has_data(file, end, size)? {
        damaged("has data after its end, which would be ignored: were several tars concatenated with cat? Pack them as one".into())
    } else if size == 0 {
        damaged("is empty".into())
    } else if end + BLOCK_BYTES > size {
        damaged("ends without a tar's closing blocks: it is cut off; get it again".into())
    } else {
        Ok(())
    }
}

/// Why a file without a tar header cannot be used.
fn not_a_tar_detail(file: &File) -> String {
    let mut head = [0; 8];
    let read = file.read_at(&mut head, 0).unwrap_or(0);
    match COMPRESSED.iter().find(|(magic, _)| head[..read].starts_with(magic)) {
        Some((_, how)) => format!(
            "is compressed with {how}, whatever its name says, but pictures are read at arbitrary offsets: decompress it"
        ),
        None => "is not a tar file".into(),
    }
}

/// Reports samples whose picture and class are not consecutive members.
fn report_scattered(samples: &mut [Sample]) {
    let mut seen = HashSet::new();
    let repeated = samples.iter().filter(|sample| !seen.insert(&sample.key));
    let repeated_keys: HashSet<Vec<u8>> = repeated.map(|sample| sample.key.clone()).collect();
    for sample in samples.iter_mut().filter(|sample| repeated_keys.contains(&sample.key)) {
        let has_class = sample.class.is_some() || sample.json_class.is_some();
        match (&sample.picture, has_class) {
            (Some(_), false) => {
                sample.broken.get_or_insert(
                    "has its class elsewhere in the shard, but members of a sample must be consecutive: pack them with \
                     tar --sort=name"
                        .into(),
                );
            }
            // The sample with the picture reports this.
            (None, true) => (sample.class, sample.json_class) = (None, None),
            _ => {}
        }
    }
}

/// Whether data other than zeros follows a tar's last member.
fn has_data(file: &File, end: u64, size: u64) -> io::Result<bool> {
    let mut bytes = vec![0; size.saturating_sub(end).min(MAX_TRAILING_BYTES) as usize];
    file.read_exact_at(&mut bytes, end)?;
    Ok(bytes.iter().any(|byte| *byte != 0))
}

/// The key and the last extension of a member's name, and whether nothing is between them. As in WebDataset, the
/// key ends at the first dot of the file name. `None` for hidden files, files without extension, and webdataset's own
/// metadata (`__name__`, and files in such a folder).
fn split_name(name: &[u8]) -> Option<(Vec<u8>, String, bool)> {
    let file = name.iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1);
    let dot = file + name[file..].iter().position(|b| *b == b'.')?;
    let last = name.iter().rposition(|b| *b == b'.')?;
    let first_part = name.split(|b| *b == b'/').next().unwrap_or_default();
    let is_metadata = first_part.len() >= 4 && first_part.starts_with(b"__") && first_part.ends_with(b"__");
    if dot == file || is_metadata {
        return None;
    }
    let extension = String::from_utf8_lossy(&name[last + 1..]).to_lowercase();
    Some((name[..dot].to_vec(), extension, dot == last))
}

/// The text of a short member. `None` if it is longer than `limit` or not UTF-8.
fn read_text(member: &mut impl Read, length: u64, limit: u64) -> io::Result<Option<String>> {
    if length > limit {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    member.read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).ok())
}

impl Sample {
    fn add(
        &mut self,
        (name, extension, is_plain): (&[u8], &str, bool),
        (offset, length): (u64, u64),
        unusable: Option<&str>,
        read: impl FnOnce(u64) -> io::Result<Option<String>>,
    ) -> io::Result<()> {
        let file_name = String::from_utf8_lossy(name).into_owned();
        // Only the first fault is kept.
        let mut broken = |detail: String| {
            self.broken.get_or_insert(detail);
        };
        let rule = if is_plain { "" } else { FIRST_DOT };
        let second = || format!("has a second class, in {file_name}, in its sample; keep one of them{rule}");
        match (extension, unusable) {
            ("cls", Some(unusable)) => broken(format!("has a class in {file_name}, which {unusable}")),
            ("cls", None) => match read(MAX_LABEL_BYTES)?
                .filter(|text| text.trim().len() <= CLASS_NAME_BYTES)
                .map(|text| class_name(text.trim()))
            {
                Some(class) if !class.is_empty() => match &self.class {
                    Some(first) if *first != class => broken(second()),
                    _ => self.class = Some(class),
                },
                _ => broken(format!("has a class in {file_name} that is empty, not text, or too long")),
            },
            ("json", Some(unusable)) => {
                self.json_error.get_or_insert(format!("has a description {file_name}, which {unusable}"));
            }
            ("json", None) => {
                let parsed = read(MAX_JSON_BYTES)?.and_then(|text| serde_json::from_str(&text).ok());
                match (parsed, &self.json_class) {
                    (Some(serde_json::Value::Object(description)), first) => {
                        match (label(&description), first) {
                            (Some(class), Some(first)) if class != *first => {
                                self.json_error.get_or_insert_with(second);
                            }
                            (Some(class), _) => self.json_class = Some(class),
                            (None, _) => {}
                        }
                    }
                    _ => {
                        self.json_error.get_or_insert_with(|| {
                            format!("has a description {file_name} that is not a JSON object, or too long")
                        });
                    }
                }
            }
            _ if !picture::has_picture_extension(Path::new(&file_name)) => {}
            (_, Some(unusable)) => broken(format!("has a picture {file_name}, which {unusable}")),
            _ => match &self.picture {
                Some(_) if self.is_plain && !is_plain => {}
                Some((first, ..)) if self.is_plain == is_plain => {
                    self.second_picture_error.get_or_insert_with(|| {
                        format!(
                            "has a second picture, {file_name}, in its sample; keep one of them (the first is {}){rule}",
                            String::from_utf8_lossy(first)
                        )
                    });
                }
                _ => {
                    self.picture = Some((name.to_vec(), offset, length));
                    (self.is_plain, self.second_picture_error) = (is_plain, None);
                }
            },
        }
        Ok(())
    }

    /// The index entry. `None` if the members have neither a picture nor a class.
    fn entry(mut self, shard: &File) -> Option<Entry> {
        // An error in the `.json` is irrelevant if there is a `.cls`.
        if self.class.is_none() {
            self.broken = self.broken.or(self.json_error);
        }
        self.broken = self.broken.or(self.second_picture_error);
        let label = self.class.or(self.json_class);
        let Some((name, offset, size)) = self.picture else {
            let broken = self.broken.or(label.map(|_| "has no picture in its sample".into()));
            return broken.map(|detail| Entry { name: self.key, broken: Some(detail), ..Entry::default() });
        };
        // The name is shown after the name of its shard.
        let shown = name.iter().position(|b| *b != b'/').unwrap_or(0);
        let entry = Entry { name: name[shown..].to_vec(), offset, size, label, ..Entry::default() };
        let broken = self.broken.or_else(|| entry.label.is_none().then(|| NO_LABEL.into()));
        if broken.is_some() {
            return Some(Entry { broken, ..entry });
        }
        if size > picture::MAX_BYTES {
            let detail = format!("has {size} bytes; at most {} are allowed", picture::MAX_BYTES);
            return Some(Entry { broken: Some(detail), ..entry });
        }
        let mut bytes = vec![0; size as usize];
        if let Err(error) = shard.read_exact_at(&mut bytes, offset) {
            return Some(Entry { broken: Some(files::cannot_be_read(error)), is_transient: true, ..entry });
        }
        let name = String::from_utf8_lossy(&entry.name).into_owned();
        Some(describe(Path::new(&name), &bytes, entry))
    }
}

/// The class in a description.
fn label(description: &serde_json::Map<String, serde_json::Value>) -> Option<String> {
    match description.get("label")? {
        serde_json::Value::Number(number) => Some(match number.as_f64() {
            // Some writers store whole numbers as floating point. Adding 0 turns -0 into 0.
            Some(value) if number.is_f64() && value.fract() == 0.0 && value.abs() < 1e9 => {
                format!("{:.0}", value + 0.0)
            }
            _ => number.to_string(),
        }),
        serde_json::Value::String(name) => Some(class_name(name.trim())).filter(|name| !name.is_empty()),
        _ => None,
    }
}
