use super::*;
use std::os::unix::fs::symlink;

fn tree(path: &Path) -> Tree {
    Tree::open(path).unwrap().unwrap()
}

fn list_all(tree: Tree, limit: u64) -> Vec<DatasetEntry> {
    let mut list = FileList::open(tree, limit).unwrap().unwrap();
    let mut text = Vec::new();
    while let Some(chunk) = list.chunk().unwrap() {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The names of the files and folders (a folder ends with a slash), and the last line of the list.
fn names(path: &Path) -> (Vec<String>, DatasetEntry) {
    let mut entries = list_all(tree(path), MAX_FILES);
    let last = entries.pop().unwrap();
    let names = entries.into_iter().filter_map(|entry| match entry {
        DatasetEntry::File(name, ..) => Some(name),
        DatasetEntry::Folder(name) => Some(format!("{name}/")),
        _ => None,
    });
    (names.collect(), last)
}

fn refused(path: &Path) -> String {
    match names(path).1 {
        DatasetEntry::Failed(why) => why,
        other => panic!("{other:?}"),
    }
}

fn read(tree: Tree, parts: Vec<DatasetPart>) -> Vec<u8> {
    let mut parts = Parts::of(tree, parts);
    let mut response = Vec::new();
    while let Some(chunk) = parts.chunk().unwrap() {
        response.extend(chunk);
    }
    response
}

fn part(tree: &Tree, path: &str, offset: u64, length: u64) -> DatasetPart {
    let listed = list_all(tree.clone(), MAX_FILES);
    let found = listed.into_iter().find_map(|entry| match entry {
        DatasetEntry::File(name, size, changed) if name == path => Some((size, changed)),
        _ => None,
    });
    let (size_bytes, changed_ns) = found.unwrap_or((1, 1));
    DatasetPart { path: path.into(), size_bytes, changed_ns, offset, length }
}

fn sent(bytes: &[u8]) -> Vec<u8> {
    [&[PART_FOLLOWS], bytes, &Sha256::digest(bytes)[..]].concat()
}

/// The message of a response that ends with this code.
fn message(code: u8, response: &[u8]) -> String {
    assert_eq!(response[0], code, "{response:?}");
    String::from_utf8(response[5..].to_vec()).unwrap()
}

#[test]
fn files_and_folders_are_listed_in_order_including_empty_ones() {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["train/cats", "train/none"] {
        fs::create_dir_all(dir.path().join(folder)).unwrap();
    }
    assert!(Tree::open(&dir.path().join("train/none")).unwrap().is_none(), "an empty folder");
    assert!(Tree::open(&dir.path().join("gone")).unwrap().is_none());
    for (name, text) in [("train/cats/2", "b"), ("train/cats/1", "aa"), (".hidden", ""), ("z", "ccc")] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    // Links to files and folders inside are followed, with relative and with absolute paths.
    symlink("../cats/1", dir.path().join("train/none/short")).unwrap();
    symlink(dir.path().canonicalize().unwrap().join("train/cats"), dir.path().join("train/dogs")).unwrap();
    let expected = [
        ".hidden",
        "train/",
        "train/cats/",
        "train/cats/1",
        "train/cats/2",
        "train/dogs/",
        "train/dogs/1",
        "train/dogs/2",
        "train/none/",
        "train/none/short",
        "z",
    ];
    assert_eq!(names(dir.path()), (expected.map(str::to_owned).to_vec(), DatasetEntry::End(7, 11)));
    // At the limit of files and folders, and above it; also if a single folder has more.
    let all = tree(dir.path());
    assert_eq!(list_all(all.clone(), 11).last(), Some(&DatasetEntry::End(7, 11)));
    for limit in [10, 2] {
        let detail = format!("the dataset has more than {limit} files and folders");
        assert_eq!(list_all(all.clone(), limit).last(), Some(&DatasetEntry::Failed(detail)));
    }
}

#[test]
fn nested_folders_are_limited_and_links_form_no_loops() {
    let dir = tempfile::tempdir().unwrap();
    let deep: PathBuf = (0..MAX_DEPTH).map(|_| "d").collect();
    fs::create_dir_all(dir.path().join(&deep)).unwrap();
    fs::write(dir.path().join(&deep).join("x"), "one").unwrap();
    assert_eq!(names(dir.path()).1, DatasetEntry::End(1, 3));
    fs::create_dir(dir.path().join(&deep).join("d")).unwrap();
    assert!(refused(dir.path()).contains("deeper than 32 folders"));
    let with_loop = tempfile::tempdir().unwrap();
    fs::write(with_loop.path().join("x"), "one").unwrap();
    symlink(".", with_loop.path().join("again")).unwrap();
    assert!(refused(with_loop.path()).contains("deeper than 32 folders"));
}

#[test]
fn nothing_outside_the_folder_is_listed_or_read() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(outside.path().join("secret"), "secret").unwrap();
    fs::write(dir.path().join("inside"), "inside").unwrap();
    let all = tree(dir.path());
    let link = dir.path().join("link");
    for target in [outside.path().join("secret"), outside.path().to_owned(), "..".into(), "/etc".into()] {
        symlink(&target, &link).unwrap();
        let detail = refused(dir.path());
        assert!(detail.contains("link is a link that leads out of the dataset's folder"), "{detail}");
        for path in ["link", "link/secret", "link/passwd"] {
            let requested = DatasetPart { size_bytes: 6, ..part(&all, path, 0, 6) };
            let response = message(PART_REFUSED, &read(all.clone(), vec![requested]));
            assert!(
                response.contains("leads out of") || response.contains("cannot be read"),
                "{path}: {response}"
            );
        }
        fs::remove_file(&link).unwrap();
    }
    let secret = format!("{}/secret", outside.path().display());
    for path in ["../inside", "/etc/passwd", "", ".", "a/../../x", &secret] {
        let response = read(all.clone(), vec![part(&all, path, 0, 1)]);
        // A file that does not exist counts as changed.
        let code = if path == "a/../../x" { PART_CHANGED } else { PART_REFUSED };
        let response = message(code, &response);
        assert!(
            response.contains("not a file of the dataset") || response.contains("has changed"),
            "{path}: {response}"
        );
    }
    // A pipe is refused, too.
    rustix::fs::mknodat(rustix::fs::CWD, &link, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(refused(dir.path()).contains("neither a file nor a folder"));
    assert!(
        message(PART_CHANGED, &read(all.clone(), vec![part(&all, "link", 0, 1)])).contains("has changed")
    );
}

#[test]
fn links_made_after_registration_are_not_followed() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (above, other) = (dir.path().join("above"), outside.path().join("set"));
    let set = above.join("set");
    for folder in [&set, &other] {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("a-0.tar"), "text").unwrap();
    }
    let registered = [set.clone(), set.join("a-0.tar"), set.join("a-{0..1}.tar")];
    let opened_before: Vec<_> = registered.iter().map(|path| tree(path)).collect();
    let requested: Vec<_> = opened_before.iter().map(|tree| part(tree, "a-0.tar", 0, 4)).collect();
    // The folder, its parent folder, and the file are replaced by links.
    for (from, to) in
        [(&set, &other), (&above, &outside.path().to_owned()), (&registered[1], &other.join("a-0.tar"))]
    {
        let aside = dir.path().join("aside");
        fs::rename(from, &aside).unwrap();
        symlink(to, from).unwrap();
        for (path, (tree, requested)) in registered.iter().zip(opened_before.iter().zip(&requested)) {
            if from != &registered[1] || path == from {
                let detail = Tree::open(path).unwrap_err();
                assert!(detail.contains("is not what was registered"), "{detail}");
            }
            let response = message(PART_REFUSED, &read(tree.clone(), vec![requested.clone()]));
            assert!(response.contains("a-0.tar"), "a tree that was opened before: {response}");
        }
        fs::remove_file(from).unwrap();
        fs::rename(&aside, from).unwrap();
    }
    // The files are readable again.
    assert_eq!(read(opened_before[0].clone(), vec![part(&opened_before[0], "a-0.tar", 0, 4)]), sent(b"text"));
}

#[test]
fn parts_have_checksums_and_changed_files_are_not_sent() {
    let dir = tempfile::tempdir().unwrap();
    let large: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
    fs::write(dir.path().join("large"), &large).unwrap();
    fs::write(dir.path().join("small"), "small").unwrap();
    let all = tree(dir.path());
    let requested = vec![
        part(&all, "small", 0, 5),
        part(&all, "large", 0, 2_500_000),
        part(&all, "large", 2_500_000, 500_000),
    ];
    let expected = [sent(b"small"), sent(&large[..2_500_000]), sent(&large[2_500_000..])].concat();
    assert!(read(all.clone(), requested) == expected);
    let beyond_end = part(&all, "small", 1, 5);
    assert!(
        message(PART_CHANGED, &read(all.clone(), vec![beyond_end]))
            .contains("has changed since it was listed")
    );
    let (changed, unchanged) = (part(&all, "small", 0, 5), part(&all, "large", 0, 1));
    fs::write(dir.path().join("small"), "larger").unwrap();
    let response = read(all.clone(), vec![unchanged.clone(), changed, unchanged]);
    let (first, rest) = response.split_at(34);
    assert_eq!(first, sent(&large[..1]));
    assert!(message(PART_CHANGED, rest).contains("small has changed since it was listed"), "nothing follows");
    let removed = part(&all, "small", 0, 5);
    fs::remove_file(dir.path().join("small")).unwrap();
    assert!(
        message(PART_CHANGED, &read(all, vec![removed])).contains("small has changed since it was listed")
    );
}

#[test]
fn a_file_shorter_than_its_size_is_reported_and_not_sent() {
    // A file of the kernel that has fewer bytes than its size.
    let online = tree(Path::new("/sys/devices/system/cpu/online"));
    let requested = part(&online, "online", 0, 4096);
    assert_eq!(requested.size_bytes, 4096);
    let response = message(PART_CHANGED, &read(online, vec![requested.clone(), requested]));
    assert!(response.contains("online has changed"), "{response}");
}

#[test]
fn a_dataset_of_files_does_not_include_other_files_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["train-0.tar", "train-1.tar", "other.tar"] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    let one_file = tree(&dir.path().join("train-0.tar"));
    let begin = |entries: &[DatasetEntry]| entries[0].clone();
    assert_eq!(begin(&list_all(one_file.clone(), 9)), DatasetEntry::Begin("train-0.tar".into()));
    assert_eq!(names(&dir.path().join("train-0.tar")).0, ["train-0.tar"]);
    assert!(
        message(PART_REFUSED, &read(one_file.clone(), vec![part(&one_file, "other.tar", 0, 1)]))
            .contains("not a file of the dataset")
    );
    assert_eq!(read(one_file.clone(), vec![part(&one_file, "train-0.tar", 0, 5)]), sent(b"train"));
    let pattern = dir.path().join("train-{0..3}.tar");
    assert_eq!(names(&pattern), (vec!["train-0.tar".into(), "train-1.tar".into()], DatasetEntry::End(2, 22)));
    let several_files = tree(&pattern);
    assert_eq!(begin(&list_all(several_files.clone(), 9)), DatasetEntry::Begin("train-{0..3}.tar".into()));
    assert!(
        message(PART_REFUSED, &read(several_files.clone(), vec![part(&several_files, "other.tar", 0, 1)]))
            .contains("not a file of the dataset")
    );
    // A name of the pattern that is a link out of the folder is refused.
    let outside = tempfile::tempdir().unwrap();
    symlink(dir.path().join("other.tar"), outside.path().join("x.tar")).unwrap();
    assert!(refused(&outside.path().join("{x,y}.tar")).contains("leads out of the dataset's folder"));
    assert!(FileList::open(tree(&outside.path().join("{p,q}.tar")), 9).unwrap().is_none());
    assert!(FileList::open(tree(&outside.path().join("{p}.tar")), 9).is_err_and(|why| why.contains("{p}")));
    assert!(Tree::open(&outside.path().join("gone/{x,y}.tar")).unwrap().is_none());
}

#[test]
fn a_pattern_may_name_up_to_100_000_files() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("x-00007.tar"), "one").unwrap();
    let path = |last: usize| dir.path().join(format!("x-{{00000..{last}}}.tar"));
    assert_eq!(names(&path(MAX_NAMES - 1)), (vec!["x-00007.tar".into()], DatasetEntry::End(1, 3)));
    let detail = FileList::open(tree(&path(MAX_NAMES)), MAX_FILES).err().expect("there is one file too many");
    assert!(detail.contains("names more than 100000 files"), "{detail}");
}
