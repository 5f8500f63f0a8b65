//! The list of jobs: one row per job, newest first.

use crate::{
    layout::CurrentUser,
    numbers::{age, clock, percent, plural, rate, value},
};
use askama::Template;
use lockstep_protocol::{
    job::{Job, JobState},
    labels::DEFAULT_PROJECT,
    numbers::uncertainty,
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// The filter of the list, which is part of the page's URL.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobFilter {
    /// Jobs in one of these states (`?state=running,failed`). Empty: jobs in any state.
    pub states: Vec<JobState>,
    /// Jobs with this text in their name, tags or notes (`?q=cifar`). Empty: all jobs.
    pub text: String,
    /// Jobs of this project (`?project=vision`). Empty: jobs of any project.
    pub project: String,
    /// Jobs with all of these tags (`?tag=a,b`). Empty: jobs with any tags.
    pub tag: String,
    /// Jobs of this person or token (`?owner=ada`). Empty: jobs of any owner.
    pub owner: String,
    /// The order (`?sort=-loss`). Empty: the newest jobs first.
    pub sort: String,
    /// Other parameters of the URL, conditions and times, which the page's links keep.
    pub other_parameters: Vec<(&'static str, String)>,
}

/// `GET /jobs`.
#[derive(Debug, Clone, Template)]
#[template(path = "jobs.html")]
pub struct JobsPage {
    /// Jobs that match `filter`, newest first.
    pub jobs: Vec<Job>,
    /// The filter in the page's URL.
    pub filter: JobFilter,
    /// Whether any job exists, even if it does not match the filter. The text of an empty list depends on this.
    pub has_jobs: bool,
    /// Cursor of the next page, with older jobs, if there are more.
    pub next: Option<String>,
    /// This server's URL in the browser, such as `http://127.0.0.1:7070`. Commands on the page contain it.
    pub server_url: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl JobsPage {
    fn rows(&self) -> Vec<JobRow> {
        self.jobs.iter().map(JobRow::new).collect()
    }

    fn states(&self) -> Vec<StateLink> {
        use JobState::{Cancelled, Failed, Paused, Queued, Restarting, Running, Starting, Succeeded};
        let chosen = &self.filter.states;
        let mut shown = vec![Running, Starting, Queued, Restarting, Paused, Succeeded, Failed, Cancelled];
        // The states pausing and lost have no link, and are shown only if the URL names them.
        shown.extend(chosen.iter().copied().filter(|state| !shown.contains(state)).collect::<Vec<_>>());
        let all = StateLink { state: "", leads_to: String::new(), is_chosen: chosen.is_empty() };
        let link = |state: JobState| {
            let is_chosen = chosen.contains(&state);
            let others = chosen.iter().copied().filter(|other| *other != state);
            let leads_to = join_states(others.chain((!is_chosen).then_some(state)));
            StateLink { state: state.as_str(), leads_to, is_chosen }
        };
        std::iter::once(all).chain(shown.into_iter().map(link)).collect()
    }

    /// Returns the chosen states, as in the URL.
    fn chosen_states(&self) -> String {
        join_states(self.filter.states.iter().copied())
    }

    /// Returns all filters except states, for the end of a URL.
    fn filter_query(&self) -> String {
        let JobFilter { states: _, text, project, tag, owner, sort: _, other_parameters } = &self.filter;
        let filters = [("q", text), ("project", project), ("tag", tag), ("owner", owner)].into_iter();
        let filters = filters.chain(other_parameters.iter().map(|(key, value)| (*key, value)));
        let filters = filters.filter(|(_, value)| !value.is_empty());
        filters.map(|(key, value)| format!("&{key}={}", percent_encode(value))).collect()
    }

    /// Returns all filters except states, and the order, for the end of a URL.
    fn filter_and_order_query(&self) -> String {
        let order = match self.filter.sort.as_str() {
            "" => String::new(),
            sort => format!("&sort={}", percent_encode(sort)),
        };
        self.filter_query() + &order
    }

    /// Returns the value of `aria-sort` for the column with this sort key. Empty if the list is sorted by another column.
    fn aria_sort(&self, sort: &str) -> &'static str {
        let current = if self.filter.sort.is_empty() { "-created" } else { self.filter.sort.as_str() };
        match current.strip_prefix('-') {
            Some(by) if by == sort => "descending",
            None if current == sort => "ascending",
            _ => "",
        }
    }

    /// Returns the URL of the list sorted by a column, in reverse order if the list is sorted by this column already.
    fn sort_url(&self, sort: &str, largest_first: bool) -> String {
        let descends = match self.aria_sort(sort) {
            "" => largest_first,
            order => order == "ascending",
        };
        let sign = if descends { "-" } else { "" };
        format!("/jobs?state={}{}&sort={sign}{sort}", self.chosen_states(), self.filter_query())
    }
}

/// For each column: class, label, sort key, and whether the first click sorts in descending order.
const COLUMNS: [(&str, &str, &str, bool); 7] = [
    ("c-state", "State", "state", false),
    ("c-name", "Job", "name", false),
    ("c-progress", "Progress", "step", true),
    ("c-loss", "Loss", "loss", false),
    ("num c-best", "Best accuracy", "best", true),
    ("num c-speed", "Images/s", "speed", true),
    ("num c-age", "Submitted", "created", true),
];

/// A state to filter by.
struct StateLink {
    /// Empty for the link to all states.
    state: &'static str,
    /// The chosen states after a click, which adds or removes this state.
    leads_to: String,
    is_chosen: bool,
}

fn join_states(states: impl Iterator<Item = JobState>) -> String {
    states.map(JobState::as_str).collect::<Vec<_>>().join(",")
}

/// Percent-encodes a value for a URL.
pub(crate) fn percent_encode(text: &str) -> String {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
    utf8_percent_encode(text, ENCODED).to_string()
}

/// Text in place of network, dataset and ranks of a run from elsewhere.
pub(crate) const ELSEWHERE: &str = "run from elsewhere";

/// The texts of a row.
#[derive(Debug, Clone, Default)]
struct JobRow {
    id: String,
    state: String,
    state_words: &'static str,
    name: String,
    about: String,
    reason: String,
    step: u64,
    total_steps: u64,
    progress: String,
    sparkline: String,
    loss: String,
    /// Best validation accuracy.
    best: String,
    /// Standard error of `best`, and the number of validation pictures. Empty for 10,000 pictures or more.
    uncertainty: String,
    /// A sentence about validation pictures that the initial weights were trained on; empty if there is none. Then `uncertainty` ends with `*`.
    trained_validation: String,
    speed: String,
    age: String,
    created_at: String,
}

impl JobRow {
    fn new(job: &Job) -> Self {
        Self {
            id: job.id.to_string(),
            state: job.state.to_string(),
            state_words: job.state_in_words(),
            name: job.name.clone(),
            about: about(job),
            reason: reason_text(job),
            step: job.step.min(job.total_steps),
            total_steps: job.total_steps.max(1),
            progress: progress(job),
            sparkline: sparkline(&job.sparkline),
            loss: job.last.loss.map(value).unwrap_or_default(),
            best: job.best.map(|b| percent(b.value)).unwrap_or_default(),
            uncertainty: job
                .best
                .map(|b| {
                    uncertainty(b.value, job.last.val_pictures)
                        + job.trained_validation.as_ref().map_or("", |_| " *")
                })
                .unwrap_or_default(),
            trained_validation: job.trained_validation.clone().unwrap_or_default(),
            speed: job.images_per_second.map(rate).unwrap_or_default(),
            age: age(job.created_at),
            created_at: job.created_at.to_string(),
        }
    }
}

/// Returns network, dataset and number of ranks; also the priority and the project if they are not the defaults.
fn about(job: &Job) -> String {
    let ranks = plural(job.ranks.into(), "rank");
    let mut parts = match job.external {
        Some(_) => vec![ELSEWHERE.to_owned()],
        None => vec![job.spec.model.arch.as_str().to_owned(), job.spec.data.dataset.clone(), ranks],
    };
    if job.spec.priority != 0 {
        parts.push(format!("priority {}", job.spec.priority));
    }
    if job.project != DEFAULT_PROJECT {
        parts.push(job.project.clone());
    }
    parts.join(" · ")
}

/// Returns the reason for a job's state, after the place in the queue of a waiting job: `place 2 in the queue · needs 4 slots`.
fn reason_text(job: &Job) -> String {
    let place = job.queue.as_ref().map(|queue| format!("place {} in the queue", queue.place));
    [place, job.reason.clone()].into_iter().flatten().collect::<Vec<_>>().join(" · ")
}

/// Describes the job's progress: `epoch 3 of 10 · 0:12 left`.
fn progress(job: &Job) -> String {
    if job.state.is_final() {
        return match (job.started_at, job.ran_secs) {
            (None, _) => "never started".into(),
            (_, secs) => secs.map(|secs| format!("ran for {}", clock(secs))).unwrap_or_default(),
        };
    }
    if job.total_steps == 0 {
        return String::new();
    }
    let epochs = job.total_steps.div_ceil(job.steps_per_epoch.max(1));
    let epoch = format!("epoch {} of {epochs}", job.epoch);
    match job.eta_secs {
        Some(left) if job.state == JobState::Running => format!("{epoch} · {} left", clock(left)),
        _ => epoch,
    }
}

/// Returns the points of an SVG polyline in a box of 120 by 28, with the minimum loss at the bottom. Empty for fewer than two values.
pub(crate) fn sparkline(values: &[f32]) -> String {
    let finite = || values.iter().copied().filter(|v| v.is_finite());
    let (low, high) = finite().fold((f32::MAX, f32::MIN), |(low, high), v| (low.min(v), high.max(v)));
    if finite().count() < 2 {
        return String::new();
    }
    let span = (high - low).max(f32::EPSILON);
    let dx = 118.0 / (values.len() - 1) as f32;
    let point = |(i, v): (usize, &f32)| {
        v.is_finite().then(|| format!("{:.1},{:.1}", 1.0 + i as f32 * dx, 2.0 + (high - v) / span * 24.0))
    };
    values.iter().enumerate().filter_map(point).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_shows_how_to_submit_a_job() {
        let page = JobsPage {
            jobs: vec![],
            filter: JobFilter::default(),
            has_jobs: false,
            next: None,
            server_url: "http://127.0.0.1:7070".into(),
            user: CurrentUser::NOBODY,
        };
        let html = page.render().expect("renders");
        assert!(html.contains("lockstep submit"), "a command to copy");
        assert!(html.contains("/jobs/new"), "a link to the form");

        let filtered = JobsPage {
            has_jobs: true,
            filter: JobFilter {
                states: vec![JobState::Lost, JobState::Failed],
                text: "x\"<y".into(),
                project: "vision".into(),
                tag: "a b".into(),
                owner: "ada".into(),
                sort: "loss".into(),
                other_parameters: vec![("where", "train.lr>0.1".into())],
            },
            ..page
        };
        let html = filtered.render().expect("renders");
        assert!(html.contains("Show all jobs") && html.contains("lost"), "{html}");
        assert!(!html.contains("x\"<y"), "the search is escaped");
        let others = "q=x%22%3Cy&#38;project=vision&#38;tag=a%20b&#38;owner=ada&#38;where=train.lr%3E0.1";
        for states in ["", "failed", "lost", "lost,failed,running", "lost,failed,restarting"] {
            let link = format!("href=\"/jobs?state={states}&#38;{others}&#38;sort=loss\"");
            assert!(html.contains(&link), "{link}: {html}");
        }
        assert_eq!(html.matches("aria-current=\"true\"").count(), 2, "two states are chosen");
        // The heading of the sort column reverses the order; other headings sort in their usual direction.
        for (order, sort) in [(" aria-sort=\"ascending\"", "-loss"), ("", "-best"), ("", "name")] {
            let head = format!(
                "{order}><a class=\"sort\" href=\"/jobs?state=lost,failed&#38;{others}&#38;sort={sort}\""
            );
            assert!(html.contains(&head), "{head}: {html}");
        }
        assert_eq!(html.matches("aria-sort").count(), 1);
        for name in ["project", "owner", "tag", "state", "where", "sort"] {
            assert!(html.contains(&format!("type=\"hidden\" name=\"{name}\"")), "{name}");
        }
    }
}
