//! The pods' template, a YAML file of the user's: what is read, what is refused, and what the launch puts into it.

use super::super::{
    super::{file, wrong},
    Args, LauncherKind, MOST_HOSTS, MOST_SLOTS,
    hosts::Host,
};
use lockstep_protocol::{JobSpec, spec::Device};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

const TEMPLATE_BYTES: u64 = 256 << 10;
/// Containers of a pod, those that prepare it among them.
const MOST_CONTAINERS: usize = 32;
/// In which container agents start, where a pod has several.
const CONTAINER: &str = "lockstep";
/// For the agents' state, where `--dir` names no other folder.
const STATE_DIR: &str = "/var/lib/lockstep";
/// Where the description of the agents is mounted.
pub(super) const BUNDLE_DIR: &str = "/run/lockstep/launch";
pub(super) const BUNDLE_FILE: &str = "bundle.json";
const GPU: &str = "nvidia.com/gpu";
/// Kueue's labels are for the Job.
const KUEUE: &str = "kueue.x-k8s.io/";
/// Ranks write a checkpoint (20 s), and agents upload it (30 s).
const GRACE_SECS: u64 = 60;

/// A template that has been checked.
#[derive(Debug, Clone)]
pub(in super::super) struct Template {
    /// Folder for the agents' state in the pods.
    pub(in super::super) dir: PathBuf,
    metadata: Map<String, Value>,
    spec: Map<String, Value>,
    /// Which of the containers is the agent's.
    container: usize,
    /// GPUs of that container.
    gpus: Option<u32>,
    /// Labels for the Job: Kueue's.
    pub(super) job_labels: BTreeMap<String, String>,
}

/// The template that the arguments name, where Kubernetes is to start the agents.
///
/// # Errors
/// Exit status 2: what is wrong with it, and where.
pub(in super::super) fn template(args: &Args) -> anyhow::Result<Option<Template>> {
    let path = match (&args.template, args.with) {
        (Some(path), LauncherKind::Kubernetes) => path,
        (None, LauncherKind::Kubernetes) => {
            return Err(wrong("which pods? Give their template: --template pod.yaml"));
        }
        (Some(_), _) => return Err(wrong("--template is for --with kubernetes")),
        (None, _) => return Ok(None),
    };
    if !args.options.is_empty() {
        return Err(wrong("Kubernetes takes no options after --: they belong into the template"));
    }
    let failed = |detail: String| wrong(format!("--template {}: {detail}", path.display()));
    let bytes = file::read(path, TEMPLATE_BYTES, "is larger than 256 KiB").map_err(failed)?;
    let mut template = parse(&bytes).map_err(failed)?;
    // The default is a folder in a home directory, which a pod seldom has.
    if args.dir.is_absolute() {
        template.dir.clone_from(&args.dir);
    } else if args.dir != Path::new(super::super::DEFAULT_DIR) {
        return Err(wrong("--dir: in a pod this is an absolute path, such as /var/lib/lockstep"));
    }
    Ok(Some(template))
}

fn parse(bytes: &[u8]) -> Result<Template, String> {
    // As Kubernetes reads YAML: 0440 is octal.
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let value: Value = serde_saphyr::from_slice_with_options(bytes, options)
        .map_err(|e| format!("is no YAML: {}", e.to_string().lines().next().unwrap_or_default()))?;
    let template = match value.get("kind").and_then(Value::as_str) {
        Some("Pod") | None => value,
        Some("PodTemplate") => value.get("template").cloned().unwrap_or_default(),
        Some(kind) => {
            return Err(format!("is a {kind}; give a Pod, a PodTemplate, or what stands under `template:`"));
        }
    };
    let object = |name: &str| match template.get(name) {
        None => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(_) => Err(format!("{name} is no mapping")),
    };
    let (mut metadata, mut spec) = (object("metadata")?, object("spec")?);
    let count = |name: &str| spec.get(name).and_then(Value::as_array).map_or(0, Vec::len);
    let containers = count("containers");
    if containers == 0 {
        return Err("has no spec.containers".into());
    }
    if containers + count("initContainers") > MOST_CONTAINERS {
        return Err(format!("has more than {MOST_CONTAINERS} containers"));
    }
    let container = agent_container(&spec)?;
    match spec.get("restartPolicy").and_then(Value::as_str) {
        None | Some("Never") => {}
        Some(other) => {
            return Err(format!(
                "spec.restartPolicy is {other}: leave it away, or say Never; the Job starts another pod for one that fails"
            ));
        }
    }
    extensible("spec", &mut spec, "volumes", Value::is_array)?;
    extensible("metadata", &mut metadata, "labels", Value::is_object)?;
    let agent = &mut spec["containers"][container];
    extensible_parts(agent, &format!("spec.containers[{container}]"))?;
    let gpus = gpus(agent)?;
    // A name would be the same for all pods, and they are where the Job is.
    metadata.retain(|key, _| key == "labels" || key == "annotations");
    let mut job_labels = BTreeMap::new();
    if let Some(labels) = metadata.get_mut("labels").and_then(Value::as_object_mut) {
        for (key, value) in labels.iter().filter(|(key, _)| key.starts_with(KUEUE)) {
            let value = value.as_str().ok_or_else(|| format!("metadata.labels.{key} is no text"))?;
            job_labels.insert(key.clone(), value.to_owned());
        }
        labels.retain(|key, _| !key.starts_with(KUEUE));
    }
    Ok(Template { dir: STATE_DIR.into(), metadata, spec, container, gpus, job_labels })
}

/// The only container, or the one that is called `lockstep`.
fn agent_container(spec: &Map<String, Value>) -> Result<usize, String> {
    let containers = spec["containers"].as_array().map_or(&[][..], Vec::as_slice);
    let named = containers.iter().position(|one| one["name"] == CONTAINER);
    let Some(at) = named.or((containers.len() == 1).then_some(0)) else {
        return Err(format!("has several containers: call the one with lockstep `{CONTAINER}`"));
    };
    let one = &containers[at];
    let text = |key: &str| one.get(key).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    for key in ["name", "image"] {
        if !text(key) {
            return Err(format!("spec.containers[{at}].{key} is missing"));
        }
    }
    for key in ["command", "args"] {
        if one.get(key).is_some_and(|value| !value.is_null()) {
            return Err(format!(
                "spec.containers[{at}].{key} is set: leave it away, as the launch starts `lockstep` there (--program names it)"
            ));
        }
    }
    Ok(at)
}

/// Checks what the launch adds to in the agent's container.
fn extensible_parts(container: &mut Value, path: &str) -> Result<(), String> {
    let Some(container) = container.as_object_mut() else { return Err(format!("{path} is no mapping")) };
    extensible(path, container, "volumeMounts", Value::is_array)?;
    extensible(path, container, "resources", Value::is_object)?;
    if let Some(resources) = container.get_mut("resources").and_then(Value::as_object_mut) {
        let path = format!("{path}.resources");
        extensible(&path, resources, "limits", Value::is_object)?;
        extensible(&path, resources, "requests", Value::is_object)?;
    }
    Ok(())
}

/// What the launch adds to must be a mapping or a list; a key without a value is one that is not there.
fn extensible(
    path: &str,
    of: &mut Map<String, Value>,
    key: &str,
    is_right: fn(&Value) -> bool,
) -> Result<(), String> {
    match of.get(key) {
        Some(Value::Null) => drop(of.remove(key)),
        Some(value) if !is_right(value) => {
            let (wanted, example) = match key {
                "volumes" | "volumeMounts" => ("list", "- name: ..."),
                "limits" | "requests" => ("mapping", "cpu: 4"),
                "resources" => ("mapping", "limits: {cpu: 4}"),
                _ => ("mapping", "team: vision"),
            };
            return Err(format!(
                "{path}.{key} is no {wanted}: write it as `{example}` below `{key}:`, or leave it away"
            ));
        }
        _ => {}
    }
    Ok(())
}

/// GPUs that a container asks for.
fn gpus(container: &Value) -> Result<Option<u32>, String> {
    let find = |under: &str| container["resources"][under].get(GPU).cloned();
    let Some(value) = find("limits").or_else(|| find("requests")) else { return Ok(None) };
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let found = number.and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=MOST_SLOTS).contains(n));
    found.map(Some).ok_or_else(|| format!("{GPU}: {value} is no number from 1 to {MOST_SLOTS}"))
}

impl Template {
    /// Whether Kueue decides when the Job starts; its queue.
    pub(super) fn queue(&self) -> Option<&str> {
        self.job_labels.get("kueue.x-k8s.io/queue-name").map(String::as_str)
    }

    pub(super) fn container_name(&self) -> &str {
        self.spec["containers"][self.container]["name"].as_str().unwrap_or_default()
    }

    /// A pod has as many slots as its container has GPUs, where the job uses them; and without `--nodes` there are as many pods as it takes.
    ///
    /// # Errors
    /// `--slots` says something else, or too many pods are needed.
    pub(in super::super) fn give_slots(
        &self,
        hosts: &mut Vec<Host>,
        args: &Args,
        spec: &JobSpec,
    ) -> anyhow::Result<()> {
        let Some(gpus) = self.gpus.filter(|_| !spec.parallel.device.is_cores()) else { return Ok(()) };
        if let Some(slots) = args.slots.filter(|slots| *slots != gpus) {
            return Err(wrong(format!(
                "--slots {slots}, and the template's container has {gpus} GPUs, a slot each: leave --slots away, or change {GPU}"
            )));
        }
        let pods = args.nodes.unwrap_or_else(|| spec.parallel.ranks.div_ceil(gpus)).max(1) as usize;
        if pods > MOST_HOSTS {
            return Err(wrong(format!(
                "{} ranks need {pods} pods of {gpus} GPUs; a launch has at most {MOST_HOSTS}",
                spec.parallel.ranks
            )));
        }
        *hosts = vec![Host { slots: Some(gpus), ..Host::default() }; pods];
        Ok(())
    }

    /// The pods of a launch, as a Job has them under `template`. They find the description of the agents in the Secret called `name`, and each
    /// other under the Service of that name.
    pub(super) fn pods(
        &self,
        name: &str,
        labels: &Map<String, Value>,
        program: &str,
        slots: u32,
        device: Device,
    ) -> Value {
        let (mut metadata, mut spec) = (self.metadata.clone(), self.spec.clone());
        let of_user = metadata.entry("labels").or_insert_with(|| json!({}));
        if let Some(of_user) = of_user.as_object_mut() {
            of_user.extend(labels.clone());
        }
        let or = |spec: &mut Map<String, Value>, key: &str, value: Value| {
            spec.entry(key).or_insert(value);
        };
        spec.insert("restartPolicy".into(), json!("Never"));
        spec.insert("subdomain".into(), json!(name));
        or(&mut spec, "terminationGracePeriodSeconds", json!(GRACE_SECS));
        or(&mut spec, "automountServiceAccountToken", json!(false));
        // Readable for the container's user: by its group where there is one for volumes.
        let has_group = spec.get("securityContext").is_some_and(|of_pod| of_pod.get("fsGroup").is_some());
        let mode = if has_group { 0o440 } else { 0o444 };
        let secret = json!({"name": "lockstep-launch", "secret": {"secretName": name, "defaultMode": mode}});
        let mut volumes = vec![(secret, BUNDLE_DIR.to_owned(), true)];
        let state = self.dir.to_string_lossy().into_owned();
        volumes.push((json!({"name": "lockstep-state", "emptyDir": {}}), state, false));
        // Ranks of one pod exchange gradients through shared memory; Kubernetes gives 64 MiB of it otherwise.
        let shm = json!({"name": "lockstep-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}});
        volumes.push((shm, "/dev/shm".into(), false));
        let container = &mut spec["containers"][self.container];
        container["command"] = json!([program, "launched", format!("{BUNDLE_DIR}/{BUNDLE_FILE}")]);
        let on_gpus = device.is_counted() || self.gpus.is_some() && !device.is_cores();
        let names =
            |container: &Value, under: &str, key: &str| container["resources"][under].get(key).is_some();
        if on_gpus && self.gpus.is_none() {
            container["resources"]["limits"][GPU] = json!(slots);
        } else if !on_gpus && !names(container, "requests", "cpu") && !names(container, "limits", "cpu") {
            container["resources"]["requests"]["cpu"] = json!(slots.to_string());
        }
        let mut added = Vec::new();
        if !container["volumeMounts"].is_array() {
            container["volumeMounts"] = json!([]);
        }
        if let Some(mounts) = container["volumeMounts"].as_array_mut() {
            for (volume, path, read_only) in volumes {
                // What the template mounts there is meant: a disk that stays, say.
                if mounts.iter().any(|mount| mount["mountPath"] == path.as_str()) {
                    continue;
                }
                mounts.push(json!({"name": volume["name"], "mountPath": path, "readOnly": read_only}));
                added.push(volume);
            }
        }
        or(&mut spec, "volumes", json!([]));
        if let Some(volumes) = spec.get_mut("volumes").and_then(Value::as_array_mut) {
            volumes.extend(added);
        }
        json!({"metadata": metadata, "spec": spec})
    }
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
