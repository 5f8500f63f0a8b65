//! Names decide which files are shards, and to which split each belongs.

use super::*;

#[test]
fn names_of_files_or_folders_determine_splits() {
    let dir = tempfile::tempdir().unwrap();
    let shard = fixtures().join("numbers/train-000000.tar");
    fs::create_dir(dir.path().join("validation")).unwrap();
    for name in ["imagenet1k-train-0000.tar", "validation/0000.tar", "data_test00.tar"] {
        fs::copy(&shard, dir.path().join(name)).unwrap();
    }
    let catalog = open(dir.path()).expect("opens");
    let names: Vec<_> = catalog.splits.iter().map(|split| split.name.as_str()).collect();
    assert_eq!(names, ["train", "test", "validation"]);
    fs::copy(&shard, dir.path().join("more.tar")).unwrap();
    assert_contains(
        broken(&open(dir.path()).expect("opens")).join("\n"),
        &["more.tar has no split in its name"],
    );
    fs::remove_file(dir.path().join("imagenet1k-train-0000.tar")).unwrap();
    assert!(open(dir.path()).unwrap_err().to_string().contains("has no training split"));
    // A class that occurs only in the validation split.
    let other_dir = tempfile::tempdir().unwrap();
    fs::copy(fixtures().join("names.tar"), other_dir.path().join("train.tar")).unwrap();
    write(&other_dir.path().join("val.tar"), &[("a.png", &png()), ("a.cls", b"fox")]);
    assert_contains(open(other_dir.path()).unwrap_err(), &["split \"val\" has the class \"fox\""]);
}

#[test]
fn errors_name_compressed_shards() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("train-0.tar.gz"), "").unwrap();
    assert_contains(open(dir.path()).unwrap_err(), &["its shards are compressed"]);
    // A compressed shard is ignored if its decompressed copy exists. Otherwise it is reported as broken.
    for name in ["train-0.tar", "train-1.tar"] {
        fs::copy(fixtures().join("numbers/train-000000.tar"), dir.path().join(name)).unwrap();
    }
    assert_eq!(broken(&open(dir.path()).expect("opens")), Vec::<String>::new());
    fs::write(dir.path().join("train-2.tar.zst"), "").unwrap();
    let messages = broken(&open(dir.path()).expect("opens"));
    assert!(messages.len() == 1 && messages[0].contains("train-2.tar.zst is compressed"), "{messages:?}");
}

#[test]
fn errors_name_a_split_that_cannot_be_listed() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("gone", dir.path().join("val")).unwrap();
    // Despite their names, these are not folders.
    fs::write(dir.path().join("test"), "").unwrap();
    std::os::unix::fs::symlink("gone", dir.path().join("train.txt")).unwrap();
    let message = open(dir.path()).unwrap_err().to_string();
    assert!(message.ends_with("val is a link to gone, which does not exist; repair the link"), "{message}");
    fs::copy(fixtures().join("numbers/train-000000.tar"), dir.path().join("train.tar")).unwrap();
    let messages = broken(&open(dir.path()).expect("opens"));
    assert!(messages.len() == 1 && messages[0].contains("val is a link to gone"), "{messages:?}");
    assert!(crate::image_folder::entries(&dir.path().join("train.tar")).is_err());
}

#[test]
fn a_pattern_exists_if_some_of_its_shards_exist() {
    let dir = tempfile::tempdir().unwrap();
    let pattern = dir.path().join("train-{0..3}.tar");
    assert!(!crate::exists(&pattern), "only the folder exists");
    fs::write(dir.path().join("train-1.tar"), "").unwrap();
    assert!(crate::exists(&pattern));
}

#[test]
fn a_shard_that_a_pattern_names_twice_is_counted_once() {
    let folder = fixtures().join("numbers");
    let samples = |pattern: &str| -> Vec<usize> {
        let catalog = open(&folder.join(pattern)).expect("opens");
        catalog.splits.iter().map(|split| split.labels.len()).collect()
    };
    let once = samples("train-{000000..000001}.tar");
    assert!(once[0] > 0);
    for twice in ["train-{000000,000001,000000}.tar", "{train,train}-{000000..000001}.tar"] {
        assert_eq!(samples(twice), once, "{twice}");
    }
}

#[test]
fn patterns_are_limited_to_a_number_of_files() {
    let names = |pattern: &str| expand(pattern, 12);
    assert_eq!(names("a-{08..11}.tar").unwrap(), ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]);
    assert_eq!(names("{a,b}{0..1}").unwrap(), ["a0", "a1", "b0", "b1"]);
    assert_eq!(names("{b,a,b}-{1,1}").unwrap(), ["b-1", "a-1"], "each file once");
    assert_eq!(names("{0..11}").unwrap().len(), 12);
    assert_eq!(names("{0..12}").unwrap_err(), "names more than 12 files");
    assert_eq!(names("{a,b}{0..6}").unwrap_err(), "names more than 12 files");
    assert_eq!(names("{0..18446744073709551615}").unwrap_err(), "names more than 12 files");
    for (wrong, why) in [
        ("{0..", "without its }"),
        ("{x}", "neither a range"),
        ("{a..b}", "neither a range"),
        ("{3..1}", "goes down"),
    ] {
        assert!(names(wrong).unwrap_err().contains(why), "{wrong}");
    }
}
