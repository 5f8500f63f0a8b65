//! Describes the status of a Job and its pods in sentences.

use crate::cli::{agent::IN_POD_SIGNALLED, api::text};
use serde_json::Value;

/// Reasons for a waiting container that is starting. Other reasons do not resolve by themselves.
const STARTING_REASONS: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];
/// Maximum length of a message of Kubernetes. Longer messages are cut.
const MAX_CHARS: usize = 500;

fn items<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns the object's condition of this kind, if it has this status.
fn find_condition<'a>(object: &'a Value, kind: &str, status: &str) -> Option<&'a Value> {
    let is_wanted = |condition: &&Value| condition["type"] == kind && condition["status"] == status;
    items(&object["status"], "conditions").iter().find(is_wanted)
}

/// Formats reason and message: `Unschedulable: 0/3 nodes are available`.
fn format_reason(status: &Value) -> String {
    let (reason, message) = (text(status, "reason"), text(status, "message"));
    let sentence = match (reason, message) {
        ("", message) => message.to_owned(),
        (reason, "") => reason.to_owned(),
        (reason, message) => format!("{reason}: {message}"),
    };
    sentence.chars().take(MAX_CHARS).collect()
}

/// Describes when another pod replaces a pod that has to leave its node. Kubernetes waits until the pod has ended, which never happens on a
/// lost node.
fn describe_replacement(pod: &Value, why: &Value) -> String {
    let node = text(&pod["spec"], "nodeName");
    if why["reason"] != "DeletionByTaintManager" || node.is_empty() {
        return "another pod is started".into();
    }
    format!(
        "another pod is started when this pod has ended, which never happens on a lost node: if {node} is lost, \
         `kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute` tells Kubernetes so"
    )
}

/// Describes a pod's problem, with advice. `None` if there is no problem.
pub(super) fn describe_pod(pod: &Value) -> Option<String> {
    let name = text(&pod["metadata"], "name");
    let status = &pod["status"];
    // Checked before exit codes, which follow from this reason.
    if status["reason"] == "Evicted" {
        return Some(format!(
            "pod {name} was evicted from its node: {}; another pod is started",
            text(status, "message")
        ));
    }
    if let Some(why) = find_condition(pod, "DisruptionTarget", "True") {
        return Some(format!(
            "pod {name} has to leave its node ({}); {}",
            format_reason(why),
            describe_replacement(pod, why)
        ));
    }
    let containers = items(status, "initContainerStatuses").iter().chain(items(status, "containerStatuses"));
    for container in containers {
        let label = text(container, "name");
        let ended = [&container["state"]["terminated"], &container["lastState"]["terminated"]];
        if ended.iter().any(|ended| ended["reason"] == "OOMKilled") {
            return Some(format!(
                "pod {name}: container {label} was killed because its memory was used up (OOMKilled): raise resources.limits.memory in \
                 the template, or lower train.batch_size or train.global_batch_size"
            ));
        }
        let waiting = &container["state"]["waiting"];
        if !STARTING_REASONS.contains(&text(waiting, "reason")) {
            return Some(format!("pod {name}: container {label} cannot start: {}", format_reason(waiting)));
        }
        let ended = &container["state"]["terminated"];
        let code = ended["exitCode"].as_i64().unwrap_or(0);
        let is_signalled = code == i64::from(IN_POD_SIGNALLED);
        if code != 0 && !is_signalled {
            return Some(format!(
                "pod {name}: container {label} ended with exit code {code} ({}); `kubectl logs {name}` has its log",
                format_reason(ended)
            ));
        }
    }
    if let Some(why) = find_condition(pod, "PodScheduled", "False") {
        return Some(format!("pod {name} waits for a node: {}", format_reason(why)));
    }
    if status["phase"] == "Failed" && !text(status, "reason").is_empty() {
        return Some(format!("pod {name} has failed: {}", format_reason(status)));
    }
    None
}

/// Describes the state of the Job in one line.
pub(super) fn describe_job(job: &Value, queue: Option<&str>) -> String {
    if let Some(failed) = find_condition(job, "Failed", "True") {
        return format!("failed ({})", format_reason(failed));
    }
    if find_condition(job, "Complete", "True").is_some() {
        return "complete".into();
    }
    if job["metadata"]["deletionTimestamp"].is_string() {
        return "is being deleted".into();
    }
    if is_suspended(job) {
        return match queue {
            Some(queue) => format!("waits in Kueue's queue {queue}"),
            None => "suspended".into(),
        };
    }
    let status = &job["status"];
    let number = |key: &str| status[key].as_u64().unwrap_or(0);
    let failed = match number("failed") {
        0 => String::new(),
        failed => format!(", {failed} failed so far"),
    };
    format!("{} of {} pods are running{failed}", number("ready"), job["spec"]["completions"])
}

/// Describes how the Job ended. `None` if the Job has not ended.
pub(super) fn describe_end(job: &Value) -> Option<String> {
    let is_over =
        find_condition(job, "Failed", "True").or_else(|| find_condition(job, "Complete", "True")).is_some();
    is_over.then(|| describe_job(job, None))
}

pub(super) fn is_suspended(job: &Value) -> bool {
    job["spec"]["suspend"] == true
}

/// Whether the Job has pods, including terminating pods.
pub(super) fn has_pods(job: &Value) -> bool {
    ["active", "terminating"].iter().any(|key| job["status"][key].as_u64().is_some_and(|pods| pods > 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn describe(status: Value) -> String {
        describe_pod(&json!({"metadata": {"name": "p-0"}, "status": status})).unwrap_or_default()
    }

    #[test]
    fn problems_of_pods_are_described() {
        let container = |state: Value| json!({"containerStatuses": [{"name": "agent", "state": state}]});
        let waiting = |reason: &str| container(json!({"waiting": {"reason": reason, "message": "back-off"}}));
        assert!(describe(waiting("ImagePullBackOff")).contains("cannot start: ImagePullBackOff: back-off"));
        assert_eq!(describe(waiting("ContainerCreating")), "");
        let ended =
            |code: i64, reason: &str| container(json!({"terminated": {"exitCode": code, "reason": reason}}));
        assert!(describe(ended(137, "OOMKilled")).contains("resources.limits.memory"));
        assert!(describe(ended(2, "Error")).contains("exit code 2 (Error)"));
        assert_eq!(describe(ended(0, "Completed")), "");
        assert_eq!(describe(ended(143, "Error")), "", "the agent got a signal");
        let condition = |kind: &str, status: &str| {
            let condition = json!({"type": kind, "status": status, "reason": "Why", "message": "because"});
            json!({ "conditions": [condition] })
        };
        assert!(describe(condition("PodScheduled", "False")).contains("waits for a node: Why: because"));
        assert_eq!(describe(condition("PodScheduled", "True")), "");
        assert!(
            describe(condition("DisruptionTarget", "True"))
                .ends_with("has to leave its node (Why: because); another pod is started")
        );
        let evicted =
            json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"});
        assert!(describe(evicted).contains("was evicted from its node: The node was low on memory"));
        let mut long = waiting("ErrImagePull");
        long["containerStatuses"][0]["state"]["waiting"]["message"] = json!("x".repeat(10 * MAX_CHARS));
        assert!(describe(long).chars().count() < MAX_CHARS + 100);
    }

    #[test]
    fn a_pod_on_a_lost_node_gets_advice() {
        let condition =
            json!({"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"});
        let pod = |node: &str| json!({"metadata": {"name": "p-0"}, "spec": {"nodeName": node}, "status": {"conditions": [condition]}});
        let output = describe_pod(&pod("gpu-7")).unwrap();
        assert!(output.contains("never happens on a lost node: if gpu-7 is"), "{output}");
        assert!(output.contains("kubectl taint nodes gpu-7 node.kubernetes.io/out-of-service"), "{output}");
    }

    #[test]
    fn the_state_of_a_job_is_one_line() {
        let job = |spec: Value, status: Value| json!({"spec": spec, "status": status});
        let running = job(json!({"completions": 2, "suspend": false}), json!({"ready": 1, "failed": 3}));
        assert_eq!(describe_job(&running, None), "1 of 2 pods are running, 3 failed so far");
        let suspended = job(json!({"suspend": true}), json!({}));
        assert_eq!(describe_job(&suspended, Some("team")), "waits in Kueue's queue team");
        assert_eq!(describe_job(&suspended, None), "suspended");
        let failed =
            json!({"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]});
        assert_eq!(describe_end(&job(json!({}), failed)), Some("failed (BackoffLimitExceeded)".into()));
        assert_eq!(describe_end(&running), None);
    }
}
