#!/usr/bin/env python3
"""Checks deploy/, docker-compose.yml and the objects of `lockstep launch --with kubernetes` against Kubernetes' published schemas and the Compose
specification. Checks that the program has all commands in these files and their comments, and runs the commands. tests/run installs the
imported packages (into target/schemas) and runs this script.

    PYTHONPATH=target/schemas python3 tests/deploy/check.py target/debug/lockstep
"""

import copy
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml

import commands
import running
from commands import ROOT

KUBERNETES = "1.37"


def documents():
    """Yields all objects; files with commented-out options are yielded again with these options."""
    for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml")):
        text = path.read_text()
        for document in yaml.safe_load_all(text):
            yield path.name, document
        with_options = re.sub(r"^( {4,})# (?=envFrom:$|  - |kueue)", r"\1", text, flags=re.MULTILINE)
        if with_options != text:
            for document in yaml.safe_load_all(with_options):
                yield f"{path.name} with its options", document


def is_valid(document):
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return True
    except kubernetes_validate.ValidationError as error:
        print("refused:", str(error).splitlines()[0])
        return False


def check_kubernetes(program):
    kinds, roles = [], []
    for name, document in documents():
        assert is_valid(document), f"{name}: {document['kind']} {document['metadata']['name']}"
        kinds.append(document["kind"])
        if document["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
            roles.append(name)
        if document["kind"] == "StatefulSet":
            pod = document["spec"]["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"], name
            container = pod["containers"][0]
            commands.check_command(program, name, container["args"])
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
            assert mounted == {volume["name"] for volume in pod["volumes"]} | claims, f"{name}: {mounted}"
    # The server's StatefulSet is checked twice: with and without its options.
    assert kinds.count("StatefulSet") == 4, kinds
    assert set(roles) == {"launch-role.yaml"}, f"only a launch needs a role: {roles}"
    check_role()
    # The schemas find an unknown key.
    broken = copy.deepcopy(next(document for _, document in documents() if document["kind"] == "StatefulSet"))
    broken["spec"]["replicaz"] = 1
    assert not is_valid(broken), "a key that is unknown to Kubernetes is accepted"


def check_role():
    """Checks that the role has only the rights that a launch needs, and none for the whole cluster."""
    role = next(document for _, document in documents() if document["kind"] == "Role")
    rights = {(group, resource): set(rule["verbs"]) for rule in role["rules"] for group in rule["apiGroups"] for resource in rule["resources"]}
    assert rights == {
        ("batch", "jobs"): {"create", "get", "patch", "delete"},
        ("", "services"): {"create", "get", "delete"},
        ("", "secrets"): {"create", "get", "delete"},
        ("", "pods"): {"list"},
    }, rights


def check_launch(program):
    """Checks the objects of a launch on CPU cores and on GPUs, with the template of deploy/ and with a minimal template."""
    with tempfile.TemporaryDirectory() as folder:
        small = pathlib.Path(folder, "small.yaml")
        small.write_text("spec: {containers: [{name: a, image: b}]}")
        job = pathlib.Path(folder, "job.toml")
        for device in ("cpu", "cuda"):
            job.write_text(f'[data]\ndataset = "x"\n[parallel]\nranks = 8\ndevice = "{device}"\n')
            for template in (small, ROOT / "deploy/kubernetes/launch-pod.yaml"):
                command = [program, "launch", job, "--with", "kubernetes", "--template", template, "--dry-run"]
                objects = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                kinds = [item["kind"] for item in objects["items"]]
                assert kinds == ["Job", "Service", "Secret"], kinds
                for item in objects["items"]:
                    assert is_valid(item), f"{template.name}, {device}: {item['kind']}"


def check_compose(program):
    path = ROOT / "docker-compose.yml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*check, str(path)], check=True)
    invalid = subprocess.run([*check, "-"], input="services: {a: {imagge: x}}", text=True, capture_output=True)
    assert invalid.returncode != 0, "a key that is unknown to Compose is accepted"
    compose = yaml.safe_load(path.read_text())
    targets = {line.split()[-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if " AS " in line}
    for name, service in compose["services"].items():
        assert service.get("profiles"), f"{name} has no profile"
        if "entrypoint" in service:
            assert commands.check_text(program, name, "\n".join(service["command"])), f"{name} runs no lockstep command"
        elif "command" in service:
            commands.check_command(program, name, service["command"])
        if "build" in service:
            assert service["build"]["target"] in targets, f"{name}: {targets}"


if __name__ == "__main__":
    check_kubernetes(sys.argv[1])
    check_launch(sys.argv[1])
    check_compose(sys.argv[1])
    commands.check_all(sys.argv[1])
    running.check_kubernetes(sys.argv[1])
    running.check_compose(sys.argv[1])
    print("deploy/ and docker-compose.yml are valid, and their commands work")
