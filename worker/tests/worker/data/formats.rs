//! Formats on disk: CIFAR and IDX files and class folders, whole and damaged.

use super::*;

/// Writes CIFAR-10 files of bundled pictures. The second and the third plane are a half and a third of the grey values.
fn write_cifar(dir: &Path, pictures: usize) {
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(32)), ..DataSpec::default() };
    let source = DataSource::open(&bundled(), &unnormalised(spec), 0).expect("opens");
    let all = validation_batches(&source, pictures);
    for (name, batch) in [("data_batch_1.bin", &all[0]), ("test_batch.bin", &all[1])] {
        let mut file = Vec::new();
        for (label, picture) in batch.labels.iter().zip(batch.images.chunks_exact(1024)) {
            file.push(*label as u8);
            (0..3).for_each(|plane| file.extend(picture.iter().map(|v| v.round() as u8 / (plane + 1))));
        }
        fs::write(dir.join(name), file).expect("writes");
    }
}

#[test]
fn cifar_planes_become_pixels_and_a_truncated_file_is_named() {
    let dir = TempDir::new().expect("a folder");
    let inner = dir.path().join("cifar-10-batches-bin");
    fs::create_dir(&inner).expect("a folder");
    write_cifar(&inner, 100);
    let info = inspect(dir.path()).expect("readable");
    assert_eq!((info.format.as_str(), info.width, info.splits[0].samples), ("cifar10", 32, 100));
    assert!(
        info.mean[0] > 1.8 * info.mean[1] && info.mean[1] > 1.3 * info.mean[2],
        "red, green, blue: {:?}",
        info.mean
    );

    let file = inner.join("data_batch_1.bin");
    let whole = fs::read(&file).expect("readable");
    fs::write(inner.join("data_batch_2.bin"), &whole[..5000]).expect("writes");
    assert_contains(
        &open_error(dir.path(), &DataSpec::default()),
        &["data_batch_2.bin", "5000 bytes", "3073", "broken_files = \"skip\""],
    );
    let skip = DataSpec { broken_files: BrokenFiles::Skip, ..DataSpec::default() };
    let source = DataSource::open(dir.path(), &skip, 0).expect("opens without it");
    assert_eq!((source.shape.train_samples, source.shape.skipped.len()), (100, 1));
    assert_eq!(inspect(dir.path()).expect("readable").broken_count, 1);

    let mut wrong = whole.clone();
    // The label of the second record.
    wrong[3073] = 11;
    fs::write(inner.join("data_batch_2.bin"), wrong).expect("writes");
    assert_contains(&open_error(dir.path(), &DataSpec::default()), &["record 1 has label 11", "0 to 9"]);
}

/// Writes a folder of `per_class` bundled pictures for each of `classes`, alternately as PNG and JPEG files, with `sizes` in turn.
fn write_folder(dir: &Path, split: &str, classes: &[&str], per_class: usize, sizes: &[u32]) {
    let source = DataSource::open(&bundled(), &unnormalised(DataSpec::default()), 0).expect("opens");
    let (rank, world_size, batch_size, threads) = (0, 1, 1, 1);
    let mut pictures = source.validation(rank, world_size, batch_size, threads);
    for (c, class) in classes.iter().enumerate() {
        let home = dir.join(split).join(class);
        fs::create_dir_all(&home).expect("a folder");
        for i in 0..per_class {
            let grey: Vec<u8> = pictures
                .next()
                .expect("a picture")
                .expect("readable")
                .images
                .iter()
                .map(|v| v.round() as u8)
                .collect();
            let picture = image::GrayImage::from_raw(28, 28, grey).expect("28 x 28");
            let size = sizes[(i + c) % sizes.len()];
            let picture = image::imageops::resize(
                &picture,
                size,
                size + (size % 10),
                image::imageops::FilterType::Triangle,
            );
            let name = home.join(format!("{i:04}.{}", if i % 2 == 0 { "png" } else { "jpg" }));
            picture.save(name).expect("writes");
        }
    }
}

#[test]
fn folders_may_contain_pictures_of_any_size() {
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), "train", &["cat", "dog"], 8, &[28, 37, 64]);
    write_folder(dir.path(), "val", &["dog"], 4, &[28]);
    fs::write(dir.path().join("train/cat/Thumbs.db"), b"not a picture, and not called one").expect("writes");
    let info = inspect(dir.path()).expect("readable");
    assert_eq!(
        (info.format.as_str(), info.classes.join(" ").as_str(), info.width, info.channels),
        ("image_folder", "cat dog", 0, 3)
    );
    assert_eq!(
        (info.splits[0].per_class.clone(), info.splits[1].per_class.clone()),
        (vec![8, 8], vec![0, 4])
    );

    assert_contains(
        &open_error(dir.path(), &DataSpec::default()),
        &["no split \"test\"", "train, val", "a fraction"],
    );
    let spec = DataSpec { validation: Validation::Split("val".into()), ..DataSpec::default() };
    assert_contains(&open_error(dir.path(), &spec), &["differ in size", "data.image_size"]);
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(24)), ..spec };
    let source = DataSource::open(dir.path(), &spec, 0).expect("opens");
    let batch = &batches(&source, EpochPlan { batch_size: 16, ..plan(0, 1) })[0];
    assert_eq!((batch.images.len(), batch.labels.iter().sum::<u32>()), (16 * 24 * 24 * 3, 8));
}

#[test]
fn broken_pictures_are_named_counted_and_fatal_or_skipped() {
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), "train", &["cat", "dog"], 8, &[32]);
    let cat = dir.path().join("train/cat");
    fs::write(cat.join("text.jpg"), "I am no picture").expect("writes");
    fs::write(cat.join("empty.png"), "").expect("writes");
    let whole = fs::read(cat.join("0001.jpg")).expect("readable");
    fs::write(cat.join("cut.jpg"), &whole[..whole.len() / 2]).expect("writes");
    let whole = fs::read(cat.join("0000.png")).expect("readable");
    fs::write(cat.join("cut.png"), &whole[..whole.len() / 2]).expect("writes");

    let info = inspect(dir.path()).expect("readable");
    assert_eq!(info.broken_count, 4, "{:?}", info.broken);
    assert_eq!(info.splits[0].per_class, [8, 8]);
    let spec = DataSpec {
        validation: Validation::Fraction(0.25),
        image_size: Some(ImageSize::Fixed(32)),
        ..DataSpec::default()
    };
    assert_contains(
        &open_error(dir.path(), &spec),
        &[
            "4 broken files: train/cat/",
            "text.jpg is text, not a JPEG, PNG, WebP, GIF, BMP or TIFF picture",
            "empty.png is empty",
            "skip",
        ],
    );
    let skip = DataSpec { broken_files: BrokenFiles::Skip, ..spec };
    let shape = DataSource::open(dir.path(), &skip, 0).expect("opens").shape;
    assert_eq!((shape.train_samples + shape.validation_samples, shape.skipped.len()), (16, 4));
    assert_contains(&shape.skipped.join("\n"), &["cut.jpg is cut off", "cut.png is cut off"]);
}

#[test]
fn usual_names_of_splits_are_recognised_in_any_case() {
    for (folders, splits) in [
        (["training", "validation"], ["train", "validation"]),
        (["Train", "Val"], ["train", "val"]),
        (["TRAINING", "Testing"], ["train", "test"]),
        (["train", "Valid"], ["train", "valid"]),
    ] {
        let dir = TempDir::new().expect("a folder");
        write_folder(dir.path(), folders[0], &["cat", "dog"], 4, &[28]);
        write_folder(dir.path(), folders[1], &["dog"], 2, &[28]);
        let info = inspect(dir.path()).expect("readable");
        let found: Vec<_> = info.splits.iter().map(|split| (split.name.as_str(), split.samples)).collect();
        assert_eq!(found, [(splits[0], 8), (splits[1], 2)]);
        let spec = DataSpec {
            validation: Validation::Split(splits[1].into()),
            image_size: Some(ImageSize::Fixed(28)),
            ..DataSpec::default()
        };
        let shape = DataSource::open(dir.path(), &spec, 0).expect("opens").shape;
        assert_eq!((shape.train_samples, shape.validation_samples), (8, 2), "{folders:?}");
        // An evaluation of all training pictures.
        let spec = DataSpec { validation: Validation::Split(splits[0].into()), ..spec };
        let shape = DataSource::open(dir.path(), &spec, 0).expect("opens").shape;
        assert_eq!((shape.train_samples, shape.validation_samples), (8, 8), "{folders:?}");
    }
    let dir = TempDir::new().expect("a folder");
    write_folder(dir.path(), "train", &["cat"], 2, &[28]);
    write_folder(dir.path(), "Training", &["cat"], 2, &[28]);
    let message = inspect(dir.path()).expect_err("two folders of one split").to_string();
    assert_contains(&message, &["a second folder for the split \"train\", ", "merge the two"]);
}

#[test]
fn class_folders_without_a_split_are_training_pictures() {
    // Two class folders, and these empty files beside them.
    let write_with = |others: &[&str]| {
        let dir = TempDir::new().expect("a folder");
        write_folder(dir.path(), ".", &["cat", "dog"], 30, &[28]);
        others.iter().for_each(|other| write(&dir.path().join(other), ""));
        dir
    };
    // Files beside the class folders, and the expected error.
    for (others, expected_error) in [
        (&[][..], None),
        (&["README.md", "lockstep.toml", "lockstep-data/lockstep.db", ".cache/1.jpg"], None),
        (&["notes/about.txt"], Some("notes has no picture: add pictures")),
        (&["test/cat/1.jpg"], Some("it has cat/, dog/, test/; a picture's class is the name of its folder")),
    ] {
        let dir = write_with(others);
        let found = inspect(dir.path());
        let Some(expected_error) = expected_error else {
            let info = found.expect("readable");
            let splits: Vec<_> =
                info.splits.iter().map(|split| (split.name.as_str(), split.samples)).collect();
            assert_eq!((info.classes.join(" ").as_str(), &splits[..]), ("cat dog", &[("train", 60)][..]));
            assert_eq!(info.broken_count, 0);
            // The index was written by the inspection, and is read here.
            let spec = DataSpec {
                validation: Validation::Fraction(0.2),
                image_size: Some(ImageSize::Fixed(28)),
                ..DataSpec::default()
            };
            let shape = DataSource::open(dir.path(), &spec, 0).expect("opens").shape;
            assert_eq!(shape.train_samples + shape.validation_samples, 60, "{others:?}");
            assert!(shape.validation_samples > 0, "{others:?}");
            continue;
        };
        assert_contains(&found.expect_err("no dataset").to_string(), &[expected_error]);
    }
    let dir = write_with(&["loose.jpg"]);
    let info = inspect(dir.path()).expect("readable");
    assert_contains(&info.broken[0].detail, &["is not in a class folder; move it into one"]);
}

#[test]
fn errors_for_folders_without_a_dataset_give_advice() {
    let advice = "put the training pictures of each class directly into a folder train/<class>/, for at least two classes";
    for (files, contents) in [
        (&["train/1.jpg", "val/2.jpg"][..], "it has train/, val/; "),
        (&["1.jpg", "2.png"], "it has 1.jpg, 2.png; "),
        // Folders whose names contain the name of a split are not classes.
        (&["train2017/1.jpg", "val2017/2.jpg"], "it has train2017/, val2017/; "),
        (&["images_train/1.jpg", "testA/2.jpg"], "it has images_train/, testA/; "),
        (&["cat/1.jpg", "dog/notes", "labels.csv"], "it has cat/, dog/, labels.csv; "),
        (&["pictures/cat/1.jpg", "validation/cat/1.jpg"], "it has pictures/, validation/; "),
        (&["a", "b", "c", "d", "e", "f", "g"], "it has a, b, c, d, e and 2 more; "),
        (&[], "the folder is empty; "),
    ] {
        let dir = TempDir::new().expect("a folder");
        files.iter().for_each(|file| write(&dir.path().join(file), ""));
        let message = inspect(dir.path()).expect_err("no dataset").to_string();
        assert_contains(&message, &["holds no known dataset", contents, advice]);
    }
    let dir = TempDir::new().expect("a folder");
    // An archive instead of a folder.
    let archive = dir.path().join("pets.ZIP");
    fs::write(&archive, "PK").expect("writes");
    let message = inspect(&archive).expect_err("no folder").to_string();
    assert_contains(&message, &["pets.ZIP is a zip file; unpack it", "page Datasets"]);
}

#[test]
fn classes_whose_names_differ_in_unicode_normalisation_are_one() {
    let dir = TempDir::new().expect("a folder");
    let (composed, decomposed) = ("caf\u{e9}", "cafe\u{301}");
    write_folder(dir.path(), "train", &[decomposed, "dog"], 4, &[28]);
    write_folder(dir.path(), "val", &[composed], 2, &[28]);
    let info = inspect(dir.path()).expect("readable");
    assert_eq!((info.classes, info.broken_count), (vec![composed.into(), "dog".into()], 0));
    assert_eq!(info.splits[1].per_class, [2, 0]);
    write_folder(dir.path(), "train", &[composed], 4, &[28]);
    let info = inspect(dir.path()).expect("readable");
    assert_eq!((info.splits[0].per_class.as_slice(), info.broken_count), (&[4, 4][..], 1));
    assert_contains(
        &info.broken[0].detail,
        &["in another Unicode normalisation", "put their pictures into one folder"],
    );
}

#[test]
fn errors_name_git_lfs_pointers_in_every_format() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n";
    for file in
        ["train/cat/0.jpg", "train-0.tar", "train-0.parquet", "train-images-idx3-ubyte", "data_batch_1.bin"]
    {
        let dir = TempDir::new().expect("a folder");
        write(&dir.path().join("train-labels-idx1-ubyte"), pointer);
        write(&dir.path().join(file), pointer);
        let spec = DataSpec { validation: Validation::Split("none".into()), ..DataSpec::default() };
        assert_contains(
            &open_error(dir.path(), &spec),
            &[file, " is a Git LFS pointer", "run `git lfs pull`"],
        );
    }
}

#[test]
fn errors_for_missing_datasets_say_what_was_expected() {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path();
    let inspect_error = || inspect(path).expect_err("no dataset").to_string();
    assert_contains(
        &inspect_error(),
        &["data_batch_1.bin", "train-images-idx3-ubyte", "train/<class>/", "is empty"],
    );
    assert_contains(&open_error(&path.join("nowhere"), &DataSpec::default()), &["nowhere does not exist"]);
    fs::write(path.join("data_batch_1"), "pickle").expect("writes");
    assert_contains(&inspect_error(), &["Python version", "binary version"]);
    fs::create_dir_all(path.join("train/cat")).expect("a folder");
    assert_contains(&inspect_error(), &["train/cat has no picture", "add pictures"]);
    fs::remove_dir_all(path.join("train")).expect("removes");
    write_folder(path, "train", &["cat"], 2, &[28]);
    assert_contains(&inspect_error(), &["has one class, \"cat\": there is nothing to tell apart"]);
    write_folder(path, "test", &["dog"], 2, &[28]);
    assert_contains(&inspect_error(), &["test/dog", "training split does not have"]);
    let one_class = TempDir::new().expect("a folder");
    write_folder(one_class.path(), "", &["cat"], 2, &[28]);
    let error = inspect(one_class.path()).expect_err("no dataset").to_string();
    assert_contains(&error, &["it has cat/; ", "for at least two classes"]);
}

#[test]
fn damaged_idx_files_are_named() {
    let dir = TempDir::new().expect("a folder");
    for name in ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"] {
        fs::copy(bundled().join(name), dir.path().join(name)).expect("copies");
    }
    let pictures = dir.path().join("train-images-idx3-ubyte.gz");
    let labels = dir.path().join("train-labels-idx1-ubyte.gz");
    let spec = DataSpec { validation: Validation::Fraction(0.1), ..DataSpec::default() };
    // Without names, classes are numbered.
    assert_eq!(DataSource::open(dir.path(), &spec, 0).expect("opens").shape.classes[3], "3");
    let pack = |bytes: &[u8]| {
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(bytes).expect("packs");
        gz.finish().expect("packs")
    };
    let whole = fs::read(&pictures).expect("readable");
    fs::write(&pictures, &whole[..whole.len() / 2]).expect("writes");
    assert_contains(&open_error(dir.path(), &spec), &["train-images", "cannot be decompressed"]);
    fs::write(&pictures, pack(&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 9, 9])).expect("writes");
    assert_contains(&open_error(dir.path(), &spec), &["2 pictures", "8000 labels"]);
    fs::write(
        &pictures,
        [0, 0, 8, 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
    )
    .expect("writes");
    assert_contains(&open_error(dir.path(), &spec), &["4294967295 pictures", "8000 labels"]);
    fs::copy(&labels, &pictures).expect("copies");
    assert_contains(&open_error(dir.path(), &spec), &["0x00000801", "0x00000803"]);
    // The header of the pictures has the number of labels, but the data is shorter.
    fs::write(&labels, pack(&[0, 0, 8, 1, 0, 0, 0, 2, 0, 1])).expect("writes");
    fs::write(&pictures, pack(&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 9])).expect("writes");
    assert_contains(&open_error(dir.path(), &spec), &["train-images", "[2, 1, 1]", "1 follow"]);
    fs::write(
        &pictures,
        pack(&[&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1][..], &[7; 1 << 20]].concat()),
    )
    .expect("writes");
    assert_contains(&open_error(dir.path(), &spec), &["[2, 1, 1]", "more follow"]);
    fs::write(&pictures, [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]).expect("writes");
    assert_contains(&open_error(dir.path(), &spec), &["[2, 0, 1]", "0 follow"]);
    fs::remove_file(&pictures).expect("removes");
    assert_contains(&open_error(dir.path(), &spec), &["looked for"]);
}

#[test]
fn idx_files_may_be_unpacked_and_splits_have_one_picture_size() {
    let dir = TempDir::new().expect("a folder");
    for entry in fs::read_dir(bundled()).expect("readable") {
        let path = entry.expect("readable").path();
        let name = path.file_name().and_then(|n| n.to_str()).expect("a name");
        let bytes = fs::read(&path).expect("readable");
        match name.strip_suffix(".gz") {
            Some(plain) => {
                let mut unpacked = Vec::new();
                std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&bytes[..]), &mut unpacked)
                    .expect("unpacks");
                fs::write(dir.path().join(plain), unpacked).expect("writes");
            }
            None => fs::write(dir.path().join(name), bytes).expect("writes"),
        }
    }
    let open = |path: &Path| DataSource::open(path, &DataSpec::default(), 5).expect("opens");
    assert!(batches(&open(dir.path()), plan(0, 1)) == batches(&open(&bundled()), plan(0, 1)));

    let test = dir.path().join("t10k-images-idx3-ubyte");
    let mut bytes = fs::read(&test).expect("readable");
    (bytes[11], bytes[15]) = (14, 56);
    fs::write(&test, bytes).expect("writes");
    assert_contains(&open_error(dir.path(), &DataSpec::default()), &["t10k-images", "56 x 14", "28 x 28"]);
}

#[test]
fn larger_pictures_are_scaled_and_other_folders_ignored() {
    let dir = TempDir::new().expect("a folder");
    for (class, rgb) in [("red", [200, 0, 0]), ("green", [0, 200, 0])] {
        let home = dir.path().join("train").join(class);
        fs::create_dir_all(&home).expect("a folder");
        // The sides, which the centred square leaves out, are blue.
        let picture = image::RgbImage::from_fn(300, 100, |x, _| {
            if (100..200).contains(&x) { image::Rgb(rgb) } else { image::Rgb([0, 0, 255]) }
        });
        picture.save(home.join("wide.png")).expect("writes");
    }
    fs::create_dir_all(dir.path().join("notes/of mine")).expect("a folder");
    let spec = unnormalised(DataSpec {
        validation: Validation::Split("none".into()),
        image_size: Some(ImageSize::Fixed(16)),
        crop_padding: 0,
        ..DataSpec::default()
    });
    let source = DataSource::open(dir.path(), &spec, 0).expect("opens");
    let batch = &batches(&source, EpochPlan { batch_size: 2, ..plan(0, 1) })[0];
    assert_eq!(batch.images.len(), 2 * 16 * 16 * 3);
    for (label, picture) in batch.labels.iter().zip(batch.images.chunks_exact(16 * 16 * 3)) {
        // Classes are sorted: green, red.
        let expected = if *label == 0 { [0.0, 200.0, 0.0] } else { [200.0, 0.0, 0.0] };
        for (i, pixel) in picture.chunks_exact(3).enumerate() {
            // Bilinear scaling mixes a little blue into the outermost columns.
            let outermost = [0, 15].contains(&(i % 16));
            let near = |(a, b): (&f32, f32)| (a - b).abs() < 0.01;
            assert!(outermost || pixel.iter().zip(expected).all(near), "{i}: {pixel:?}");
        }
    }
    assert_eq!(validation_batches(&source, 4), []);
    assert_contains(
        &open_error(dir.path(), &DataSpec { image_size: None, ..spec }),
        &["300 x 100", "data.image_size"],
    );
}
