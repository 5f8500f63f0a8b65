#!/usr/bin/env python3
"""A simulated Kubernetes for tests of `lockstep launch`: an API server (versions, rights), a Job
controller and a kubelet.

    api.py PORT TOKEN ROLE.json HIDDEN_FOLDER FOLDER

ROLE.json has the rules of a Role. These rules, and those of Roles that are bound later, apply to every request, except requests of kubectl,
which sends no token over plain HTTP and is an admin. HIDDEN_FOLDER is empty in pods. The test controls the simulation by POST /test/ACTION.
"""

import http.server
import json
import os
import signal
import socket
import threading
import time
import urllib.parse

import admission
import discovery
from nodes import collect, control, pod_pid, simulate_node_failure
from state import CONNECTIONS, GROUPS, KINDS, LOCK, PORT, PROCESSES, ROLE, STATE, STORE, TOKEN, Refused, create, delete, forget, set_new_version


def shown(item):
    """An object as clients see it, without fields that only the simulation has."""
    item = json.loads(json.dumps(item))
    secret = item.pop("test-data", None)
    if secret is not None:
        item["data"] = {name: "eA==" for name in secret}
    for key in [key for key in item.get("status", {}) if key.startswith("test-")]:
        del item["status"][key]
    return item


def selected(item, query):
    labels = item["metadata"].get("labels", {})
    for part in filter(None, query.get("labelSelector", [""])[0].split(",")):
        name, value = part.split("=")
        if labels.get(name) != value:
            return False
    return True


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        CONNECTIONS.add(self.connection)

    def finish(self):
        CONNECTIONS.discard(self.connection)
        super().finish()

    def answer(self, code, body):
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def body(self):
        length = int(self.headers.get("content-length") or 0)
        return json.loads(self.rfile.read(length) or b"null")

    def run(self):
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        body = self.body()
        parts = [part for part in url.path.split("/") if part]
        try:
            if parts[0] == "test":
                return self.answer(200, ACTIONS[parts[1]](body))
            is_admin = self.headers.get("user-agent", "").startswith("kubectl/")
            if not is_admin and self.headers.get("authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if parts[:2] == ["openapi", "v2"]:
                # An empty document, so that kubectl validates nothing.
                return self.answer(200, None)
            document = discovery.answer(parts)
            if document is not None:
                return self.answer(200, document)
            if "namespaces" not in parts:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            # /api/v1/namespaces/N/R[/NAME] or /apis/batch/v1/namespaces/N/R[/NAME]
            group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
            namespace, resource, name = rest[1], rest[2], rest[3] if len(rest) > 3 else None
            assert GROUPS[resource] == group, url.path
            verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[self.command]
            if not is_admin and not any(group in r["apiGroups"] and resource in r["resources"] and verb in r["verbs"] for r in ROLE):
                STATE["refused"].append(f"{verb} {resource}")
                raise Refused(403, "Forbidden", f'User "test" cannot {verb} resource "{resource}" in API group "{group}" in the namespace "{namespace}"')
            with LOCK:
                code, item = self.do(verb, resource, namespace, name, query, body)
                item = shown(item) if item.get("kind") in KINDS.values() else item
                if STATE["lost"] and verb in ("create", "patch"):
                    # The request succeeds, but its response is lost.
                    STATE["lost"] -= 1
                    self.close_connection = True
                    return None
            return self.answer(code, item)
        except Refused as refused:
            return self.answer(refused.status["code"], refused.status)

    do_GET = do_POST = do_PATCH = do_DELETE = run

    def do(self, verb, resource, namespace, name, query, body):
        key = (resource, namespace, name)
        if verb == "list":
            items = [shown(o) for k, o in STORE.items() if k[:2] == key[:2] and selected(o, query)]
            kind = f"{KINDS[resource]}List"
            return 200, {"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": str(STATE["version"])}, "items": items}
        if verb == "create":
            admission.check(resource, namespace, body)
            if resource == "secrets":
                body["test-data"] = body.pop("stringData")
            if resource == "jobs":
                body["status"] = {"failed": 0, "test-done": []}
            if resource == "rolebindings":
                ROLE.extend(STORE["roles", namespace, body["roleRef"]["name"]]["rules"])
            return 201, create(resource, namespace, body)
        if verb == "delete":
            return 200, delete(key, body)
        if key not in STORE:
            raise Refused(404, "NotFound", f'{resource} "{name}" not found')
        item = STORE[key]
        if verb == "patch":
            assert self.headers["content-type"] == "application/merge-patch+json"
            item["spec"].update(body["spec"])
            annotations = item["metadata"].setdefault("annotations", {})
            for annotation, value in body["metadata"]["annotations"].items():
                annotations.pop(annotation, None) if value is None else annotations.update({annotation: value})
            set_new_version(item)
        return 200, item


# Actions of the test


def running_pods(body):
    return [p for k, p in STORE.items() if k[0] == "pods" and p["status"]["phase"] == "Running" and p["metadata"]["labels"].get("batch.kubernetes.io/job-name", "").startswith(body.get("job", ""))]


def evict(body):
    """Evicts a pod, as a node with too little memory does. The pod stays as a failed pod."""
    with LOCK:
        pod = running_pods(body)[0]
        pod["status"].update(reason="Evicted", message="The node was low on resource: memory.")
        pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": ""})
        os.kill(pod_pid(PROCESSES[("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])]), signal.SIGTERM)
    return {}


def node_dies(body):
    """A node loses power. After its tolerations the pod is marked for deletion, but the kubelet reports nothing."""
    with LOCK:
        pod = next(p for p in running_pods({}) if p["spec"]["nodeName"] == body["node"])
        simulate_node_failure(pod)
    return {}


def out_of_service(body):
    """An admin declares a node lost (taint out-of-service, or deletion of its Node)."""
    with LOCK:
        collect(body["node"])
    return {}


def out_of_memory(body):
    with LOCK:
        pod = running_pods(body)[0]
        pod["status"]["test-reason"] = "OOMKilled"
        os.kill(pod_pid(PROCESSES[("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])]), signal.SIGKILL)
    return {}


def away(body):
    """The API server stops for some seconds."""
    def later():
        time.sleep(0.1)
        STATE["down"] = True
        STATE["server"].shutdown()
        STATE["server"].server_close()
        for connection in list(CONNECTIONS):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        time.sleep(body["secs"])
        STATE["down"] = False
    threading.Thread(target=later, daemon=True).start()
    return {}


def suspend(body):
    """Suspends or resumes a Job, as Kueue and users do."""
    with LOCK:
        job = next(o for k, o in STORE.items() if k[0] == "jobs")
        job["spec"]["suspend"] = body["suspend"]
        set_new_version(job)
    return {}


def annotate(body):
    """Adds annotations to a Job, as any client may that can change Jobs."""
    with LOCK:
        job = next(o for k, o in STORE.items() if k[0] == "jobs")
        job["metadata"]["annotations"].update(body)
        set_new_version(job)
    return {}


def drop(body):
    """Deletes an object immediately; its dependents are deleted later."""
    with LOCK:
        forget(next(k for k in STORE if k[0] == body["resource"]))
    return {}


def objects(_):
    with LOCK:
        return {"items": [{**shown(o), "secret": o.get("test-data")} for o in STORE.values()], "refused": STATE["refused"]}


def put(body):
    with LOCK:
        resource = next(r for r, kind in KINDS.items() if kind == body["kind"])
        if resource == "secrets":
            body["test-data"] = body.pop("stringData", {})
        if resource == "jobs":
            body["status"] = {"failed": 0, "test-done": []}
        create(resource, body["metadata"]["namespace"], body)
    return {}


def state(body):
    with LOCK:
        STATE.update(body)
    return {}


ACTIONS = {"annotate": annotate, "drop": drop, "evict": evict, "node-dies": node_dies, "out-of-service": out_of_service, "oom": out_of_memory, "away": away, "suspend": suspend, "objects": objects, "put": put, "state": state}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def end(*_):
    for process in PROCESSES.values():
        process.kill()
    os._exit(0)


signal.signal(signal.SIGTERM, end)
threading.Thread(target=control, daemon=True).start()
while True:
    if STATE["down"]:
        time.sleep(0.05)
        continue
    STATE["server"] = Server(("127.0.0.1", PORT), Handler)
    STATE["server"].serve_forever(0.05)
    while not STATE["down"]:
        time.sleep(0.01)
