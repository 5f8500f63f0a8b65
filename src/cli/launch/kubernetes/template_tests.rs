//! Templates at their limits and beyond.

use super::*;

const POD: &str = "kind: Pod\nmetadata:\n  name: mine\n  labels: {team: vision}\nspec:\n  containers:\n  - {name: agent, image: 'lockstep:latest'}\n";

fn refused(text: &str) -> String {
    parse(text.as_bytes()).expect_err("a mistake")
}

fn pods(text: &str, slots: u32, device: Device) -> Value {
    let labels = json!({"lockstep/job": "id"});
    let labels = labels.as_object().expect("a mapping");
    parse(text.as_bytes()).expect("a template").pod_template("lockstep-x", labels, "lockstep", slots, device)
}

#[test]
fn templates_are_pods_pod_templates_or_parts_of_jobs() {
    let bare = "metadata: {labels: {team: vision}}\nspec:\n  containers:\n  - {name: agent, image: 'lockstep:latest'}\n";
    let indented: String = bare.lines().map(|line| format!("  {line}\n")).collect();
    let named = format!("kind: PodTemplate\ntemplate:\n{indented}");
    for text in [POD, bare, &named] {
        let pod_template = pods(text, 2, Device::Cpu);
        assert_eq!(
            pod_template["metadata"],
            json!({"labels": {"team": "vision", "lockstep/job": "id"}}),
            "{text}"
        );
        let spec = &pod_template["spec"];
        assert_eq!(spec["restartPolicy"], "Never");
        assert_eq!(spec["subdomain"], "lockstep-x");
        assert_eq!(spec["terminationGracePeriodSeconds"], 60);
        let container = &spec["containers"][0];
        assert_eq!(container["command"], json!(["lockstep", "launched", "/run/lockstep/launch/bundle.json"]));
        assert_eq!(container["resources"], json!({"requests": {"cpu": "2"}}));
        let mounts = container["volumeMounts"].as_array().expect("mounts");
        let paths: Vec<_> = mounts.iter().map(|mount| &mount["mountPath"]).collect();
        assert_eq!(paths, ["/run/lockstep/launch", "/var/lib/lockstep", "/dev/shm"]);
        assert_eq!(spec["volumes"][0]["secret"], json!({"secretName": "lockstep-x", "defaultMode": 0o444}));
    }
}

#[test]
fn gpus_become_slots_and_the_template_s_mounts_are_kept() {
    let text = "spec:\n  securityContext: {fsGroup: 0440}\n  terminationGracePeriodSeconds: 300\n  volumes: [{name: disk, hostPath: {path: /scratch}}]\n  \
                containers:\n  - {name: sidecar, image: x}\n  - name: lockstep\n    image: lockstep:gpu\n    resources: {limits: {nvidia.com/gpu: 4}}\n    \
                volumeMounts: [{name: disk, mountPath: /var/lib/lockstep}]\n";
    let pod_template = pods(text, 4, Device::Auto);
    let container = &pod_template["spec"]["containers"][1];
    assert_eq!(container["resources"], json!({"limits": {"nvidia.com/gpu": 4}}), "no CPUs are asked for");
    assert_eq!(container["volumeMounts"].as_array().map(Vec::len), Some(3), "{container:#}");
    assert_eq!(pod_template["spec"]["volumes"].as_array().map(Vec::len), Some(3));
    assert_eq!(pod_template["spec"]["containers"][0], json!({"name": "sidecar", "image": "x"}));
    assert_eq!(pod_template["spec"]["terminationGracePeriodSeconds"], 300);
    assert_eq!(pod_template["spec"]["volumes"][1]["secret"]["defaultMode"], 0o440);
    assert_eq!(pod_template["spec"]["securityContext"]["fsGroup"], 0o440, "as Kubernetes reads YAML");
    // A job that must run on GPUs, and a container that requests none.
    let pod_template = pods(POD, 8, Device::Cuda);
    assert_eq!(pod_template["spec"]["containers"][0]["resources"]["limits"], json!({"nvidia.com/gpu": 8}));
    let quoted = POD.replace("latest'", "latest', resources: {limits: {nvidia.com/gpu: '2'}}");
    assert_eq!(parse(quoted.as_bytes()).expect("a template").gpus, Some(2));
}

#[test]
fn kueue_s_labels_are_moved_to_the_job() {
    let text = POD.replace(
        "team: vision",
        "kueue.x-k8s.io/queue-name: team-a, kueue.x-k8s.io/priority-class: low, team: vision",
    );
    let template = parse(text.as_bytes()).expect("a template");
    assert_eq!(template.queue(), Some("team-a"));
    assert_eq!(template.job_labels.len(), 2);
    assert_eq!(template.metadata["labels"], json!({"team": "vision"}));
    assert_eq!(parse(POD.as_bytes()).expect("a template").queue(), None);
}

#[test]
fn mistakes_are_named() {
    let pod_with = |key: &str| POD.replace("latest'", &format!("latest', {key}"));
    for (text, message) in [
        ("kind: Deployment\nspec: {}\n".to_owned(), "is a Deployment"),
        ("spec: {}\n".to_owned(), "no spec.containers"),
        ("spec: [1]\n".to_owned(), "spec is not a mapping"),
        ("a: [".to_owned(), "is not YAML"),
        ("a: 1\na: 2\n".to_owned(), "is not YAML"),
        (POD.replace("image: ", "picture: "), "spec.containers[0].image is missing"),
        (pod_with("command: [sh]"), "spec.containers[0].command is set"),
        (pod_with("args: [x]"), "spec.containers[0].args is set"),
        (pod_with("resources: {limits: {nvidia.com/gpu: 0}}"), "nvidia.com/gpu: 0 is not a number"),
        (pod_with("resources: {limits: {nvidia.com/gpu: 1025}}"), "nvidia.com/gpu: 1025 is not a number"),
        (format!("{POD}  restartPolicy: Always\n"), "spec.restartPolicy is Always"),
        (format!("{POD}  - {{name: other, image: y}}\n"), "the agent's container must be called `lockstep`"),
        (
            pod_with("resources: x"),
            "spec.containers[0].resources is not a mapping: write a mapping below `resources:`",
        ),
        (pod_with("resources: {limits: []}"), "spec.containers[0].resources.limits is not a mapping"),
        (pod_with("resources: {requests: 4}"), "spec.containers[0].resources.requests is not a mapping"),
        (pod_with("volumeMounts: {a: b}"), "spec.containers[0].volumeMounts is not a list"),
        (format!("{POD}  volumes: {{a: b}}\n"), "spec.volumes is not a list"),
        (POD.replace("{team: vision}", "vision"), "metadata.labels is not a mapping"),
        (POD.replace("team: vision", "kueue.x-k8s.io/queue-name: 3"), "is not text"),
    ] {
        assert!(refused(&text).contains(message), "{text}: {}", refused(&text));
    }
}

#[test]
fn keys_without_a_value_count_as_absent() {
    let text = POD
        .replace("latest'", "latest', volumeMounts: , resources: {limits: , requests: null}")
        .replace("{team: vision}", "null")
        + "  volumes:\n";
    for (device, resources) in [
        (Device::Cpu, json!({"requests": {"cpu": "2"}})),
        (Device::Cuda, json!({"limits": {"nvidia.com/gpu": 2}})),
    ] {
        let pod_template = pods(&text, 2, device);
        let container = &pod_template["spec"]["containers"][0];
        assert_eq!(container["resources"], resources);
        assert_eq!(container["volumeMounts"].as_array().map(Vec::len), Some(3));
        assert_eq!(pod_template["spec"]["volumes"].as_array().map(Vec::len), Some(3));
        assert_eq!(pod_template["metadata"]["labels"], json!({"lockstep/job": "id"}));
    }
}

#[test]
fn a_pod_with_more_than_32_containers_is_refused() {
    let more = |n: usize| (0..n).map(|n| format!("  - {{name: c{n}, image: y}}\n")).collect::<String>();
    let text = |n: usize| POD.replace("name: agent", "name: lockstep") + &more(n);
    assert!(parse(text(MAX_CONTAINERS - 1).as_bytes()).is_ok());
    assert!(refused(&text(MAX_CONTAINERS)).contains("more than 32 containers"));
}
