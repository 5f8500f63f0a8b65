//! Sweeps: a job file for each combination of the values of some keys (`--sweep`), and files with a section `sweep`.

use super::{
    WrongRequest,
    api::{Api, mistake},
    job_file, output, usage_error,
};
use lockstep_protocol::numbers::plural;
use lockstep_protocol::{
    Job, JobSpec,
    spec::{
        SpecError, from_json, read_sweep, set_key, shortened, split_sweep, toml_document, trial_document,
    },
};
use serde_json::{Value, json};
use std::{collections::BTreeSet, path::Path};

/// Of a job file with a section `sweep`: the number of trials, and every mistake that needs no server, once. `None` for another file.
pub(crate) fn mistakes(document: &Value) -> Option<(usize, Vec<SpecError>)> {
    let (section, job) = split_sweep(document)?;
    let sweep = match read_sweep(&section) {
        Ok(sweep) => sweep,
        Err(mistakes) => return Some((0, mistakes)),
    };
    let settings = sweep.settings();
    let mut mistakes: Vec<SpecError> = Vec::new();
    for setting in &settings {
        let found = match trial_document(&job, setting, "sweep") {
            Ok(trial) => job_file::read(&trial).map_or_else(|found| found, |spec| sweep.check(&spec)),
            Err(detail) => vec![SpecError { pointer: "/sweep/parameters".into(), detail }],
        };
        for mistake in found {
            if !mistakes.contains(&mistake) {
                mistakes.push(mistake);
            }
        }
    }
    Some((settings.len(), mistakes))
}

/// The job of the first trial of a file with a section `sweep` without a mistake.
pub(crate) fn first_trial(document: &Value) -> Option<Value> {
    let (section, job) = split_sweep(document)?;
    let setting = read_sweep(&section).ok()?.settings().into_iter().next()?;
    trial_document(&job, &setting, "sweep").ok()
}

/// Maximum number of jobs in a sweep. In a launched sweep each agent has a token, and a server keeps 5000 tokens.
const MOST_JOBS: usize = 500;
/// Maximum number of keys in a sweep.
const MOST_KEYS: usize = 16;

/// The swept keys with their values.
#[derive(Debug, PartialEq)]
pub(crate) struct Sweep {
    keys: Vec<(String, Vec<Value>)>,
}

/// The submitted jobs of a sweep.
pub(crate) struct Submitted {
    /// The tag of all these jobs.
    pub(crate) tag: String,
    pub(crate) jobs: Vec<Job>,
}

impl Submitted {
    /// Prints the jobs, one per line, and the address of their list.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(crate) fn show(&self, api: &Api, as_json: bool) -> anyhow::Result<()> {
        if as_json {
            return output::json(&json!({"tag": self.tag, "jobs": self.jobs}));
        }
        // Prints a warning once if several jobs share it.
        let warnings: BTreeSet<_> = self.jobs.iter().flat_map(|job| &job.warnings).collect();
        warnings.into_iter().for_each(|warning| output::warn(format_args!("warning: {warning}")));
        for job in &self.jobs {
            output::line(format_args!("{}  {}/jobs/{}  {}", job.id, api.base(), job.id, job.spec.name))?;
        }
        let jobs = plural(self.jobs.len() as u64, "job");
        output::line(format_args!("{jobs}: {}/jobs?tag={}", api.base(), self.tag))
    }
}

impl Sweep {
    /// Parses an argument such as `train.lr=0.1,0.05` for each key. Values are written as in a job file; quotes of texts may be left out.
    ///
    /// # Errors
    /// Exit status 2 if an argument is invalid, a key is repeated, or a sweep has too many jobs.
    pub(crate) fn parse(arguments: &[String]) -> anyhow::Result<Self> {
        let refused =
            |argument: &str, why: &str| usage_error(format!("--sweep {}: {why}", shortened(argument)));
        if arguments.len() > MOST_KEYS {
            return Err(usage_error(format!(
                "--sweep: at most {MOST_KEYS} keys, and these are {}",
                arguments.len()
            )));
        }
        let mut keys: Vec<(String, Vec<Value>)> = Vec::new();
        for argument in arguments {
            let Some((path, text)) = argument.split_once('=') else {
                return Err(refused(argument, "write it as train.lr=0.1,0.05"));
            };
            let path = path.trim();
            if keys.iter().any(|(known, _)| known == path) {
                return Err(refused(argument, "the key has a --sweep already; give all its values in one"));
            }
            let values = values(path, text);
            if values.iter().any(|value| *value == json!("")) {
                return Err(refused(argument, "a value is missing; write it as train.lr=0.1,0.05"));
            }
            keys.push((path.to_owned(), values));
        }
        let jobs = keys.iter().try_fold(1usize, |jobs, (_, values)| jobs.checked_mul(values.len()));
        match jobs {
            Some(jobs) if jobs <= MOST_JOBS => Ok(Self { keys }),
            _ => Err(usage_error(format!(
                "--sweep: a sweep has at most {MOST_JOBS} jobs, and these values have more combinations"
            ))),
        }
    }

    /// Returns a job file for each combination. The values of the last key change fastest. Each name contains the combination, and each job
    /// has the tag.
    ///
    /// # Errors
    /// Exit status 2 if a path is not a key.
    pub(crate) fn documents(&self, document: &Value, tag: &str) -> anyhow::Result<Vec<Value>> {
        let mut all = vec![(document.clone(), String::new())];
        for (path, values) in &self.keys {
            let key = self.short(path);
            let mut next = Vec::with_capacity(all.len() * values.len());
            for (document, label) in &all {
                for value in values {
                    let mut document = document.clone();
                    set_key(&mut document, path, value.clone())
                        .map_err(|e| usage_error(format!("--sweep {}: {e}", shortened(path))))?;
                    next.push((document, format!("{label} {key}={}", in_words(value))));
                }
            }
            all = next;
        }
        for (document, label) in &mut all {
            let Value::Object(table) = document else { continue };
            let name = table.get("name").and_then(Value::as_str).map(|name| format!("{name}{label}"));
            if let Some(name) = name {
                table.insert("name".into(), name.into());
            }
            // If `tags` is not a list, the later check reports it.
            if let Value::Array(tags) = table.entry("tags").or_insert_with(|| json!([])) {
                tags.push(tag.into());
            }
        }
        Ok(all.into_iter().map(|(document, _)| document).collect())
    }

    /// Returns the last part of a key's path, or the whole path if two keys have the same last part.
    fn short<'a>(&self, path: &'a str) -> &'a str {
        let last = |path: &'a str| path.rsplit('.').next().unwrap_or(path);
        let alike = self.keys.iter().filter(|(other, _)| other.rsplit('.').next() == Some(last(path)));
        if alike.count() > 1 { path } else { last(path) }
    }
}

/// Parses values: `0.1,0.05`, `"a","b"` or `[[0, 32], [5, 64]],[[0, 64]]`. Text that is not TOML is split at commas. For a key with numbers
/// or switches, each part is then parsed.
fn values(path: &str, text: &str) -> Vec<Value> {
    let listed = |text: &str| {
        let mut document = toml_document(&format!("value = [{text}]")).ok()?;
        match document.as_object_mut()?.remove("value")? {
            Value::Array(values) if !values.is_empty() => Some(values),
            _ => None,
        }
    };
    let pointer = format!("/{}", path.replace('.', "/"));
    let defaults = serde_json::to_value(JobSpec::default()).unwrap_or_default();
    let is_text = defaults.pointer(&pointer).is_none_or(|usual| usual.is_string() || usual.is_null());
    let one = |part: &str| match listed(part).as_deref() {
        Some([value]) if !is_text => value.clone(),
        _ => part.into(),
    };
    listed(text).unwrap_or_else(|| text.split(',').map(|part| one(part.trim())).collect())
}

fn in_words(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Returns a tag that no other sweep has. It begins with `kind`.
pub(crate) fn new_tag(kind: &str) -> String {
    format!("{kind}-{}", &uuid::Uuid::new_v4().simple().to_string()[..8])
}

/// Returns job files for all combinations, checked here and by the server (`launched`: agents for the jobs are about to be started).
/// Replaces paths of datasets, in the file or among the values, by registered names.
///
/// # Errors
/// Exit status 2, with every mistake on a line; a mistake that jobs share is listed once. Also if the server cannot be reached.
pub(crate) async fn prepare(
    api: &Api,
    path: &Path,
    sweep: &Sweep,
    document: &Value,
    tag: &str,
    launched: bool,
) -> anyhow::Result<Vec<Value>> {
    let mut documents = sweep.documents(document, tag)?;
    // Checked first, so that no dataset is registered for jobs that cannot be submitted.
    check(None, launched, path, &documents).await?;
    job_file::resolve_all(api, &mut documents).await?;
    check(Some(api), launched, path, &documents).await?;
    Ok(documents)
}

/// Checks all jobs, with `api` also on the server.
///
/// # Errors
/// See [`prepare`].
pub(crate) async fn check(
    api: Option<&Api>,
    launched: bool,
    path: &Path,
    documents: &[Value],
) -> anyhow::Result<()> {
    let mut lines = BTreeSet::new();
    for document in documents {
        let own = from_json(document).err().unwrap_or_default();
        lines.extend(own.iter().map(|m| mistake(&m.pointer, &m.detail)));
        if let Some(api) = api {
            lines.extend(
                api.mistakes(document, launched).await.iter().map(|(at, detail)| mistake(at, detail)),
            );
        }
    }
    if lines.is_empty() {
        return Ok(());
    }
    Err(usage_error(job_file::mistaken(path, &lines.into_iter().collect::<Vec<_>>())))
}

/// Submits all jobs or none: if the server refuses a job, the earlier jobs are cancelled. If a response is lost, the request is repeated.
///
/// # Errors
/// Exit status 2 if the server refuses a job. Also if the server cannot be reached.
pub(crate) async fn submit(
    api: &Api,
    route: &str,
    tag: String,
    documents: &[Value],
) -> anyhow::Result<Submitted> {
    let mut jobs: Vec<Job> = Vec::new();
    for document in documents {
        match api.post_once(route, document).await {
            Ok(job) => jobs.push(job),
            Err(error) => {
                let done = take_back(api, &tag, &jobs).await;
                return Err(match (jobs.len(), error.is::<WrongRequest>()) {
                    // No job has been submitted.
                    (0, true) => error,
                    (there, _) => error
                        .context(format!("{there} of {} jobs were submitted and {done}", documents.len())),
                });
            }
        }
    }
    Ok(Submitted { tag, jobs })
}

/// Cancels the sweep's jobs, including a job whose submission was not acknowledged. Returns a sentence with the outcome.
async fn take_back(api: &Api, tag: &str, jobs: &[Job]) -> String {
    let tagged = api.all("/jobs", "jobs", &[("tag", tag.to_owned())], None).await;
    let text = |job: &Value| job.get("id").and_then(Value::as_str).map(str::to_owned);
    let mut ids: BTreeSet<_> = jobs.iter().map(|job| job.id.to_string()).collect();
    let is_known = tagged.is_ok();
    ids.extend(tagged.unwrap_or_default().iter().filter_map(text));
    let mut left = Vec::new();
    for id in ids {
        let cancelled: anyhow::Result<Value> = api.post(&format!("/jobs/{id}/cancel"), &json!({})).await;
        if cancelled.is_err() {
            left.push(id);
        }
    }
    match (left.is_empty(), is_known) {
        (true, true) => "are cancelled".into(),
        (true, false) => format!("are cancelled, unless one more has the tag {tag}"),
        (false, _) => format!("are not all cancelled: {}, and others with the tag {tag}", left.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(arguments: &[&str]) -> anyhow::Result<Sweep> {
        Sweep::parse(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    fn refusal(arguments: &[&str]) -> String {
        sweep(arguments).expect_err("it is refused").to_string()
    }

    #[test]
    fn every_combination_is_a_job_with_its_values_in_its_name() {
        let document = json!({"name": "wide", "tags": ["paper"], "train": {"lr": 1.0, "steps": 5}});
        let found = sweep(&["train.lr=0.1,0.05", "model.arch=resnet18, resnet34"]).expect("a sweep");
        let documents = found.documents(&document, "sweep-1").expect("documents");
        let names: Vec<_> = documents.iter().filter_map(|d| d["name"].as_str()).collect();
        assert_eq!(
            names,
            [
                "wide lr=0.1 arch=resnet18",
                "wide lr=0.1 arch=resnet34",
                "wide lr=0.05 arch=resnet18",
                "wide lr=0.05 arch=resnet34"
            ]
        );
        assert_eq!(documents[2]["train"], json!({"lr": 0.05, "steps": 5}));
        assert_eq!(documents[2]["model"], json!({"arch": "resnet18"}));
        assert_eq!(documents[2]["tags"], json!(["paper", "sweep-1"]));
    }

    #[test]
    fn values_are_as_in_a_job_file() {
        let found = sweep(&["train.image_size=[[0, 32], [5, 64]],[[0, 64]]", "train.ema=true,false"]);
        let keys = found.expect("a sweep").keys;
        assert_eq!(keys[0].1, [json!([[0, 32], [5, 64]]), json!([[0, 64]])]);
        assert_eq!(keys[1].1, [json!(true), json!(false)]);
    }

    #[test]
    fn keys_that_end_alike_are_named_whole() {
        let found = sweep(&["a.lr=1,2", "b.lr=3"]).expect("a sweep");
        let documents = found.documents(&json!({"name": "x"}), "t").expect("documents");
        assert_eq!(documents[1]["name"], "x a.lr=2 b.lr=3");
    }

    #[test]
    fn one_value_that_is_none_leaves_the_others_what_they_are() {
        assert_eq!(values("train.seed", "1,2,x"), [json!(1), json!(2), json!("x")]);
        assert_eq!(values("train.deterministic", "true,maybe"), [json!(true), json!("maybe")]);
        // Texts, one of which happens to be a number.
        assert_eq!(values("data.dataset", "mnist,2024"), [json!("mnist"), json!("2024")]);
        assert_eq!(values("name", "run,2"), [json!("run"), json!("2")]);
    }

    #[test]
    fn what_is_no_sweep_is_refused_in_words() {
        assert!(refusal(&["train.lr"]).contains("write it as train.lr=0.1,0.05"));
        assert!(refusal(&["train.lr="]).contains("a value is missing"));
        assert!(refusal(&["train.lr=a,,b"]).contains("a value is missing"));
        assert!(refusal(&["train.lr=1", "train.lr=2"]).contains("already"));
    }

    #[test]
    fn a_sweep_has_a_limit_of_jobs_and_of_keys() {
        let numbers = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
        assert!(sweep(&[&format!("train.seed={}", numbers(MOST_JOBS))]).is_ok());
        assert!(refusal(&[&format!("train.seed={}", numbers(MOST_JOBS + 1))]).contains("at most 500 jobs"));
        // The product overflows every integer.
        let many: Vec<_> = (0..MOST_KEYS).map(|i| format!("k{i}={}", numbers(100))).collect();
        assert!(refusal(&many.iter().map(String::as_str).collect::<Vec<_>>()).contains("at most 500 jobs"));
        let keys: Vec<_> = (0..=MOST_KEYS).map(|i| format!("k{i}=1")).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        assert!(sweep(&keys[1..]).is_ok());
        assert!(refusal(&keys).contains("at most 16 keys"));
    }
}
