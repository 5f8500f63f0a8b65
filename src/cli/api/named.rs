//! Finds jobs and sweeps by the start of an id or by a name, also objects that this version cannot read.

use super::{
    super::{age::age, output::one_line},
    text,
};
use lockstep_protocol::JobId;
use serde_json::Value;
use std::{fmt::Write as _, path::Path};

/// Minimum length of an id's prefix. Ids that are made at about the same time have the same first characters.
const MIN_PREFIX_CHARS: usize = 4;

/// The kind of object that a name means.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    /// The noun in messages. With an `s`, it is the URL path of the list of all objects of this kind.
    pub(super) noun: &'static str,
    /// Whether a text is a complete id.
    pub(super) is_id: fn(&str) -> bool,
}

pub(super) const JOB: Kind = Kind { noun: "job", is_id: |id| id.parse::<JobId>().is_ok() };
pub(super) const SWEEP: Kind = Kind {
    noun: "sweep",
    is_id: |id| {
        let digits = id.strip_prefix("sweep-").unwrap_or_default();
        digits.len() == 12 && digits.bytes().all(|b| b.is_ascii_hexdigit())
    },
};
/// Maximum number of jobs or sweeps that an error message lists.
const MAX_LISTED: usize = 10;

/// What [`choose`] does if several objects have the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnDuplicateName {
    TakeNewest,
    /// Refuses the name if none of the objects is accepted.
    TakeNewestAccepted,
    Refuse,
}

/// The object that a name means.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) id: String,
    /// Says which object was chosen, if several have the name.
    pub(super) note: Option<String>,
}

/// Returns the newest job (or sweep) called `name`, or the only job whose id begins with `name`. `None` if no job matches. Of the jobs
/// called `name`, prefers the jobs that `accepts` accepts. `jobs` is sorted, the newest first.
///
/// # Errors
/// If several jobs are called `name`, and `on_duplicate` refuses them. Also if several ids begin with `name`, or `name` is the path of a
/// file or of a run's folder. The error is a sentence.
pub(super) fn choose(
    Kind { noun, .. }: Kind,
    jobs: &[Value],
    name: &str,
    accepts: impl Fn(&Value) -> bool,
    on_duplicate: OnDuplicateName,
) -> Result<Option<Chosen>, String> {
    let id = |job: &Value| text(job, "id").to_owned();
    let named_jobs: Vec<_> = jobs.iter().filter(|job| text(job, "name") == name).collect();
    let mut candidates = named_jobs.clone();
    let accepts_any = candidates.iter().any(|job| accepts(job));
    if accepts_any {
        candidates.retain(|job| accepts(job));
    }
    if let [newest, others @ ..] = &candidates[..] {
        let is_refused = match on_duplicate {
            OnDuplicateName::TakeNewest => false,
            OnDuplicateName::TakeNewestAccepted => !accepts_any,
            OnDuplicateName::Refuse => true,
        };
        if is_refused && !others.is_empty() {
            let why = if accepts_any {
                format!("several {noun}s are called {name}")
            } else {
                format!(
                    "{} {noun}s are called {name}, and their states forbid this command",
                    named_jobs.len()
                )
            };
            return Err(format!("{why}; give a {noun}'s id:{}", list(&candidates)));
        }
        let is_newest_of_all = named_jobs.first().is_some_and(|first| id(first) == id(newest));
        let which = if is_newest_of_all { "newest" } else { "newest that this command can use" };
        let note = || {
            format!(
                "{} {noun}s are called {name}; the {which} is taken: {}",
                named_jobs.len(),
                describe(newest)
            )
        };
        return Ok(Some(Chosen { id: id(newest), note: (named_jobs.len() > 1).then(note) }));
    }
    let has_prefix = |job: &&Value| name.len() >= MIN_PREFIX_CHARS && text(job, "id").starts_with(name);
    let matches: Vec<_> = jobs.iter().filter(has_prefix).collect();
    match &matches[..] {
        [job] => Ok(Some(Chosen { id: id(job), note: None })),
        [] if noun == JOB.noun && Path::new(name).is_file() => Err(format!(
            "no job is called {name}; it is a file, and the job comes first, as in `lockstep predict JOB {name}`"
        )),
        [] if noun == JOB.noun && Path::new(name).join("checkpoints").is_dir() => Err(format!(
            "no job is called {name}; it is the folder of a run of `lockstep train`, which only `lockstep predict --model {name} IMAGE` \
             and `lockstep export` read"
        )),
        [] => Ok(None),
        matches => Err(format!(
            "{} ids begin with {name}; give a longer part of the id:{}",
            matches.len(),
            list(matches)
        )),
    }
}

/// Formats a job's id, state and age.
fn describe(job: &Value) -> String {
    let created = text(job, "created_at").parse().map(|at| format!(", {} ago", age(at)));
    let [id, state] = ["id", "state"].map(|key| one_line(text(job, key)));
    format!("{id}, {state}{}", created.unwrap_or_default())
}

/// Describes each job on a line of its own, so that the user can choose. Each line begins with a line break.
fn list(jobs: &[&Value]) -> String {
    let mut lines = String::new();
    for job in jobs.iter().take(MAX_LISTED) {
        let _ = write!(lines, "\n  {}  {}", describe(job), one_line(text(job, "name")));
    }
    if jobs.len() > MAX_LISTED {
        let _ = write!(lines, "\n  and {} more", jobs.len() - MAX_LISTED);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::{
        OnDuplicateName::{Refuse, TakeNewest, TakeNewestAccepted},
        *,
    };
    use crate::cli::unknown_name_message;
    use serde_json::json;

    #[test]
    fn jobs_with_the_same_name_are_distinguished() {
        let now = jiff::Timestamp::now();
        let job = |id: &str, name: &str, state: &str, hours: i64| {
            let at = (now - jiff::SignedDuration::from_hours(hours)).to_string();
            json!({"id": id, "name": name, "state": state, "created_at": at})
        };
        let jobs = [
            job("j0002", "pics", "running", 1),
            job("j0001", "pics", "failed", 72),
            job("j0010", "j000", "queued", 80),
        ];
        let names = || jobs.iter().map(|job| text(job, "name"));
        // The name, the chosen job, and the note or the error.
        for (name, chosen, note_or_error) in [
            ("pics", Some("j0002"), "2 jobs are called pics; the newest is taken: j0002, running, 1 h ago"),
            ("j0001", Some("j0001"), ""),
            ("j001", Some("j0010"), ""),
            ("j000", Some("j0010"), ""),
            ("j00", None, "no job is called j00; did you mean \"j000\"? `lockstep list` shows all jobs"),
            ("piks", None, "no job is called piks; did you mean \"pics\"? `lockstep list` shows all jobs"),
            ("xyzzy", None, "no job is called xyzzy; `lockstep list` shows all jobs"),
            (
                "Cargo.toml",
                None,
                "it is a file, and the job comes first, as in `lockstep predict JOB Cargo.toml`",
            ),
        ] {
            match choose(JOB, &jobs, name, |_| true, TakeNewest)
                .and_then(|job| job.ok_or_else(|| unknown_name_message(JOB.noun, names(), name)))
            {
                Ok(Chosen { id, note }) => {
                    assert_eq!((Some(&*id), &*note.unwrap_or_default()), (chosen, note_or_error));
                }
                Err(error) => assert!(chosen.is_none() && error.contains(note_or_error), "{name}: {error}"),
            }
        }
        let has_not_ended = |job: &Value| text(job, "state") != "failed" && text(job, "state") != "succeeded";
        let trials = [job("j0003", "pics", "succeeded", 0), jobs[0].clone(), jobs[1].clone()];
        for on_duplicate in [TakeNewest, TakeNewestAccepted, Refuse] {
            let Chosen { id, note } =
                choose(JOB, &trials, "pics", has_not_ended, on_duplicate).unwrap().unwrap();
            assert_eq!(id, "j0002");
            let note = note.expect("several have the name");
            let expected =
                "3 jobs are called pics; the newest that this command can use is taken: j0002, running";
            assert!(note.starts_with(expected), "{note}");
        }
        let error = choose(JOB, &trials, "pics", |_| true, Refuse).unwrap_err();
        assert!(
            error.starts_with("several jobs are called pics; give a job's id:\n  j0003, succeeded"),
            "{error}"
        );
        let ended = [trials[0].clone(), trials[2].clone()];
        for on_duplicate in [TakeNewestAccepted, Refuse] {
            let error = choose(JOB, &ended, "pics", has_not_ended, on_duplicate).unwrap_err();
            let expected = "2 jobs are called pics, and their states forbid this command; give a job's id:\n  j0003, succeeded";
            assert!(error.starts_with(expected), "{error}");
        }
        let error = choose(JOB, &jobs[..2], "j000", |_| true, TakeNewest).unwrap_err();
        let listed = "2 ids begin with j000; give a longer part of the id:\n  j0002, running, 1 h ago  pics\n  \
                      j0001, failed, 3 d ago  pics";
        assert_eq!(error, listed);
        let many: Vec<_> = (0..12).map(|n| job(&format!("j000{n}"), "x", "succeeded", n)).collect();
        let error = choose(JOB, &many, "j000", |_| true, TakeNewest).unwrap_err();
        assert!(error.ends_with("\n  and 2 more"));
    }
}
