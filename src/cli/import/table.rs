//! Metrics in a CSV or Parquet file: a row has all metrics of a step, or one value.

use super::{Parts, Run, derive_id, file_name};
use crate::cli::usage_error;
use anyhow::Context;
use jiff::{Timestamp, civil::DateTime, tz::TimeZone};
use lockstep_protocol::numbers::plural;
use parquet::{
    file::reader::{FileReader, SerializedFileReader},
    record::Field,
};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    iter,
    path::Path,
};

/// Names of the columns for steps, times and runs, in lower case. Of each list, the first name that a file has is used.
const STEP_COLUMNS: [&str; 5] = ["step", "_step", "global_step", "iteration", "epoch"];
const TIME_COLUMNS: [&str; 5] = ["_timestamp", "timestamp", "wall_time", "wall time", "time"];
const RUN_COLUMNS: [&str; 3] = ["run", "run_id", "job"];

/// Column names and rows.
pub(super) struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Returns the runs in a file. `id` identifies the runs in place of the file's path.
pub(super) fn parts(
    file: &Path,
    id: Option<&str>,
    read: impl Fn(&Path) -> anyhow::Result<Table> + 'static,
) -> anyhow::Result<Parts> {
    if !file.is_file() {
        return Err(usage_error(format!("{}: there is no such file", file.display())));
    }
    let shown = file.display().to_string();
    let path = file.canonicalize().with_context(|| shown.clone())?;
    let identity = id.map_or_else(|| path.to_string_lossy().into_owned(), str::to_owned);
    let read_runs = move || read(&path).and_then(|table| make_runs(&file_name(&path), &identity, &table));
    Ok(Box::new(iter::once_with(move || (shown, read_runs()))))
}

/// Reads a CSV file (RFC 4180).
pub(super) fn read_csv(path: &Path) -> anyhow::Result<Table> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let text = String::from_utf8(bytes).map_err(|_| {
        anyhow::anyhow!(
            "is not CSV, as it is not text (UTF-8); `lockstep import parquet` reads Parquet files"
        )
    })?;
    let mut rows = parse_csv(text.trim_start_matches('\u{feff}'));
    anyhow::ensure!(!rows.is_empty(), "the file is empty");
    Ok(Table { columns: rows.remove(0), rows })
}

/// Parses the rows of CSV. No other part of the program reads CSV of other programs, so it does not depend on a crate for CSV.
fn parse_csv(text: &str) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut cell) = (Vec::new(), Vec::new(), String::new());
    let (mut is_quoted, mut chars) = (false, text.chars().peekable());
    while let Some(c) = chars.next() {
        match c {
            '"' if is_quoted && chars.peek() == Some(&'"') => {
                chars.next();
                cell.push('"');
            }
            '"' if is_quoted || cell.is_empty() => is_quoted = !is_quoted,
            ',' if !is_quoted => row.push(std::mem::take(&mut cell)),
            '\r' if !is_quoted => {}
            '\n' if !is_quoted => {
                row.push(std::mem::take(&mut cell));
                rows.push(std::mem::take(&mut row));
            }
            c => cell.push(c),
        }
    }
    if !cell.is_empty() || !row.is_empty() {
        row.push(cell);
        rows.push(row);
    }
    rows.retain(|row| row.iter().any(|cell| !cell.is_empty()));
    rows
}

/// Reads a Parquet file.
pub(super) fn read_parquet(path: &Path) -> anyhow::Result<Table> {
    let reader = SerializedFileReader::new(File::open(path).with_context(|| path.display().to_string())?)?;
    let mut table = Table { columns: Vec::new(), rows: Vec::new() };
    for row in reader.get_row_iter(None)? {
        let row = row?.into_columns();
        if table.columns.is_empty() {
            table.columns = row.iter().map(|(name, _)| name.clone()).collect();
        }
        let text = |field: &Field| match field {
            Field::Null => String::new(),
            Field::Str(text) => text.clone(),
            Field::Float(value) => value.to_string(),
            Field::Double(value) => value.to_string(),
            // In seconds, like times in other columns.
            Field::TimestampMillis(ms) => (*ms as f64 / 1e3).to_string(),
            Field::TimestampMicros(us) => (*us as f64 / 1e6).to_string(),
            other => other.to_string(),
        };
        table.rows.push(row.iter().map(|(_, field)| text(field)).collect());
    }
    Ok(table)
}

/// Parses seconds or (above 1e11, which as seconds would be after the year 5000) milliseconds since 1970, or an ISO 8601 time (UTC without
/// an offset), as milliseconds since 1970.
fn parse_time(text: &str) -> Option<i64> {
    if let Ok(at) = text.parse::<f64>() {
        return at.is_finite().then_some((if at > 1e11 { at } else { at * 1000.0 }) as i64);
    }
    let at = text.parse::<Timestamp>().or_else(|_| TimeZone::UTC.to_timestamp(text.parse::<DateTime>()?));
    at.ok().map(Timestamp::as_millisecond)
}

fn make_runs(file: &str, identity: &str, table: &Table) -> anyhow::Result<Vec<Run>> {
    anyhow::ensure!(
        !table.rows.is_empty(),
        "the file has no rows below the names of its columns: import it when it has rows"
    );
    let columns: Vec<String> = table.columns.iter().map(|name| name.trim().to_lowercase()).collect();
    let find = |name: &str| columns.iter().position(|column| column == name);
    let find_first = |names: &[&str]| names.iter().find_map(|name| find(name));
    let (step_column, time_column) = (find_first(&STEP_COLUMNS), find_first(&TIME_COLUMNS));
    let (run_column, rank_column) = (find_first(&RUN_COLUMNS), find("rank"));
    let not_metrics = [step_column, time_column, run_column, rank_column];
    // One value per row, as in the output of `lockstep export parquet` and `lockstep metrics --csv`. If `metric` is the column of metrics,
    // `name` is the column of the runs' names.
    let value_column = find("value");
    let has_value_and_step = value_column.is_some() && step_column.is_some();
    let metric_column = find("metric").or_else(|| find("name")).filter(|_| has_value_and_step);
    let name_column = find("name").filter(|name| metric_column.is_some_and(|metric| metric != *name));
    let stem =
        Path::new(file).file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());

    let mut runs_by_key = BTreeMap::<(String, String), Run>::new();
    let mut order = Vec::new();
    for (index, row) in table.rows.iter().enumerate() {
        let cell =
            |column: Option<usize>| column.and_then(|column| row.get(column)).map_or("", |cell| cell.trim());
        let (run_name, rank) = (cell(run_column), cell(rank_column));
        let rank = if rank == "0" { "" } else { rank };
        let key = (run_name.to_owned(), rank.to_owned());
        let run = runs_by_key.entry(key.clone()).or_insert_with(|| {
            let parts = [identity, run_name, rank].map(str::as_bytes);
            let names = [cell(name_column), run_name, stem.as_str()];
            let name = names.into_iter().find(|name| !name.is_empty()).unwrap_or_default();
            let name = if rank.is_empty() { name.to_owned() } else { format!("{name} rank {rank}") };
            order.push(key.clone());
            Run { id: derive_id("table", &parts), name, may_differ: true, ..Run::default() }
        });
        // A row that is appended to the file later must add a record, and must not change an earlier record.
        run.begins_record = true;
        let at = parse_time(cell(time_column));
        run.leave_out("times that cannot be read", u64::from(at.is_none() && !cell(time_column).is_empty()));
        run.started_at = run.started_at.or(at);
        run.ended_at = run.ended_at.max(at);
        let step = match step_column {
            None => Some(index as i64),
            // A step may be written as `12` or as `12.0`.
            Some(_) => {
                let number = cell(step_column).parse::<f64>().ok();
                number.filter(|step| step.fract() == 0.0).map(|step| step as i64)
            }
        };
        let Some(step) = step else {
            run.leave_out("rows without a whole number as step", 1);
            continue;
        };
        if metric_column.is_some() {
            match cell(value_column).parse() {
                Ok(value) => run.add_point(step, at, cell(metric_column), value),
                Err(_) => run.leave_out("values that are not numbers", 1),
            }
            continue;
        }
        let is_metric = |column: usize| !not_metrics.contains(&Some(column));
        for (column, text) in row.iter().enumerate().filter(|(column, _)| is_metric(*column)) {
            let Some(metric) = table.columns.get(column).filter(|_| !text.trim().is_empty()) else {
                continue;
            };
            match text.trim().parse() {
                Ok(value) => run.add_point(step, at, metric.trim(), value),
                Err(_) => run.leave_out("values that are not numbers", 1),
            }
        }
    }
    let runs: Vec<Run> = order.into_iter().filter_map(|key| runs_by_key.remove(&key)).collect();
    anyhow::ensure!(
        runs.iter().any(|run| run.point_count > 0),
        "no number was found below the columns {:?} in {}: separate columns by commas, write numbers such as 0.5, and steps as whole \
         numbers",
        table.columns,
        plural(table.rows.len() as u64, "row")
    );
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(text: &str) -> Vec<Run> {
        let mut rows = parse_csv(text);
        make_runs("losses.csv", "/losses.csv", &Table { columns: rows.remove(0), rows }).unwrap()
    }

    fn records(run: &Run) -> Value {
        serde_json::to_value(&run.records).unwrap()
    }

    #[test]
    fn a_row_has_the_metrics_of_a_step_or_one_value() {
        let wide =
            read("Step,Loss,\"acc, top 1\",note,_timestamp\r\n0,2.5,0.1,x,1700000000.5\r\n10.0,nan,,,\r\n");
        assert_eq!((wide.len(), wide[0].name.as_str(), wide[0].point_count), (1, "losses", 3));
        let expected = json!([
            {"step": 0, "at": 1_700_000_000_500i64, "values": {"Loss": 2.5, "acc, top 1": 0.1}},
            {"step": 10, "values": {"Loss": "NaN"}},
        ]);
        assert_eq!(records(&wide[0]), expected);
        assert_eq!(wide[0].left_out.values().copied().collect::<Vec<_>>(), [1]);
        let exported = read(
            "attempt,rank,name,step,value\n1,0,loss,1,2\n1,1,loss,1,3\n1,0,\"a,\"\"b\"\"\",1,4\n1,0,loss,2,1.5\n",
        );
        let names: Vec<_> = exported.iter().map(|run| run.name.as_str()).collect();
        assert_eq!(names, ["losses", "losses rank 1"]);
        let expected = json!([
            {"step": 1, "values": {"loss": 2.0}},
            {"step": 1, "values": {"a,\"b\"": 4.0}},
            {"step": 2, "values": {"loss": 1.5}},
        ]);
        assert_eq!(records(&exported[0]), expected);
        let several = read("job,name,metric,step,value\nj1,shoes,loss,1,2\nj2,boots,loss,1,3\n");
        assert_eq!(several.iter().map(|run| run.name.as_str()).collect::<Vec<_>>(), ["shoes", "boots"]);
        let times = read("loss,time\n1,2023-11-14T22:13:20.5Z\n2,2023-11-14 22:13:21\n3,noon\n");
        assert_eq!(
            records(&times[0]),
            json!([
                {"step": 0, "at": 1_700_000_000_500i64, "values": {"loss": 1.0}},
                {"step": 1, "at": 1_700_000_001_000i64, "values": {"loss": 2.0}},
                {"step": 2, "values": {"loss": 3.0}},
            ])
        );
        assert_eq!(times[0].left_out["times that cannot be read"], 1);
        // The same file with more rows is the same run.
        let longer = read("a,b\n1,2\n3,4\n");
        assert_eq!(longer[0].id, read("a,b\n1,2\n")[0].id);
        assert_eq!(records(&longer[0])[1]["step"], 1);
    }
}
