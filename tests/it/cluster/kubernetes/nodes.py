"""Simulated kubelet and Job controller. A pod is a process in its own namespaces. No image is pulled: pods use this machine's programs."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time
import uuid

from state import FOLDER, HIDDEN_FOLDER, HOOKS, LOCK, PROCESSES, STORE, create, delete, forget, set_new_version

def script(pod, container):
    """A shell script that mounts a container's volumes and executes its command."""
    home = FOLDER / "pods" / pod["metadata"]["uid"]
    lines = ["set -e", "mount -t tmpfs none /run", "mount -t tmpfs none /var/lib"]
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        volume = volumes[mount["name"]]
        source = home / mount["name"]
        source.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            secret = STORE.get(("secrets", pod["metadata"]["namespace"], volume["secret"]["secretName"]))
            if secret is None:
                return None
            # Like a kubelet: files in a separate folder, and links to them.
            (source / "..data").mkdir(exist_ok=True)
            for name, text in secret["test-data"].items():
                (source / "..data" / name).write_text(text)
                (source / "..data" / name).chmod(volume["secret"]["defaultMode"])
                if not (source / name).exists():
                    (source / name).symlink_to(f"..data/{name}")
        elif volume.get("emptyDir", {}).get("medium") == "Memory":
            lines.append(f"mount -t tmpfs none '{source}'")
        elif "hostPath" in volume:
            source = volume["hostPath"]["path"]
        lines.append(f"mkdir -p '{mount['mountPath']}'; mount --bind '{source}' '{mount['mountPath']}'")
    lines.append(f"mount -t tmpfs none '{HIDDEN_FOLDER}'")
    lines.append('exec "$@"')
    return "\n".join(lines)


def start_pod(key, pod):
    container = pod["spec"]["containers"][0]
    status = pod["status"]
    waiting = lambda reason, message="": [{"name": container["name"], "ready": False, "state": {"waiting": {"reason": reason, "message": message}}}]
    # A test asks for an unschedulable pod with the node selector `nowhere`, and for a failing pull with an image called `missing`.
    if "nowhere" in pod["spec"].get("nodeSelector", {}):
        status["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: 3 node(s) didn't match"}]
    elif "missing" in container["image"]:
        status["containerStatuses"] = waiting("ImagePullBackOff", f'Back-off pulling image "{container["image"]}"')
    else:
        text = script(pod, container)
        if text is None:
            status["containerStatuses"] = waiting("ContainerCreating", "secret not found")
            if not status.get("test-waiting-published"):
                status["test-waiting-published"] = True
                set_new_version(pod)
            return
        env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "HOSTNAME": pod["spec"]["hostname"], "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        # As in tests/it/server.rs: slows the steps of long jobs.
        env["LOCKSTEP_FAULT"] = "step:slow@100"
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            env[variable["name"]] = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] if "index" in field else variable["value"]
        log = open(FOLDER / f"{pod['metadata']['name']}.log", "ab")
        # Only root may create the other namespaces without a user namespace.
        user = [] if os.geteuid() == 0 else ["-U", "-r"]
        command = ["unshare", *user, "-m", "-p", "--fork", "--mount-proc", "--kill-child", "sh", "-c", text, "sh", *container["command"]]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=FOLDER, start_new_session=True)
        PROCESSES[key] = process
        pod["spec"]["nodeName"] = "node-" + pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
        status.update(phase="Running", startTime="2026-01-01T00:00:00Z")
        status["conditions"] = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
        status["containerStatuses"] = [{"name": container["name"], "ready": True, "state": {"running": {}}}]
        threading.Thread(target=wait_pod, args=(key, pod, process), daemon=True).start()
    set_new_version(pod)


def wait_pod(key, pod, process):
    code = process.wait()
    code = 128 - code if code < 0 else code
    with LOCK:
        PROCESSES.pop(key, None)
        status = pod["status"]
        if status.get("test-lost"):
            return
        status["phase"] = "Succeeded" if code == 0 else "Failed"
        reason = status.pop("test-reason", "Completed" if code == 0 else "Error")
        status["containerStatuses"] = [{"name": pod["spec"]["containers"][0]["name"], "ready": False, "state": {"terminated": {"exitCode": code, "reason": reason}}}]
        status["conditions"] = [c for c in status["conditions"] if c["type"] != "Ready"]
        if key in STORE and STORE[key] is pod:
            set_new_version(pod)


def pod_pid(process):
    """The first process of a pod: the child of unshare."""
    text = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(text[0]) if text else None


def simulate_node_failure(pod):
    """Kills the pod as if its node had died. The node's taint marks the pod for deletion, and no kubelet confirms the deletion."""
    pod["status"]["test-lost"] = True
    PROCESSES[("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])].kill()
    pod["status"]["conditions"] = [c for c in pod["status"]["conditions"] if c["type"] != "Ready"]
    pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "Taint manager: deleting due to NoExecute taint"})
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
    set_new_version(pod)


def collect(node):
    """The garbage collector of pods: pods of a lost node count as failed and are deleted."""
    for key, pod in list(STORE.items()):
        if key[0] == "pods" and pod["spec"].get("nodeName") == node and pod["status"].get("test-lost"):
            pod["status"]["phase"] = "Failed"
            record_end(pod)
            forget(key)


def end_pod(key, pod):
    with LOCK:
        process = PROCESSES.get(key)
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        child = pod_pid(process) if process else None
    if child:
        os.kill(child, signal.SIGTERM)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
        while pod["status"]["phase"] == "Running":
            time.sleep(0.01)
    with LOCK:
        if not pod["status"].get("test-end-recorded") and pod["status"]["phase"] in ("Succeeded", "Failed"):
            record_end(pod)
        if STORE.get(key) is pod:
            forget(key)


# Job controller


def job_of(pod):
    return STORE.get(("jobs", pod["metadata"]["namespace"], pod["metadata"]["labels"]["batch.kubernetes.io/job-name"]))


def add_condition(job, kind, reason=""):
    job["status"].setdefault("conditions", []).append({"type": kind, "status": "True", "reason": reason, "message": ""})


def has_ended(job):
    return any(c["type"] in ("Complete", "Failed") for c in job["status"].get("conditions", []))


def record_end(pod):
    """Records the end of a pod in its Job, according to the podFailurePolicy."""
    pod["status"]["test-end-recorded"] = True
    job = job_of(pod)
    if job is None or has_ended(job):
        return
    status = job["status"]
    index = int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
    if pod["status"]["phase"] == "Succeeded":
        if index not in status["test-done"]:
            status["test-done"].append(index)
        return
    # None if the kubelet has not reported the end.
    code = pod["status"]["containerStatuses"][0]["state"].get("terminated", {}).get("exitCode")
    for rule in job["spec"].get("podFailurePolicy", {}).get("rules", []):
        conditions = [(c["type"], c["status"]) for c in pod["status"]["conditions"]]
        matches = code in rule.get("onExitCodes", {}).get("values", []) or any((c["type"], c["status"]) in conditions for c in rule.get("onPodConditions", []))
        if matches and rule["action"] == "Ignore":
            return
        if matches and rule["action"] == "FailJob":
            add_condition(job, "Failed", "PodFailurePolicy")
            return
    status["failed"] += 1
    if status["failed"] > job["spec"]["backoffLimit"]:
        add_condition(job, "Failed", "BackoffLimitExceeded")


def reconcile(key, job):
    spec, meta = job["spec"], job["metadata"]
    status = job["status"]
    before = json.dumps(status)
    job_pods = {k: p for k, p in STORE.items() if k[0] == "pods" and p["metadata"]["labels"].get("batch.kubernetes.io/job-name") == key[2]}
    for pod in job_pods.values():
        if pod["status"]["phase"] in ("Succeeded", "Failed") and not pod["status"].get("test-end-recorded"):
            record_end(pod)
    active = {k: p for k, p in job_pods.items() if p["status"]["phase"] in ("Pending", "Running")}
    # With `Failed`, a terminating pod is replaced only after it has ended.
    policy = spec.get("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    pods_that_hold_their_index = [p for p in active.values() if policy == "Failed" or "deletionTimestamp" not in p["metadata"]]
    if "deletionTimestamp" in meta:
        for pod_key in job_pods:
            delete(pod_key)
        if not job_pods:
            forget(key)
        return
    done = len(status["test-done"])
    if not has_ended(job) and done == spec["completions"]:
        add_condition(job, "Complete")
    if has_ended(job) or spec["suspend"]:
        for pod_key in active:
            delete(pod_key)
    else:
        busy = {p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] for p in pods_that_hold_their_index}
        for index in range(spec["completions"]):
            if index not in status["test-done"] and str(index) not in busy:
                create("pods", key[1], make_pod(job, index))
    ready = sum(any(c["type"] == "Ready" for c in p["status"].get("conditions", [])) for p in active.values())
    status.update(active=len(active), ready=ready, succeeded=done)
    if json.dumps(status) != before:
        set_new_version(job)


def make_pod(job, index):
    template = json.loads(json.dumps(job["spec"]["template"]))
    meta = template.setdefault("metadata", {})
    name = job["metadata"]["name"]
    assert len(f"{name}-{index}") <= 63, name
    meta["name"] = f"{name}-{index}-{uuid.uuid4().hex[:5]}"
    meta.setdefault("labels", {})["batch.kubernetes.io/job-name"] = name
    meta.setdefault("annotations", {})["batch.kubernetes.io/job-completion-index"] = str(index)
    meta["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}]
    spec = template["spec"]
    spec["hostname"] = f"{name}-{index}"
    for container in spec["containers"]:
        path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": "Pending"}}


def control():
    """The loops of the Job controller and of the kubelet."""
    while True:
        time.sleep(0.05)
        with LOCK:
            for key, item in list(STORE.items()):
                if key[0] == "jobs":
                    reconcile(key, item)
            for key, item in list(STORE.items()):
                if key[0] == "pods" and item["status"]["phase"] == "Pending" and "deletionTimestamp" not in item["metadata"]:
                    if item["status"].get("containerStatuses", [{}])[0].get("state", {}).get("waiting", {}).get("reason") != "ImagePullBackOff" and not item["status"].get("conditions"):
                        start_pod(key, item)


HOOKS["end_pod"] = end_pod
