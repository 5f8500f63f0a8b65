//! Log lines of a job.

use crate::api::prelude::*;
use crate::{
    api::{
        jobs, large,
        list::{self, Pages},
    },
    http::{
        attachment::attachment,
        extract::{check_count, check_search_text},
    },
    scheduler::Scheduler,
    store::{LogFilter, LogPage, Store, StoreError},
};
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue},
};
use futures_util::stream;
use lockstep_protocol::{
    agent::LogLine,
    job::Job,
    spec::shortened,
    stream::{Event, EventBody},
};
use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

const DEFAULT_LINES: u32 = 1000;
const MAX_LINES: u32 = 10_000;
/// Number of events that each query of a search covers.
const SEARCH_EVENTS: u64 = 50_000;
/// Time after which a search returns the lines found so far.
const SEARCH_TIME: Duration = Duration::from_millis(300);

/// Parameters of `GET /jobs/{id}/logs`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogsQuery {
    rank: Option<u32>,
    attempt: Option<u32>,
    /// Only lines after the event with this number.
    #[serde(default)]
    after: u64,
    /// Only lines before the event with this number.
    before: Option<u64>,
    /// Page size in lines, 1 to 10000 (default 1000). A page contains whole reports of ranks, so it may have fewer lines, or more lines if
    /// it consists of one report. A page also ends after 4 MiB.
    #[param(minimum = 1, maximum = 10000)]
    limit: Option<u32>,
    /// Order of the lines: `seq` for the oldest line first (default), `-seq` for the newest line first.
    sort: Option<String>,
    /// `next_cursor` of the previous page, requested with the same `sort`.
    cursor: Option<String>,
    /// Format of the response: `text` returns a file of all matching lines regardless of the header `Accept`, for use in links.
    format: Option<String>,
    /// Only lines that contain this text of at most 200 characters, ignoring case. Each request searches for at most about a third of a
    /// second; `next_cursor` continues the search.
    q: Option<String>,
}

/// A page of lines, in the order of `sort`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Logs {
    lines: Vec<Line>,
    /// Value of `cursor` for the next page; null at the end.
    next_cursor: Option<String>,
}

/// The lines of a page, oldest first.
struct FoundLines {
    lines: Vec<Line>,
    /// Number of the event at which the next page continues: the page begins after this event, or, with the newest line first, before it.
    /// `None` on the last page.
    next: Option<u64>,
}

impl FoundLines {
    /// Keeps the oldest or newest lines of complete events: at most `limit` lines, unless a single event has more.
    fn limit_to(mut self, limit: usize, keeps_newest: bool) -> Self {
        let count = self.lines.len();
        let (Some(first), Some(last)) = (self.lines.first(), self.lines.last()) else { return self };
        if count <= limit {
            return self;
        }
        // The event of the first line beyond `limit` is left out completely.
        let kept_seqs = if keeps_newest {
            (self.lines[count - limit - 1].seq + 1).min(last.seq)..=last.seq
        } else {
            first.seq..=(self.lines[limit].seq - 1).max(first.seq)
        };
        self.lines.retain(|line| kept_seqs.contains(&line.seq));
        if self.lines.len() < count {
            self.next = Some(if keeps_newest { *kept_seqs.start() } else { *kept_seqs.end() });
        }
        self
    }
}

/// A line and its source.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Line {
    /// Number of the event that has the line.
    seq: u64,
    attempt: u32,
    rank: u32,
    #[serde(flatten)]
    line: LogLine,
}

/// Read log lines
///
/// The response is a page of lines as JSON, or with `Accept: text/plain` a file of all matching lines.
#[utoipa::path(get, path = "/jobs/{id}/logs", tag = "logs", params(("id" = String, Path), LogsQuery),
    responses((status = 200, content((Logs = "application/json"), (String = "text/plain"))), (status = 422, body = Problem)))]
pub(crate) async fn query(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Query(query): Query<LogsQuery>,
) -> Result<Response> {
    check_search_text("q", query.q.as_deref())?;
    let job = jobs::find(&scheduler, &id).await?;
    let accepts = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if let Some(format) = query.format.as_deref().filter(|format| *format != "text") {
        let format = shortened(format);
        return Err(Error::BadRequest(format!("format is {format:?}, but must be text or absent")));
    }
    let order = query.sort.as_deref().unwrap_or("seq");
    let (sort, is_newest_first) = list::split_sort_key(order);
    list::find_known_name("sort", sort, &["seq"])?;
    let limit = check_count("limit", query.limit, DEFAULT_LINES, MAX_LINES)?;
    let pages = Pages::new("logs", order).owned_by("job", job.id.as_str());
    let position: Option<u64> = pages.decode(query.cursor.as_deref())?;
    let LogsQuery { rank, attempt, after, before, .. } = query;
    if accepts.starts_with("text/plain") || query.format.is_some() {
        if query.sort.is_some() || query.cursor.is_some() {
            let detail = "a file of the log has all lines, the oldest first: leave sort and cursor out";
            return Err(Error::BadRequest(detail.into()));
        }
        let (limit, containing) = (DEFAULT_LINES, query.q);
        let filter = LogFilter { rank, attempt, after, before, limit, containing, ..LogFilter::default() };
        return Ok(text_file(scheduler.store.clone(), job, filter));
    }
    let (after, before) = match position {
        None => (after, before),
        Some(seq) if is_newest_first => (after, Some(before.map_or(seq, |before| before.min(seq)))),
        Some(seq) => (after.max(seq), before),
    };
    let selects_newest = is_newest_first;
    let filter = LogFilter { rank, attempt, after, before, limit, selects_newest, containing: None };
    let found = if let Some(q) = query.q.as_deref().filter(|q| !q.is_empty()) {
        search(&*scheduler.store, &job, filter, q).await?
    } else {
        let LogPage { events, range, is_full } = scheduler.store.logs(&job.id, &filter).await?;
        let next = range.filter(|_| is_full).map(|(first, last)| if is_newest_first { first } else { last });
        FoundLines { lines: lines(events, None), next }
    };
    let FoundLines { mut lines, next } = found.limit_to(limit as usize, is_newest_first);
    if is_newest_first {
        lines.reverse();
    }
    let next_cursor = next.map(|next| pages.encode(&next)).transpose()?;
    large::json_response(Logs { lines, next_cursor }).await
}

/// Searches until `limit` matching lines are found, the log ends, or [`SEARCH_TIME`] has passed.
async fn search(store: &dyn Store, job: &Job, filter: LogFilter, q: &str) -> Result<FoundLines> {
    let start = Instant::now();
    let mut filter = LogFilter { containing: Some(q.to_owned()), ..filter };
    let limit = filter.limit as usize;
    // Events with `low < seq < high` are not searched yet.
    let (mut low, mut high) =
        (filter.after.min(job.last_seq), filter.before.unwrap_or(u64::MAX).min(job.last_seq + 1));
    let mut found: Vec<Line> = Vec::new();
    loop {
        let (after, before) = if filter.selects_newest {
            (low.max(high.saturating_sub(SEARCH_EVENTS)), high)
        } else {
            (low, high.min(low.saturating_add(SEARCH_EVENTS)))
        };
        (filter.after, filter.before) = (after, Some(before));
        let LogPage { events, range, is_full } = store.logs(&job.id, &filter).await?;
        let part = lines(events, Some(q));
        let next = if filter.selects_newest {
            high = range.filter(|_| is_full).map_or(after + 1, |(first, _)| first);
            found.splice(0..0, part);
            high
        } else {
            low = range.filter(|_| is_full).map_or(before.saturating_sub(1), |(_, last)| last);
            found.extend(part);
            low
        };
        if low + 1 >= high {
            return Ok(FoundLines { lines: found, next: None });
        }
        if found.len() >= limit || start.elapsed() > SEARCH_TIME {
            return Ok(FoundLines { lines: found, next: Some(next) });
        }
    }
}

/// Returns the log lines of `events`; with `containing`, only lines that contain this text, ignoring case.
fn lines(events: Vec<Event>, containing: Option<&str>) -> Vec<Line> {
    let containing = containing.map(str::to_lowercase);
    let mut found = Vec::new();
    for Event { seq, body, .. } in events {
        if let EventBody::Log { attempt, rank, lines } = body {
            let matching = lines
                .into_iter()
                .filter(|l| containing.as_ref().is_none_or(|q| l.text.to_lowercase().contains(q)));
            found.extend(matching.map(|line| Line { seq, attempt, rank, line }));
        }
    }
    found
}

/// Returns a text file with time, rank and text of each line. If `filter` names a rank, lines have only the text, as in the rank's log
/// file.
fn text_file(store: Arc<dyn Store>, job: Job, filter: LogFilter) -> Response {
    let rank = filter.rank.map(|r| format!("-rank{r}")).unwrap_or_default();
    let name = attachment(&format!("{}{rank}.log", job.name));
    let parts = stream::try_unfold(Some(filter), move |filter| {
        let (store, job) = (store.clone(), job.id.clone());
        async move {
            let Some(filter) = filter else { return Ok(None) };
            let LogPage { events, range, is_full } = store.logs(&job, &filter).await?;
            let mut text = String::new();
            for Line { rank, line, .. } in lines(events, filter.containing.as_deref()) {
                let _ = match filter.rank {
                    Some(_) => writeln!(text, "{}", line.text),
                    None => writeln!(text, "{} rank {rank}  {}", line.at, line.text),
                };
            }
            let next = range.filter(|_| is_full).map(|(_, last)| LogFilter { after: last, ..filter });
            Ok::<_, StoreError>(Some((text, next)))
        }
    });
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    let headers = [(header::CONTENT_TYPE, kind), (header::CONTENT_DISPOSITION, name)];
    (headers, Body::from_stream(parts)).into_response()
}
