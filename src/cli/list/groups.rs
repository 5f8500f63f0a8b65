//! `lockstep list --group-by`: prints groups of jobs with the same properties, and their mean results.

use crate::cli::{
    api::{Api, parse_elements},
    block_on, output,
};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Metrics whose mean is printed for each group.
const METRICS: [&str; 3] = ["best", "loss", "speed"];

#[derive(Deserialize)]
struct Group {
    values: Vec<Value>,
    jobs: u64,
    metrics: BTreeMap<String, MetricSummary>,
}

#[derive(Deserialize)]
struct MetricSummary {
    n: u64,
    mean: Option<f64>,
    std: Option<f64>,
    max: Option<f64>,
}

/// Prints the groups.
///
/// # Errors
/// The server is unreachable, or refuses a property to group by, a filter or a sort order.
pub(super) fn run(
    api: &Api,
    keys: &str,
    mut query: Vec<(&'static str, String)>,
    limit: Option<u32>,
    as_json: bool,
) -> anyhow::Result<()> {
    query.push(("by", keys.to_owned()));
    let mut metrics = METRICS.to_vec();
    // The response must include the metric by which groups are sorted.
    let sort = query.iter().find(|(key, _)| *key == "sort").map(|(_, sort)| sort.clone()).unwrap_or_default();
    let sort_key = sort.trim_start_matches('-');
    if !["", "group", "jobs", "newest"].contains(&sort_key) && !metrics.contains(&sort_key) {
        metrics.push(sort_key);
    }
    query.push(("metrics", metrics.join(",")));
    let groups = block_on(api.read_pages("/jobs/groups", &query, limit))?;
    if as_json {
        return output::json(&groups);
    }
    let groups: Vec<Group> = parse_elements(&groups, "groups");
    if groups.is_empty() {
        return output::line("no job matches");
    }
    output::table(["GROUP", "JOBS", "BEST", "LOSS", "IMAGES/S"], groups.iter().map(row))?;
    output::line(
        "mean ± standard deviation over the jobs that have a value (n is their count, if some jobs have no value)",
    )
}

fn row(group: &Group) -> [String; 5] {
    let value = |value: &Value| match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        // Formats whole numbers without `.0`, as far as floats represent them exactly.
        Value::Number(number) => number
            .as_f64()
            .filter(|n| n.fract() == 0.0 && n.abs() < 1e15)
            .map_or_else(|| number.to_string(), |n| format!("{n:.0}")),
        other => other.to_string(),
    };
    let metric = |name: &str, scale: f64, digits: usize, unit: &str| {
        let summary = group.metrics.get(name);
        let Some((summary, mean)) = summary.and_then(|summary| Some((summary, summary.mean?))) else {
            return String::new();
        };
        let std = summary.std.map(|std| format!(" ± {:.digits$}", std * scale)).unwrap_or_default();
        let n = if summary.n == group.jobs { String::new() } else { format!(" (n = {})", summary.n) };
        format!("{:.digits$}{std}{unit}{n}", mean * scale)
    };
    // With `--sort best`, groups are sorted by their best job, so its value is printed beside the mean.
    let several = group.metrics.get("best").filter(|summary| summary.n > 1);
    let best = several.and_then(|summary| summary.max);
    let best = best.map(|best| format!(", best {:.2} %", 100.0 * best)).unwrap_or_default();
    // Prints as many digits as for the speed of a job.
    let is_slow = |summary: &MetricSummary| summary.mean.is_some_and(|mean| mean < 99.95);
    let digits = usize::from(group.metrics.get("speed").is_some_and(is_slow));
    [
        group.values.iter().map(value).collect::<Vec<_>>().join(", "),
        group.jobs.to_string(),
        metric("best", 100.0, 2, " %") + &best,
        metric("loss", 1.0, 4, ""),
        metric("speed", 1.0, digits, ""),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_group_is_a_row_with_means_and_counts() {
        let group: Group = serde_json::from_value(json!({
            "values": ["resnet20", 0.1, null], "jobs": 3,
            "metrics": {
                "best": {"n": 3, "mean": 0.9, "std": 0.0123, "min": 0.88, "max": 0.91},
                "loss": {"n": 1, "mean": 0.25, "std": null, "min": 0.25, "max": 0.25},
                "speed": {"n": 3, "mean": 5.44, "std": 0.26, "min": 5.2, "max": 5.7},
            },
        }))
        .unwrap();
        assert_eq!(
            row(&group),
            ["resnet20, 0.1, none", "3", "90.00 ± 1.23 %, best 91.00 %", "0.2500 (n = 1)", "5.4 ± 0.3"]
        );
    }
}
