//! Panels: charts of a job's page that people configure.

use crate::{
    limits::{MAX_PANEL_METRICS, MAX_PANELS, PANEL_TITLE_CHARS},
    metric,
    spec::{SpecError, nearest, shortened},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The largest factor of smoothing.
const MAX_SMOOTHING: f32 = 0.99;
/// The largest width (in columns of the page) and height (in rows) of a panel.
const MAX_SPAN: u8 = 3;
/// Number of vertical axes of a panel: one at each side.
const AXES: usize = 2;

/// Where the panels of a job come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The job has its own panels.
    Job,
    /// The job has no own panels and shows its project's panels.
    Project,
    /// Neither the job nor its project has panels.
    None,
}

/// The panels of a job's page.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct JobPanels {
    pub from: Origin,
    /// In the order on the page.
    pub panels: Vec<Panel>,
}

/// A chart of one or several metrics of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Panel {
    /// Title of the panel, 1 to 80 characters.
    pub title: String,
    /// Names of 1 to 6 different metrics, of at most two quantities. Metrics of the first quantity use the left axis,
    /// the others the right axis.
    pub metrics: Vec<String>,
    /// Which lines to draw for a metric that every rank reports.
    #[serde(default)]
    pub lines: PanelLines,
    /// Width of the panel in columns: 1 to 3 of the page's three columns.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 3)]
    pub columns: u8,
    /// Height of the panel in rows: 1 to 3.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 3)]
    pub rows: u8,
    /// Factor of smoothing: 0 (none) to 0.99.
    #[serde(default)]
    #[schema(minimum = 0.0, maximum = 0.99)]
    pub smoothing: f32,
    /// Whether the axes are logarithmic.
    #[serde(default)]
    pub log: bool,
    /// Whether the axes leave out the highest and the lowest hundredth of the points.
    #[serde(default)]
    pub robust: bool,
    /// Start of the left axis; absent: the lowest point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub y_min: Option<f64>,
    /// End of the left axis; absent: the highest point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub y_max: Option<f64>,
}

/// Which lines to draw for a metric that every rank reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PanelLines {
    /// The mean over the ranks, with a band from the lowest to the highest rank.
    #[default]
    Mean,
    /// A line for each rank; with more than 8 ranks, the mean.
    Ranks,
}

fn one() -> u8 {
    1
}

/// The mistakes in `panels`, each with a JSON pointer to its key. `allows_any_metric`: for runs from elsewhere,
/// which choose the names of their metrics.
pub fn mistakes(panels: &[Panel], allows_any_metric: bool) -> Vec<SpecError> {
    let mut errors = Vec::new();
    if panels.len() > MAX_PANELS {
        let detail = format!("has {} panels; at most {MAX_PANELS} are allowed", panels.len());
        errors.push(SpecError { pointer: "/panels".into(), detail });
        return errors;
    }
    for (index, panel) in panels.iter().enumerate() {
        for (key, detail) in panel.mistakes(allows_any_metric) {
            errors.push(SpecError { pointer: format!("/panels/{index}/{key}"), detail });
        }
    }
    errors
}

impl Panel {
    fn mistakes(&self, allows_any_metric: bool) -> Vec<(&'static str, String)> {
        let mut errors = Vec::new();
        let chars = self.title.chars().count();
        if self.title.trim().is_empty() || chars > PANEL_TITLE_CHARS {
            errors.push((
                "title",
                format!("has {chars} characters; 1 to {PANEL_TITLE_CHARS} visible characters are allowed"),
            ));
        } else if self.title.chars().any(char::is_control) {
            errors.push(("title", "has characters that cannot be shown, such as a line break".into()));
        }
        errors.extend(self.metrics_mistake(allows_any_metric).map(|detail| ("metrics", detail)));
        for (key, span) in [("columns", self.columns), ("rows", self.rows)] {
            if !(1..=MAX_SPAN).contains(&span) {
                errors.push((key, format!("must be 1 to {MAX_SPAN}, is {span}")));
            }
        }
        if !(0.0..=MAX_SMOOTHING).contains(&self.smoothing) {
            errors.push(("smoothing", format!("must be 0 to {MAX_SMOOTHING}, is {}", self.smoothing)));
        }
        if let (Some(low), Some(high)) = (self.y_min, self.y_max)
            && low >= high
        {
            errors.push(("y_max", format!("must be above y_min, which is {low}")));
        }
        for (key, end) in [("y_min", self.y_min), ("y_max", self.y_max)] {
            if self.log && end.is_some_and(|end| end <= 0.0) {
                errors.push((key, "must be above 0 on a logarithmic axis".into()));
            }
        }
        errors
    }

    fn metrics_mistake(&self, allows_any_metric: bool) -> Option<String> {
        let count = self.metrics.len();
        if count == 0 || count > MAX_PANEL_METRICS {
            return Some(format!("has {count} metrics; 1 to {MAX_PANEL_METRICS} are allowed"));
        }
        let mut quantities: Vec<&str> = Vec::new();
        for (index, name) in self.metrics.iter().enumerate() {
            if allows_any_metric {
                if let Some(mistake) = metric::name_mistake(name) {
                    return Some(format!("has the name {:?}: {mistake}", shortened(name)));
                }
            } else if !metric::NAMES.contains(&name.as_str()) {
                let near = nearest(name, metric::NAMES.into_iter());
                let near = near.map_or_else(String::new, |near| format!("; did you mean {near:?}?"));
                return Some(format!("no metric is called {:?}{near}", shortened(name)));
            }
            if self.metrics[..index].contains(name) {
                return Some(format!("has {name} twice"));
            }
            let quantity = metric::quantity(name);
            if !quantities.contains(&quantity) {
                quantities.push(quantity);
            }
        }
        (quantities.len() > AXES).then(|| {
            format!(
                "has {} quantities ({}), and a panel has two axes: put some of them on another panel",
                quantities.len(),
                quantities.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel() -> Panel {
        serde_json::from_str(r#"{"title": "t", "metrics": ["loss"]}"#).unwrap()
    }

    /// The keys in which the panel has mistakes.
    fn bad_keys(panel: Panel) -> Vec<String> {
        mistakes(&[panel], true)
            .into_iter()
            .map(|mistake| mistake.pointer.replace("/panels/0/", ""))
            .collect()
    }

    #[test]
    fn panels_metrics_and_titles_have_limits() {
        assert_eq!(mistakes(&vec![panel(); MAX_PANELS], false), []);
        assert_eq!(mistakes(&vec![panel(); MAX_PANELS + 1], false)[0].pointer, "/panels");
        let with_quantities = |quantities: [&str; 2]| {
            let names = metric::NAMES.into_iter().filter(|name| quantities.contains(&metric::quantity(name)));
            Panel { metrics: names.map(str::to_owned).collect(), ..panel() }
        };
        let (at_limit, beyond) = (with_quantities(["time", "bytes"]), with_quantities(["time", "bytes/s"]));
        assert_eq!(
            (at_limit.metrics.len(), beyond.metrics.len()),
            (MAX_PANEL_METRICS, MAX_PANEL_METRICS + 1)
        );
        assert!(bad_keys(at_limit).is_empty());
        assert_eq!(beyond.metrics_mistake(false).unwrap(), "has 7 metrics; 1 to 6 are allowed");
        assert_eq!(bad_keys(Panel { metrics: Vec::new(), ..panel() }), ["metrics"]);
        for (chars, good) in
            [(0, false), (1, true), (PANEL_TITLE_CHARS, true), (PANEL_TITLE_CHARS + 1, false)]
        {
            assert_eq!(bad_keys(Panel { title: "ä".repeat(chars), ..panel() }).is_empty(), good, "{chars}");
        }
    }

    #[test]
    fn a_panel_has_at_most_two_quantities_and_no_metric_twice() {
        let with_metrics = |names: &[&str]| Panel {
            metrics: names.iter().map(|name| (*name).to_owned()).collect(),
            ..panel()
        };
        assert!(bad_keys(with_metrics(&["loss", "val_loss", "lr"])).is_empty());
        let three = with_metrics(&["loss", "lr", "step_ms"]).metrics_mistake(false).unwrap();
        assert!(three.contains("3 quantities (loss, learning rate, time)"), "{three}");
        assert_eq!(with_metrics(&["loss", "loss"]).metrics_mistake(false).unwrap(), "has loss twice");
        assert!(
            bad_keys(with_metrics(&["train/loss", "val loss", "loss", "lr"])).contains(&"metrics".to_owned())
        );
        // These are names of runs from elsewhere.
        assert!(bad_keys(with_metrics(&["train/loss", "Überlebensrate, %", "loss"])).is_empty());
        assert_eq!(bad_keys(with_metrics(&["a\nb"])), ["metrics"]);
        let unknown = with_metrics(&["los"]).metrics_mistake(false).unwrap();
        assert!(unknown.contains("did you mean \"loss\"?"), "{unknown}");
    }

    #[test]
    fn numbers_of_a_panel_have_limits() {
        for (columns, good) in [(0, false), (1, true), (3, true), (4, false)] {
            assert_eq!(bad_keys(Panel { columns, ..panel() }).is_empty(), good, "{columns}");
            assert_eq!(bad_keys(Panel { rows: columns, ..panel() }).is_empty(), good, "{columns}");
        }
        for (smoothing, good) in [(-0.1, false), (0.0, true), (0.99, true), (0.995, false), (f32::NAN, false)]
        {
            assert_eq!(bad_keys(Panel { smoothing, ..panel() }).is_empty(), good, "{smoothing}");
        }
        let ends = |low, high, log| Panel { y_min: Some(low), y_max: Some(high), log, ..panel() };
        assert!(bad_keys(ends(-1.0, 1.0, false)).is_empty());
        assert_eq!(bad_keys(ends(1.0, 1.0, false)), ["y_max"]);
        assert_eq!(bad_keys(ends(0.0, 1.0, true)), ["y_min"]);
        assert_eq!(bad_keys(Panel { title: "a\nb".into(), ..panel() }), ["title"]);
    }
}
