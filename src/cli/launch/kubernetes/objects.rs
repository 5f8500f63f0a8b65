//! The objects of a launch: an Indexed Job, and a Service and a Secret that the Job owns.

use super::{
    super::{
        bundle::{BUNDLE_BYTES, Bundle},
        hosts::Host,
    },
    template::{BUNDLE_FILE, Template},
};
use crate::cli::agent::{IN_POD_JOB_FAILED, IN_POD_SIGNALLED};
use lockstep_protocol::JobSpec;
use serde_json::{Map, Value, json};

/// Label with the id of Lockstep's job.
pub(super) const JOB_LABEL: &str = "lockstep/job";
/// Annotation with a random id of the launch. Identifies an object if the response to its creation was lost.
pub(super) const LAUNCH_ANNOTATION: &str = "lockstep/launch";
/// Annotation with the ids of the agents' tokens, which the launch revokes when the job is over.
pub(super) const TOKENS_ANNOTATION: &str = "lockstep/tokens";
/// Annotation of a Job that this program has suspended: until its Secret exists, or because Lockstep's job is paused.
pub(super) const SUSPENDED_ANNOTATION: &str = "lockstep/suspended";
/// Number of seconds for which Kubernetes keeps the Job after its end, so that its pods' logs can be read.
const TTL_SECS: u32 = 3600;
/// Maximum length of a name. Pods are called `NAME-INDEX`, which has at most 63 characters.
const NAME_CHARS: usize = 30;

/// Returns the name of a job's objects: `lockstep-`, the valid characters of the job's name, and the end of its id.
pub(super) fn object_name(id: &str, name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let words: String = name.chars().map(plain).collect();
    let words: Vec<_> = words.split('-').filter(|word| !word.is_empty()).collect();
    let words: String = words.join("-").chars().take(NAME_CHARS).collect();
    let end: String = id.chars().filter(char::is_ascii_alphanumeric).collect();
    let end = end[end.len().saturating_sub(12)..].to_ascii_lowercase();
    match words.trim_matches('-') {
        "" => format!("lockstep-{end}"),
        words => format!("lockstep-{words}-{end}"),
    }
}

/// The values from which the objects are made.
pub(super) struct Plan<'a> {
    pub(super) name: String,
    /// The id of Lockstep's job.
    pub(super) job: &'a str,
    /// Random id of the launch, for [`LAUNCH_ANNOTATION`].
    pub(super) launch: String,
    pub(super) program: &'a str,
    pub(super) hosts: &'a [Host],
    pub(super) spec: &'a JobSpec,
    pub(super) token_ids: &'a [String],
    pub(super) template: &'a Template,
}

impl Plan<'_> {
    fn labels(&self) -> Map<String, Value> {
        let labels = [("app.kubernetes.io/name", "lockstep"), (JOB_LABEL, self.job)];
        labels.into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect()
    }

    fn metadata(&self) -> Value {
        json!({"name": self.name, "labels": self.labels(), "annotations": {LAUNCH_ANNOTATION: self.launch}})
    }

    /// Returns the Job. The Job is created suspended, because its pods need the Secret, and the Secret needs the UID of the Job as its
    /// owner. In a queue of Kueue, Kueue starts the Job.
    pub(super) fn job(&self) -> Value {
        let pods = self.hosts.len();
        let slots = self.hosts.iter().filter_map(|host| host.slots).max().unwrap_or(1);
        let device = self.spec.parallel.device;
        let container = self.template.container_name();
        let exit_rule = |action: &str, codes: &[i32]| {
            json!({
                "action": action,
                "onExitCodes": {"containerName": container, "operator": "In", "values": codes},
            })
        };
        let mut metadata = self.metadata();
        for (key, value) in &self.template.job_labels {
            metadata["labels"][key] = json!(value);
        }
        metadata["annotations"][TOKENS_ANNOTATION] = json!(self.token_ids.join(","));
        if self.template.queue().is_none() {
            metadata["annotations"][SUSPENDED_ANNOTATION] = json!("true");
        }
        json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "completions": pods,
                "parallelism": pods,
                "suspend": true,
                // Limits the replacements of lost pods; Kubernetes' default is 6. A failed rank does not end a pod: the server counts the
                // job's restarts (`max_restarts`).
                "backoffLimit": (3 * pods).max(6),
                // The only policy that Kubernetes accepts with a podFailurePolicy. Two pods of an index would be the same agent, and a
                // terminating pod still uploads its checkpoint.
                "podReplacementPolicy": "Failed",
                "podFailurePolicy": {"rules": [
                    // The pod was preempted or evicted, or its node drained: the next pod continues the job.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    exit_rule("Ignore", &[IN_POD_SIGNALLED]),
                    // The job has failed, or the agent cannot use its bundle.
                    exit_rule("FailJob", &[2, IN_POD_JOB_FAILED]),
                ]},
                "ttlSecondsAfterFinished": TTL_SECS,
                "template": self.template.pod_template(&self.name, &self.labels(), self.program, slots, device),
            },
        })
    }

    /// Returns the headless Service, which gives pods DNS names even before they are ready.
    pub(super) fn service(&self, owner: Option<&Value>) -> Value {
        let mut metadata = self.metadata();
        set_owner(&mut metadata, owner);
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": true, "selector": {JOB_LABEL: self.job}},
        })
    }

    /// Returns the Secret with the agents' bundles. Without `bundle`, contains only the parts that may be printed.
    ///
    /// # Errors
    /// The bundle is larger than Kubernetes allows.
    pub(super) fn secret(&self, owner: Option<&Value>, bundle: Option<&Bundle>) -> anyhow::Result<Value> {
        let mut metadata = self.metadata();
        set_owner(&mut metadata, owner);
        let data = match bundle {
            Some(bundle) => json!({BUNDLE_FILE: bundle.to_json(BUNDLE_BYTES)?}),
            None => json!({}),
        };
        Ok(json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": true, "stringData": data,
        }))
    }
}

/// Makes the Job the owner of an object, so that it is deleted with the Job.
fn set_owner(metadata: &mut Value, owner: Option<&Value>) {
    if let Some(job) = owner {
        let field = |key: &str| job["metadata"][key].clone();
        metadata["ownerReferences"] =
            json!([{"apiVersion": "batch/v1", "kind": "Job", "name": field("name"), "uid": field("uid")}]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels_with_space_for_an_index() {
        let id = "01890a5d-ac96-774b-bcce-b302099a8057";
        assert_eq!(object_name(id, "ResNet 50/v2"), "lockstep-resnet-50-v2-b302099a8057");
        assert_eq!(object_name(id, "Ärger--"), "lockstep-rger-b302099a8057");
        assert_eq!(object_name(id, "…"), "lockstep-b302099a8057");
        let longest = object_name(id, &"x".repeat(200));
        assert_eq!(longest.len(), 9 + 30 + 1 + 12);
        assert!(format!("{longest}-255").len() <= 63, "{longest}");
        // The name must not end with a hyphen.
        let shortened = object_name(id, &format!("{} tail", "x".repeat(29)));
        assert_eq!(shortened, format!("lockstep-{}-b302099a8057", "x".repeat(29)));
    }
}
