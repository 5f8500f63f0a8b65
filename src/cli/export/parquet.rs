//! `lockstep export parquet`: writes jobs' metrics into a Parquet file.

use crate::cli::{
    api::{Api, ServerArgs},
    block_on, file,
    history::{self, Point},
    output, usage_error,
};
use anyhow::Context;
use parquet::{
    basic::{Compression, ZstdLevel},
    data_type::{ByteArray, ByteArrayType, DataType, FloatType, Int32Type, Int64Type},
    errors::ParquetError,
    file::{
        properties::WriterProperties,
        writer::{SerializedFileWriter, SerializedRowGroupWriter},
    },
    schema::parser::parse_message_type,
};
use serde_json::json;
use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

const SCHEMA: &str = "message metrics {
    REQUIRED BYTE_ARRAY job (UTF8);
    REQUIRED BYTE_ARRAY name (UTF8);
    REQUIRED INT32 attempt;
    REQUIRED INT32 rank;
    REQUIRED BYTE_ARRAY metric (UTF8);
    REQUIRED INT64 step;
    REQUIRED FLOAT value;
}";

/// Write every point of jobs' metrics into a Parquet file: job, name, attempt, rank, metric, step, value
#[derive(clap::Args)]
pub(super) struct Args {
    /// Jobs: an id, the start of an id, or a name
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    /// File for the points; an existing file is replaced
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    server: ServerArgs,
}

/// Writes the file.
///
/// # Errors
/// Exit status 2 if a job does not exist or no job has metrics.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    file::check_output(&args.output)?;
    let api = args.server.api()?;
    let file = args.output.display().to_string();
    let points = file::replace(&args.output, |partial| block_on(write(&api, &args.jobs, partial)));
    let points = points.map_err(|error| match error.downcast() {
        // The error that is in it, such as "No space left on device".
        Ok(ParquetError::External(source)) => anyhow::anyhow!("{file}: {source}"),
        Ok(error) => anyhow::anyhow!("{file}: {error}"),
        Err(error) => error,
    })?;
    let value = json!({"file": file, "points": points});
    output::print(args.server.json, &value, format_args!("{file}: {points} points"))
}

/// Writes a row group for each rank of each job. Returns the number of points.
async fn write(api: &Api, jobs: &[String], path: &Path) -> anyhow::Result<usize> {
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let compression = Compression::ZSTD(ZstdLevel::default());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let out = File::create(path).map_err(|e| usage_error(format!("{}: {e}", path.display())))?;
    let mut writer = SerializedFileWriter::new(out, schema, properties)?;
    let mut point_count = 0;
    for job in jobs {
        let job = api.find_job(job).await?;
        for rank in 0..job.ranks {
            let series = history::read_points(api, job.id.as_str(), rank).await?;
            let mut points: Vec<(&str, Point)> = Vec::new();
            for (name, points_of_metric) in &series {
                points.extend(points_of_metric.iter().map(|point| (name.as_str(), *point)));
            }
            if points.is_empty() {
                continue;
            }
            let repeat = |text: &str| vec![ByteArray::from(text); points.len()];
            let mut group = writer.next_row_group()?;
            write_column::<ByteArrayType>(&mut group, &repeat(job.id.as_str()))?;
            write_column::<ByteArrayType>(&mut group, &repeat(&job.name))?;
            let attempts: Vec<_> = points.iter().map(|(_, point)| point.attempt as i32).collect();
            write_column::<Int32Type>(&mut group, &attempts)?;
            write_column::<Int32Type>(&mut group, &vec![rank as i32; points.len()])?;
            let metrics: Vec<_> = points.iter().map(|(name, _)| ByteArray::from(*name)).collect();
            write_column::<ByteArrayType>(&mut group, &metrics)?;
            let steps: Vec<_> = points.iter().map(|(_, point)| point.step as i64).collect();
            write_column::<Int64Type>(&mut group, &steps)?;
            let values: Vec<_> = points.iter().map(|(_, point)| point.value).collect();
            write_column::<FloatType>(&mut group, &values)?;
            group.close()?;
            point_count += points.len();
        }
    }
    writer.close()?;
    if point_count == 0 { Err(usage_error("there are no metrics yet")) } else { Ok(point_count) }
}

/// Writes the next column of a row group.
fn write_column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
) -> anyhow::Result<()> {
    let mut column = group.next_column()?.context("the schema has no such column")?;
    column.typed::<T>().write_batch(values, None, None)?;
    Ok(column.close()?)
}
