//! Which files need not be read because of the index, and which changes must still be detected.

mod folders;

use super::*;
use crate::{
    Catalog, DataError,
    test_catalog::{assert_contains, listing, repository},
};
use std::{
    fs,
    time::{Duration, SystemTime},
};
use tempfile::TempDir;

/// Creates `classes` class folders, each with `per_class` hard links to one small picture.
fn folder(classes: usize, per_class: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for class in 0..classes {
        let class_dir = dir.path().join(format!("train/class-{class:04}"));
        fs::create_dir_all(&class_dir).unwrap();
        // Each class has its own, because a file system limits the number of hard links to a file.
        let picture = class_dir.join("000000.png");
        image::RgbImage::from_pixel(6, 4, image::Rgb([9, 80, 200])).save(&picture).unwrap();
        for number in 1..per_class {
            fs::hard_link(&picture, class_dir.join(format!("{number:06}.png"))).unwrap();
        }
    }
    dir
}

/// A dataset, and a store that indexes datasets of at least four pictures.
struct Fixture {
    data: TempDir,
    cache: TempDir,
}

impl Fixture {
    fn new(classes: usize, per_class: usize) -> Self {
        Self { data: folder(classes, per_class), cache: tempfile::tempdir().unwrap() }
    }

    fn store(&self) -> IndexStore {
        IndexStore::at(self.cache.path(), 4)
    }

    fn open(&self) -> Result<Catalog, DataError> {
        Catalog::open_with(self.data.path(), &self.store())
    }

    fn picture(&self, name: &str) -> PathBuf {
        self.data.path().join("train").join(name)
    }

    fn cached_file(&self, extension: &str) -> Option<PathBuf> {
        let all = fs::read_dir(self.cache.path()).unwrap().map(|entry| entry.unwrap().path());
        all.into_iter().find(|path| path.extension().is_some_and(|e| e == extension))
    }

    /// Changes the entries of the index. A process that reads the files instead does not see the change.
    fn edit_index(&self, alter: impl Fn(&mut Entry)) {
        let folders = fs::read_dir(self.data.path().join("train")).unwrap();
        let names = folders.map(|entry| Path::new("train").join(entry.unwrap().file_name()));
        edit_index(&self.store(), self.data.path(), names.collect(), alter);
    }

    fn widths(&self) -> Vec<u32> {
        let catalog = self.open().unwrap();
        let listing = listing(&catalog.splits[0]);
        (0..listing.len()).map(|i| listing.dimensions(i).0).collect()
    }
}

fn edit_index(store: &IndexStore, dataset: &Path, containers: Vec<PathBuf>, alter: impl Fn(&mut Entry)) {
    let (builder, facts) = store.begin(dataset).unwrap();
    let altered = |path: &PathBuf| {
        let mut block = facts.of(path.as_os_str().as_bytes()).last().unwrap();
        block.entries.iter_mut().for_each(&alter);
        block
    };
    builder.write(containers.iter().map(|path| (path.as_os_str().as_bytes(), altered(path)))).unwrap();
}

/// Writes other content of the same size with the old modification time, as `rsync -t` and `cp -p` do.
fn replace(path: &Path, content: &[u8]) {
    let before = fs::metadata(path).unwrap();
    assert_eq!(before.len(), content.len() as u64);
    fs::remove_file(path).unwrap();
    fs::write(path, content).unwrap();
    set_modified(path, before.modified().unwrap());
}

fn set_modified(path: &Path, time: SystemTime) {
    fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

fn touch(path: &Path, ahead_secs: u64) {
    set_modified(path, SystemTime::now() + Duration::from_secs(ahead_secs));
}

/// The number of pictures of the training split, and the split's broken files.
fn counts(catalog: &Catalog) -> (usize, Vec<String>) {
    let train = &catalog.splits[0];
    (train.labels.len(), train.broken.iter().map(ToString::to_string).collect())
}

/// Opens the dataset as ranks do, trusting unchanged folders.
fn open_trusting_folders(fixture: &Fixture) -> Catalog {
    let store = IndexStore { trusts_folders: true, ..fixture.store() };
    Catalog::open_with(fixture.data.path(), &store).unwrap()
}

#[test]
fn only_changed_files_are_read_again() {
    let fixture = Fixture::new(2, 4);
    let first = fixture.open().unwrap();
    assert_eq!(counts(&first), (8, vec![]));
    assert!(
        fixture.cached_file("index").is_some()
            && fixture.cached_file("part").is_none_or(|p| fs::metadata(p).unwrap().len() == 0)
    );
    fixture.edit_index(|entry| entry.width = 77);
    assert_eq!(fixture.widths(), [77; 8], "the index was read");
    // The same size and modification time with other content: the file is read, and found not to be a picture.
    let size = fs::metadata(fixture.picture("class-0000/000001.png")).unwrap().len() as usize;
    replace(&fixture.picture("class-0000/000001.png"), &vec![b'x'; size]);
    let (pictures, broken) = counts(&fixture.open().unwrap());
    assert_eq!((pictures, broken.len()), (7, 1), "{broken:?}");
    assert!(broken[0].contains("class-0000/000001.png is text"), "{broken:?}");
    // A picture was added, one removed, and one repaired.
    image::RgbImage::new(5, 5).save(fixture.picture("class-0001/new.png")).unwrap();
    fs::remove_file(fixture.picture("class-0001/000000.png")).unwrap();
    fs::remove_file(fixture.picture("class-0000/000001.png")).unwrap();
    fs::hard_link(fixture.picture("class-0000/000002.png"), fixture.picture("class-0000/000001.png"))
        .unwrap();
    let last = fixture.open().unwrap();
    assert_eq!(counts(&last), (8, vec![]));
    let listing = listing(&last.splits[0]);
    let all: Vec<_> = (0..8).map(|i| (listing.name(i), listing.dimensions(i))).collect();
    assert_eq!(all[1], (fixture.picture("class-0000/000001.png").display().to_string(), (6, 4)));
    assert_eq!(all[7], (fixture.picture("class-0001/new.png").display().to_string(), (5, 5)));
}

#[test]
fn datasets_open_without_an_index_if_small_or_without_cache() {
    let fixture = Fixture::new(1, 3);
    assert_eq!(counts(&fixture.open().unwrap()).0, 3);
    assert!(fixture.cached_file("index").is_none(), "three pictures are too few");
    let fixture = Fixture::new(1, 4);
    fs::write(fixture.cache.path().join("file"), "").unwrap();
    let store = IndexStore::at(&fixture.cache.path().join("file/inside"), 4);
    assert_eq!(counts(&Catalog::open_with(fixture.data.path(), &store).unwrap()).0, 4);
    assert_eq!(counts(&fixture.open().unwrap()).0, 4);
    assert!(fixture.cached_file("index").is_some(), "four pictures are enough");
}

#[test]
fn results_of_an_interrupted_run_are_reused() {
    let fixture = Fixture::new(2, 4);
    fixture.open().unwrap();
    fixture.edit_index(|entry| entry.width = 77);
    // The index was never finished: its blocks are in the part file, and the second class's block is truncated.
    let index = fixture.cached_file("index").unwrap();
    let bytes = fs::read(&index).unwrap();
    fs::remove_file(&index).unwrap();
    fs::write(index.with_extension("part"), &bytes[..bytes.len() - 7]).unwrap();
    let mut widths = fixture.widths();
    widths.sort_unstable();
    assert_eq!(widths, [6, 6, 6, 6, 77, 77, 77, 77], "only the class of the truncated block is read");
    assert!(index.exists());
}

#[test]
fn a_damaged_index_is_rebuilt() {
    let fixture = Fixture::new(2, 4);
    let identity = |catalog: &Catalog| catalog.fingerprint(fixture.data.path());
    let intact = identity(&fixture.open().unwrap());
    let index = fixture.cached_file("index").unwrap();
    let bytes = fs::read(&index).unwrap();
    for at in (0..bytes.len()).step_by(5) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        fs::write(&index, &damaged).unwrap();
        assert_eq!(identity(&fixture.open().unwrap()), intact, "byte {at}");
    }
    for length in (0..bytes.len()).step_by(11) {
        fs::write(&index, &bytes[..length]).unwrap();
        assert_eq!(identity(&fixture.open().unwrap()), intact, "{length} bytes");
    }
}

#[test]
fn moved_or_touched_pictures_are_the_same_dataset() {
    let fixture = Fixture::new(2, 4);
    let fingerprint_of = |fixture: &Fixture| fixture.open().unwrap().fingerprint(fixture.data.path());
    let first = fingerprint_of(&fixture);
    assert_eq!(first.pictures, 8);
    let copy = Fixture::new(2, 4);
    assert_eq!(fingerprint_of(&copy), first);
    touch(&fixture.picture("class-0000/000000.png"), 60);
    assert_eq!(fingerprint_of(&fixture), first);
    // A longer file replaces the hard link. Decoders ignore bytes after the picture's end, but it is another file.
    let path = fixture.picture("class-0000/000000.png");
    let mut bytes = fs::read(&path).unwrap();
    bytes.push(0);
    fs::remove_file(&path).unwrap();
    fs::write(&path, &bytes).unwrap();
    let second = fingerprint_of(&fixture);
    assert_ne!(second, first, "another size");
    *bytes.last_mut().unwrap() = 1;
    fs::write(&path, &bytes).unwrap();
    touch(&path, 120);
    let third = fingerprint_of(&fixture);
    assert_eq!(third.picture_bytes, second.picture_bytes);
    assert_ne!(third, second, "other content");
    fs::rename(&path, fixture.picture("class-0000/another.png")).unwrap();
    assert_ne!(fingerprint_of(&fixture), third, "another name");
}

#[test]
fn temporarily_unreadable_files_are_checked_again() {
    let fixture = Fixture::new(1, 4);
    // A regular file that no user can read, not even root.
    let odd = fixture.picture("class-0000/odd.png");
    std::os::unix::fs::symlink("/proc/self/mem", &odd).unwrap();
    let (pictures, broken) = counts(&fixture.open().unwrap());
    assert!(pictures == 4 && broken[0].contains("odd.png cannot be read: Input/output error"), "{broken:?}");
    let index = fs::metadata(fixture.cached_file("index").unwrap()).unwrap().modified().unwrap();
    fixture.open().unwrap();
    let later = fs::metadata(fixture.cached_file("index").unwrap()).unwrap().modified().unwrap();
    assert_eq!(index, later, "the index was not written again");
}

#[test]
fn shards_are_cached_until_they_change() {
    let data = tempfile::tempdir().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let shard = data.path().join("train.tar");
    let bytes = fs::read(repository("tests/data/shards/numbers/train-000000.tar")).unwrap();
    fs::write(&shard, &bytes).unwrap();
    let store = IndexStore { min_unknown: 0, ..IndexStore::at(cache.path(), 0) };
    let open = || Catalog::open_with(data.path(), &store);
    assert_eq!(open().unwrap().splits[0].labels.len(), 6);
    edit_index(&store, data.path(), vec!["train.tar".into()], |entry| entry.label = Some("cat".into()));
    assert_eq!(open().unwrap().classes, ["cat"], "the index was read");
    replace(&shard, &vec![0; bytes.len()]);
    assert!(open().unwrap_err().to_string().contains("holds no sample"));
    fs::write(&shard, &bytes).unwrap();
    touch(&shard, 90);
    assert_eq!(open().unwrap().splits[0].labels.len(), 6);
}

#[test]
fn indexes_in_a_shared_cache_are_separate_and_unused_ones_removed() {
    let fixture = Fixture::new(1, 4);
    if fs::metadata(fixture.data.path()).unwrap().created().is_err() {
        // The file system reports no birth times, so it does not distinguish the folders.
        return;
    }
    // Two machines, each with its own folder at this path.
    let (here, there) = (fixture.data.path().to_owned(), tempfile::tempdir().unwrap());
    let copies = ["first", "second"].map(|name| there.path().join(name));
    let mount = |copy: &Path| fs::rename(copy, &here).unwrap();
    let unmount = |copy: &Path| fs::rename(&here, copy).unwrap();
    unmount(&copies[0]);
    fs::create_dir(&copies[1]).unwrap();
    fs::rename(folder(1, 4).path().join("train"), copies[1].join("train")).unwrap();
    for (copy, width) in copies.iter().zip([71, 72]) {
        mount(copy);
        fixture.open().unwrap();
        fixture.edit_index(|entry| entry.width = width);
        unmount(copy);
    }
    for (copy, width) in copies.iter().zip([71, 72]) {
        mount(copy);
        assert_eq!(fixture.widths(), [width; 4]);
        unmount(copy);
    }
    mount(&copies[0]);
    // Indexes that were not used for a month are removed.
    let files = fs::read_dir(fixture.cache.path()).unwrap().map(|entry| entry.unwrap().path());
    let indexes: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "index")).collect();
    assert_eq!(indexes.len(), 2);
    for index in &indexes {
        set_modified(index, SystemTime::now() - Duration::from_secs(31 * 24 * 3600));
    }
    touch(&fixture.picture("class-0000/000001.png"), 5);
    fixture.open().unwrap();
    assert_eq!(indexes.iter().filter(|index| index.exists()).count(), 1);
}

#[test]
fn a_few_pictures_are_checked_without_the_lock() {
    let fixture = Fixture::new(1, 8);
    let open = |min_unknown| {
        let store = IndexStore { min_unknown, ..fixture.store() };
        Catalog::open_with(fixture.data.path(), &store).unwrap()
    };
    assert_eq!(counts(&open(9)).0, 8);
    assert!(fixture.cached_file("index").is_none() && fixture.cached_file("lock").is_none());
    assert_eq!(counts(&open(8)).0, 8);
    assert!(fixture.cached_file("index").is_some());
}

#[test]
fn progress_is_reported_only_while_an_index_is_built() {
    let fixture = Fixture::new(1, 4);
    fixture.open().unwrap();
    let (store, dataset) = (fixture.store(), fixture.data.path());
    let at = Progress { done: 1, total: 4 };
    let (mut builder, _) = store.begin(dataset).unwrap();
    builder.publish(at);
    assert_eq!(store.progress(dataset), Some(at));
    // A killed process leaves its progress file.
    let file = fixture.cached_file("progress").unwrap();
    let content = fs::read(&file).unwrap();
    drop(builder);
    fs::write(&file, content).unwrap();
    // A process that another test starts may inherit the lock's file for a moment.
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while store.progress(dataset).is_some() {
        assert!(std::time::Instant::now() < deadline, "no index is being built");
        std::thread::yield_now();
    }
    let (_builder, _) = store.begin(dataset).unwrap();
    assert_eq!(store.progress(dataset), None, "this build has reported no progress yet");
}

#[test]
fn pictures_are_read_without_known_sizes() {
    let dir = folder(1, 1);
    let path = dir.path().join("train/class-0000/000000.png");
    let bytes = fs::read(&path).unwrap();
    let modified_ns = lockstep_host::files::modified_ns(&fs::metadata(&path).unwrap());
    let found = FoundFile { name: "000000.png".into(), size: 0, modified_ns, needs_check: false };
    let entry = examine(&path, &found);
    assert!(entry.is_transient, "the file may still be being written");
    let mut listing = crate::Listing::new(dir.path());
    listing.add_container(Path::new("train/class-0000"), crate::listing::ContainerKind::Folder);
    listing.push(&entry);
    assert_eq!(listing.read(0).unwrap(), bytes);
}

/// Measures how long building an index takes and how large the index is. Run by hand:
/// `LOCKSTEP_INDEX_PICTURES=1300000 cargo test -p lockstep-data --release --lib -- --ignored --nocapture
/// many_pictures`.
#[test]
#[ignore = "takes minutes at the size that it is for"]
fn many_pictures() {
    let count = std::env::var("LOCKSTEP_INDEX_PICTURES").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let began = std::time::Instant::now();
    let fixture = Fixture::new(1000, count / 1000);
    eprintln!("{count} files in 1000 folders: created in {:.1} s", began.elapsed().as_secs_f64());
    for trusts_folders in [false, false, false, true, true] {
        let began = std::time::Instant::now();
        let catalog = if trusts_folders { open_trusting_folders(&fixture) } else { fixture.open().unwrap() };
        assert_eq!(counts(&catalog), (count, vec![]));
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let peak_memory = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or_default().to_owned();
        eprintln!(
            "opening, trusts folders: {trusts_folders}: {:.2} s; index {:.1} MB; {peak_memory}",
            began.elapsed().as_secs_f64(),
            fs::metadata(fixture.cached_file("index").unwrap()).unwrap().len() as f64 / 1e6
        );
    }
}
