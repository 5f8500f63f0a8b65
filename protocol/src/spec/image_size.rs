//! The size of the network's input: one size for the whole run, or sizes that grow during the run (progressive resizing).

use super::mistake::describe_value;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::RangeInclusive;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ArrayBuilder, RefOr, Schema},
};

/// Maximum number of sizes in a run: an engine keeps memory and plans for each size.
pub const MAX_SIZES: usize = 8;

/// Valid sizes: pixels of a side.
pub const SIDES: RangeInclusive<u32> = 8..=4096;
/// Valid epochs.
const EPOCHS: RangeInclusive<u32> = 1..=100_000;

/// Height and width of the training pictures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ImageSize {
    /// One size in every epoch.
    Fixed(u32),
    /// Each size begins in its epoch: the first in epoch 1, epochs and sizes ascending, at most [`MAX_SIZES`].
    Schedule(Vec<SizeFrom>),
}

/// A size and the epoch in which it begins; in a specification `[epoch, pixels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, u32)", into = "(u32, u32)")]
pub struct SizeFrom {
    /// Counted from 1.
    pub epoch: u32,
    /// Height and width, in pixels.
    pub size: u32,
}

impl From<(u32, u32)> for SizeFrom {
    fn from((epoch, size): (u32, u32)) -> Self {
        Self { epoch, size }
    }
}

impl PartialSchema for SizeFrom {
    fn schema() -> RefOr<Schema> {
        let pair = ArrayBuilder::new().items(u32::schema()).min_items(Some(2)).max_items(Some(2));
        pair.description(Some("An epoch, counted from 1, and the size in pixels that begins in it.")).into()
    }
}

impl ToSchema for SizeFrom {}

impl From<SizeFrom> for (u32, u32) {
    fn from(SizeFrom { epoch, size }: SizeFrom) -> Self {
        (epoch, size)
    }
}

impl From<u32> for ImageSize {
    fn from(size: u32) -> Self {
        ImageSize::Fixed(size)
    }
}

impl ImageSize {
    /// Every size with the epoch, counted from 1, in which it begins.
    pub fn sizes(&self) -> Vec<SizeFrom> {
        match self {
            ImageSize::Fixed(size) => vec![SizeFrom { epoch: 1, size: *size }],
            ImageSize::Schedule(sizes) => sizes.clone(),
        }
    }

    /// The size of the last epoch.
    pub fn last(&self) -> u32 {
        match self {
            ImageSize::Fixed(size) => *size,
            ImageSize::Schedule(sizes) => sizes.last().map_or(0, |last| last.size),
        }
    }
}

/// Checks that `value` is a size or a list of sizes.
///
/// # Errors
/// What is wrong, and what would be right.
pub(super) fn check(value: &Value) -> Result<(), String> {
    let form = "must be a whole number from 8 to 4,096, or a list of pairs [epoch, pixels], each with the epoch from which \
                the size applies, such as [[1, 128], [14, 192]]";
    let within = |value: &Value, range: RangeInclusive<u32>| {
        value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| range.contains(n))
    };
    let list = match value {
        Value::Array(list) => list,
        value if within(value, SIDES).is_some() => return Ok(()),
        // The form of a new job sends text that it cannot read.
        Value::String(_) => {
            return Err(format!(
                "{form} (in the form of a new job: 1: 128, 14: 192); is {}",
                describe_value(value)
            ));
        }
        value => return Err(format!("{form}; is {}", describe_value(value))),
    };
    if !(1..=MAX_SIZES).contains(&list.len()) {
        return Err(format!("must have 1 to {MAX_SIZES} sizes, has {}", list.len()));
    }
    let mut before: Option<SizeFrom> = None;
    for (number, entry) in (1..).zip(list) {
        let [epoch, size] = match (entry.as_array().map(Vec::as_slice), entry.get("epoch"), entry.get("size"))
        {
            (Some([epoch, size]), ..) => [epoch, size],
            (_, Some(epoch), Some(size)) => {
                return Err(format!(
                    "{form}; entry {number} is a table: write [{}, {}]",
                    describe_value(epoch),
                    describe_value(size)
                ));
            }
            _ => return Err(format!("{form}; entry {number} is not [epoch, pixels]")),
        };
        let Some(epoch) = within(epoch, EPOCHS) else {
            return Err(format!(
                "entry {number}: epoch must be a whole number from 1 to 100,000, is {}",
                describe_value(epoch)
            ));
        };
        let Some(size) = within(size, SIDES) else {
            return Err(format!(
                "entry {number}: pixels must be a whole number from 8 to 4,096, is {}",
                describe_value(size)
            ));
        };
        match before {
            None if epoch != 1 => {
                return Err(format!("the first size must begin in epoch 1, begins in {epoch}"));
            }
            Some(before) if epoch <= before.epoch || size <= before.size => {
                return Err(format!(
                    "epochs and sizes must ascend: {size} pixels from epoch {epoch} come after {} from epoch {}",
                    before.size, before.epoch
                ));
            }
            _ => before = Some(SizeFrom { epoch, size }),
        }
    }
    Ok(())
}
