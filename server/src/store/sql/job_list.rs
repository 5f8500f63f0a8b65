//! The list of jobs: conditions and order as SQL. Only constants become SQL text; values of requests are bound as
//! parameters.

mod groups;

use self::groups::push_group;
use super::{
    super::dialect::{FALSE, POSITION, TRUE, json_is_number, json_number, json_text},
    Db, DbRow, SqlStore,
    jobs::{SELECT_JOBS, SELECT_JOBS_WITH_NOTES, job_row, like_pattern},
    pages::bounded,
};
use crate::store::{
    Comparison, Condition, Cursor, JobFilter, JobSort, Page, Project, Result, SettingValue, SortBy,
    SortValue, StoreError,
    unreadable::readable,
    values::{json, strip_nul, time, uint},
};
use lockstep_protocol::job::JobState;
use sqlx::{QueryBuilder, Row};
use std::collections::BTreeMap;

/// Default number of jobs on a page.
const DEFAULT_PAGE_SIZE: u32 = 50;

/// Number of rows that are parsed before other tasks may run.
const ROWS_PER_YIELD: usize = 32;

/// Total size in bytes of a row's columns of unbounded length.
fn long_columns_bytes(row: &DbRow) -> usize {
    let long = ["spec", "notes", "last", "progress", "external"];
    let length = |name| row.try_get::<Option<&str>, _>(name).ok().flatten().map_or(0, str::len);
    long.into_iter().map(length).sum()
}

/// The type of a column.
#[derive(Clone, Copy, PartialEq)]
enum ColumnType {
    Integer,
    Number,
    Text,
}

/// The sort key as an SQL expression, its type, and whether it may be NULL.
fn sort_expression(sort_by: &SortBy) -> (String, ColumnType, bool) {
    match sort_by {
        SortBy::Created => ("jobs.created_at".into(), ColumnType::Integer, false),
        SortBy::Started => ("jobs.started_at".into(), ColumnType::Integer, true),
        SortBy::Finished => ("jobs.finished_at".into(), ColumnType::Integer, true),
        SortBy::Name => ("jobs.name".into(), ColumnType::Text, false),
        SortBy::State => ("jobs.state".into(), ColumnType::Text, false),
        SortBy::Project => ("jobs.project".into(), ColumnType::Text, false),
        SortBy::Owner => ("jobs.owner".into(), ColumnType::Text, true),
        SortBy::Priority => ("jobs.priority".into(), ColumnType::Integer, false),
        SortBy::Step => ("jobs.step".into(), ColumnType::Integer, false),
        SortBy::Epoch => ("jobs.epoch".into(), ColumnType::Integer, false),
        SortBy::Attempt => ("jobs.attempt".into(), ColumnType::Integer, false),
        SortBy::Ranks => ("jobs.ranks".into(), ColumnType::Integer, false),
        SortBy::Speed => ("jobs.images_per_second".into(), ColumnType::Number, true),
        SortBy::Best => (json_number("jobs.best", &["value"]), ColumnType::Number, true),
        SortBy::Metric(name) => (json_number("jobs.last", &[name]), ColumnType::Number, true),
        SortBy::Tag(_) => {
            let has = |tag: &str| format!("{POSITION}(annotations.tags, sorting.{tag}) > 0");
            let tagged = format!("{} OR {}", has("first_tag"), has("later_tag"));
            (format!("CAST(CASE WHEN {tagged} THEN 1 ELSE 0 END AS BIGINT)"), ColumnType::Integer, false)
        }
        SortBy::Setting { table, key, is_number } => {
            let column_type = if *is_number { ColumnType::Number } else { ColumnType::Text };
            (setting_expression(table, key, *is_number), column_type, true)
        }
    }
}

/// SQL expression for a key of the specification. For a run from elsewhere, the expression reads the run's setting of the same name (`lr`
/// for `train.lr`). `table` and `key` are constants, not text of a request.
fn setting_expression(table: &'static str, key: &'static str, is_number: bool) -> String {
    if (table, key) == ("", "project") {
        // A specification omits the default project.
        return "jobs.project".into();
    }
    let json = if is_number { json_number } else { json_text };
    if table.is_empty() {
        return json("jobs.spec", &[key]);
    }
    let (specified, path) = (json("jobs.spec", &[table, key]), ["config", key]);
    let mut config = json("jobs.external", &path);
    if is_number {
        // An external program may log a text for a setting that is a number in a specification.
        let (text, test) = (json_text("jobs.external", &path), json_is_number("jobs.external", &path));
        let first_characters = "('0', '1', '2', '3', '4', '5', '6', '7', '8', '9', '-', '.')";
        config = format!("CASE WHEN substr({text}, 1, 1) IN {first_characters} AND {test} THEN {config} END");
    }
    format!("CASE WHEN jobs.external IS NULL THEN {specified} ELSE {config} END")
}

/// Adds a condition. A job without the value fulfils only `!=`.
fn push_condition(query: &mut QueryBuilder<Db>, condition: &Condition) {
    let Condition { key, comparison, value } = condition;
    let (mut column, ..) = sort_expression(key);
    if matches!(value, SettingValue::Bool(_)) {
        // Specifications omit some settings that are false.
        column = format!("COALESCE({column}, {FALSE})");
    }
    let or_missing =
        if *comparison == Comparison::NotEqual { format!("{column} IS NULL OR ") } else { String::new() };
    query.push(format!(" AND ({or_missing}{column} {comparison} "));
    match value {
        SettingValue::Number(number) => query.push_bind(*number),
        SettingValue::Text(text) => query.push_bind(strip_nul(text).into_owned()),
        SettingValue::Bool(value) => query.push(if *value { TRUE } else { FALSE }),
    };
    query.push(")");
}

/// Adds a condition: `column`, an SQL expression, contains `text`. The case of letters does not matter.
pub(super) fn push_contains(query: &mut QueryBuilder<Db>, column: &str, text: &str) {
    query.push(format!("lower({column}) LIKE lower(")).push_bind(like_pattern(text)).push(") ESCAPE '!'");
}

/// Adds a condition: the name, a tag or the notes contain `text`.
fn push_text(query: &mut QueryBuilder<Db>, text: &str) -> Result<()> {
    query.push(" AND (");
    push_contains(query, "jobs.name", text);
    query.push(" OR ");
    push_contains(query, "annotations.notes", text);
    // Tags contain no commas.
    if !text.contains(',') {
        // Searches the JSON list without its brackets. Quotation marks in the text are escaped, so a match never extends
        // over two tags.
        let escaped = json(&text)?;
        query.push(" OR ");
        let tags = "substr(annotations.tags, 2, length(annotations.tags) - 2)";
        push_contains(query, tags, escaped.get(1..escaped.len() - 1).unwrap_or_default());
    }
    query.push(")");
    Ok(())
}

/// The two texts that a tag has in the JSON list of a job's tags: as the first tag, and after a comma. Quotation marks in the tag are
/// escaped.
fn tag_patterns(tag: &str) -> Result<[String; 2]> {
    let tag = json(&tag)?;
    Ok([format!("[{tag}"), format!(",{tag}")])
}

/// Adds a condition: the job has this tag.
fn push_tag(query: &mut QueryBuilder<Db>, tag: &str) -> Result<()> {
    let [first, later] = tag_patterns(tag)?;
    query.push(format!(" AND ({POSITION}(annotations.tags, ")).push_bind(first);
    query.push(format!(") > 0 OR {POSITION}(annotations.tags, ")).push_bind(later).push(") > 0)");
    Ok(())
}

/// Binds the tag to sort by once, for all uses in [`sort_expression`].
fn push_sorting(query: &mut QueryBuilder<Db>, sort_by: &SortBy) -> Result<()> {
    if let SortBy::Tag(tag) = sort_by {
        let [first, later] = tag_patterns(tag)?;
        query.push(" CROSS JOIN (SELECT CAST(").push_bind(first).push(" AS TEXT) AS first_tag, CAST(");
        query.push_bind(later).push(" AS TEXT) AS later_tag) AS sorting");
    }
    Ok(())
}

/// Adds `WHERE` for existing jobs that the person or token `seen_by` sees (`None`: all).
pub(super) fn push_visibility(query: &mut QueryBuilder<Db>, seen_by: Option<&str>) {
    query.push(" WHERE jobs.deleted_at IS NULL");
    if let Some(name) = seen_by {
        query
            .push(" AND (jobs.private = 0 OR jobs.owner = ")
            .push_bind(strip_nul(name).into_owned())
            .push(")");
    }
}

/// Adds the conditions of a filter, except its cursor.
fn push_conditions(query: &mut QueryBuilder<Db>, filter: &JobFilter) -> Result<()> {
    push_visibility(query, filter.seen_by.as_deref());
    if let Some(owner) = &filter.owner {
        query.push(" AND jobs.owner = ").push_bind(strip_nul(owner).into_owned());
    }
    if !filter.states.is_empty() {
        query.push(" AND jobs.state IN (");
        let mut states = query.separated(", ");
        for state in &filter.states {
            states.push_bind(state.as_str());
        }
        query.push(")");
    }
    if let Some(name) = filter.name.as_deref().filter(|name| !name.is_empty()) {
        query.push(" AND ");
        push_contains(query, "jobs.name", name);
    }
    if let Some(text) = filter.text.as_deref().filter(|text| !text.is_empty()) {
        push_text(query, text)?;
    }
    for condition in &filter.conditions {
        push_condition(query, condition);
    }
    if let Some(project) = &filter.project {
        query.push(" AND jobs.project = ").push_bind(project.clone());
    }
    for tag in &filter.tags {
        push_tag(query, tag)?;
    }
    push_group(query, &filter.group)?;
    if let Some(after) = filter.created_after {
        query.push(" AND jobs.created_at >= ").push_bind(after.as_millisecond());
    }
    if let Some(before) = filter.created_before {
        query.push(" AND jobs.created_at < ").push_bind(before.as_millisecond());
    }
    Ok(())
}

/// Adds a condition: the job comes after the cursor in the order of `sort`.
fn push_cursor(query: &mut QueryBuilder<Db>, sort: &JobSort, cursor: &Cursor) -> Result<()> {
    let (expression, column_type, is_nullable) = sort_expression(&sort.by);
    let operator = if sort.descending { "<" } else { ">" };
    query.push(" AND (");
    if cursor.value == SortValue::Missing {
        query.push(format!("{expression} IS NULL AND jobs.id {operator} ")).push_bind(cursor.id.clone());
    } else {
        query.push(format!("({expression}, jobs.id) {operator} ("));
        match (&cursor.value, column_type) {
            (SortValue::Integer(value), ColumnType::Integer) => query.push_bind(*value),
            (SortValue::Integer(value), ColumnType::Number) => query.push_bind(*value as f64),
            (SortValue::Number(value), ColumnType::Number) => query.push_bind(*value),
            (SortValue::Text(value), ColumnType::Text) => query.push_bind(value.clone()),
            // The server writes cursors with the right type, so a client has changed this cursor.
            _ => return Err(StoreError::Cursor),
        };
        query.push(", ").push_bind(cursor.id.clone()).push(")");
        if is_nullable {
            query.push(format!(" OR {expression} IS NULL"));
        }
    }
    query.push(")");
    Ok(())
}

fn sort_value(row: &DbRow, column_type: ColumnType) -> Result<SortValue> {
    Ok(match column_type {
        ColumnType::Integer => row.try_get::<Option<i64>, _>("sorted_by")?.map(SortValue::Integer),
        ColumnType::Number => row.try_get::<Option<f64>, _>("sorted_by")?.map(SortValue::Number),
        ColumnType::Text => row.try_get::<Option<String>, _>("sorted_by")?.map(SortValue::Text),
    }
    .unwrap_or(SortValue::Missing))
}

impl SqlStore {
    pub async fn jobs(&self, filter: &JobFilter) -> Result<Page> {
        let limit = if filter.limit == 0 { DEFAULT_PAGE_SIZE } else { filter.limit };
        let (expression, column_type, is_nullable) = sort_expression(&filter.sort.by);
        let order = if filter.sort.descending { "DESC" } else { "ASC" };
        let jobs = if filter.with_notes { SELECT_JOBS_WITH_NOTES } else { SELECT_JOBS };
        let mut query =
            QueryBuilder::new(jobs.replace(" FROM", &format!(", {expression} AS sorted_by FROM")));
        push_sorting(&mut query, &filter.sort.by)?;
        push_conditions(&mut query, filter)?;
        if let Some(cursor) = &filter.cursor {
            push_cursor(&mut query, &filter.sort, cursor)?;
        }
        query.push(" ORDER BY ");
        if is_nullable {
            query.push(format!("{expression} IS NULL, "));
        }
        query.push(format!("{expression} {order}, jobs.id {order} LIMIT ")).push_bind(i64::from(limit) + 1);
        let (rows, reached_size) = bounded(query.build().fetch(&self.reader), long_columns_bytes).await?;
        // Counts rows, not jobs, so that an unreadable job does not end the list.
        let has_more = reached_size || rows.len() > limit as usize;
        let page = &rows[..rows.len().min(limit as usize)];
        let cursor = |row: &DbRow| -> Result<Cursor> {
            Ok(Cursor { value: sort_value(row, column_type)?, id: row.try_get("id")? })
        };
        let next = page.last().filter(|_| has_more).map(cursor).transpose()?;
        let mut jobs = Vec::with_capacity(page.len());
        for part in page.chunks(ROWS_PER_YIELD) {
            jobs.extend(readable(part.iter().map(|row| Ok(job_row(row)?.job))));
            tokio::task::yield_now().await;
        }
        Ok(Page { jobs, next })
    }

    pub async fn count_jobs(&self, filter: &JobFilter) -> Result<u64> {
        let mut query = QueryBuilder::new(
            "SELECT count(*) FROM jobs LEFT JOIN annotations ON annotations.job_id = jobs.id",
        );
        push_conditions(&mut query, filter)?;
        Ok(uint(query.build_query_scalar().fetch_one(&self.reader).await?))
    }

    pub async fn projects(&self, seen_by: Option<&str>) -> Result<Vec<Project>> {
        let mut query = QueryBuilder::new("SELECT project, state, count(*), max(created_at) FROM jobs");
        push_visibility(&mut query, seen_by);
        query.push(" GROUP BY project, state ORDER BY project, state");
        let rows: Vec<(String, String, i64, i64)> = query.build_query_as().fetch_all(&self.reader).await?;
        let mut projects: Vec<Project> = Vec::new();
        let read = |(name, state, count, newest): (String, String, i64, i64)| {
            Ok((name, state.parse::<JobState>().map_err(StoreError::Corrupt)?, uint(count), time(newest)?))
        };
        for (name, state, count, newest_at) in readable(rows.into_iter().map(read)) {
            if projects.last().is_none_or(|project| project.name != name) {
                projects.push(Project { name, jobs: 0, states: BTreeMap::new(), newest_at });
            }
            if let Some(project) = projects.last_mut() {
                project.jobs += count;
                project.states.insert(state.as_str(), count);
                project.newest_at = project.newest_at.max(newest_at);
            }
        }
        Ok(projects)
    }
}
