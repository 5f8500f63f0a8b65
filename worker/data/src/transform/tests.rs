//! Comparison with torchvision's results for the same pictures and parameters (`tests/pytorch/make_pictures.py`).

use super::op::Op;
use crate::{
    picture::{Area, Picture, Region, Resize},
    test_catalog::repository,
};
use serde::Deserialize;
use std::{collections::BTreeSet, path::PathBuf};

#[derive(Deserialize)]
struct Recorded {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    /// The name of the source picture, without `.png`.
    of: String,
    /// The file with torchvision's result.
    file: String,
    side: u32,
    /// Top, left, height, width.
    resized_crop: Option<[u32; 4]>,
    resize: Option<u32>,
    #[serde(default)]
    op: String,
    #[serde(default)]
    strength: f64,
}

fn folder() -> PathBuf {
    repository("tests/pytorch/fixtures/pictures/transforms")
}

/// The picture in its own colour type: grey or RGB.
fn read(name: &str) -> Picture {
    let picture = image::open(folder().join(name)).unwrap();
    let (width, height) = (picture.width(), picture.height());
    match picture {
        image::DynamicImage::ImageLuma8(grey) => {
            Picture { width, height, channels: 1, pixels: grey.into_raw() }
        }
        other => Picture { width, height, channels: 3, pixels: other.into_rgb8().into_raw() },
    }
}

fn cases() -> Vec<Case> {
    let text = std::fs::read(folder().join("transforms.json")).unwrap();
    serde_json::from_slice::<Recorded>(&text).unwrap().cases
}

fn largest_difference(a: &[u8], b: &[u8]) -> u8 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0)
}

#[test]
fn crops_and_resizes_match_torchvision() {
    let (mut values, mut far_values, mut seen) = (0, 0, 0);
    for case in cases().iter().filter(|case| case.op.is_empty()) {
        let (source, expected) = (read(&format!("{}.png", case.of)), read(&case.file));
        let picture = source.view();
        let area = match (case.resized_crop, case.resize) {
            (Some([top, left, height, width]), _) => Area::Cut(Region { left, top, width, height }),
            (_, Some(resize)) => picture.centre_crop(resize, case.side),
            _ => panic!("{} has no operation", case.file),
        };
        let mut actual = vec![0; expected.pixels.len()];
        Resize::default().run(picture, area, (case.side, case.side), &mut actual);
        let far = actual.iter().zip(&expected.pixels).filter(|(a, b)| a.abs_diff(**b) > 1).count();
        assert!(far * 100 <= actual.len(), "{} of {}: {far} of {} values", case.file, case.of, actual.len());
        seen += 1;
        values += actual.len();
        far_values += far;
    }
    assert!(seen >= 17 && far_values * 1000 <= values, "{far_values} of {values} differ by more than 1");
}

#[test]
fn operations_match_torchvision() {
    let mut names = BTreeSet::new();
    for case in cases().into_iter().filter(|case| !case.op.is_empty()) {
        let m = case.strength;
        let op = match case.op.as_str() {
            "ShearX" => Op::ShearX(m),
            "ShearY" => Op::ShearY(m),
            "TranslateX" => Op::TranslateX(m as i32),
            "TranslateY" => Op::TranslateY(m as i32),
            "Rotate" => Op::Rotate(m),
            "Brightness" => Op::Brightness(1.0 + m),
            "Color" => Op::Saturation(1.0 + m),
            "Contrast" => Op::Contrast(1.0 + m),
            "Sharpness" => Op::Sharpness(1.0 + m),
            "Hue" => Op::Hue(m),
            "Posterize" => Op::Posterize(m as u32),
            "Solarize" => Op::Solarize(m),
            "AutoContrast" => Op::AutoContrast,
            "Equalize" => Op::Equalize,
            other => panic!("{other}"),
        };
        let (mut actual, expected) = (read(&format!("{}.png", case.of)), read(&case.file));
        op.apply(&mut actual.pixels, case.side as usize, actual.channels as usize, &mut vec![7; 3]);
        let difference = largest_difference(&actual.pixels, &expected.pixels);
        assert!(difference == 0, "{op:?} of {}: up to {difference} off ({})", case.of, case.file);
        names.insert(case.op);
    }
    assert_eq!(names.len(), 14);
}
