//! The section `sweep` of a job file: several settings of one job, and how their trials are compared.

use super::{
    JobSpec,
    check::{check_keys, check_section},
    document::{key_parts, set_key},
    keys::{self, KEYS, SWEEP, Section},
    mistake::{Mistakes, SpecError, describe_value, escaped, shortened, type_of},
    named::words,
    stop::{GOALS, maximizes},
};
use crate::random::Random;
use serde_json::{Map, Value, json};
use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
};
use utoipa::ToSchema;

/// Maximum number of trials of a sweep.
pub const MAX_TRIALS: u32 = keys::MAX_TRIALS as u32;
/// Maximum number of parameters of a sweep.
const MAX_PARAMETERS: usize = 16;
/// The keys of a parameter.
const PARAMETER_KEYS: [&str; 4] = ["values", "min", "max", "distribution"];

/// The values of a trial's parameters, by key path, such as `train.lr`.
pub type Setting = BTreeMap<String, Value>;

words! {
    /// How a sweep chooses settings, and whether it ends trials early.
    pub enum SweepMethod: "method" {
        Grid = "grid",
        Random = "random",
        Asha = "asha",
    }
}

/// The metric by which trials are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SweepMetric {
    /// `val_accuracy` or `val_loss`.
    pub name: &'static str,
    pub maximize: bool,
}

impl SweepMetric {
    /// The value of this metric among the results of a validation.
    pub fn of(self, val_accuracy: Option<f64>, val_loss: Option<f64>) -> Option<f64> {
        if self.name == "val_loss" { val_loss } else { val_accuracy }
    }

    /// Orders two values of the metric: the better one is `Less`. A value that is missing or not finite is the worst.
    pub fn order(self, a: Option<f64>, b: Option<f64>) -> Ordering {
        let cost = |value: Option<f64>| match value.filter(|value| value.is_finite()) {
            Some(value) if self.maximize => -value,
            Some(value) => value,
            None => f64::INFINITY,
        };
        cost(a).total_cmp(&cost(b))
    }
}

/// The values that a parameter may have.
#[derive(Debug, Clone, PartialEq)]
enum Parameter {
    Values(Vec<Value>),
    Range { min: f64, max: f64, is_whole: bool, is_log: bool },
}

/// Trains the job with several settings, each of which is a job of its own (a trial), and compares them by a metric of
/// their validations. Only `lockstep submit` and `POST /api/v1/sweeps` take a file with this section.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub struct SweepSpec {
    /// `grid`: every combination of the values, in the order of nested loops over the parameters sorted by key, with the
    /// last parameter in the innermost loop. `random`: settings drawn with `seed`. `asha`: settings as with `random`;
    /// after each rung only the best 1/`reduction` of the trials continue, and the others end but keep their checkpoints.
    #[schema(value_type = String)]
    pub method: SweepMethod,
    /// The metric by whose best value trials are compared. `name` is `val_accuracy` (when absent) or `val_loss`. `goal` may be absent; it
    /// is `maximize` for the accuracy and `minimize` for the loss.
    #[schema(value_type = Object)]
    pub metric: SweepMetric,
    /// A table for each key of the job file that differs between trials. The table has `values`, a list, or `min` and `max`. If `min` and
    /// `max` are whole numbers, the values are whole numbers. Random values are drawn uniformly; with `distribution = "log"`,
    /// their logarithms are drawn uniformly.
    #[schema(value_type = Object)]
    parameters: BTreeMap<String, Parameter>,
    /// Seed of the settings that `random` and `asha` draw. The same section always gives the same settings.
    pub seed: u64,
    /// Maximum number of trials. Required if a parameter has `min` and `max`; otherwise the default is every
    /// combination, at most 500.
    pub max_trials: Option<u32>,
    /// Maximum number of trials that wait for slots or train at the same time. Default: all.
    pub max_concurrent: Option<u32>,
    /// With `asha`: one in `reduction` trials continues after each rung. The last rung is the end of training. The epoch
    /// of each earlier rung is the epoch of the next rung divided by `reduction`, rounded down.
    pub reduction: u32,
    /// With `asha`: the earliest epoch that may be a rung.
    pub min_epochs: u32,
    /// With `asha`: the maximum number of rungs, including the end of training.
    pub rungs: u32,
}

/// The section `sweep` of a document, and the document without this section. `None` if the document has no such section.
pub fn split_sweep(document: &Value) -> Option<(Value, Value)> {
    document.get("sweep").filter(|section| !section.is_null())?;
    let mut job = document.clone();
    let section = job.as_object_mut()?.remove("sweep")?;
    Some((section, job))
}

/// Reads the section `sweep` of a document.
///
/// # Errors
/// Every mistake in the section.
pub fn read_sweep(section: &Value) -> Result<SweepSpec, Vec<SpecError>> {
    let Value::Object(table) = section else {
        let detail = format!("must be a table of keys, is {}", type_of(section));
        return Err(vec![SpecError { pointer: "/sweep".into(), detail }]);
    };
    let mut found = Vec::new();
    let mut table = table.clone();
    let known_keys: Vec<&str> =
        SWEEP.keys.iter().map(|(key, _)| *key).chain(["metric", "parameters"]).collect();
    check_section(&mut table, &SWEEP, &known_keys, &mut found);
    let errors = &mut Mistakes(&mut found);
    let method = table.get("method").and_then(Value::as_str).and_then(|word| word.parse().ok());
    if method.is_none() {
        errors.add("/sweep/method", "is missing: give \"grid\", \"random\" or \"asha\"");
    }
    let number = |key: &str| table.get(key).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    let sweep = SweepSpec {
        method: method.unwrap_or(SweepMethod::Grid),
        metric: read_metric(table.get("metric"), errors),
        parameters: read_parameters(table.get("parameters"), errors),
        seed: table.get("seed").and_then(Value::as_u64).unwrap_or(0),
        max_trials: number("max_trials"),
        max_concurrent: number("max_concurrent"),
        reduction: number("reduction").unwrap_or(REDUCTION),
        min_epochs: number("min_epochs").unwrap_or(MIN_EPOCHS),
        rungs: number("rungs").unwrap_or(RUNGS),
    };
    if errors.0.is_empty() {
        sweep.check_size(errors);
    }
    if found.is_empty() { Ok(sweep) } else { Err(found) }
}

/// Defaults of the keys `reduction`, `min_epochs` and `rungs`.
pub(super) const REDUCTION: u32 = 3;
pub(super) const MIN_EPOCHS: u32 = 1;
pub(super) const RUNGS: u32 = 5;

fn read_metric(given: Option<&Value>, errors: &mut Mistakes<'_>) -> SweepMetric {
    let mut word = |key: &str, words: [&'static str; 2]| {
        let value = given.and_then(|table| table.get(key))?;
        let found = words.into_iter().find(|word| value == word);
        if found.is_none() {
            let detail = format!("must be {:?} or {:?}, is {}", words[0], words[1], describe_value(value));
            errors.add(&format!("/sweep/metric/{key}"), detail);
        }
        found
    };
    let name = word("name", ["val_accuracy", "val_loss"]).unwrap_or("val_accuracy");
    let goal = word("goal", GOALS);
    let has_unknown_key =
        |table: &Map<String, Value>| table.keys().any(|key| !["name", "goal"].contains(&&**key));
    if given.is_some_and(|value| value.as_object().is_none_or(has_unknown_key)) {
        let detail = "must be a table such as { name = \"val_accuracy\", goal = \"maximize\" }";
        errors.add("/sweep/metric", detail);
    }
    SweepMetric { name, maximize: maximizes(name, goal) }
}

fn read_parameters(given: Option<&Value>, errors: &mut Mistakes<'_>) -> BTreeMap<String, Parameter> {
    let mut parameters = BTreeMap::new();
    match given {
        Some(Value::Object(table)) => {
            for (path, value) in flatten(table, "") {
                let outcome = match value {
                    Value::Object(inner) => {
                        key_parts(&path).and_then(|_| check_path(&path)).and_then(|()| read_parameter(inner))
                    }
                    _ => Err("must be a table with values, or with min and max".into()),
                };
                match outcome {
                    Ok(_) if parameters.contains_key(&path) => {
                        errors.add(&format!("/sweep/parameters/{}", escaped(&path)), "is given twice");
                    }
                    Ok(parameter) => drop(parameters.insert(path, parameter)),
                    Err(detail) => {
                        errors.add(&format!("/sweep/parameters/{}", escaped(&shortened(&path))), detail);
                    }
                }
            }
        }
        Some(other) => errors.add("/sweep/parameters", format!("must be a table, is {}", type_of(other))),
        None => {}
    }
    if errors.0.is_empty() && !(1..=MAX_PARAMETERS).contains(&parameters.len()) {
        let detail = format!(
            "must name 1 to {MAX_PARAMETERS} keys, such as train.lr = {{ values = [0.1, 0.05] }}, names {}",
            parameters.len()
        );
        errors.add("/sweep/parameters", detail);
    }
    parameters
}

/// The parameters of the table at the path `prefix`, by path. TOML reads the quoted `"train.lr"` as one key, and the unquoted `train.lr`
/// as a table in a table. Both name the parameter `train.lr`.
fn flatten<'a>(table: &'a Map<String, Value>, prefix: &str) -> Vec<(String, &'a Value)> {
    let mut parameters = Vec::new();
    for (key, value) in table {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner)
                if !inner.is_empty() && !inner.keys().any(|key| PARAMETER_KEYS.contains(&&**key)) =>
            {
                parameters.extend(flatten(inner, &path));
            }
            _ => parameters.push((path, value)),
        }
    }
    parameters
}

/// Mistakes in the keys and values of a document without its section `sweep`, and in the names of the section's parameters. Combinations
/// are not checked, because trials have other values.
pub fn key_mistakes(section: &Value, job: &Value) -> Vec<SpecError> {
    let mut job = job.clone();
    let parameters = section.get("parameters").and_then(Value::as_object);
    for (path, _) in parameters.into_iter().flat_map(|table| flatten(table, "")) {
        // With null, a known key counts as absent, so only unknown keys are mistakes. A path may have further parts, which lie within the
        // key's value.
        if let Some((owner, rest)) = path.split_once('.') {
            let key = rest.split('.').next().unwrap_or_default();
            let _ = set_key(&mut job, &format!("{owner}.{key}"), Value::Null);
        }
    }
    check_keys(&job)
}

/// Refuses a key without the name of its section, such as `lr` in place of `train.lr`.
fn check_path(path: &str) -> Result<(), String> {
    let has_key = |section: &Section| section.keys.iter().any(|(key, _)| *key == path);
    let is_at_top = |section: &Section| section.name == path || (section.name.is_empty() && has_key(section));
    match KEYS.iter().find(|section| has_key(section)) {
        Some(owner) if !KEYS.iter().any(is_at_top) => {
            Err(format!("no key is called {path:?}: write {}.{path} in its place", owner.name))
        }
        _ => Ok(()),
    }
}

fn read_parameter(table: &Map<String, Value>) -> Result<Parameter, String> {
    if let Some(unknown) = table.keys().find(|key| !PARAMETER_KEYS.contains(&&***key)) {
        return Err(format!(
            "no key is called {:?} here; the keys are {}",
            shortened(unknown),
            PARAMETER_KEYS.join(", ")
        ));
    }
    match (table.get("values"), table.get("min"), table.get("max")) {
        (Some(Value::Array(values)), None, None)
            if (1..=MAX_TRIALS as usize).contains(&values.len()) && !table.contains_key("distribution") =>
        {
            match values.iter().enumerate().find(|(i, value)| values[..*i].contains(value)) {
                Some((_, value)) => Err(format!("has the value {} twice", describe_value(value))),
                None => Ok(Parameter::Values(values.clone())),
            }
        }
        (Some(_), None, None) => {
            Err(format!("values must be a list of 1 to {MAX_TRIALS} values, without distribution"))
        }
        (None, Some(low), Some(high)) => {
            let (Some(min), Some(max)) = (low.as_f64(), high.as_f64()) else {
                return Err("min and max must be numbers".into());
            };
            let is_log = match table.get("distribution").map(|word| word.as_str().unwrap_or_default()) {
                None | Some("uniform") => false,
                Some("log") => true,
                Some(_) => return Err("distribution must be \"uniform\" or \"log\"".into()),
            };
            if min >= max || (is_log && min <= 0.0) {
                let above = if is_log { ", and above 0 with distribution = \"log\"" } else { "" };
                return Err(format!("min must be less than max{above}"));
            }
            Ok(Parameter::Range { min, max, is_whole: low.is_i64() && high.is_i64(), is_log })
        }
        _ => Err("must have values, or min and max".into()),
    }
}

impl SweepSpec {
    /// Refuses a grid with a range, and a sweep without a limit of its number of trials.
    fn check_size(&self, errors: &mut Mistakes<'_>) {
        match (self.method, self.combination_count(), self.max_trials) {
            (SweepMethod::Grid, None, _) => errors.add(
                "/sweep/method",
                "a grid needs values for every parameter; draw from min and max with method = \"random\"",
            ),
            (_, None, None) => errors
                .add("/sweep/max_trials", "is missing: say how many settings are drawn from min and max"),
            (_, Some(count), None) if count > u64::from(MAX_TRIALS) => errors.add(
                "/sweep/max_trials",
                format!(
                    "is missing: the values have more than {MAX_TRIALS} combinations, and a sweep has at most {MAX_TRIALS} trials; \
                     say how many to train"
                ),
            ),
            _ => {}
        }
    }

    /// Checks the sweep against the specification of one of its trials.
    pub fn check_with_trial(&self, trial: &JobSpec) -> Vec<SpecError> {
        let mut found = Vec::new();
        let errors = &mut Mistakes(&mut found);
        // Not checked in `read_sweep`, which must be able to read every stored sweep.
        let SweepMetric { name, maximize } = self.metric;
        if maximize != maximizes(name, None) {
            let detail = format!("must be {:?}, or absent, for {name}", GOALS[usize::from(maximize)]);
            errors.add("/sweep/metric/goal", detail);
        }
        if self.method != SweepMethod::Asha {
            return found;
        }
        if !trial.data.is_validated() {
            let detail = "nothing is validated, so trials cannot be compared: set data.validation";
            errors.add("/sweep/metric", detail);
        }
        // `asha` needs the same epochs and the same validations in every trial.
        let epoch_keys = ["train.epochs", "train.steps", "evaluate.every_epochs"];
        if trial.train.steps.is_some() || epoch_keys.iter().any(|key| self.parameters.contains_key(*key)) {
            let detail = format!(
                "\"asha\" compares trials after the same epochs: give all trials one value of train.epochs and no train.steps, and remove {} \
                 from the sweep's parameters",
                epoch_keys.join(" or ")
            );
            errors.add("/sweep/method", detail);
            return found;
        }
        let rungs = self.rungs_of(trial);
        if rungs.len() < 2 {
            let detail = format!(
                "trials of {} epochs would be compared only at their end: lower min_epochs or reduction, or raise train.epochs",
                trial.train.epochs()
            );
            errors.add("/sweep/min_epochs", detail);
        }
        let every = trial.evaluate.every_epochs;
        if rungs.iter().rev().skip(1).any(|epoch| every == 0 || !epoch.is_multiple_of(every)) {
            let detail =
                format!("trials are compared after epochs {}: validate after each of them", listed(&rungs));
            errors.add("/evaluate/every_epochs", detail);
        }
        found
    }

    /// The epochs after which trials of such a job are compared, ascending; the last is the end of training. Without
    /// `asha` only the end.
    pub fn rungs_of(&self, trial: &JobSpec) -> Vec<u32> {
        let mut rungs = vec![trial.train.epochs()];
        if self.method == SweepMethod::Asha {
            while rungs.len() < self.rungs as usize
                && let Some(last) = rungs.last().copied()
                && last / self.reduction.max(2) >= self.min_epochs.max(1)
            {
                rungs.push(last / self.reduction.max(2));
            }
        }
        rungs.reverse();
        rungs
    }

    /// The number of combinations; `None` if a parameter has a range.
    fn combination_count(&self) -> Option<u64> {
        self.parameters.values().try_fold(1u64, |product, parameter| match parameter {
            Parameter::Values(values) => Some(product.saturating_mul(values.len() as u64)),
            Parameter::Range { .. } => None,
        })
    }

    /// The settings of all trials, in the order in which trials start. A function of the section only.
    pub fn settings(&self) -> Vec<Setting> {
        let max_trials = u64::from(self.max_trials.unwrap_or(MAX_TRIALS).min(MAX_TRIALS));
        let mut random = Random(self.seed);
        match (self.method, self.combination_count()) {
            (SweepMethod::Grid, Some(all)) => {
                (0..all.min(max_trials)).map(|index| self.combination(index)).collect()
            }
            (_, Some(all)) => {
                let (mut seen, mut settings) = (BTreeSet::new(), Vec::new());
                while (settings.len() as u64) < all.min(max_trials) {
                    let index = random.below(all);
                    if seen.insert(index) {
                        settings.push(self.combination(index));
                    }
                }
                settings
            }
            (_, None) => (0..max_trials).map(|_| self.draw(&mut random)).collect(),
        }
    }

    /// The combination with this index, from 0. The last key changes fastest.
    fn combination(&self, mut index: u64) -> Setting {
        let mut setting = Setting::new();
        for (key, parameter) in self.parameters.iter().rev() {
            if let Parameter::Values(values) = parameter {
                let count = values.len() as u64;
                setting.insert(key.clone(), values[(index % count) as usize].clone());
                index /= count;
            }
        }
        setting
    }

    fn draw(&self, random: &mut Random) -> Setting {
        self.parameters.iter().map(|(key, parameter)| (key.clone(), parameter.draw(random))).collect()
    }
}

fn listed(epochs: &[u32]) -> String {
    epochs.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

impl Parameter {
    fn draw(&self, random: &mut Random) -> Value {
        match self {
            Parameter::Values(values) => values[random.below(values.len() as u64) as usize].clone(),
            Parameter::Range { min, max, is_whole, is_log } => {
                // Each whole number gets an interval of length 1, so that `min` and `max` are as likely as the numbers
                // between them. With `log`, the intervals of `min` and `max` have half of this length.
                let (low, high) = if *is_whole && !*is_log { (min - 0.5, max + 0.5) } else { (*min, *max) };
                let fraction = random.unit();
                let drawn = if *is_log {
                    libm::exp(libm::log(low) + fraction * (libm::log(high) - libm::log(low)))
                } else {
                    low + fraction * (high - low)
                };
                if *is_whole {
                    json!(drawn.round().clamp(*min, *max) as i64)
                } else {
                    // Six digits are easier to read and compare than all digits.
                    json!(format!("{drawn:.5e}").parse().unwrap_or(drawn).clamp(*min, *max))
                }
            }
        }
    }
}

/// The document of a trial: the job's document with the values of `setting` set, with these keys and values appended to
/// the name, and with the sweep's id as another tag.
///
/// # Errors
/// A sentence, if a key of the setting lies below a value that is not a table (such as `name.x`).
pub fn trial_document(job: &Value, setting: &Setting, sweep: &str) -> Result<Value, String> {
    let mut document = job.clone();
    let mut name = job.get("name").and_then(Value::as_str).unwrap_or("untitled").to_owned();
    for (path, value) in setting {
        set_key(&mut document, path, value.clone())?;
        let last_part = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
        let is_unique = setting.keys().filter(|other| last_part(other) == last_part(path)).count() == 1;
        let key = if is_unique { last_part(path) } else { path.clone() };
        let words = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        name = format!("{name} {key}={words}");
    }
    if let Value::Object(table) = &mut document {
        table.insert("name".into(), name.into());
        // If `tags` is not a list, the check reports that.
        if let Value::Array(tags) = table.entry("tags").or_insert_with(|| json!([])) {
            tags.push(sweep.into());
        }
    }
    Ok(document)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::toml_document;

    fn read(toml: &str) -> Result<SweepSpec, Vec<SpecError>> {
        read_sweep(&toml_document(toml).unwrap())
    }

    const GRID: &str = "method = \"grid\"\nparameters.train.lr = { values = [1, 2] }\n\
        parameters.\"data.dataset\" = { values = [\"a\", \"b\", \"c\"] }\n";

    #[test]
    fn a_grid_has_every_combination_and_random_draws_each_once() {
        let grid = read(GRID).unwrap().settings();
        let words: Vec<_> = grid
            .iter()
            .map(|one| format!("{}{}", one["data.dataset"].as_str().unwrap(), one["train.lr"]))
            .collect();
        assert_eq!(words, ["a1", "a2", "b1", "b2", "c1", "c2"]);
        let random = read(&GRID.replace("grid", "random")).unwrap();
        let drawn = random.settings();
        assert_eq!(drawn, random.settings());
        assert_ne!(drawn, grid);
        assert!(drawn.len() == 6 && grid.iter().all(|setting| drawn.contains(setting)));
        assert_eq!(read(&format!("max_trials = 4\n{GRID}")).unwrap().settings(), grid[..4]);
    }

    #[test]
    fn values_are_within_their_range_and_log_ranges_spread_evenly() {
        let sweep = read(
            "method = \"random\"\nmax_trials = 400\nseed = 7\n[parameters]\n\
             a = { min = 1, max = 3 }\nb = { min = 0.5, max = 1.0 }\nc = { min = 0.001, max = 10, distribution = \"log\" }\n",
        );
        let settings = sweep.unwrap().settings();
        let all = |key: &str| settings.iter().map(|one| one[key].as_f64().unwrap()).collect::<Vec<_>>();
        for whole in [1.0, 2.0, 3.0] {
            assert!((100..170).contains(&all("a").iter().filter(|value| **value == whole).count()));
        }
        assert!(settings.iter().all(|one| one["a"].is_i64()));
        assert!(all("b").iter().all(|value| (0.5..=1.0).contains(value)));
        assert!(all("c").iter().all(|value| (0.001..=10.0).contains(value)));
        // Half of the values are below the middle.
        assert!((150..250).contains(&all("c").iter().filter(|value| **value < 0.1).count()));
    }

    #[test]
    fn each_mistake_is_reported_with_its_place_and_in_words() {
        for (toml, pointer, words) in [
            ("", "/sweep/method", "is missing"),
            ("method = \"bayes\"", "/sweep/method", "one of grid, random, asha"),
            ("method = \"grid\"\nrun_cap = 3", "/sweep/run_cap", "no key is called"),
            ("method = \"grid\"", "/sweep/parameters", "1 to 16 keys"),
            ("method = \"grid\"\nparameters.lr = { values = [1] }", "/sweep/parameters/lr", "write train.lr"),
            ("method = \"grid\"\nparameters.a = [1]", "/sweep/parameters/a", "a table with values"),
            ("method = \"grid\"\nparameters.a.b = { min = 1 }", "/sweep/parameters/a.b", "min and max"),
            ("method = \"grid\"\nparameters.a = { min = 1, max = 2 }", "/sweep/method", "needs values"),
            (
                "method = \"grid\"\nparameters.a = { values = [1, 2, 1] }",
                "/sweep/parameters/a",
                "value 1 twice",
            ),
            (
                "method = \"grid\"\nparameters.a.b = { values = [1] }\nparameters.\"a.b\" = { values = [2] }",
                "/sweep/parameters/a.b",
                "is given twice",
            ),
            ("method = \"random\"\nparameters.a = { min = 1, max = 2 }", "/sweep/max_trials", "is missing"),
            (
                "method = \"random\"\nparameters.a = { min = 2, max = 1 }",
                "/sweep/parameters/a",
                "less than max",
            ),
            ("method = \"asha\"\nmetric = { name = \"loss\" }", "/sweep/metric/name", "val_loss"),
        ] {
            let errors = read(toml).unwrap_err();
            let found = errors.iter().any(|error| error.pointer == pointer && error.detail.contains(words));
            assert!(found, "{toml}: {errors:?}");
        }
    }

    #[test]
    fn rungs_differ_by_a_factor_and_a_goal_must_suit_its_metric() {
        let rungs = |keys: &str, epochs: u32| {
            let sweep = read(&format!("{keys}\n{}", GRID.replace("grid", "asha"))).unwrap();
            let mut job = JobSpec::default();
            job.train.epochs = Some(epochs);
            (
                sweep.rungs_of(&job),
                sweep.check_with_trial(&job).into_iter().map(|error| error.pointer).collect::<Vec<_>>(),
            )
        };
        let none = Vec::<String>::new();
        assert_eq!(rungs("", 9), (vec![1, 3, 9], none.clone()));
        assert_eq!(rungs("reduction = 4\nmin_epochs = 2", 100), (vec![6, 25, 100], none.clone()));
        assert_eq!(rungs("rungs = 2", 27), (vec![9, 27], none));
        assert_eq!(rungs("", 2).1, ["/sweep/min_epochs"]);
        let mut steps = JobSpec::default();
        steps.train.steps = Some(5);
        assert_eq!(
            read(&GRID.replace("grid", "asha")).unwrap().check_with_trial(&steps)[0].pointer,
            "/sweep/method"
        );
        let goals =
            [("val_accuracy", "minimize", 1), ("val_loss", "maximize", 1), ("val_loss", "minimize", 0)];
        for (name, goal, mistakes) in goals {
            let sweep = read(&format!("metric = {{ name = {name:?}, goal = {goal:?} }}\n{GRID}")).unwrap();
            assert_eq!(sweep.check_with_trial(&steps).len(), mistakes, "{name} {goal}");
        }
    }

    #[test]
    fn a_trial_has_its_setting_in_its_name_and_the_sweep_among_its_tags() {
        let job = toml_document("name = \"x\"\ntags = [\"t\"]\n[train]\nepochs = 3").unwrap();
        let setting = Setting::from([("a.lr".into(), json!(1)), ("b.lr".into(), json!("two"))]);
        let trial = trial_document(&job, &setting, "sweep-1").unwrap();
        assert_eq!(
            trial,
            json!({"name": "x a.lr=1 b.lr=two", "tags": ["t", "sweep-1"], "train": {"epochs": 3}, "a": {"lr": 1}, "b": {"lr": "two"}})
        );
        assert!(trial_document(&job, &Setting::from([("name.x".into(), json!(1))]), "s").is_err());
    }
}
