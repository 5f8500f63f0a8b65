//! Files written by `datasets` and pyarrow (`tests/data/make_parquet.py`), intact and damaged.

use crate::{
    Catalog, Picture,
    index::IndexStore,
    test_catalog::{self, assert_broken, assert_contains, broken, listing, open, png, repository},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn fixtures() -> PathBuf {
    repository("tests/data/parquet")
}

/// A folder with a copy of a fixture.
fn copy_fixture(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("train.parquet");
    fs::copy(fixtures().join(name), &file).unwrap();
    (dir, file)
}

fn assert_samples(catalog: &Catalog, part: &str) {
    test_catalog::assert_samples(catalog, &fixtures(), part, |name, sample| {
        name.ends_with(&format!(".parquet/{}", sample["row"]))
    });
}

#[test]
fn files_of_datasets_are_read_with_class_names() {
    // The repository's folder, the folder of its files, and a pattern.
    for path in ["hub", "hub/data", "hub/data/{train,validation}-0000{0..1}-of-0000{1..2}.parquet"] {
        let catalog = open(&fixtures().join(path)).expect("opens");
        assert_eq!((catalog.format, catalog.classes.join(" ")), ("parquet", "cat dog fox".into()));
        assert_samples(&catalog, "hub");
        // Three of the pattern's eight files exist.
        assert_eq!(broken(&catalog).len(), if path.contains('{') { 5 } else { 0 }, "{:?}", broken(&catalog));
    }
}

#[test]
fn files_of_pyarrow_are_read_with_every_codec_and_encoding() {
    for codec in ["none", "snappy", "gzip", "zstd"] {
        let catalog = open(&fixtures().join(format!("plain/train-{codec}.parquet"))).expect("opens");
        assert_eq!((catalog.splits.len(), broken(&catalog)), (1, vec![]), "{codec}");
        assert_samples(&catalog, "plain");
    }
    let all = open(&fixtures().join("plain")).expect("opens");
    assert_eq!(all.splits[0].labels.len(), 160);
}

#[test]
fn invalid_rows_are_reported_and_other_rows_are_read() {
    let (dir, _) = copy_fixture("odd/rows.parquet");
    let catalog = open(dir.path()).expect("opens");
    assert_eq!(catalog.splits[0].labels, [0, 2]);
    assert!(listing(&catalog.splits[0]).name(1).ends_with("train.parquet/6"));
    assert!(listing(&catalog.splits[0]).picture(1).is_ok());
    let expected = [
        ("1", "has no picture: its bytes are null"),
        ("2", "has no picture: its bytes are null"),
        ("3", "is text, not a"),
        ("4", "has no class"),
        ("5", "has no class"),
    ];
    assert_broken(&catalog, "train.parquet", &expected);
}

#[test]
fn errors_for_missing_columns_list_the_columns_of_the_file() {
    for (name, wanted) in [
        (
            "no-label",
            "no unambiguous column of classes (called label, of whole numbers or text): its columns are image (bytes), id \
             (int64), caption (text)",
        ),
        ("no-picture", "its columns are url (text), label (int64), tags.list.element (list of text)"),
        ("two-pictures", "no unambiguous column of pictures"),
        (
            "brotli",
            "is compressed with brotli, which is not supported; write it with snappy, zstd, gzip or none",
        ),
    ] {
        let (dir, _) = copy_fixture(&format!("odd/{name}.parquet"));
        assert_contains(open(dir.path()).unwrap_err(), &["holds no sample that can be used", wanted]);
    }
}

#[test]
fn files_with_different_class_names_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let hub = fixtures().join("hub/data/train-00000-of-00002.parquet");
    fs::copy(&hub, dir.path().join("train-0.parquet")).unwrap();
    // The same file, except for the name of a class.
    let mut bytes = fs::read(&hub).unwrap();
    let places: Vec<_> = (0..bytes.len() - 5).filter(|i| &bytes[*i..*i + 5] == b"\"fox\"").collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|place| bytes[place + 1..place + 4].copy_from_slice(b"elk"));
    fs::write(dir.path().join("train-1.parquet"), bytes).unwrap();
    assert_contains(open(dir.path()).unwrap_err(), &["train-1.parquet name their classes differently"]);
}

#[test]
fn errors_name_truncated_and_foreign_files() {
    let (dir, file) = copy_fixture("plain/train-none.parquet");
    let whole = fs::read(&file).unwrap();
    for (bytes, wanted) in [
        (&b""[..], "is empty"),
        (b"PAR1", "is cut off: a Parquet file without its footer"),
        (b"not a Parquet file at all", "is not a Parquet file"),
        (b"PARE and so on", "is encrypted"),
        (&whole[..whole.len() - 1], "is cut off: a Parquet file without its footer"),
        (&whole[..whole.len() / 2], "is cut off: a Parquet file without its footer"),
    ] {
        fs::write(&file, bytes).unwrap();
        assert_contains(open(dir.path()).unwrap_err(), &["train.parquet", wanted]);
    }
    // A footer that is longer than the file, of the maximum size, and larger.
    for (length, wanted) in
        [(60_000u32, "is damaged"), (256 << 20, "is damaged"), ((256 << 20) + 1, "has a footer of")]
    {
        let mut bytes = whole.clone();
        let at = bytes.len() - 8;
        bytes[at..at + 4].copy_from_slice(&length.to_le_bytes());
        fs::write(&file, &bytes).unwrap();
        assert_contains(open(dir.path()).unwrap_err(), &[wanted]);
    }
}

#[test]
fn a_damaged_row_group_is_named_and_others_are_read() {
    let (dir, file) = copy_fixture("plain/train-snappy.parquet");
    let mut bytes = fs::read(&file).unwrap();
    let reader = super::ParquetFile::open(&file).unwrap();
    let (start, length) = reader.metadata.row_group(1).column(reader.columns.picture).byte_range();
    bytes[start as usize..(start + length) as usize].fill(0xff);
    fs::write(&file, &bytes).unwrap();
    let catalog = open(dir.path()).expect("opens");
    assert_eq!(catalog.splits[0].labels.len(), 16 + 8);
    let messages = broken(&catalog).join("\n");
    assert_contains(messages, &["train.parquet is damaged", "row group 1, rows 16 to 31"]);
}

/// A picture with changed bytes may still decode; the page's checksum reveals the change.
#[test]
fn a_page_with_a_wrong_checksum_is_damaged() {
    let (dir, file) = copy_fixture("odd/checksums.parquet");
    let whole = open(dir.path()).expect("opens");
    assert_eq!((whole.splits[0].labels.len(), broken(&whole)), (8, vec![]));
    let mut bytes = fs::read(&file).unwrap();
    let pixels = bytes.windows(4).position(|found| found == b"IDAT").expect("a picture") + 10;
    bytes[pixels] ^= 0x10;
    fs::write(&file, &bytes).unwrap();
    assert_contains(open(dir.path()).unwrap_err(), &["damaged", "row group 0"]);
}

/// Changes one bit of every `step`-th byte. The file must be read or refused, without a panic.
fn read_damaged_files(step: usize) {
    for name in
        ["hub/data/train-00001-of-00002.parquet", "plain/train-zstd.parquet", "plain/train-none.parquet"]
    {
        let (dir, file) = copy_fixture(name);
        let whole = fs::read(&file).unwrap();
        for at in (0..whole.len()).step_by(step) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&file, &damaged).unwrap();
            if let Ok(catalog) = open(dir.path()) {
                let listing = listing(&catalog.splits[0]);
                (0..listing.len()).for_each(|i| drop(listing.read(i)));
            }
        }
    }
}

#[test]
fn no_damage_causes_a_panic() {
    read_damaged_files(31);
}

/// `tests/run` skips this test, except `tests/run full`.
mod full {
    #[test]
    fn no_damage_at_more_positions_causes_a_panic() {
        super::read_damaged_files(3);
    }
}

#[test]
fn changed_files_are_detected_and_touched_files_are_accepted() {
    let (dir, file) = copy_fixture("plain/train-none.parquet");
    let catalog = open(dir.path()).expect("opens");
    let listing = listing(&catalog.splits[0]);
    let before: Picture = listing.picture(20).expect("decodes");
    fs::remove_file(&file).unwrap();
    assert!(listing.read(20).unwrap_err().to_string().contains("cannot be read"));
    // The same pictures at other offsets in the file.
    fs::copy(fixtures().join("plain/train-zstd.parquet"), &file).unwrap();
    assert_eq!(listing.picture(20).expect("decodes"), before);
    fs::copy(fixtures().join("odd/rows.parquet"), &file).unwrap();
    assert!(listing.read(20).unwrap_err().to_string().contains("no longer exists: its file now has 7 rows"));
    assert_contains(
        listing.read(3).unwrap_err(),
        &["train.parquet/3 has changed since it was first inspected"],
    );
}

#[test]
fn rows_are_checked_again_after_a_change_of_their_file() {
    let (dir, file) = copy_fixture("plain/train-none.parquet");
    let cache = tempfile::tempdir().unwrap();
    let store = IndexStore::at(cache.path(), 0);
    let first = Catalog::open_with(dir.path(), &store).expect("opens");
    let second = Catalog::open_with(dir.path(), &store).expect("opens");
    assert_eq!(second.fingerprint(dir.path()), first.fingerprint(dir.path()));
    // Overwrites pages, but not the footer.
    let mut bytes = fs::read(&file).unwrap();
    bytes[4..3000].fill(0);
    fs::write(&file, &bytes).unwrap();
    let third = Catalog::open_with(dir.path(), &store).expect("opens");
    assert!(third.splits[0].labels.len() < 40 && !broken(&third).is_empty());
}

/// Writes a file with one picture for each label.
fn write(path: &Path, labels: &[i64]) {
    use ::parquet::{
        data_type::{ByteArray, ByteArrayType, Int64Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };
    let picture = ByteArray::from(png());
    let schema = parse_message_type("message rows { required binary image; required int64 label; }").unwrap();
    let file = fs::File::create(path).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, schema.into(), WriterProperties::builder().build().into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&vec![picture; labels.len()], None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(labels, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn an_unlabelled_test_split_is_omitted_and_reported() {
    use crate::{inspect, loader::DataSource};
    use lockstep_protocol::spec::{DataSpec, Validation};

    let dir = tempfile::tempdir().unwrap();
    let path_of = |split: &str| dir.path().join(format!("{split}-00000-of-00001.parquet"));
    write(&path_of("train"), &[0, 1, 0, 1]);
    write(&path_of("validation"), &[1, 0]);
    write(&path_of("test"), &[-1, -1, -1]);
    let info = inspect(dir.path()).expect("opens");
    assert_eq!((info.splits.len(), info.broken_count, info.unlabelled.join(" ")), (2, 0, "test".into()));
    let note = info.unlabelled_note().expect("a note");
    assert_eq!(
        note,
        "test has no labels and is left out: measure jobs by validation (data.validation = \"validation\")"
    );
    let open = |split: &str| {
        let validation = Validation::Split(split.into());
        DataSource::open(dir.path(), &DataSpec { validation, crop_padding: 0, ..DataSpec::default() }, 0)
    };
    assert_eq!(open("validation").expect("opens").shape.validation_samples, 2);
    assert_contains(
        open("test").expect_err("refused"),
        &["no split \"test\" that has labels; it has train, validation"],
    );
    // A training split is never left out, and neither is a split in which only some samples have no label.
    write(&path_of("test"), &[-1, 0, -1]);
    let info = inspect(dir.path()).expect("opens");
    assert_eq!((info.splits.len(), info.broken_count, info.unlabelled_note()), (3, 2, None));
    write(&path_of("train"), &[-1, -1]);
    let catalog = crate::test_catalog::open(dir.path()).expect("opens");
    assert_eq!((broken(&catalog).len(), catalog.unlabelled.len()), (4, 0));
}
