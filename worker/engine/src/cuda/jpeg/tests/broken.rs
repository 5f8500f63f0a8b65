//! Tests of pictures that neither the device nor the CPU decodes.

use super::*;

/// A JPEG file with a valid header and end, whose scan refers to a missing table: only decoding detects this.
fn undecodable() -> Vec<u8> {
    let mut file = jpeg(&picture(5, 40, 40).into());
    let scan = file.windows(2).position(|marker| marker == [0xff, 0xda]).unwrap();
    file[scan + 6] = 0x33;
    file
}

#[test]
fn errors_name_a_broken_picture_with_any_decoder() {
    for (content, detail) in [
        (None, "03.jpg has changed since it was first inspected"),
        (Some(undecodable()), "03.jpg cannot be decoded"),
    ] {
        let dir = make_dataset(|_| (40, 40));
        let path = dir.path().join("train/all/03.jpg");
        if let Some(content) = &content {
            fs::write(&path, content).unwrap();
        }
        let spec = resized_crops(24);
        let mut data = open(dir.path(), &spec, BatchFormat::Bytes);
        data.set_decoder(Arc::new(HostDecoder::default()));
        if content.is_none() {
            fs::write(&path, "I am no picture").unwrap();
        }
        let failure = data.epoch(PLAN).chain(data.validation(0, 1, 4, 2)).find_map(Result::err);
        let error = failure.expect("an error").to_string();
        assert!(error.contains(detail), "{error}");
    }
}

#[test]
fn broken_pictures_are_replaced_equally_with_any_decoder() {
    let dir = make_dataset(|_| (40, 40));
    let home = dir.path().join("train/all");
    fs::write(home.join("05.jpg"), undecodable()).unwrap();
    let spec = DataSpec { broken_files: BrokenFiles::Skip, ..resized_crops(24) };
    let [on_cores, on_device] = open_both(dir.path(), &spec, BatchFormat::Bytes);
    fs::remove_file(home.join("11.jpg")).unwrap();
    let expected = batches(&on_cores);
    assert!(batches(&on_device) == expected);
    assert!(expected.iter().all(|batch| !batch.indices.contains(&5) && !batch.indices.contains(&11)));
    for data in [&on_cores, &on_device] {
        let (mut broken, count) = data.take_newly_broken();
        broken.sort();
        assert_eq!(count, 2, "{broken:?}");
        assert!(
            broken[0].contains("05.jpg cannot be decoded") && broken[1].contains("11.jpg cannot be read"),
            "{broken:?}"
        );
    }
    let decoded = on_device.decoded().unwrap();
    assert!(decoded.by_device >= 14 && !decoded.given_up, "{decoded:?}");
    // The data source remembers the broken pictures, so no batch fails again.
    let failed = decoded.by_cores.get(&CpuDecodeReason::Failed).copied();
    assert!(batches(&on_device) == expected);
    assert_eq!(on_device.decoded().unwrap().by_cores.get(&CpuDecodeReason::Failed).copied(), failed);
}

#[test]
fn a_damaged_scan_is_found_before_training_with_any_decoder() {
    let dir = make_dataset(|_| (40, 40));
    let path = dir.path().join("train/all/05.jpg");
    let file = fs::read(&path).unwrap();
    // Truncated in the middle, but with an end marker.
    fs::write(&path, [&file[..file.len() / 2], b"\xff\xd9"].concat()).unwrap();
    let spec = resized_crops(24);
    let error = DataSource::open(dir.path(), &spec, 5).unwrap_err().to_string();
    assert!(error.contains("05.jpg is damaged: its data is truncated"), "{error}");
    let spec = DataSpec { broken_files: BrokenFiles::Skip, ..spec };
    let [on_cores, on_device] = open_both(dir.path(), &spec, BatchFormat::Bytes);
    assert_eq!(on_cores.shape.skipped.len(), 1);
    assert!(batches(&on_cores) == batches(&on_device));
}
