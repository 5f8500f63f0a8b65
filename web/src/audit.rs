//! The audit log of requests.

use crate::{jobs::percent_encode, layout::CurrentUser};
use askama::Template;
use lockstep_protocol::access::AuditEntry;

/// A line of the log.
#[derive(Debug, Clone)]
pub struct AuditLine {
    pub entry: AuditEntry,
    /// Name of the job whose id [`AuditLine::job_id`] returns. Empty if the job no longer exists.
    pub job_name: String,
}

/// Descriptions of requests: keys, a verb, its past tense, and the kind of the object. A key is the method and the route, and on pages with
/// several buttons also the button. The page shows the object's name after the kind.
static ACTIONS: [(&[&str], &str, &str, &str); 53] = [
    (&["POST /api/v1/jobs", "POST /jobs/new"], "submit", "submitted", "job"),
    (&["PATCH /api/v1/jobs/{id}"], "change", "changed", "job"),
    (&["DELETE /api/v1/jobs/{id}"], "delete", "deleted", "job"),
    (&["POST /api/v1/jobs/{id}/cancel"], "cancel", "cancelled", "job"),
    (&["POST /api/v1/jobs/{id}/pause"], "pause", "paused", "job"),
    (&["POST /api/v1/jobs/{id}/resume"], "resume", "resumed", "job"),
    (&["POST /api/v1/jobs/{id}/retry"], "retry", "retried", "job"),
    (&["POST /api/v1/jobs/{id}/fork"], "fork", "forked", "job"),
    (&["PUT /api/v1/jobs/{id}/panels"], "change", "changed", "the panels of job"),
    (&["DELETE /api/v1/jobs/{id}/panels"], "remove", "removed", "the panels of job"),
    (&["PUT /api/v1/projects/{name}/panels"], "change", "changed", "the panels of project"),
    (&["POST /api/v1/checkpoints/{id}/predict"], "classify", "classified", "pictures with checkpoint"),
    (&["POST /api/v1/sweeps"], "submit", "submitted", "sweep"),
    (&["DELETE /api/v1/sweeps/{id}"], "delete", "deleted", "sweep"),
    (&["POST /api/v1/sweeps/{id}/cancel"], "cancel", "cancelled", "sweep"),
    (&["POST /api/v1/sweeps/{id}/pause"], "pause", "paused", "sweep"),
    (&["POST /api/v1/sweeps/{id}/resume"], "resume", "resumed", "sweep"),
    (&["POST /api/v1/runs"], "start", "started", "run"),
    (&["POST /api/v1/models"], "register", "registered", "model"),
    (&["DELETE /api/v1/models/{name}/versions/{version}"], "remove", "removed", "model"),
    (&["PUT /api/v1/models/{name}/aliases/{alias}"], "change", "changed", "alias"),
    (&["DELETE /api/v1/models/{name}/aliases/{alias}"], "remove", "removed", "alias"),
    (&["POST /api/v1/datasets", "POST /datasets"], "add", "added", "dataset"),
    (&["POST /api/v1/datasets/bundled"], "add", "added", "the bundled pictures"),
    (&["POST /api/v1/datasets/uploads/{name}"], "upload", "uploaded", "dataset"),
    (&["POST /api/v1/datasets/inspect"], "inspect", "inspected", "a folder"),
    (&["POST /api/v1/datasets/{name}/inspect"], "inspect", "inspected", "dataset"),
    (&["DELETE /api/v1/datasets/{name}"], "remove", "removed", "dataset"),
    (&["POST /api/v1/agents/{id}/drain"], "drain", "drained", "machine"),
    (&["POST /api/v1/agents/{id}/undrain"], "undrain", "undrained", "machine"),
    (&["DELETE /api/v1/agents/{id}"], "remove", "removed", "machine"),
    (&["POST /api/v1/webhooks", "POST /webhooks add"], "add", "added", "webhook"),
    (&["PATCH /api/v1/webhooks/{id}"], "change", "changed", "webhook"),
    (&["DELETE /api/v1/webhooks/{id}", "POST /webhooks remove"], "remove", "removed", "webhook"),
    (&["POST /api/v1/webhooks/{id}/test", "POST /webhooks test"], "test", "tested", "webhook"),
    (&["POST /webhooks"], "change", "changed", "webhooks"),
    (&["POST /webhooks enable"], "enable", "enabled", "webhook"),
    (&["POST /webhooks disable"], "disable", "disabled", "webhook"),
    (&["POST /api/v1/tokens"], "make", "made", "a token:"),
    (&["DELETE /api/v1/tokens/{id}"], "revoke", "revoked", "token"),
    (&["POST /api/v1/people", "POST /people Add"], "add", "added", "person"),
    (&["PATCH /api/v1/people/{name}"], "change", "changed", "person"),
    (&["DELETE /api/v1/people/{name}", "POST /people Remove"], "remove", "removed", "person"),
    (&["POST /people"], "change", "changed", "people"),
    (&["POST /people Role"], "change", "changed", "the role of person"),
    (&["POST /people Password"], "change", "changed", "the password of person"),
    (&["POST /people Disable"], "disable", "disabled", "person"),
    (&["POST /people Enable"], "enable", "enabled", "person"),
    (&["POST /account"], "change", "changed", "their account:"),
    (&["POST /api/v1/password"], "change", "changed", "their password"),
    (&["POST /api/v1/login-links"], "make", "made", "a sign-in link"),
    (&["POST /logout"], "sign", "signed", "out"),
    (&["sign in"], "sign", "signed", "in"),
];

impl AuditLine {
    /// Returns the URL without its query, and the name of the object that was created or changed.
    fn url_and_name(&self) -> (&str, &str) {
        let (url, name) = self.entry.object.split_once(": ").unwrap_or((&self.entry.object, ""));
        (url.split('?').next().unwrap_or_default(), name)
    }

    /// Returns the action's key in [`ACTIONS`], and the name of the object. For the pages People and Webhooks, the button precedes the name
    /// in the log: `Add "ada"`.
    fn key_and_name(&self) -> (String, &str) {
        let (_, name) = self.url_and_name();
        let (button, object) = name.split_once(' ').unwrap_or((name, ""));
        if !matches!(self.entry.action.as_str(), "POST /people" | "POST /webhooks") || button.is_empty() {
            return (self.entry.action.clone(), name);
        }
        let object = object.split_once("\": ").map_or(object, |(object, _)| object);
        (format!("{} {button}", self.entry.action), object.trim_matches('"'))
    }

    /// Returns the changes to a job, a person or an alias: `role: "viewer" (was "member")`. Empty for other requests.
    fn changes(&self) -> &str {
        let (_, name) = self.url_and_name();
        match self.entry.action.as_str() {
            "POST /people" => name.split_once("\": ").map_or("", |(_, changes)| changes),
            action if action.starts_with("PATCH ") || action.starts_with("PUT ") => name,
            _ => "",
        }
    }

    /// Returns the values of the route's parameters.
    fn parameters(&self) -> Vec<&str> {
        let route = self.entry.action.split_once(' ').map_or("", |(_, route)| route);
        let (url, _) = self.url_and_name();
        let parameters = route.split('/').zip(url.split('/')).filter(|(key, _)| key.starts_with('{'));
        parameters.map(|(_, value)| value).collect()
    }

    /// Returns the id of the job that the request concerns; `None` for a request that concerns no single job.
    pub fn job_id(&self) -> Option<&str> {
        let id = self.parameters().first().copied().unwrap_or_else(|| self.url_and_name().1);
        let is_about_job =
            self.entry.action.contains(" /api/v1/jobs") || self.entry.action.contains(" /jobs/new");
        Some(id).filter(|id| is_about_job && !id.is_empty())
    }

    /// Returns the job's id if the job still exists.
    fn existing_job_id(&self) -> Option<&str> {
        self.job_id().filter(|_| !self.job_name.is_empty())
    }

    /// Describes the action: `cancelled job`, or `tried to cancel job` if the request failed. Returns the action itself if it has no
    /// description.
    fn action_text(&self) -> String {
        let (key, _) = self.key_and_name();
        match ACTIONS.iter().find(|(keys, ..)| keys.contains(&key.as_str())) {
            Some((_, verb, _, object)) if self.entry.status >= 400 => format!("tried to {verb} {object}"),
            Some((_, _, past, object)) => format!("{past} {object}"),
            None => self.entry.action.clone(),
        }
    }

    /// The meaning of the response's status: `, not permitted`. Empty for other statuses.
    fn status_text(&self) -> &'static str {
        match self.entry.status {
            401 => ", not signed in",
            403 => ", not permitted",
            404 => ", not found",
            409 => ", conflict",
            413 => ", too large",
            400 | 422 => ", mistakes in the request",
            429 => ", too many requests",
            _ => "",
        }
    }

    /// Describes the object of the action: a job's name, an id, or the name of the created object.
    fn object_text(&self) -> String {
        let (url, _) = self.url_and_name();
        let (_, name) = self.key_and_name();
        let id = self.parameters().join("/");
        if !self.job_name.is_empty() {
            self.job_name.clone()
        } else if !id.is_empty() {
            id
        } else if name.is_empty() && self.action_text() == self.entry.action {
            url.to_owned()
        } else {
            name.to_owned()
        }
    }
}

/// `GET /audit`.
#[derive(Debug, Clone, Template)]
#[template(path = "audit.html")]
pub struct AuditPage {
    /// Newest first.
    pub lines: Vec<AuditLine>,
    /// Cursor of the next page, with older lines.
    pub next: Option<String>,
    /// The filter by person or token (`?who=ada`). Empty: entries of everybody.
    pub who: String,
    /// The filter by a text that the action or the object contains (`?q=/jobs`). Empty: entries with any text.
    pub text: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

/// Kinds of entries, each with the text that its entries contain.
const KINDS: [(&str, &str); 10] = [
    ("all", ""),
    ("jobs", "/jobs"),
    ("sweeps", "/sweeps"),
    ("models", "/models"),
    ("datasets", "/datasets"),
    ("machines", "/agents"),
    ("people", "/people"),
    ("tokens", "/tokens"),
    ("webhooks", "/webhooks"),
    ("sign-ins", "sign in"),
];

impl AuditPage {
    /// Returns label and URL of each kind, and whether the page shows this kind.
    fn kinds(&self) -> Vec<(&'static str, String, bool)> {
        let link = |(label, text): (&'static str, &str)| (label, self.url(text, ""), self.text == text);
        KINDS.into_iter().map(link).collect()
    }

    /// Returns the URL of the page with the entries that contain `text`, from the cursor on. An empty cursor is the newest entry.
    fn url(&self, text: &str, cursor: &str) -> String {
        let cursor =
            if cursor.is_empty() { String::new() } else { format!("&cursor={}", percent_encode(cursor)) };
        format!("/audit?who={}&q={}{cursor}", percent_encode(&self.who), percent_encode(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_described_with_the_names_of_jobs() {
        let line = |action: &str, object: &str, job_name: &str| AuditLine {
            entry: AuditEntry {
                id: "1".into(),
                at: jiff::Timestamp::UNIX_EPOCH,
                who: "ada".into(),
                token_id: String::new(),
                address: "::1".into(),
                action: action.into(),
                object: object.into(),
                status: 200,
                request_id: "r".into(),
            },
            job_name: job_name.into(),
        };
        for (action, object, name, sentence, job) in [
            (
                "POST /api/v1/jobs/{id}/cancel",
                "/api/v1/jobs/j1/cancel?x=1",
                "shoes",
                "cancelled job shoes",
                Some("j1"),
            ),
            ("DELETE /api/v1/jobs/{id}", "/api/v1/jobs/j1", "", "deleted job j1", Some("j1")),
            ("POST /api/v1/jobs", "/api/v1/jobs: j2", "shoes", "submitted job shoes", Some("j2")),
            ("POST /api/v1/jobs", "/api/v1/jobs", "", "submitted job ", None),
            ("DELETE /api/v1/datasets/{name}", "/api/v1/datasets/cats", "", "removed dataset cats", None),
            (
                "POST /api/v1/tokens",
                "/api/v1/tokens: read t1 \"ci\"",
                "",
                "made a token: read t1 \"ci\"",
                None,
            ),
            ("POST /people", "/people: Add \"ada\"", "", "added person ada", None),
            ("POST /people", "/people: Role \"ada\"", "", "changed the role of person ada", None),
            ("POST /webhooks", "/webhooks: test \"01a2\"", "", "tested webhook 01a2", None),
            ("sign in", "/login", "", "signed in ", None),
            (
                "PUT /api/v1/models/{name}/aliases/{alias}",
                "/api/v1/models/animals/aliases/champion",
                "",
                "changed alias animals/champion",
                None,
            ),
            ("PUT /api/v9/{id}", "/api/v9/x", "", "PUT /api/v9/{id} x", None),
            ("PUT /api/v9", "/api/v9", "", "PUT /api/v9 /api/v9", None),
        ] {
            let line = line(action, object, name);
            assert_eq!(format!("{} {}", line.action_text(), line.object_text()), sentence);
            assert_eq!(line.job_id(), job, "{action}");
        }
        let mut lines = vec![line("POST /api/v1/jobs/{id}/cancel", "/api/v1/jobs/j1/cancel", "<shoes>")];
        lines.push(line("POST /api/v1/jobs", "/api/v1/jobs", ""));
        lines[1].entry.status = 422;
        lines.push(line("PATCH /api/v1/jobs/{id}", "/api/v1/jobs/j1: priority: 5 (was 0)", "shoes"));
        lines.push(line("POST /people", "/people: Role \"bob\": role: \"viewer\" (was \"member\")", ""));
        let (who, text, user) = ("ada".into(), "/jobs".into(), CurrentUser::NOBODY);
        let html = AuditPage { lines, next: Some("c".into()), who, text, user }.render().expect("renders");
        for expected in [
            "<b>ada</b> cancelled job <a href=\"/jobs/j1\">&#60;shoes&#62;</a>",
            "<b>ada</b> tried to submit job",
            "<b>ada</b> changed job <a href=\"/jobs/j1\">shoes</a>: priority: 5 (was 0)",
            "<b>ada</b> changed the role of person bob: role: &#34;viewer&#34; (was",
            "refused: 422",
            "/audit?who=ada&#38;q=%2Fjobs&#38;cursor=c",
        ] {
            assert!(html.contains(expected), "{expected}: {html}");
        }
    }
}
