//! Log lines of a job.

use super::extract::{Path, Query, count, job_id, search_text};
use crate::{
    app::App,
    error::{Error, Problem, Result},
    handlers::jobs,
    store::{LogFilter, LogPage},
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use lockstep_protocol::{
    agent::LogLine,
    job::Job,
    spec::shortened,
    stream::{Event, EventBody},
};
use serde::{Deserialize, Serialize};
use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};
use utoipa::{IntoParams, ToSchema};

const DEFAULT_EVENTS: u32 = 1000;
const MAX_EVENTS: u32 = 10_000;
/// Events that are read in one query to the database while searching, and for how long to continue.
const SEARCHED: u64 = 50_000;
const SEARCH: Duration = Duration::from_millis(300);

/// Which lines.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogsQuery {
    rank: Option<u32>,
    attempt: Option<u32>,
    /// `next` of the answer before.
    #[serde(default)]
    after: u64,
    /// Only what came before this event.
    before: Option<u64>,
    /// Events to read, each of one line or a few: 1 to 10000; 1000 when absent.
    #[param(minimum = 1, maximum = 10000)]
    limit: Option<u32>,
    /// The newest so many lines, instead: 1 to 10000.
    #[param(minimum = 1, maximum = 10000)]
    tail: Option<u32>,
    /// `text` for the file of all lines that match, whatever `Accept` says: for links.
    format: Option<String>,
    /// Only lines that contain this, at most 200 characters, ignoring case. A long log is searched for a third of a second at a time: `next` continues.
    q: Option<String>,
}

/// Lines in the order in which they were stored.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Logs {
    lines: Vec<Line>,
    /// Give it as `after` to read on, or with `tail` as `before`; null at the end.
    next: Option<u64>,
}

/// A line, and where it is from.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Line {
    /// The event that it came with.
    seq: u64,
    attempt: u32,
    rank: u32,
    #[serde(flatten)]
    line: LogLine,
}

/// Log lines
///
/// As JSON, or with `Accept: text/plain` as a file of all lines that match.
#[utoipa::path(get, path = "/jobs/{id}/logs", tag = "logs", params(("id" = String, Path), LogsQuery),
    responses((status = 200, content((Logs = "application/json"), (String = "text/plain"))), (status = 404, body = Problem), (status = 422, body = Problem)))]
pub(crate) async fn query(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Query(query): Query<LogsQuery>,
) -> Result<Response> {
    search_text("q", query.q.as_deref())?;
    let job = jobs::find(&app, &id).await?;
    let accepts = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if let Some(format) = query.format.as_deref().filter(|format| *format != "text") {
        return Err(Error::BadRequest(format!("format is text or absent, is {:?}", shortened(format))));
    }
    if accepts.starts_with("text/plain") || query.format.is_some() {
        return Ok(plain(app, job.id, query));
    }
    let limit = match query.tail {
        Some(_) => count("tail", query.tail, DEFAULT_EVENTS, MAX_EVENTS)?,
        None => count("limit", query.limit, DEFAULT_EVENTS, MAX_EVENTS)?,
    };
    let newest = query.tail.is_some();
    let filter = LogFilter {
        rank: query.rank,
        attempt: query.attempt,
        after: query.after,
        before: query.before,
        limit,
        newest,
        containing: None,
    };
    if let Some(q) = query.q.as_deref().filter(|q| !q.is_empty()) {
        return Ok(Json(search(&app, &job, filter, q).await?).into_response());
    }
    let LogPage { events, ends, full } = app.store.logs(&job_id(&id)?, &filter).await?;
    let mut next = ends.filter(|_| full).map(|(first, last)| if newest { first } else { last });
    let mut lines = lines(events, query.q.as_deref());
    // Whole events: reading on before the first line's event gives all of it.
    if newest && let Some(beyond) = lines.len().checked_sub(limit as usize).filter(|n| *n > 0) {
        let first = lines[beyond].seq;
        next = Some(first);
        lines.retain(|l| l.seq >= first);
    }
    Ok(Json(Logs { lines, next }).into_response())
}

/// Reads on until `limit` events with such a line are found, the log ends, or a second has passed.
async fn search(app: &App, job: &Job, filter: LogFilter, q: &str) -> Result<Logs> {
    let start = Instant::now();
    let mut filter = LogFilter { containing: Some(q.to_owned()), ..filter };
    let wanted = filter.limit as usize;
    // What has not been searched yet: `low < seq < high`.
    let (mut low, mut high) =
        (filter.after.min(job.last_seq), filter.before.unwrap_or(u64::MAX).min(job.last_seq + 1));
    let mut found: Vec<Line> = Vec::new();
    loop {
        (filter.after, filter.before) = if filter.newest {
            (low.max(high.saturating_sub(SEARCHED)), Some(high))
        } else {
            (low, Some(high.min(low.saturating_add(SEARCHED))))
        };
        let (from, to) = (filter.after, filter.before.unwrap_or(high));
        let LogPage { events, ends, full } = app.store.logs(&job.id, &filter).await?;
        let part = lines(events, Some(q));
        let next = if filter.newest {
            high = ends.filter(|_| full).map_or(from + 1, |(first, _)| first);
            found.splice(0..0, part);
            high
        } else {
            low = ends.filter(|_| full).map_or(to.saturating_sub(1), |(_, last)| last);
            found.extend(part);
            low
        };
        if low + 1 >= high {
            return Ok(Logs { lines: found, next: None });
        }
        if found.len() >= wanted || start.elapsed() > SEARCH {
            return Ok(Logs { lines: found, next: Some(next) });
        }
    }
}

fn lines(events: Vec<Event>, containing: Option<&str>) -> Vec<Line> {
    let containing = containing.map(str::to_lowercase);
    let mut found = Vec::new();
    for Event { seq, body, .. } in events {
        if let EventBody::Log { attempt, rank, lines } = body {
            let wanted = lines
                .into_iter()
                .filter(|l| containing.as_ref().is_none_or(|q| l.text.to_lowercase().contains(q)));
            found.extend(wanted.map(|line| Line { seq, attempt, rank, line }));
        }
    }
    found
}

/// A line each: time, rank, text; with one rank chosen only the text, as in its log file.
fn plain(app: App, job: lockstep_protocol::JobId, query: LogsQuery) -> Response {
    let rank = query.rank.map(|r| format!("-rank{r}")).unwrap_or_default();
    let name = format!("attachment; filename=\"{job}{rank}.log\"");
    let parts = stream::try_unfold(Some(query.after), move |after| {
        let (app, job) = (app.clone(), job.clone());
        let filter = LogFilter {
            rank: query.rank,
            attempt: query.attempt,
            after: after.unwrap_or(0),
            before: query.before,
            limit: DEFAULT_EVENTS,
            newest: false,
            containing: query.q.clone(),
        };
        let containing = query.q.clone();
        async move {
            if after.is_none() {
                return Ok(None);
            }
            let LogPage { events, ends, full } =
                app.store.logs(&job, &filter).await.map_err(std::io::Error::other)?;
            let next = ends.filter(|_| full).map(|(_, last)| last);
            let mut text = String::new();
            for Line { rank, line, .. } in lines(events, containing.as_deref()) {
                let _ = match filter.rank {
                    Some(_) => writeln!(text, "{}", line.text),
                    None => writeln!(text, "{} rank {rank}  {}", line.at, line.text),
                };
            }
            Ok::<_, std::io::Error>(Some((text, next)))
        }
    });
    (
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()), (header::CONTENT_DISPOSITION, name)],
        Body::from_stream(parts),
    )
        .into_response()
}
