//! Uploaded zip files of pictures. The pieces of a zip file are collected in a folder of the data directory, and its pictures are
//! unpacked next to it. The unpacked pictures become a dataset, and the zip file is removed. A zip file of a few bytes may claim any
//! number and size of files, so an archive is read with little memory, whatever it claims.

use crate::util::{
    disk_space::{SPARE_BYTES, check_space},
    if_exists,
};
use sha2::{Digest, Sha256};
use std::{
    cell::Cell,
    collections::HashSet,
    fs::{self, File},
    io::{self, BufReader, Read, Seek, SeekFrom, Write as _},
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};
use zip::{
    ZipReadOptions,
    read::{ArchiveOffset, Config},
    result::ZipError,
    unstable::read::ZipIterable,
};

/// Maximum size of a piece in one request, in bytes.
pub(crate) const PIECE_BYTES: usize = 8 << 20;
/// Maximum size of a zip file, and of its unpacked files.
const MAX_ARCHIVE_BYTES: u64 = 8 << 30;
const MAX_UNPACKED_BYTES: u64 = 16 << 30;
const MAX_FILES: usize = 200_000;
/// Maximum total length of the names in a zip file. All names are in memory at the same time.
const MAX_NAMES_BYTES: usize = 64 << 20;
/// Maximum number of names in one path, and maximum length of a name in bytes.
const MAX_DEPTH: usize = 8;
const MAX_NAME_BYTES: usize = 255;
const ARCHIVE_ADVICE: &str =
    "upload a zip file with a folder of pictures for each class, such as cat/1.jpg and dog/1.jpg";
/// Extensions of picture files.
const PICTURE_EXTENSIONS: [&str; 8] = ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"];
/// Maximum number of bytes that are read at the end of an archive to find its directory.
const MAX_END_BYTES: u64 = 1 << 20;
/// Time after which an unfinished upload is removed.
const UNFINISHED_LIFE: Duration = Duration::from_secs(24 * 3600);

const ARCHIVE: &str = "archive.zip";

/// Why a piece or an archive is refused.
#[derive(Debug)]
pub(crate) enum UploadError {
    /// The archive or the request is invalid. The text says what to do.
    Wrong(String),
    /// The piece does not continue the file, which has this many bytes.
    Offset(u64),
    Io(io::Error),
}

impl From<io::Error> for UploadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

type Result<T> = std::result::Result<T, UploadError>;

fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(UploadError::Wrong(why.into()))
}

#[derive(Debug)]
pub(crate) struct UnpackProgress {
    /// The folder of the unpacked files.
    pub(crate) pictures: PathBuf,
    /// Number of files that are unpacked.
    pub(crate) files: u64,
    /// Number of files to unpack.
    pub(crate) total: u64,
}

/// The folder of one upload.
#[derive(Debug, Clone)]
pub(crate) struct Upload(PathBuf);

impl Upload {
    /// The upload `name` of an owner. Each owner has separate uploads.
    pub(crate) fn of(uploads: &Path, owner: &str, name: &str) -> Self {
        // Names do not contain the separator.
        let hash = Sha256::new().chain_update(owner).chain_update("\u{1f}").chain_update(name).finalize();
        Self(uploads.join(hex::encode(&hash[..16])))
    }

    /// Whether a dataset's path is in the folder.
    pub(crate) fn contains(&self, path: &str) -> bool {
        Path::new(path).starts_with(&self.0)
    }

    /// The folder of classes. Its name is new for each upload, so that an inspection of earlier pictures is not used for new pictures.
    fn pictures_folder(&self) -> io::Result<PathBuf> {
        let mut entries = fs::read_dir(&self.0)?.flatten().map(|entry| entry.path());
        entries.find(|path| path.is_dir()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Writes a piece. `offset`: number of bytes that were sent before. The first piece replaces an earlier upload.
    ///
    /// # Errors
    /// The piece does not continue the file, the file is too large, or a disk error.
    pub(crate) fn write(&self, offset: u64, piece: &[u8]) -> Result<()> {
        if offset.saturating_add(piece.len() as u64) > MAX_ARCHIVE_BYTES {
            return refuse(format!(
                "a zip file may have at most {} GiB; register a larger dataset by the path of its folder",
                MAX_ARCHIVE_BYTES >> 30
            ));
        }
        if offset == 0 {
            remove_folder(&self.0)?;
            fs::create_dir_all(self.0.join(uuid::Uuid::new_v4().simple().to_string()))?;
        }
        let path = self.0.join(ARCHIVE);
        let opened = File::options().write(true).create(offset == 0).truncate(false).open(path);
        let mut file = if_exists(opened)?.ok_or(UploadError::Offset(0))?;
        check_space(&self.0, piece.len() as u64, SPARE_BYTES)?;
        let size = file.metadata()?.len();
        if size < offset {
            return Err(UploadError::Offset(size));
        }
        // The client resends a piece if the response was lost.
        file.set_len(offset)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(file.write_all(piece)?)
    }

    /// Unpacks the archive, or a part of it: at least one file, and no further files after `deadline`. Existing files are not written
    /// again.
    ///
    /// # Errors
    /// The archive is not a zip file or has entries that are not allowed, or a disk error.
    pub(crate) fn unpack(&self, deadline: Instant) -> Result<UnpackProgress> {
        let path = self.0.join(ARCHIVE);
        let Ok(mut archive) = File::open(&path) else {
            return refuse("no zip file was uploaded under this name; send it first");
        };
        let mut signature = [0; 2];
        if archive.read_exact(&mut signature).is_err() || signature != *b"PK" {
            return refuse(format!("the uploaded file is not a zip file; {ARCHIVE_ADVICE}"));
        }
        archive.rewind()?;
        let reader =
            BoundedReader { file: BufReader::new(archive), budget: Rc::new(Cell::new(MAX_END_BYTES)) };
        let budget = reader.budget.clone();
        let config = Config { archive_offset: ArchiveOffset::Known(0) };
        let mut zip = ZipIterable::try_new(reader, config).map_err(zip_error)?;
        // The limit is only for the search of the archive's directory.
        budget.set(u64::MAX);
        if zip.len() > MAX_FILES {
            return refuse(format!(
                "the zip file has {} entries; at most {MAX_FILES} are allowed",
                zip.len()
            ));
        }
        let files = list_files(&mut zip)?;
        let total = files.iter().flatten().count() as u64;
        let bytes = files.iter().flatten().fold(0_u64, |sum, file| sum.saturating_add(file.bytes));
        if bytes > MAX_UNPACKED_BYTES {
            return refuse(format!(
                "the zip file unpacks to {} GiB; at most {} GiB are allowed",
                bytes >> 30,
                MAX_UNPACKED_BYTES >> 30
            ));
        }
        let root = self.pictures_folder()?;
        let progress = |files| UnpackProgress { pictures: root.clone(), files, total };
        let is_unpacked = |file: &ArchiveFile| {
            root.join(&file.path).metadata().is_ok_and(|found| found.is_file() && found.len() == file.bytes)
        };
        let missing = files.iter().flatten().filter(|file| !is_unpacked(file));
        let needed = missing.fold(0, |sum: u64, file| sum.saturating_add(file.bytes));
        check_space(&root, needed, SPARE_BYTES)?;

        let body =
            BoundedReader { file: BufReader::new(File::open(&path)?), budget: Rc::new(Cell::new(u64::MAX)) };
        let mut entries = zip.files_with_reader(body, ZipReadOptions::new()).map_err(zip_error)?;
        let (mut unpacked_count, mut written_count) = (0, 0);
        for file in &files {
            let entry =
                entries.next().ok_or_else(|| UploadError::Wrong("the zip file has changed".into()))?;
            let Some(file) = file else { continue };
            if !is_unpacked(file) {
                if written_count > 0 && Instant::now() >= deadline {
                    return Ok(progress(unpacked_count));
                }
                write_file(entry.map_err(zip_error)?, file, &root)?;
                written_count += 1;
            }
            unpacked_count += 1;
        }
        rustix::fs::syncfs(File::open(&root)?).map_err(io::Error::from)?;
        Ok(progress(unpacked_count))
    }

    /// Removes the zip file, after its pictures have become a dataset.
    pub(crate) fn finish(&self) -> io::Result<()> {
        if_exists(fs::remove_file(self.0.join(ARCHIVE))).map(drop)
    }
}

/// Removes the folder of an upload, or of a dataset that was uploaded.
pub(crate) fn remove_folder(folder: &Path) -> io::Result<()> {
    if_exists(fs::remove_dir_all(folder)).map(drop)
}

/// Removes unfinished uploads without a dataset, and files that a crash has left: zip files of datasets, and pictures of
/// removed datasets. `datasets`: the paths of all datasets.
pub(crate) fn remove_unused(uploads: &Path, datasets: &[String]) {
    for folder in fs::read_dir(uploads).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let upload = Upload(folder);
        let archive = upload.0.join(ARCHIVE).metadata();
        let changed = archive.or_else(|_| upload.0.metadata()).and_then(|found| found.modified());
        let is_old = changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > UNFINISHED_LIFE));
        let removed = if datasets.iter().any(|path| upload.contains(path)) {
            upload.finish()
        } else if is_old {
            remove_folder(&upload.0)
        } else {
            Ok(())
        };
        if let Err(error) = removed {
            tracing::warn!(folder = %upload.0.display(), %error, "files of an upload cannot be removed");
        }
    }
}

/// A file of an archive that is to be unpacked.
#[derive(Debug)]
struct ArchiveFile {
    /// The path in the folder of classes.
    path: PathBuf,
    bytes: u64,
}

impl ArchiveFile {
    fn shown(&self) -> String {
        shorten(&self.path.to_string_lossy())
    }
}

/// The names in a path of an archive: its folders, and for a file its own name.
type Names = Vec<String>;

/// The entries of an archive.
#[derive(Debug, Default)]
struct Entries {
    /// Names and size of each file, in the order of the archive. `None` for folders and for files that operating systems add.
    files: Vec<Option<(Names, u64)>>,
    /// The folders that the archive lists. Folders that operating systems add, such as `__MACOSX`, are left out.
    folders: Vec<Names>,
}

/// Reads the names of an archive.
///
/// # Errors
/// There are too many names, or an entry is not allowed.
fn read_entries(zip: &mut ZipIterable<BoundedReader>) -> Result<Entries> {
    let mut entries = Entries::default();
    let mut names_bytes = 0;
    let is_too_long =
        |parts: &Names| parts.len() > MAX_DEPTH || parts.iter().any(|part| part.len() > MAX_NAME_BYTES);
    for entry in zip.files().map_err(zip_error)? {
        let entry = entry.map_err(zip_error)?;
        // Some programs of Windows write `\` as the separator.
        let name = entry.name().map_err(zip_error)?.replace('\\', "/");
        let refuse_entry = |why: &str| refuse(format!("{:?} in the zip file {why}", shorten(&name)));
        names_bytes += name.len();
        if names_bytes > MAX_NAMES_BYTES {
            return refuse(format!(
                "the names in the zip file have more than {} MiB together; shorten them",
                MAX_NAMES_BYTES >> 20
            ));
        }
        let mut parts: Names = name.split('/').filter(|part| *part != ".").map(str::to_owned).collect();
        let is_of_system =
            parts.iter().any(|part| part.starts_with('.') || part == "__MACOSX" || part == "Thumbs.db");
        if entry.is_dir() || name.ends_with('/') {
            parts.retain(|part| !part.is_empty());
            if !is_of_system && !parts.is_empty() && !is_too_long(&parts) {
                parts.shrink_to_fit();
                entries.folders.push(parts);
            }
            entries.files.push(None);
            continue;
        }
        if parts.is_empty() || parts.iter().any(|part| part.is_empty() || part == ".." || part.contains('\0'))
        {
            return refuse_entry("has an empty name or .. in its path; pack the folder of classes again");
        }
        if is_of_system {
            entries.files.push(None);
            continue;
        }
        if entry.is_symlink() {
            return refuse_entry("is a symbolic link; pack the files themselves");
        }
        if entry.encrypted() {
            return refuse_entry("is encrypted; pack the folder without a password");
        }
        if is_too_long(&parts) {
            return refuse_entry("is in too many folders or has too long a name; shorten its path");
        }
        entries.files.push(Some((parts, entry.size())));
    }
    Ok(entries)
}

/// Returns the folder of a class without pictures.
fn find_empty_class(entries: &Entries) -> Option<&Names> {
    // The folders with files, and the folders with files at any depth.
    let (mut file_folders, mut filled_folders) = (HashSet::new(), HashSet::new());
    for (parts, _) in entries.files.iter().flatten() {
        file_folders.insert(&parts[..parts.len() - 1]);
        // If a folder is in the set, the folders that contain it are in the set, too.
        for depth in (1..parts.len()).rev() {
            if !filled_folders.insert(&parts[..depth]) {
                break;
            }
        }
    }
    // A folder in a folder with pictures is not a class.
    entries.folders.iter().find(|folder| {
        !filled_folders.contains(folder.as_slice()) && !file_folders.contains(&folder[..folder.len() - 1])
    })
}

/// The files of an archive, as in [`Entries::files`]. Folders that contain all files are left out of the files' paths.
fn list_files(zip: &mut ZipIterable<BoundedReader>) -> Result<Vec<Option<ArchiveFile>>> {
    let entries = read_entries(zip)?;
    let mut files = entries.files.iter().flatten().map(|(parts, _)| parts);
    let Some(first) = files.next() else {
        return refuse("the zip file has no file; pack a folder of classes");
    };
    let depth = |parts: &Names| parts.len() - 1;
    // The number of folders at the top that contain all files.
    let common_depth = files.fold(depth(first), |common_depth, parts| {
        let same = first.iter().zip(parts).take_while(|(a, b)| a == b).count();
        common_depth.min(same).min(depth(parts))
    });
    if let Some(empty) = find_empty_class(&entries) {
        return refuse(format!(
            "the folder {:?} in the zip file is empty; put the pictures of its class into it, or leave it out",
            shorten(&empty.join("/"))
        ));
    }

    let common_folder = first[..common_depth].last().cloned();
    let without_common =
        |(parts, bytes): (Names, u64)| ArchiveFile { path: parts.iter().skip(common_depth).collect(), bytes };
    let listed: Vec<_> = entries.files.into_iter().map(|file| file.map(without_common)).collect();
    let mut seen = HashSet::new();
    if let Some(duplicate) = listed.iter().flatten().find(|file| !seen.insert(&file.path)) {
        return refuse(format!("the zip file has {:?} twice; pack the folder again", duplicate.shown()));
    }
    drop(seen);
    let is_picture = |file: &ArchiveFile| {
        file.path.extension().is_some_and(|extension| {
            PICTURE_EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known))
        })
    };
    let files = || listed.iter().flatten();
    if files().all(|file| file.path.components().count() == 1) && files().any(is_picture) {
        let problem = common_folder.map_or_else(
            || "has no class folder: its pictures are at the top level".into(),
            |folder| format!("has only one class folder ({})", shorten(&folder)),
        );
        return refuse(format!(
            "the zip file {problem}; put the pictures of each class into a separate folder, at least two folders"
        ));
    }
    Ok(listed)
}

/// Writes a file of the archive. Writes no file if the entry cannot be read to its end.
fn write_file(mut entry: impl Read, file: &ArchiveFile, root: &Path) -> Result<()> {
    use io::ErrorKind::{AlreadyExists, IsADirectory, NotADirectory};
    let path = root.join(&file.path);
    let created = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| File::create(&path));
    let mut output = created.map_err(|error| match error.kind() {
        AlreadyExists | IsADirectory | NotADirectory => UploadError::Wrong(format!(
            "the zip file has a file and a folder with the same path at {:?}; pack the folder again",
            file.shown()
        )),
        _ => UploadError::Io(error),
    })?;
    let copied = io::copy(&mut entry.by_ref().take(file.bytes), &mut output);
    // The read at the entry's end compares its checksum.
    let copied = copied.and_then(|copied| Ok((copied, entry.read(&mut [0])?)));
    match copied {
        Ok((copied, 0)) if copied == file.bytes => return Ok(()),
        Err(error) if error.raw_os_error().is_some() => return Err(error.into()),
        _ => {}
    }
    fs::remove_file(&path)?;
    refuse(format!("{:?} in the zip file is damaged; pack the folder again", file.shown()))
}

/// Converts an error of the zip reader, whose details are only logged.
fn zip_error(error: ZipError) -> UploadError {
    let why: String = match error {
        ZipError::Io(error) if error.raw_os_error().is_some() => return UploadError::Io(error),
        ZipError::UnsupportedArchive(_) | ZipError::CompressionMethodNotSupported(_) => {
            "the zip file is encrypted, or uses a form of compression that is not supported; pack the folder again".into()
        }
        _ => "the zip file is damaged or not complete; pack it again, or upload it again".into(),
    };
    tracing::info!(%error, "an uploaded zip file cannot be read");
    UploadError::Wrong(why)
}

fn shorten(name: &str) -> String {
    name.chars().take(100).collect()
}

/// A file with a limit for the total number of bytes that are read.
#[derive(Debug)]
struct BoundedReader {
    file: BufReader<File>,
    /// Number of bytes that may still be read.
    budget: Rc<Cell<u64>>,
}

impl Read for BoundedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        let budget = self.budget.get().checked_sub(count as u64);
        self.budget.set(budget.ok_or_else(|| io::Error::other("its directory is too large"))?);
        Ok(count)
    }
}

impl Seek for BoundedReader {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.file.seek(position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zip::{ZipWriter, write::SimpleFileOptions};

    /// An upload of a zip file with these names.
    fn upload(dir: &Path, names: &[&str]) -> Upload {
        let mut zip = ZipWriter::new(io::Cursor::new(Vec::new()));
        for name in names {
            match name.strip_prefix("link:") {
                Some(name) => zip.add_symlink(name, "/etc/passwd", SimpleFileOptions::default()).unwrap(),
                None if name.ends_with('/') => {
                    zip.add_directory(*name, SimpleFileOptions::default()).unwrap();
                }
                None => {
                    zip.start_file(*name, SimpleFileOptions::default()).unwrap();
                    zip.write_all(name.as_bytes()).unwrap();
                }
            }
        }
        let bytes = zip.finish().unwrap().into_inner();
        let upload = Upload::of(dir, "ada", "flowers");
        let (first, rest) = bytes.split_at(bytes.len() / 2);
        upload.write(0, first).unwrap();
        upload.write(first.len() as u64, rest).unwrap();
        // A part that is sent again because its response was lost.
        upload.write(first.len() as u64, rest).unwrap();
        assert!(
            matches!(upload.write(1 << 20, rest), Err(UploadError::Offset(received)) if received == bytes.len() as u64)
        );
        upload
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn enclosing_folders_and_system_files_are_not_unpacked() {
        for (names, expected) in [
            (&["a/1.png", "b/2.png"][..], ["a/1.png", "b/2.png"]),
            (
                &["x/", "x/y/a/1.png", "__MACOSX/", "__MACOSX/x/._1.png", "x/.DS_Store", "x/y/b/2.png"],
                ["a/1.png", "b/2.png"],
            ),
            (&["x\\a\\1.png", "x\\b\\2.png"], ["a/1.png", "b/2.png"]),
            (&["x/train/a/1.png", "x/val/a/1.png"], ["train/a/1.png", "val/a/1.png"]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let upload = upload(dir.path(), names);
            let now = Instant::now();
            let unpack = || upload.unpack(now).map(|unpacked| (unpacked.files, unpacked.total)).unwrap();
            assert_eq!(unpack(), (1, 2), "at least one file in each call");
            assert_eq!(unpack(), (2, 2));
            let pictures = upload.pictures_folder().unwrap();
            for file in expected {
                let content = fs::read_to_string(pictures.join(file)).unwrap();
                assert!(content.replace('\\', "/").ends_with(file), "{file}: {content}");
            }
            assert!(!pictures.join("__MACOSX").exists());
        }
    }

    #[test]
    fn unsafe_paths_and_links_are_refused() {
        for (names, expected) in [
            (&["a/1.png", "../b/2.png"][..], "empty name or .."),
            (&["/etc/x"], "empty name or .."),
            (&["."], "empty name or .."),
            (&["a", "a/1.png"], "same path"),
            (&["a/1.png", "a"], "same path"),
            (&["a/1.png", "link:a/2.png"], "symbolic link"),
            (&["a/1.png", "a\\1.png"], "twice"),
            (&["1/2/3/4/5/6/7/8/9.png"], "too long"),
            (&[".hidden"], "no file"),
            (&["a/1.png", "a/2.JPG"], "only one class folder (a)"),
            (&["train/a/1.png"], "only one class folder (a)"),
            (&["1.png", "2.png"], "are at the top level"),
            (&["x/a/1.png", "x/b/", "x/b/.DS_Store"], "the folder \"x/b\" in the zip file is empty"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let upload = upload(dir.path(), names);
            let refused = upload.unpack(later()).unwrap_err();
            assert!(
                matches!(&refused, UploadError::Wrong(why) if why.contains(expected)),
                "{names:?}: {refused:?}"
            );
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no other files are left");
        }
    }

    #[test]
    fn damaged_files_are_refused_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let upload = upload(dir.path(), &["a/1.png", "b/2.png"]);
        let archive = upload.0.join(ARCHIVE);
        let mut bytes = fs::read(&archive).unwrap();
        let mut zip = zip::ZipArchive::new(io::Cursor::new(bytes.clone())).unwrap();
        let offset = zip.by_index(0).unwrap().data_start().unwrap();
        bytes[offset as usize] ^= 0xff;
        fs::write(&archive, &bytes).unwrap();
        let refused = upload.unpack(later()).unwrap_err();
        assert!(matches!(&refused, UploadError::Wrong(why) if why.contains("damaged")), "{refused:?}");
        assert!(!upload.pictures_folder().unwrap().join("a/1.png").exists());
        fs::write(&archive, "no archive").unwrap();
        assert!(matches!(upload.unpack(later()), Err(UploadError::Wrong(_))));
    }

    #[test]
    fn unfinished_uploads_are_removed_but_datasets_stay() {
        let dir = tempfile::tempdir().unwrap();
        let upload = upload(dir.path(), &["a/1.png"]);
        remove_unused(dir.path(), &[]);
        assert!(upload.0.exists(), "it is recent");
        let age = |file: File| file.set_modified(std::time::SystemTime::now() - 2 * UNFINISHED_LIFE).unwrap();
        age(File::options().write(true).open(upload.0.join(ARCHIVE)).unwrap());
        let path = upload.pictures_folder().unwrap().to_string_lossy().into_owned();
        remove_unused(dir.path(), &[path]);
        // Only the archive is removed.
        assert!(upload.pictures_folder().is_ok() && !upload.0.join(ARCHIVE).exists());
        // The dataset was removed.
        remove_unused(dir.path(), &[]);
        assert!(upload.0.exists(), "it has just changed");
        age(File::open(&upload.0).unwrap());
        remove_unused(dir.path(), &[]);
        assert!(!upload.0.exists());
    }
}
