//! Rows of events: created from changes, and inserted in batches.

use super::{
    Connection, multi_row,
    webhooks::{self, Notice},
};
use crate::store::{
    EventRow, JobRow, Result, RowContent, points,
    values::{int, json},
};
use jiff::Timestamp;
use lockstep_protocol::{job::JobId, metric::MetricColumn, stream::EventBody};

/// A row to be stored.
pub(super) struct NewRow {
    job: JobId,
    kind: &'static str,
    attempt: u32,
    rank: Option<u32>,
    notice: Option<Box<Notice>>,
    pub(super) row: EventRow,
}

/// Creates the rows of new events of a job. Each event has its own row, except that successive metrics of a rank share a row.
pub(super) fn new_rows(job_row: &mut JobRow, bodies: Vec<EventBody>, at: Timestamp) -> Result<Vec<NewRow>> {
    let notices: Vec<_> = bodies.iter().map(|body| webhooks::create_notice(job_row, body, at)).collect();
    let mut rows = Vec::new();
    let mut points: Option<(u32, u32, Vec<MetricColumn>)> = None;
    let id = job_row.job.id.clone();
    let job_attempt = job_row.job.attempt;
    /// Kind, attempt, rank and content of a row.
    type KindAndContent = (&'static str, u32, Option<u32>, RowContent);
    let mut add = |(kind, attempt, rank, content): KindAndContent, notice| {
        let mut row = EventRow { seq: 0, at, content };
        job_row.job.last_seq += row.count();
        row.seq = job_row.job.last_seq;
        rows.push(NewRow { job: id.clone(), kind, attempt, rank, notice, row });
    };
    let points_content = |(attempt, rank, columns): (u32, u32, Vec<MetricColumn>)| {
        let data = points::encode(&columns);
        ("metrics", attempt, Some(rank), RowContent::Points { attempt, rank, data })
    };
    for (body, notice) in bodies.into_iter().zip(notices) {
        let (kind, rank) = match body {
            EventBody::Metrics { attempt, rank, name, steps, values } => {
                let values = values.into_iter().map(|v| v.unwrap_or(f32::NAN)).collect();
                let column = MetricColumn { name, steps, values };
                match &mut points {
                    Some((last_attempt, last_rank, columns))
                        if (*last_attempt, *last_rank) == (attempt, rank) =>
                    {
                        columns.push(column)
                    }
                    other => {
                        if let Some(previous) = other.replace((attempt, rank, vec![column])) {
                            add(points_content(previous), None);
                        }
                    }
                }
                continue;
            }
            EventBody::State { .. } => ("state", None),
            EventBody::Plan { .. } => ("plan", None),
            EventBody::Log { rank, .. } => ("log", Some(rank)),
            EventBody::Checkpoint { .. } => ("checkpoint", None),
            EventBody::CheckpointRemoved { .. } => ("checkpoint_removed", None),
            EventBody::Evaluation { .. } => ("evaluation", None),
            EventBody::Rank { rank, .. } => ("rank", Some(rank)),
            EventBody::Histograms { .. } => ("histograms", None),
            EventBody::Network { .. } => ("network", None),
            EventBody::Alert { .. } => ("alert", None),
        };
        if let Some(previous) = points.take() {
            add(points_content(previous), None);
        }
        add((kind, job_attempt, rank, RowContent::Body(json(&body)?)), notice);
    }
    if let Some(last) = points {
        add(points_content(last), None);
    }
    Ok(rows)
}

/// Stores rows, and queues messages for webhooks.
pub(super) async fn insert(db: &mut Connection, rows: &[NewRow]) -> Result<()> {
    let text = "INSERT INTO events (job_id, seq, at, kind, attempt, rank, body, points) VALUES {}";
    multi_row::execute(db, text, 8, rows, |query, NewRow { job, kind, attempt, rank, row, .. }| {
        let (body, points) = match &row.content {
            RowContent::Body(body) => (body.as_str(), None),
            RowContent::Points { data, .. } => ("", Some(&data[..])),
        };
        Ok(query
            .bind(job.as_str())
            .bind(int(row.seq))
            .bind(row.at.as_millisecond())
            .bind(*kind)
            .bind(i64::from(*attempt))
            .bind(rank.map(i64::from))
            .bind(body)
            .bind(points))
    })
    .await?;
    let notices: Vec<&Notice> = rows.iter().filter_map(|new| new.notice.as_deref()).collect();
    webhooks::enqueue(db, &notices).await
}
