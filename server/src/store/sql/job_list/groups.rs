//! Groups of jobs. The server and not the database forms the groups, because a job is in one group for each of its tags, and SQLite has no
//! standard deviation.

use super::{
    super::super::dialect::{FALSE, TRUE},
    super::{Db, DbRow, SqlStore},
    ColumnType, push_conditions, push_tag, setting_expression, sort_expression,
};
use crate::store::{
    GroupBy, GroupRow, GroupValue, JobFilter, Result, RunningStatistics, SettingKind, SortBy,
    values::{json, strip_nul, time},
};
use futures_util::TryStreamExt;
use lockstep_protocol::job::JobState;
use sqlx::{QueryBuilder, Row};
use std::{
    collections::{BTreeMap, HashMap},
    slice,
};

/// SQL expression for a criterion. For tags, the expression is their JSON list, which the caller parses.
fn group_expression(criterion: GroupBy) -> String {
    match criterion {
        GroupBy::Project => "jobs.project".into(),
        GroupBy::Owner => "jobs.owner".into(),
        GroupBy::Tag => "annotations.tags".into(),
        GroupBy::State => "jobs.state".into(),
        GroupBy::Name => "jobs.name".into(),
        GroupBy::Setting { table, key, kind: SettingKind::Bool } => {
            let is_number = false;
            let setting = setting_expression(table, key, is_number);
            format!("CAST(CASE WHEN COALESCE({setting}, {FALSE}) = {TRUE} THEN 1 ELSE 0 END AS BIGINT)")
        }
        GroupBy::Setting { table, key, kind } => setting_expression(table, key, kind == SettingKind::Number),
    }
}

/// Adds conditions: the job is in this group.
pub(super) fn push_group(query: &mut QueryBuilder<Db>, group: &[(GroupBy, GroupValue)]) -> Result<()> {
    for (criterion, value) in group {
        let column = group_expression(*criterion);
        match (criterion, value) {
            (GroupBy::Tag, GroupValue::Text(tag)) => {
                push_tag(query, tag)?;
                continue;
            }
            (GroupBy::Tag, GroupValue::Missing) => query.push(" AND COALESCE(annotations.tags, '[]') = '[]'"),
            (_, GroupValue::Missing) => query.push(format!(" AND {column} IS NULL")),
            (_, GroupValue::Text(text)) => {
                query.push(format!(" AND {column} = ")).push_bind(strip_nul(text).into_owned())
            }
            (_, GroupValue::Number(number)) => query.push(format!(" AND {column} = ")).push_bind(*number),
            (_, GroupValue::Bool(value)) => {
                query.push(format!(" AND {column} = ")).push_bind(i64::from(*value))
            }
        };
    }
    Ok(())
}

/// A job's values of one criterion: one value, or one for each tag.
fn values(row: &DbRow, criterion: GroupBy, column: &str) -> Result<Vec<GroupValue>> {
    let text = || row.try_get::<Option<String>, _>(column);
    let value = match criterion {
        GroupBy::Tag => {
            // Another version may have written a column that is not a list of tags.
            let tags: Vec<String> =
                text()?.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
            if !tags.is_empty() {
                return Ok(tags.into_iter().map(GroupValue::Text).collect());
            }
            None
        }
        GroupBy::Setting { kind: SettingKind::Number, .. } => {
            // Converts -0.0 to 0.0, so that both are in the same group.
            row.try_get::<Option<f64>, _>(column)?.map(|number| GroupValue::Number(number + 0.0))
        }
        GroupBy::Setting { kind: SettingKind::Bool, .. } => {
            Some(GroupValue::Bool(row.try_get::<i64, _>(column)? == 1))
        }
        _ => text()?.map(GroupValue::Text),
    };
    Ok(vec![value.unwrap_or(GroupValue::Missing)])
}

/// The Cartesian product of lists of values.
fn cartesian_product(lists: Vec<Vec<GroupValue>>) -> Vec<Vec<GroupValue>> {
    lists.into_iter().fold(vec![Vec::new()], |prefixes, values| {
        let append =
            |value| prefixes.iter().map(move |prefix| [prefix.as_slice(), slice::from_ref(value)].concat());
        values.iter().flat_map(append).collect()
    })
}

fn metric_value(row: &DbRow, column: &str, column_type: &ColumnType) -> Result<Option<f64>> {
    Ok(match column_type {
        ColumnType::Integer => row.try_get::<Option<i64>, _>(column)?.map(|value| value as f64),
        ColumnType::Number => row.try_get(column)?,
        ColumnType::Text => None,
    })
}

impl SqlStore {
    pub async fn job_groups(
        &self,
        filter: &JobFilter,
        criteria: &[GroupBy],
        metrics: &[SortBy],
        max_groups: usize,
    ) -> Result<Option<Vec<GroupRow>>> {
        let metrics: Vec<_> = metrics.iter().map(sort_expression).collect();
        let group_column =
            |(n, criterion): (usize, &GroupBy)| format!(", {} AS by_{n}", group_expression(*criterion));
        let groups = criteria.iter().enumerate().map(group_column);
        let numbers = metrics.iter().enumerate().map(|(n, (sql, ..))| format!(", {sql} AS metric_{n}"));
        let columns: String = groups.chain(numbers).collect();
        let mut query = QueryBuilder::new(format!(
            "SELECT jobs.state, jobs.created_at{columns} FROM jobs LEFT JOIN annotations ON annotations.job_id = jobs.id"
        ));
        push_conditions(&mut query, filter)?;
        let query = query.build();
        let mut rows = query.fetch(&self.reader);
        let (mut found, mut indices): (Vec<GroupRow>, HashMap<String, usize>) = Default::default();
        while let Some(row) = rows.try_next().await? {
            // Jobs in a state of another version are left out, as in lists.
            let Ok(state) = row.try_get::<String, _>("state")?.parse::<JobState>() else { continue };
            let created_at = time(row.try_get("created_at")?)?;
            let criteria = criteria.iter().enumerate();
            let lists = criteria.map(|(n, criterion)| values(&row, *criterion, &format!("by_{n}")));
            for values in cartesian_product(lists.collect::<Result<_>>()?) {
                let key = json(&values)?;
                let index = *indices.entry(key).or_insert(found.len());
                if index == found.len() {
                    if found.len() == max_groups {
                        return Ok(None);
                    }
                    let metrics = vec![RunningStatistics::default(); metrics.len()];
                    found.push(GroupRow { values, states: BTreeMap::new(), newest_at: created_at, metrics });
                }
                let Some(group) = found.get_mut(index) else { continue };
                group.newest_at = group.newest_at.max(created_at);
                *group.states.entry(state.as_str()).or_default() += 1;
                for (n, (statistics, (_, column_type, _))) in
                    group.metrics.iter_mut().zip(&metrics).enumerate()
                {
                    if let Some(value) = metric_value(&row, &format!("metric_{n}"), column_type)? {
                        statistics.add(value);
                    }
                }
            }
        }
        Ok(Some(found))
    }
}
