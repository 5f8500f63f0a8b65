//! Backups of earlier versions (migrations 1 to 26, and the first form of migration 100): their rows, as today's tables take
//! them. This is the only code for those versions.

use super::cells::{Cell, Column, Kind, Table};
use super::points;
use lockstep_protocol::{metric::MetricColumn, stream::EventBody};

/// Columns that events had and that no query asked any more.
const GONE: [&str; 3] = ["name", "first_step", "last_step"];

/// Table, column and what the column is called today.
const RENAMED: [(&str, &str, &str); 4] = [
    ("annotations", "note", "notes"),
    ("jobs", "token", "fencing_token"),
    ("attempts", "token", "fencing_token"),
    ("metric_sealed", "seq", "watermark"),
];

/// A row of a backup with today's names of its table and columns. The points of a metrics event become bytes where they
/// were JSON.
pub(super) fn as_today(mut table: Table, mut row: Vec<Cell>) -> (Table, Vec<Cell>) {
    for column in &mut table.columns {
        let renamed = RENAMED.iter().find(|(of, old, _)| *of == table.name && *old == column.name);
        if let Some((_, _, name)) = renamed {
            column.name = (*name).into();
        }
    }
    if table.name == "metric_sealed" {
        table.name = "metric_compaction".into();
    }
    if table.name != "events" || !table.columns.iter().any(|column| GONE.contains(&column.name.as_str())) {
        return (table, row);
    }
    let mut kept = table.columns.iter().map(|column| !GONE.contains(&column.name.as_str()));
    row.retain(|_| kept.next().unwrap_or(true));
    table.columns.retain(|column| !GONE.contains(&column.name.as_str()));
    if !table.columns.iter().any(|column| column.name == "points") {
        table.columns.push(Column { name: "points".into(), kind: Kind::Bytes });
        row.push(Cell::Bytes(None));
    }
    let place = |name: &str| table.columns.iter().position(|column| column.name == name);
    let points = match place("body").and_then(|place| row.get(place)) {
        Some(Cell::Text(Some(body))) if body.starts_with("{\"type\":\"metrics\"") => points(body),
        _ => None,
    };
    if let Some((attempt, rank, data)) = points {
        for (name, cell) in [
            ("attempt", Cell::Integer(Some(attempt.into()))),
            ("rank", Cell::Integer(Some(rank.into()))),
            ("body", Cell::Text(Some(String::new()))),
            ("points", Cell::Bytes(Some(data))),
        ] {
            if let Some(to) = place(name).and_then(|place| row.get_mut(place)) {
                *to = cell;
            }
        }
    }
    (table, row)
}

/// Attempt, rank and points of an event of metrics; none of one that cannot be read, which stays as it is.
fn points(body: &str) -> Option<(u32, u32, Vec<u8>)> {
    match serde_json::from_str(body).ok()? {
        EventBody::Metrics { attempt, rank, name, steps, values }
            if !steps.is_empty() && steps.len() == values.len() =>
        {
            let values = values.into_iter().map(|value| value.unwrap_or(f32::NAN)).collect();
            Some((attempt, rank, points::encode(&[MetricColumn { name, steps, values }])))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_columns_of_an_earlier_backup_get_their_names_of_today() {
        let named = |table: &str, columns: &[&str]| {
            let columns = columns.iter().map(|name| Column { name: (*name).into(), kind: Kind::Integer });
            let table = Table { name: table.into(), columns: columns.collect() };
            let row = table.columns.iter().map(|_| Cell::Integer(Some(7))).collect();
            let (table, row) = as_today(table, row);
            assert_eq!(table.columns.len(), row.len());
            let columns: Vec<_> = table.columns.into_iter().map(|column| column.name).collect();
            (table.name, columns.join(" "))
        };
        for (old, today) in [
            (("metric_sealed", ["job_id", "seq"]), ("metric_compaction", "job_id watermark")),
            (("attempts", ["token", "job_id"]), ("attempts", "fencing_token job_id")),
            (("annotations", ["job_id", "note"]), ("annotations", "job_id notes")),
            (("jobs", ["id", "token"]), ("jobs", "id fencing_token")),
            // A name that only means something else elsewhere stays.
            (("checkpoints", ["token", "seq"]), ("checkpoints", "token seq")),
        ] {
            let (table, columns) = named(old.0, &old.1);
            assert_eq!((table.as_str(), columns.as_str()), today);
        }
    }
}
