//! Jobs that users name by the start of an id or by a name, including jobs that this version cannot read.

use super::super::{age::age, output::one_line};
use serde_json::Value;
use std::fmt::Write as _;

/// The shortest accepted prefix of an id: ids made at about the same time begin alike.
const SHORTEST_START: usize = 4;
/// The largest number of jobs that a message lists if a name fits several.
const MOST: usize = 10;

pub(super) fn text<'a>(job: &'a Value, key: &str) -> &'a str {
    job.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// Whether `name` names the job.
pub(super) fn fits(job: &Value, name: &str) -> bool {
    text(job, "name") == name || name.len() >= SHORTEST_START && text(job, "id").starts_with(name)
}

/// The message if `name` fits several jobs (newest first), with enough of each job to choose one.
pub(super) fn ambiguous(jobs: &[Value], name: &str) -> String {
    let count = jobs.len();
    let mut said = match jobs.iter().filter(|job| text(job, "name") == name).count() {
        0 => format!("{count} ids begin with {name}; give more of one:"),
        same if same == count => format!("{count} jobs are called {name}; name one by its id:"),
        _ => {
            format!("{count} jobs are called {name} or have an id that begins so; name one by its whole id:")
        }
    };
    for job in jobs.iter().take(MOST) {
        let created = text(job, "created_at").parse().map(|at| format!(", {} ago", age(at)));
        let [id, called, state] = ["id", "name", "state"].map(|key| one_line(text(job, key)));
        let called = if called == name { String::new() } else { format!("{called}, ") };
        let _ = write!(said, "\n  {id}  {called}{state}{}", created.unwrap_or_default());
    }
    if count > MOST {
        let _ = write!(said, "\n  and {} more", count - MOST);
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn jobs_that_share_a_name_are_told_apart() {
        let now = jiff::Timestamp::now();
        let job = |id: &str, name: &str, state: &str, hours: i64| {
            let at = (now - jiff::SignedDuration::from_hours(hours)).to_string();
            json!({"id": id, "name": name, "state": state, "created_at": at})
        };
        let jobs = [job("j0002", "pics", "running", 1), job("j0001", "pics", "failed", 72)];
        assert_eq!(
            ambiguous(&jobs, "pics"),
            "2 jobs are called pics; name one by its id:\n  j0002  running, 1 h ago\n  j0001  failed, 3 d ago"
        );
        let said = ambiguous(&jobs, "j000");
        assert!(
            said.starts_with("2 ids begin with j000; give more of one:\n  j0002  pics, running"),
            "{said}"
        );
        let many: Vec<_> = (0..12).map(|n| job(&format!("j00{n}"), "x", "succeeded", n)).collect();
        assert!(ambiguous(&many, "j00").ends_with("\n  and 2 more"));
        assert!(fits(&jobs[0], "pics") && fits(&jobs[0], "j000") && !fits(&jobs[0], "j00"));
    }
}
