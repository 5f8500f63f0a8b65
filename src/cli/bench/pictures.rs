//! `lockstep bench --pictures`: measures how fast a dataset's pictures are prepared for training.

use crate::cli::usage_error;
use lockstep_data::loader::{BatchFormat, DataSource, EpochPlan};
use lockstep_protocol::spec::{BrokenFiles, DataSpec, Validation};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Number of pictures in a batch. The threads work on two batches at a time.
const BATCH_SIZE: usize = 128;
/// Number of batches before the measurement, in which buffers grow and the page cache fills.
const WARM_UP_BATCHES: usize = 2;
const MEASURED_TIME: Duration = Duration::from_secs(10);

/// Prepares pictures for 10 s: reads and decodes them, crops them at random like torchvision's `RandomResizedCrop`, and flips them. Does
/// not normalise pictures, because the device normalises them during training.
///
/// # Errors
/// The dataset cannot be read, or is too small to measure.
pub(super) fn run(path: &Path, image_size: u32, threads: usize) -> anyhow::Result<Value> {
    let spec = DataSpec {
        image_size: Some(image_size.into()),
        random_resized_crop: true,
        horizontal_flip: true,
        crop_padding: 0,
        validation: Validation::Split("none".into()),
        broken_files: BrokenFiles::Skip,
        // ImageNet's values. Without values, the dataset's own mean and standard deviation would be computed first.
        mean: Some(vec![0.485, 0.456, 0.406]),
        std: Some(vec![0.229, 0.224, 0.225]),
        ..DataSpec::default()
    };
    let mut data = DataSource::open(path, &spec, 0).map_err(|e| usage_error(e.to_string()))?;
    data.set_format(BatchFormat::Bytes);
    if data.shape.train_samples < (BATCH_SIZE * (WARM_UP_BATCHES + 1)) as u64 {
        return Err(usage_error(format!(
            "{}: {} pictures are too few to measure; {} are enough",
            path.display(),
            data.shape.train_samples,
            BATCH_SIZE * (WARM_UP_BATCHES + 1)
        )));
    }
    let epoch =
        |epoch| data.epoch(EpochPlan { epoch, drop_remainder: true, threads, ..EpochPlan::of(BATCH_SIZE) });
    let mut batches = (0..).flat_map(epoch);
    for batch in batches.by_ref().take(WARM_UP_BATCHES) {
        batch?;
    }
    let (began, mut pictures) = (Instant::now(), 0);
    while began.elapsed() < MEASURED_TIME {
        pictures += batches.next().transpose()?.map_or(0, |batch| batch.labels.len());
    }
    let secs = began.elapsed().as_secs_f64();
    Ok(json!({
        "case": format!("pictures:{image_size}"),
        "threads": threads,
        "pictures": pictures,
        "secs": secs,
        "images_per_second": pictures as f64 / secs,
    }))
}
