//! The binary format of a report's points in a row of events.
//!
//! The number of columns, then for each column: the metric (index in [`NAMES`] from 1; or 0, the name's length and the name), the number
//! of steps (0: the steps of the previous column), the differences between successive steps, and the values (float32, little endian).
//! Integers are LEB128.

use super::error::StoreError;
use crate::util::leb128::{Reader, put_number};
use lockstep_protocol::metric::{MetricColumn, NAMES};

/// Encodes columns, none of which is empty.
pub(crate) fn encode(columns: &[MetricColumn]) -> Vec<u8> {
    let mut out = Vec::with_capacity(8 + columns.iter().map(|c| 3 + 5 * c.values.len()).sum::<usize>());
    put_number(&mut out, columns.len() as u64);
    let mut previous_steps: &[u64] = &[];
    for column in columns {
        match NAMES.iter().position(|name| *name == column.name) {
            Some(index) => put_number(&mut out, index as u64 + 1),
            None => {
                put_number(&mut out, 0);
                put_number(&mut out, column.name.len() as u64);
                out.extend(column.name.as_bytes());
            }
        }
        if column.steps == previous_steps {
            put_number(&mut out, 0);
        } else {
            put_number(&mut out, column.steps.len() as u64);
            let mut last = 0;
            for step in &column.steps {
                put_number(&mut out, step.wrapping_sub(last));
                last = *step;
            }
        }
        previous_steps = &column.steps;
        out.extend(column.values.iter().flat_map(|value| value.to_le_bytes()));
    }
    out
}

/// The number of encoded columns; 1 for invalid bytes.
pub(crate) fn column_count(data: &[u8]) -> u64 {
    Reader(data).number().unwrap_or(1).max(1)
}

/// Decodes the columns called `name`, or all. Other columns are skipped without allocations, because a chart shows one metric of many.
pub(crate) fn decode(data: &[u8], name: Option<&str>) -> Result<Vec<MetricColumn>, StoreError> {
    decode_columns(data, name).ok_or_else(|| StoreError::Corrupt("the points of a report".into()))
}

fn decode_columns(data: &[u8], wanted: Option<&str>) -> Option<Vec<MetricColumn>> {
    let mut reader = Reader(data);
    let mut columns = Vec::new();
    let mut steps: Vec<u64> = Vec::new();
    for _ in 0..reader.number()? {
        let name = match usize::try_from(reader.number()?).ok()? {
            0 => {
                let length = usize::try_from(reader.number()?).ok()?;
                std::str::from_utf8(reader.take(length)?).ok()?
            }
            number => *NAMES.get(number - 1)?,
        };
        let count = reader.number()?;
        if count > 0 {
            steps.clear();
            let mut step = 0u64;
            for _ in 0..count {
                step = step.wrapping_add(reader.number()?);
                steps.push(step);
            }
        }
        if steps.is_empty() {
            return None;
        }
        let values = reader.take(steps.len().checked_mul(4)?)?;
        if wanted.is_some_and(|wanted| wanted != name) {
            continue;
        }
        let values = values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        columns.push(MetricColumn { name: name.to_owned(), steps: steps.clone(), values });
    }
    reader.0.is_empty().then_some(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, steps: &[u64]) -> MetricColumn {
        let values = steps.iter().map(|s| *s as f32 / 3.0).collect();
        MetricColumn { name: name.into(), steps: steps.into(), values }
    }

    #[test]
    fn points_are_decoded_and_take_about_five_bytes() {
        let columns = [
            column("loss", &[1, 2, 300]),
            column("accuracy", &[1, 2, 300]),
            column("of another version", &[7, 3, u64::MAX]),
            column("gpu_temperature_celsius", &[1 << 40]),
        ];
        let bytes = encode(&columns);
        assert_eq!((decode(&bytes, None).unwrap(), column_count(&bytes)), (columns.to_vec(), 4));
        for wanted in &columns {
            assert_eq!(decode(&bytes, Some(&wanted.name)).unwrap(), std::slice::from_ref(wanted));
        }
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end], None).is_err(), "cut at {end}");
        }
        assert!(decode(&[&bytes[..], &[0]].concat(), None).is_err());

        let steps: Vec<u64> = (1_000_001..=1_000_010).collect();
        let report: Vec<_> = NAMES[..8].iter().map(|name| column(name, &steps)).collect();
        assert!(encode(&report).len() < 80 * 5, "{}", encode(&report).len());
    }

    /// Rows name metrics by these numbers, so new names go to the end.
    #[test]
    fn the_numbers_of_metrics_do_not_change() {
        assert_eq!(
            NAMES[..25].join(" "),
            "loss accuracy lr grad_norm loss_scale skipped_steps images_per_second step_ms data_ms \
             all_reduce_ms val_loss val_accuracy val_ema_loss val_ema_accuracy gpu_utilization \
             gpu_memory_bytes gpu_power_watts gpu_temperature_celsius cpu_utilization memory_used_bytes \
             disk_used_bytes disk_read_bytes_per_second disk_written_bytes_per_second \
             network_received_bytes_per_second network_sent_bytes_per_second"
        );
    }
}
