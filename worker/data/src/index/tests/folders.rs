//! Unchanged folders are not examined.

use super::*;

/// Sets the modification times of the folders to a time long before any change.
fn backdate(fixture: &Fixture) {
    for entry in fs::read_dir(fixture.data.path().join("train")).unwrap() {
        let folder = fs::File::open(entry.unwrap().path()).unwrap();
        folder.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    }
}

#[test]
fn unchanged_folders_are_skipped_until_a_change_is_found() {
    let fixture = Fixture::new(2, 4);
    // A picture that is changed below, and a file that is not a picture.
    let odd = fixture.picture("class-0001/odd.png");
    image::RgbImage::new(9, 9).save(&odd).unwrap();
    fs::write(fixture.picture("class-0001/notes"), "no picture").unwrap();
    let fingerprint_of = |catalog: &Catalog| catalog.fingerprint(fixture.data.path());
    assert_eq!(counts(&open_trusting_folders(&fixture)), (9, vec![]), "no folder is known yet");
    let before = fingerprint_of(&fixture.open().unwrap());
    fixture.edit_index(|entry| entry.width = 77);
    // Overwriting a file does not change its folder.
    fs::write(&odd, "I am no picture any more").unwrap();
    let catalog = open_trusting_folders(&fixture);
    assert_eq!((counts(&catalog), fingerprint_of(&catalog)), ((9, vec![]), before.clone()));
    let listing = listing(&catalog.splits[0]);
    assert!((0..9).all(|i| listing.dimensions(i).0 == 77), "no file was read");
    assert!((0..8).all(|i| listing.read(i).is_ok()));
    assert_eq!(counts(&open_trusting_folders(&fixture)).0, 9, "unchanged folders are not examined");
    assert_contains(listing.read(8).unwrap_err(), &["odd.png has changed since it was first inspected"]);
    let now = open_trusting_folders(&fixture);
    assert_eq!(counts(&now).0, 8);
    assert!(counts(&now).1[0].contains("odd.png is text") && fingerprint_of(&now) != before, "{now:?}");
    assert_eq!(fingerprint_of(&open_trusting_folders(&fixture)), fingerprint_of(&now));
}

#[test]
fn changes_of_files_are_detected_by_their_folders() {
    let fixture = Fixture::new(3, 4);
    let trusting_counts = || counts(&open_trusting_folders(&fixture));
    // `Fixture::open` examines all files and writes the folder cache.
    let examine_all = || {
        backdate(&fixture);
        assert_eq!(counts(&fixture.open().unwrap()), trusting_counts());
    };
    examine_all();
    image::RgbImage::new(5, 5).save(fixture.picture("class-0001/new.png")).unwrap();
    assert_eq!(trusting_counts().0, 13);
    examine_all();
    fs::remove_file(fixture.picture("class-0002/000003.png")).unwrap();
    assert_eq!(trusting_counts().0, 12);
    examine_all();
    let other = fixture.data.path().join("other");
    fs::write(&other, "not a picture").unwrap();
    fs::rename(&other, fixture.picture("class-0000/000002.png")).unwrap();
    let (pictures, broken) = trusting_counts();
    assert!(pictures == 11 && broken[0].contains("class-0000/000002.png is text"), "{broken:?}");
    examine_all();
    fs::create_dir(fixture.picture("class-0000/inner")).unwrap();
    fs::write(fixture.picture("class-0000/inner/x.png"), "x").unwrap();
    assert_eq!(trusting_counts().1.len(), 2);
    // A folder was removed and another added.
    fs::remove_dir_all(fixture.picture("class-0001")).unwrap();
    fs::create_dir(fixture.picture("class-0009")).unwrap();
    image::RgbImage::new(5, 5).save(fixture.picture("class-0009/a.png")).unwrap();
    let found = open_trusting_folders(&fixture);
    assert_eq!((counts(&found).0, found.classes.join(" ")), (7, "class-0000 class-0002 class-0009".into()));
}

#[test]
fn recently_changed_or_unknown_folders_are_checked() {
    let fixture = Fixture::new(2, 4);
    let store = IndexStore { min_age: Duration::from_secs(3600), ..fixture.store() };
    Catalog::open_with(fixture.data.path(), &store).unwrap();
    let odd = fixture.picture("class-0000/000001.png");
    let rewrite = |side: u32| {
        image::RgbImage::new(side, 3).save(&odd).unwrap();
    };
    let width = || listing(&open_trusting_folders(&fixture).splits[0]).dimensions(1).0;
    // A folder that changed just now could change again with the same time, so it is not cached.
    rewrite(20);
    assert_eq!(width(), 20);
    // The last opening had no minimum age, so it cached the folder, and the change is not noticed.
    rewrite(30);
    assert_eq!(width(), 20, "the folder cache is used");
    // Rebuilds the index, so the saved folder cache no longer belongs to it.
    fixture.open().unwrap();
    let cache = fs::read(fixture.cached_file("folders").unwrap()).unwrap();
    rewrite(40);
    for damaged in [&b"nothing"[..], &cache[..cache.len() / 2], b""] {
        fs::write(fixture.cached_file("folders").unwrap(), damaged).unwrap();
        assert_eq!(width(), 40);
    }
    fs::write(fixture.cached_file("folders").unwrap(), &cache).unwrap();
    assert_eq!(width(), 40, "the folder cache belongs to another index");
}
