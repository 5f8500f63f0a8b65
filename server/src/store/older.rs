//! Backups of versions before the tables were put together anew (migrations 1 to 26): their rows, as today's tables take them.
//! The one way over, so that nothing else knows of those versions.

use super::cells::{Cell, Column, Kind, Table};
use super::points;
use lockstep_protocol::{metric::MetricColumn, stream::EventBody};

/// Columns that events had and that no query asked any more.
const GONE: [&str; 3] = ["name", "first_step", "last_step"];

/// A row of a backup as today's tables take it: that of an event of metrics has its points in bytes, where it was JSON.
pub(super) fn as_today(mut table: Table, mut row: Vec<Cell>) -> (Table, Vec<Cell>) {
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
