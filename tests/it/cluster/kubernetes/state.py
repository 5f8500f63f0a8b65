"""The objects of the cluster, their versions, and the garbage collector."""

import json
import pathlib
import sys
import threading
import uuid

PORT, TOKEN, ROLE, HIDDEN_FOLDER, FOLDER = int(sys.argv[1]), sys.argv[2], json.load(open(sys.argv[3])), sys.argv[4], pathlib.Path(sys.argv[5])
GROUPS = {"jobs": "batch", "pods": "", "services": "", "secrets": "", "serviceaccounts": "", "roles": "rbac.authorization.k8s.io", "rolebindings": "rbac.authorization.k8s.io"}
KINDS = {"jobs": "Job", "pods": "Pod", "services": "Service", "secrets": "Secret", "serviceaccounts": "ServiceAccount", "roles": "Role", "rolebindings": "RoleBinding"}
LOCK = threading.RLock()
STORE = {}  # objects by (resource, namespace, name)
# `version`: the newest; `down`: no server listens; `refused`: forbidden requests; `lost`: responses to lose.
STATE = {"version": 100, "lost": 0, "down": False, "refused": []}
# HIDDEN_FOLDER: a folder of the test that pods must not see.
CONNECTIONS = set()
PROCESSES = {}  # of pods, by the key in STORE
HOOKS = {}  # functions of nodes.py, which imports this module


class Refused(Exception):
    def __init__(self, code, reason, message):
        super().__init__(message)
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}


def set_new_version(item):
    STATE["version"] += 1
    item["metadata"]["resourceVersion"] = str(STATE["version"])


def create(resource, namespace, item):
    meta = item["metadata"]
    key = (resource, namespace, meta["name"])
    if key in STORE:
        raise Refused(409, "AlreadyExists", f'{resource} "{meta["name"]}" already exists')
    meta.update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp="2026-01-01T00:00:00Z")
    meta.setdefault("generation", 1)
    for owner in meta.get("ownerReferences", []):
        assert any(o["metadata"]["uid"] == owner["uid"] for o in STORE.values()), "the owner exists"
    STORE[key] = item
    set_new_version(item)
    return item


def forget(key):
    item = STORE.pop(key, None)
    if item is None:
        return
    # The garbage collector.
    for other, dependent in list(STORE.items()):
        if any(o["uid"] == item["metadata"]["uid"] for o in dependent["metadata"].get("ownerReferences", [])):
            delete(other)


def delete(key, options=None):
    item = STORE.get(key)
    if item is None:
        raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
    wanted = ((options or {}).get("preconditions") or {}).get("uid")
    if wanted and wanted != item["metadata"]["uid"]:
        raise Refused(409, "Conflict", "the UID in the precondition does not match")
    if key[0] == "pods":
        # A pod of a lost node stays even if its deletion is forced: the Job's finalizer is removed once the pod has failed.
        if "deletionTimestamp" not in item["metadata"]:
            item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
            set_new_version(item)
            threading.Thread(target=HOOKS["end_pod"], args=(key, item), daemon=True).start()
    elif key[0] == "jobs" and (options or {}).get("propagationPolicy") == "Foreground":
        # The controller deletes the Job after its pods.
        if "deletionTimestamp" not in item["metadata"]:
            item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
            item["metadata"]["finalizers"] = ["foregroundDeletion"]
            set_new_version(item)
    else:
        forget(key)
    return item
