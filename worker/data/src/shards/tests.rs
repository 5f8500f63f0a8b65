//! Shards written by Python's webdataset (`tests/data/make_shards.py`), intact and damaged.

mod names;

use crate::{
    Catalog,
    pattern::expand,
    test_catalog::{self, assert_broken, assert_contains, broken, listing, open, png, repository},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn fixtures() -> PathBuf {
    repository("tests/data/shards")
}

/// The name and class of every sample. Each picture can be decoded.
fn samples(catalog: &Catalog) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for split in &catalog.splits {
        let listing = listing(split);
        for (index, label) in split.labels.iter().enumerate() {
            listing.picture(index).expect("decodes");
            all.push((listing.name(index), catalog.classes[*label as usize].clone()));
        }
    }
    all
}

fn assert_samples(catalog: &Catalog, part: &str) {
    test_catalog::assert_samples(catalog, &fixtures(), part, |name, sample| {
        name.contains(&format!(".tar/{}.", sample["key"].as_str().expect("a name")))
    });
}

#[test]
fn shards_of_webdataset_are_read_in_their_order() {
    let catalog = open(&fixtures().join("numbers")).expect("opens");
    assert_eq!((catalog.format, catalog.classes.join(" ")), ("webdataset", "0 1 2".into()));
    assert_eq!(broken(&catalog), Vec::<String>::new());
    assert_samples(&catalog, "numbers");
    // A pattern, some of whose shards do not exist, has the same samples. Then a single file, whose classes have names.
    let catalog = open(&fixtures().join("numbers/{train,val}-{000000..000001}.tar")).expect("opens");
    assert_samples(&catalog, "numbers");
    let messages = broken(&catalog);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert_contains(&messages[0], &["val-000001.tar cannot be read: No such file"]);
    let catalog = open(&fixtures().join("names.tar")).expect("opens");
    assert_eq!(catalog.classes.join(" "), "cat dog");
    assert_samples(&catalog, "names");
}

#[test]
fn classes_txt_names_numbered_classes() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixtures().join("numbers/train-000000.tar"), dir.path().join("a.tar")).unwrap();
    fs::write(dir.path().join("classes.txt"), "cat\ndog\nfox\nnever seen\n").unwrap();
    let catalog = open(dir.path()).expect("opens");
    assert_eq!(catalog.classes.join(" "), "cat dog fox never seen");
    // No name contains a split, so all shards are training data.
    assert_eq!((catalog.splits.len(), catalog.splits[0].name.as_str()), (1, "train"));
    fs::write(dir.path().join("classes.txt"), "cat\ndog\n").unwrap();
    assert_contains(open(dir.path()).unwrap_err(), &["names 2 classes, but the data has 3"]);
}

#[test]
fn complete_samples_of_a_truncated_shard_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let whole = fs::read(fixtures().join("numbers/train-000000.tar")).unwrap();
    let shard = dir.path().join("train-0.tar");
    let read_truncated = |length: usize| {
        fs::write(&shard, &whole[..length]).unwrap();
        let catalog = open(dir.path()).expect("opens");
        (catalog.splits[0].labels.len(), broken(&catalog).join("\n"))
    };
    // A sample has seven blocks: three headers, a class, a picture of two blocks, and a text.
    assert_eq!(read_truncated(whole.len()), (6, String::new()));
    for (length, reason) in [
        (512 * 7 * 3 + 512 * 3 + 100, "is cut off in the middle of 000003.jpg"),
        (512 * 7 * 3, "ends without a tar's closing blocks"),
    ] {
        let (samples, message) = read_truncated(length);
        assert_eq!((samples, message.lines().count()), (3, 1), "{message}");
        assert_contains(message, &[reason]);
    }
    let mut damaged = whole.clone();
    damaged[512 * 7 * 2..512 * 7 * 2 + 512].fill(b'x');
    fs::write(&shard, &damaged).unwrap();
    let catalog = open(dir.path()).expect("opens");
    assert_eq!(catalog.splits[0].labels.len(), 2);
    assert_contains(broken(&catalog).join("\n"), &["is damaged after 6 members"]);
    let gzip = [b"\x1f\x8b\x08\0".to_vec(), vec![0x9d; 2000]].concat();
    for (bytes, wanted) in [
        (&b""[..], "is empty"),
        (&b"not a tar file at all"[..], "is not a tar file"),
        (&[0x9d; 2000], "train-0.tar is not a tar file"),
        (&gzip, "train-0.tar is compressed with gzip, whatever its name says"),
    ] {
        fs::write(&shard, bytes).unwrap();
        assert_contains(open(dir.path()).unwrap_err(), &["holds no sample that can be used", wanted]);
    }
}

/// Writes a shard with these members.
fn write(path: &Path, members: &[(&str, &[u8])]) {
    let mut tar = tar::Builder::new(fs::File::create(path).unwrap());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, *content).unwrap();
    }
    tar.finish().unwrap();
}

#[test]
fn lengths_of_member_and_class_names_are_limited() {
    let png = png();
    let max_bytes = lockstep_protocol::limits::MEMBER_NAME_BYTES;
    for (length, samples) in [(max_bytes, 2), (max_bytes + 1, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let key = "k".repeat(length - ".png".len());
        write(
            &dir.path().join("train.tar"),
            &[("a.png", &png), ("a.cls", b"0"), (&format!("{key}.cls"), b"1"), (&format!("{key}.png"), &png)],
        );
        let catalog = open(dir.path()).unwrap();
        assert_eq!(catalog.splits[0].labels.len(), samples, "{length}");
        let message = broken(&catalog).join("\n");
        assert_eq!(message.contains("whose name takes 4097 bytes"), samples == 1, "{message}");
        assert!(message.len() < 1000, "the error abbreviates the name");
    }
    let max_bytes = lockstep_protocol::limits::CLASS_NAME_BYTES;
    for (length, refused) in [(max_bytes, false), (max_bytes + 1, true)] {
        let dir = tempfile::tempdir().unwrap();
        let class = "c".repeat(length);
        write(&dir.path().join("train.tar"), &[("a.png", &png), ("a.cls", class.as_bytes())]);
        let message = open(dir.path()).map(|_| String::new()).unwrap_or_else(|error| error.to_string());
        assert_eq!(message.contains("a.cls that is empty, not text, or too long"), refused, "{message}");
    }
    // A class member and a description member, of the maximum length and one byte longer.
    let (class_error, description_error) =
        ("a.cls that is empty, not text, or too long", "b.json that is not a JSON object, or too long");
    for (excess, errors) in [(0, &[][..]), (1, &[class_error, description_error])] {
        let padded =
            |text: &str, bytes: usize| [text.as_bytes(), &vec![b' '; bytes + excess - text.len()]].concat();
        let (class, description) = (padded("1", 4096), padded("{\"label\": 1}", 1 << 20));
        let members: [(&str, &[u8]); 4] =
            [("a.png", &png), ("a.cls", &class), ("b.png", &png), ("b.json", &description)];
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("train.tar"), &[&members[..], &[("c.png", &png), ("c.cls", b"0")]].concat());
        let messages = broken(&open(dir.path()).unwrap());
        assert_eq!(messages.len(), errors.len(), "{messages:?}");
        assert!(messages.iter().zip(errors).all(|(text, why)| text.contains(why)), "{messages:?}");
    }
}

#[test]
fn invalid_samples_are_named_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let png = png();
    write(
        &dir.path().join("train.tar"),
        &[
            ("good.png", &png),
            ("good.cls", b" 1 "),
            ("both.cls", b"0"),
            ("both.json", b"{\"label\": 7}"),
            ("both.png", &png),
            ("no-class.png", &png),
            ("no-label.png", &png),
            ("no-label.json", b"{\"caption\": \"a cat\"}"),
            ("no-picture.cls", b"1"),
            ("two.png", &png),
            ("two.right.png", &png),
            ("two.cls", b"1"),
            ("text.jpg", b"I am no picture"),
            ("text.cls", b"1"),
            ("long.png", &png),
            ("long.cls", &[b'7'; 4097]),
            ("list.png", &png),
            ("list.json", b"[1]"),
            ("boxes.json", b"[1]"),
            ("boxes.cls", b"1"),
            ("boxes.png", &png),
            ("whole.json", b"{\"label\": 1.0}"),
            ("whole.meta.json", b"{\"width\": 4}"),
            ("whole.png", &png),
            ("nothing.json", b"{\"label\": \" \"}"),
            ("nothing.png", &png),
            ("classes.fine.cls", b"1"),
            ("classes.coarse.cls", b"0"),
            ("classes.png", &png),
            ("__note.cls", b"1"),
            ("__note.png", &png),
            ("__notes__/a.png", &png),
            ("notes.txt", b"nothing to train on"),
            (".hidden.png", &png),
        ],
    );
    let catalog = open(dir.path()).expect("opens");
    let names = samples(&catalog);
    let shown = |name: &str| dir.path().join("train.tar").join(name).display().to_string();
    let wanted = [
        ("good.png", "1"),
        ("both.png", "0"),
        ("two.png", "1"),
        ("boxes.png", "1"),
        ("whole.png", "1"),
        ("__note.png", "1"),
    ];
    assert_eq!(names, wanted.map(|(name, class)| (shown(name), class.to_owned())));
    let expected = [
        ("no-class.png", "has no class: put a member"),
        ("no-label.png", "has no class: put a member"),
        ("no-picture", "has no picture in its sample"),
        ("text.jpg", "is text, not a JPEG"),
        ("long.png", "has a class in long.cls that is empty, not text, or too long"),
        ("list.png", "has a description list.json that is not a JSON object"),
        ("nothing.png", "has no class: put a member"),
        ("classes.png", "has a second class, in classes.coarse.cls, in its sample"),
    ];
    assert_broken(&catalog, "train.tar", &expected);
    // The longest allowed label, and the largest allowed class number.
    write(&dir.path().join("train.tar"), &[("a.png", &png), ("a.cls", &[b'7'; 255])]);
    assert_eq!(open(dir.path()).expect("opens").classes[0].len(), 255);
    write(&dir.path().join("train.tar"), &[("a.png", &png), ("a.cls", b"99999")]);
    assert_eq!(open(dir.path()).expect("opens").classes.len(), 100_000);
    write(&dir.path().join("train.tar"), &[("a.png", &png), ("a.cls", b"100000")]);
    assert_contains(open(dir.path()).unwrap_err(), &["is 100000; classes are numbered from 0, up to 99999"]);
}

#[test]
fn members_are_joined_to_samples_by_the_first_dot_of_their_names() {
    let png = png();
    let rule = "names that are the same up to their first dot are one sample, as in WebDataset";
    for (members, wanted, details) in [
        (&["0.png", "0.seg.png", "0.cls"][..], &["0.png"][..], &[][..]),
        (&["0.cls", "0.left.png", "0.right.png", "0.png"], &["0.png"], &[]),
        (&["0.image.png", "0.cls"], &["0.image.png"], &[]),
        (
            &["0.jpg", "0.png", "0.cls"],
            &[],
            &["0.jpg has a second picture, 0.png, in its sample; keep one of them"],
        ),
        (&["22.00.png", "22.00.cls", "22.01.png", "22.01.cls"], &[], &[rule]),
        // In the order in which `find` lists them, not sorted.
        (&["0.png", "1.png", "0.cls", "1.cls"], &[], &["0.png has its class elsewhere", "tar --sort=name"]),
        (&["0.png", "0.cls", "1.cls", "0.txt"], &["0.png"], &["has no picture in its sample"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let content = |name: &str| if name.ends_with("cls") { &b"0"[..] } else { &png[..] };
        let mut all: Vec<_> = members.iter().map(|name| (*name, content(name))).collect();
        all.extend([("last.png", content("png")), ("last.cls", content("cls"))]);
        write(&dir.path().join("train.tar"), &all);
        let catalog = open(dir.path()).expect("opens");
        let found: Vec<_> = samples(&catalog).into_iter().map(|(name, _)| name).collect();
        let shown = |name: &&str| dir.path().join("train.tar").join(name).display().to_string();
        assert_eq!(found, wanted.iter().chain(&["last.png"]).map(shown).collect::<Vec<_>>());
        let message = broken(&catalog).join("\n");
        assert!(details.iter().all(|detail| message.contains(detail)), "{members:?}: {message}");
        assert_eq!(message.is_empty(), details.is_empty(), "{members:?}: {message}");
        assert_eq!(message.contains("has no picture"), members.contains(&"0.txt"), "{message}");
    }
}

#[test]
fn class_names_that_differ_in_unicode_normalisation_are_one() {
    let dir = tempfile::tempdir().unwrap();
    let png = png();
    for (split, class) in [("train", "cafe\u{301}"), ("val", "caf\u{e9}")] {
        let shard = dir.path().join(format!("{split}.tar"));
        write(&shard, &[("a.png", &png), ("a.cls", class.as_bytes())]);
    }
    let catalog = open(dir.path()).expect("opens");
    assert_eq!((catalog.classes, catalog.splits.len()), (vec!["caf\u{e9}".to_owned()], 2));
}

#[test]
fn negative_labels_outside_the_training_split_mean_unlabelled() {
    let dir = tempfile::tempdir().unwrap();
    let png = png();
    let shard = |name: &str, labels: [&[u8]; 2]| {
        let members = [("a.png", &png[..]), ("a.cls", labels[0]), ("b.png", &png[..]), ("b.cls", labels[1])];
        write(&dir.path().join(name), &members);
    };
    for (train, classes) in [([&b"0"[..], &b"1"[..]], "0 1"), ([&b"cat"[..], &b"dog"[..]], "cat dog")] {
        shard("train.tar", train);
        shard("val.tar", train);
        shard("test.tar", [b"-1", b"-1"]);
        let catalog = open(dir.path()).expect("opens");
        assert_eq!(catalog.classes.join(" "), classes);
        let counts: Vec<_> =
            catalog.splits.iter().map(|s| (&s.name[..], s.labels.len(), s.broken.len())).collect();
        assert_eq!(counts, [("train", 2, 0), ("val", 2, 0)]);
        assert_eq!((broken(&catalog).len(), catalog.unlabelled.join(" ")), (0, "test".into()));
        // If one sample has a label, a sample without one is an error.
        shard("test.tar", [train[0], b"-1"]);
        let catalog = open(dir.path()).expect("opens");
        assert_eq!((catalog.splits[1].labels.len(), catalog.unlabelled.len()), (1, 0));
        assert_contains(
            broken(&catalog).join("\n"),
            &["test.tar/b.png has the label -1, which is not a class"],
        );
        fs::remove_file(dir.path().join("test.tar")).unwrap();
    }
    // Two classes whose names are negative numbers.
    shard("train.tar", [b"-1", b"1"]);
    shard("val.tar", [b"-1", b"1"]);
    let catalog = open(dir.path()).expect("opens");
    assert_eq!((catalog.classes.join(" "), broken(&catalog).len()), ("-1 1".into(), 0));
    // Classes with numbers and names, and a label that is not a class.
    fs::write(dir.path().join("classes.txt"), "cat\ndog\n").unwrap();
    assert_contains(
        open(dir.path()).unwrap_err(),
        &["classes.txt names classes by their numbers, but one sample has the label \"-1\""],
    );
}

#[test]
fn data_after_the_end_of_a_tar_file_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join("train.tar");
    let whole = fs::read(fixtures().join("numbers/train-000000.tar")).unwrap();
    fs::write(&shard, [&whole[..], &[0; 1 << 16][..]].concat()).unwrap();
    assert_eq!(broken(&open(dir.path()).expect("opens")), Vec::<String>::new(), "zeros are no data");
    fs::write(&shard, [&whole[..], &whole[..]].concat()).unwrap();
    let catalog = open(dir.path()).expect("opens");
    assert_eq!(catalog.splits[0].labels.len(), 6);
    assert_contains(
        broken(&catalog).join("\n"),
        &["train.tar has data after its end, which would be ignored"],
    );
}

#[test]
fn links_and_sparse_files_in_shards_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let png = png();
    let mut tar = tar::Builder::new(fs::File::create(dir.path().join("train.tar")).unwrap());
    let mut add = |name: &str, kind: tar::EntryType, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        match kind {
            tar::EntryType::Link | tar::EntryType::Symlink => {
                tar.append_link(&mut header, name, "a.png").unwrap()
            }
            _ => tar.append_data(&mut header, name, content).unwrap(),
        }
    };
    let file = tar::EntryType::Regular;
    for (name, kind) in [("a", file), ("b", tar::EntryType::Link), ("c", tar::EntryType::Symlink)] {
        add(&format!("{name}.png"), kind, if kind == file { &png[..] } else { &b""[..] });
        add(&format!("{name}.cls"), file, b"0");
    }
    add("d.png", file, &png);
    add("d.cls", tar::EntryType::Link, b"");
    // A sparse file with one block, and a hole that is larger than the whole shard.
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::GNUSparse);
    header.set_size(512);
    let octal = |number: u64| -> [u8; 12] { format!("{number:011o}\0").into_bytes().try_into().unwrap() };
    let sparse = header.as_gnu_mut().unwrap();
    sparse.realsize = octal(1 << 20);
    for (place, (offset, length)) in sparse.sparse.iter_mut().zip([(0, 512), (1 << 20, 0)]) {
        (place.offset, place.numbytes) = (octal(offset), octal(length));
    }
    tar.append_data(&mut header, "e.png", &[1; 512][..]).unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    tar.append_data(&mut header, "e.cls", &b"0"[..]).unwrap();
    tar.finish().unwrap();
    let catalog = open(dir.path()).expect("opens");
    assert_eq!(catalog.splits[0].labels.len(), 1);
    let message = broken(&catalog).join("\n");
    for wanted in [
        "has a picture b.png, which is a hard link inside its shard",
        "has a picture c.png, which is a symbolic link inside its shard",
        "d.png has a class in d.cls, which is a hard link inside its shard",
        "has a picture e.png, which is stored as a sparse file",
    ] {
        assert!(message.contains(wanted), "{wanted} is not in {message}");
    }
}

#[test]
fn changed_shards_are_detected_and_touched_shards_are_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join("train.tar");
    fs::copy(fixtures().join("numbers/train-000000.tar"), &shard).unwrap();
    let catalog = open(dir.path()).expect("opens");
    let listing = listing(&catalog.splits[0]);
    let before = listing.picture(2).expect("decodes");
    let mut bytes = fs::read(&shard).unwrap();
    fs::remove_file(&shard).unwrap();
    assert!(listing.read(2).unwrap_err().to_string().contains("cannot be read"));
    fs::write(&shard, &bytes).unwrap();
    assert_eq!(listing.picture(2).expect("decodes"), before, "touched");
    // Changes the third picture's data.
    bytes[512 * 7 * 2 + 512 * 3 + 200] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    assert!(listing.read(1).is_ok(), "another picture of the shard");
    assert_contains(listing.read(2).unwrap_err(), &["000002.jpg has changed since it was first inspected"]);
    fs::write(&shard, &bytes[..2000]).unwrap();
    assert!(listing.read(2).unwrap_err().to_string().contains("its shard now has 2000 bytes"));
}
