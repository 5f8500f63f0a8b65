//! The user's template for pods (YAML): the parts that are used or refused, and the parts that a launch adds.

use super::super::{
    super::{file, usage_error},
    Args, LauncherKind, MAX_HOSTS, MAX_SLOTS,
    hosts::Host,
};
use lockstep_protocol::{JobSpec, spec::Device};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Maximum size of a template.
const TEMPLATE_BYTES: u64 = 256 << 10;
/// Maximum number of containers in a pod, including init containers.
const MAX_CONTAINERS: usize = 32;
/// Name of the container with the agent, if a pod has several containers.
const CONTAINER: &str = "lockstep";
/// Default folder for the agents' state.
const STATE_DIR: &str = "/var/lib/lockstep";
/// Path at which the Secret with the agents' bundles is mounted.
pub(super) const BUNDLE_DIR: &str = "/run/lockstep/launch";
pub(super) const BUNDLE_FILE: &str = "bundle.json";
/// The resource of GPUs in Kubernetes.
const GPU: &str = "nvidia.com/gpu";
/// Prefix of Kueue's labels, which are moved to the Job.
const KUEUE: &str = "kueue.x-k8s.io/";
/// Grace period of pods in seconds: ranks write a checkpoint (20 s), and agents upload it (30 s).
const GRACE_SECS: u64 = 60;

/// A checked template.
#[derive(Debug, Clone)]
pub(in super::super) struct Template {
    /// Folder for the agents' state in the pods.
    pub(super) dir: PathBuf,
    metadata: Map<String, Value>,
    spec: Map<String, Value>,
    /// Index of the agent's container.
    container: usize,
    /// Number of GPUs that this container requests. `None` if it requests none.
    gpus: Option<u32>,
    /// Labels of the Job, for Kueue.
    pub(super) job_labels: BTreeMap<String, String>,
}

/// Returns the template that the arguments name, or `None` if the launcher is not Kubernetes.
///
/// # Errors
/// Exit status 2. The message names the mistake in the template, and the mistake's path.
pub(in super::super) fn read(args: &Args) -> anyhow::Result<Option<Template>> {
    let path = match (&args.template, args.with) {
        (Some(path), LauncherKind::Kubernetes) => path,
        (None, LauncherKind::Kubernetes) => {
            return Err(usage_error(
                "no template is named: give the pods' template with --template pod.yaml",
            ));
        }
        (Some(_), _) => return Err(usage_error("--template is for --with kubernetes")),
        (None, _) => return Ok(None),
    };
    if !args.options.is_empty() {
        return Err(usage_error(
            "--with kubernetes accepts no options after --: write them into the template",
        ));
    }
    let failed = |detail: String| usage_error(format!("--template {}: {detail}", path.display()));
    let bytes = file::read(path, TEMPLATE_BYTES, "is larger than 256 KiB").map_err(failed)?;
    let mut template = parse(&bytes).map_err(failed)?;
    // The default of `--dir` is relative to a home directory, which few pods have.
    if args.dir.is_absolute() {
        template.dir.clone_from(&args.dir);
    } else if args.dir != Path::new(super::super::DEFAULT_DIR) {
        return Err(usage_error("--dir must be an absolute path in the pods, such as /var/lib/lockstep"));
    }
    Ok(Some(template))
}

fn parse(bytes: &[u8]) -> Result<Template, String> {
    // YAML in Kubernetes reads 0440 as octal.
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let value: Value = serde_saphyr::from_slice_with_options(bytes, options)
        .map_err(|e| format!("is not YAML: {}", e.to_string().lines().next().unwrap_or_default()))?;
    let template = match value.get("kind").and_then(Value::as_str) {
        Some("Pod") | None => value,
        Some("PodTemplate") => value.get("template").cloned().unwrap_or_default(),
        Some(kind) => {
            return Err(format!(
                "is a {kind}; give a Pod, a PodTemplate, or the part of a Job under `template:`"
            ));
        }
    };
    let object = |name: &str| match template.get(name) {
        None => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(_) => Err(format!("{name} is not a mapping")),
    };
    let (mut metadata, mut spec) = (object("metadata")?, object("spec")?);
    let count = |name: &str| spec.get(name).and_then(Value::as_array).map_or(0, Vec::len);
    let containers = count("containers");
    if containers == 0 {
        return Err("has no spec.containers".into());
    }
    if containers + count("initContainers") > MAX_CONTAINERS {
        return Err(format!("has more than {MAX_CONTAINERS} containers"));
    }
    let container = find_agent_container(&spec)?;
    match spec.get("restartPolicy").and_then(Value::as_str) {
        None | Some("Never") => {}
        Some(other) => {
            return Err(format!(
                "spec.restartPolicy is {other}: leave it out, or set Never; the Job replaces a failed pod"
            ));
        }
    }
    check_extensible("spec", &mut spec, "volumes", "list")?;
    check_extensible("metadata", &mut metadata, "labels", "mapping")?;
    let agent = &mut spec["containers"][container];
    check_extensible_parts(agent, &format!("spec.containers[{container}]"))?;
    let gpus = requested_gpus(agent)?;
    // With a name, all pods would have the same name. The Job decides the namespace.
    metadata.retain(|key, _| key == "labels" || key == "annotations");
    let mut job_labels = BTreeMap::new();
    if let Some(labels) = metadata.get_mut("labels").and_then(Value::as_object_mut) {
        for (key, value) in labels.iter().filter(|(key, _)| key.starts_with(KUEUE)) {
            let value = value.as_str().ok_or_else(|| format!("metadata.labels.{key} is not text"))?;
            job_labels.insert(key.clone(), value.to_owned());
        }
        labels.retain(|key, _| !key.starts_with(KUEUE));
    }
    Ok(Template { dir: STATE_DIR.into(), metadata, spec, container, gpus, job_labels })
}

/// Returns the index of the only container, or of the container called `lockstep`.
fn find_agent_container(spec: &Map<String, Value>) -> Result<usize, String> {
    let containers = spec["containers"].as_array().map_or(&[][..], Vec::as_slice);
    let named = containers.iter().position(|container| container["name"] == CONTAINER);
    let Some(index) = named.or((containers.len() == 1).then_some(0)) else {
        return Err(format!("has several containers: the agent's container must be called `{CONTAINER}`"));
    };
    let container = &containers[index];
    let has_text =
        |key: &str| container.get(key).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    for key in ["name", "image"] {
        if !has_text(key) {
            return Err(format!("spec.containers[{index}].{key} is missing"));
        }
    }
    for key in ["command", "args"] {
        if container.get(key).is_some_and(|value| !value.is_null()) {
            return Err(format!(
                "spec.containers[{index}].{key} is set: leave it out, because the launch starts --program in this container"
            ));
        }
    }
    Ok(index)
}

/// Checks the parts of the agent's container that a launch extends.
fn check_extensible_parts(container: &mut Value, path: &str) -> Result<(), String> {
    let Some(container) = container.as_object_mut() else { return Err(format!("{path} is not a mapping")) };
    check_extensible(path, container, "volumeMounts", "list")?;
    check_extensible(path, container, "resources", "mapping")?;
    if let Some(resources) = container.get_mut("resources").and_then(Value::as_object_mut) {
        let path = format!("{path}.resources");
        check_extensible(&path, resources, "limits", "mapping")?;
        check_extensible(&path, resources, "requests", "mapping")?;
    }
    Ok(())
}

/// Checks a part that a launch extends: it must be a mapping or a list. A key without a value counts as absent.
fn check_extensible(
    path: &str,
    object: &mut Map<String, Value>,
    key: &str,
    expected: &str,
) -> Result<(), String> {
    match object.get(key) {
        Some(Value::Null) => drop(object.remove(key)),
        Some(Value::Array(_)) if expected == "list" => {}
        Some(Value::Object(_)) if expected == "mapping" => {}
        Some(_) => {
            return Err(format!(
                "{path}.{key} is not a {expected}: write a {expected} below `{key}:`, or leave it out"
            ));
        }
        None => {}
    }
    Ok(())
}

/// Returns the number of GPUs that a container requests.
fn requested_gpus(container: &Value) -> Result<Option<u32>, String> {
    let find = |section: &str| container["resources"][section].get(GPU).cloned();
    let Some(value) = find("limits").or_else(|| find("requests")) else { return Ok(None) };
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let found = number.and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=MAX_SLOTS).contains(n));
    found.map(Some).ok_or_else(|| format!("{GPU}: {value} is not a number from 1 to {MAX_SLOTS}"))
}

impl Template {
    /// Returns the Kueue queue that decides when the Job starts. `None` without Kueue.
    pub(super) fn queue(&self) -> Option<&str> {
        self.job_labels.get("kueue.x-k8s.io/queue-name").map(String::as_str)
    }

    pub(super) fn container_name(&self) -> &str {
        self.spec["containers"][self.container]["name"].as_str().unwrap_or_default()
    }

    /// Sets the pods and their slots if the job uses GPUs: each pod has one slot for each GPU of its container, and without `--nodes`, there
    /// are as many pods as the job's ranks need.
    ///
    /// # Errors
    /// `--slots` contradicts the template, or the job needs too many pods.
    pub(in super::super) fn set_slots(
        &self,
        hosts: &mut Vec<Host>,
        args: &Args,
        spec: &JobSpec,
    ) -> anyhow::Result<()> {
        let Some(gpus) = self.gpus.filter(|_| !spec.parallel.device.is_cpu()) else { return Ok(()) };
        if let Some(slots) = args.slots.filter(|slots| *slots != gpus) {
            return Err(usage_error(format!(
                "--slots {slots}, but the template's container has {gpus} GPUs, each of which is a slot: leave --slots out, or change {GPU}"
            )));
        }
        let pods = args.nodes.unwrap_or_else(|| spec.parallel.ranks.div_ceil(gpus)).max(1) as usize;
        if pods > MAX_HOSTS {
            return Err(usage_error(format!(
                "{} ranks need {pods} pods of {gpus} GPUs; a launch may have at most {MAX_HOSTS} pods",
                spec.parallel.ranks
            )));
        }
        *hosts = vec![Host { slots: Some(gpus), ..Host::default() }; pods];
        Ok(())
    }

    /// Returns the `template` of the Job, from which Kubernetes makes the pods. The pods read their agents' bundles from the Secret `name`,
    /// and reach each other through the Service of the same name.
    pub(super) fn pod_template(
        &self,
        name: &str,
        labels: &Map<String, Value>,
        program: &str,
        slots: u32,
        device: Device,
    ) -> Value {
        let (mut metadata, mut spec) = (self.metadata.clone(), self.spec.clone());
        let pod_labels = metadata.entry("labels").or_insert_with(|| json!({}));
        if let Some(pod_labels) = pod_labels.as_object_mut() {
            pod_labels.extend(labels.clone());
        }
        spec.insert("restartPolicy".into(), json!("Never"));
        spec.insert("subdomain".into(), json!(name));
        spec.entry("terminationGracePeriodSeconds").or_insert(json!(GRACE_SECS));
        spec.entry("automountServiceAccountToken").or_insert(json!(false));
        // The container's user must be able to read the file. If the pod sets fsGroup, the group's permission is enough.
        let has_group = spec.get("securityContext").is_some_and(|context| context.get("fsGroup").is_some());
        let mode = if has_group { 0o440 } else { 0o444 };
        let secret = json!({"name": "lockstep-launch", "secret": {"secretName": name, "defaultMode": mode}});
        let state = json!({"name": "lockstep-state", "emptyDir": {}});
        // Ranks of a pod exchange gradients through shared memory, which Kubernetes limits to 64 MiB by default.
        let shm = json!({"name": "lockstep-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}});
        let state_dir = self.dir.to_string_lossy();
        // Each volume with its path, and whether the container may only read it.
        let volumes = [(secret, BUNDLE_DIR, true), (state, &*state_dir, false), (shm, "/dev/shm", false)];
        let container = &mut spec["containers"][self.container];
        container["command"] = json!([program, "launched", format!("{BUNDLE_DIR}/{BUNDLE_FILE}")]);
        let on_gpus = device.is_accelerator() || (self.gpus.is_some() && !device.is_cpu());
        let sets_cpu = |container: &Value| {
            ["requests", "limits"].iter().any(|section| container["resources"][section].get("cpu").is_some())
        };
        if on_gpus && self.gpus.is_none() {
            container["resources"]["limits"][GPU] = json!(slots);
        } else if !on_gpus && !sets_cpu(container) {
            container["resources"]["requests"]["cpu"] = json!(slots.to_string());
        }
        let mut added = Vec::new();
        if !container["volumeMounts"].is_array() {
            container["volumeMounts"] = json!([]);
        }
        if let Some(mounts) = container["volumeMounts"].as_array_mut() {
            for (volume, path, read_only) in volumes {
                // The template has its own mount at this path, such as a persistent volume.
                if mounts.iter().any(|mount| mount["mountPath"] == path) {
                    continue;
                }
                mounts.push(json!({"name": volume["name"], "mountPath": path, "readOnly": read_only}));
                added.push(volume);
            }
        }
        if let Some(volumes) = spec.entry("volumes").or_insert(json!([])).as_array_mut() {
            volumes.extend(added);
        }
        json!({"metadata": metadata, "spec": spec})
    }
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
