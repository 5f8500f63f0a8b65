"""Starts `lockstep` with the arguments of the containers in the manifests and the Compose file, and runs the shell commands in their comments,
without Kubernetes and Docker.

Folders in a temporary folder replace the containers' paths, and a free port replaces port 7070. The shell commands run in a real shell, in
which this file replaces `kubectl` and `docker`: `exec` runs the command on this machine, `create configmap` and `create secret` create the
folder that a pod would mount. Not tested: images, users, owners of volumes, mounts, and names that Kubernetes chooses.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time

import yaml

from commands import ROOT

# Enough for the start of a server or an agent on a busy machine.
TIMEOUT_SECS = 60
ONE_PIXEL_GIF = bytes.fromhex("474946383961010001008000000000 00ffffff2c00000000010001000002024401003b")


class Containers:
    """Runs `lockstep` once for each container. The folder CONTAINER/data of a temporary folder stands for the container's path /data, and so on
    for /agent, /ca, /tokens and /datasets."""

    def __init__(self, program, folder):
        self.program, self.folder = program, pathlib.Path(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.processes = []

    def localize(self, text, container):
        """Replaces a container's paths and port with those of this machine."""
        text = re.sub(r"(?<![\w./-])/(data|agent|ca|tokens|datasets)\b", rf"{self.folder}/{container}/\1", text)
        return text.replace(":7070", f":{self.port}")

    def start(self, container, arguments, environment):
        for name in ("data", "datasets"):
            pathlib.Path(self.folder, container, name).mkdir(parents=True, exist_ok=True)
        arguments = [self.localize(argument, container) for argument in arguments]
        environment = clean_environment() | {name: self.localize(value, container) for name, value in environment.items()}
        log = open(self.folder / f"{container}.log", "w")
        self.processes.append(subprocess.Popen([self.program, *arguments], env=environment, stdout=log, stderr=log, cwd=self.folder))
        return self.processes[-1]

    def shell(self, script):
        """Runs the shell commands of a comment as they are written. Returns the standard output."""
        stubs = self.folder / "stubs"
        stubs.mkdir(exist_ok=True)
        for name in ("kubectl", "docker"):
            stub = stubs / name
            stub.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
            stub.chmod(0o755)
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        variables = {"PATH": f"{stubs}:{os.environ['PATH']}", "DEPLOY_PORT": str(self.port), "DEPLOY_PROGRAM": self.program}
        result = subprocess.run(["sh", "-ec", script], env=clean_environment() | variables, cwd=work, capture_output=True, text=True)
        assert result.returncode == 0, f"{script}\n{result.stdout}{result.stderr}"
        return result.stdout

    def get(self, server, path, name="127.0.0.1"):
        """Requests a path over loopback under this host name, trusting only the server's CA. Returns status and body."""
        context = ssl.create_default_context(cafile=self.folder / server / "data/ca/ca.crt")
        with socket.create_connection(("127.0.0.1", self.port), 10) as plain, context.wrap_socket(plain, server_hostname=name) as stream:
            token = (self.folder / server / "data/token").read_text().strip()
            stream.sendall(f"GET {path} HTTP/1.0\r\nHost: {name}:{self.port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
            head, _, body = b"".join(iter(lambda: stream.recv(65536), b"")).partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def until(self, what, process, is_so):
        deadline = time.monotonic() + TIMEOUT_SECS
        while True:
            assert process.poll() is None, f"{what}: the process has ended\n{self.logs()}"
            with contextlib.suppress(OSError):
                if is_so():
                    return
            assert time.monotonic() < deadline, f"{what}: not in {TIMEOUT_SECS} s\n{self.logs()}"
            time.sleep(0.05)

    def is_online(self, server, agent):
        status, body = self.get(server, "/api/v1/agents")
        return status == 200 and any(each["name"] == agent and each["online"] for each in json.loads(body)["agents"])

    def logs(self):
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("*.log")))

    def stop(self):
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_SECS) == 0, f"{process.args}: {process.returncode}\n{self.logs()}"
        self.processes = []


def clean_environment():
    """Returns the environment without variables that would lead commands to another server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "AWS_"))}


@contextlib.contextmanager
def containers(program):
    with tempfile.TemporaryDirectory() as folder:
        running = Containers(str(pathlib.Path(program).resolve()), folder)
        try:
            yield running
            running.stop()
        finally:
            for process in running.processes:
                process.kill()


def script(path, begins):
    """Returns the shell commands in a file's comments: indented lines that begin with the pattern `begins`, and the lines of loops."""
    lines = re.findall(r"^#   +(.*)$", path.read_text(), re.MULTILINE)
    return "\n".join(line for line in lines if re.match(rf"({begins}|for|done)\b", line))


def expand(value):
    """Returns a value as Compose expands it if no variable is set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", value).replace("$$", "$")


def stateful_set_pod(name):
    """Returns the pod's specification in a manifest's StatefulSet."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes" / name).read_text())
    return next(document["spec"]["template"]["spec"] for document in documents if document["kind"] == "StatefulSet")


def check_kubernetes(program):
    folder = ROOT / "deploy/kubernetes"
    with containers(program) as running:
        container = stateful_set_pod("server.yaml")["containers"][0]
        server = running.start("lockstep-0", container["args"], {each["name"]: each["value"] for each in container["env"]})
        probe = container["readinessProbe"]["httpGet"]
        running.until("server", server, lambda: running.get("lockstep-0", probe["path"])[0] == 200)
        # The server's certificate must also be valid for the name of its service.
        assert running.get("lockstep-0", probe["path"], "lockstep")[0] == 200
        write_pictures(running.folder / "lockstep-0/datasets/flowers")
        commands = script(folder / "server.yaml", "kubectl")
        (running.folder / "work").mkdir()
        (running.folder / "work/server.env").write_text("LOCKSTEP_DATABASE=postgres://lockstep@postgres/lockstep\n")
        # `dataset add` needs an agent, and no agent has joined yet, so this line runs last.
        dataset = next(line for line in commands.splitlines() if "dataset add" in line)
        link = running.shell(commands.replace(dataset, ""))
        assert f"https://lockstep:{running.port}/login?code=" in link, link
        for file in ("agents.yaml", "agents-gpu.yaml"):
            running.shell(script(folder / file, "kubectl"))
            pod = stateful_set_pod(file)
            volumes = {each["name"]: each for each in pod["volumes"]}
            name = f"{pod['serviceAccountName']}-0"
            objects = {
                "ca": running.folder / "work/configmap" / volumes["ca"]["configMap"]["name"],
                "tokens": running.folder / "work/secret" / volumes["tokens"]["secret"]["secretName"],
            }
            for mount, source in objects.items():
                shutil.copytree(source, running.folder / name / mount)
            # The name of the service cannot be resolved on this machine.
            arguments = [each.replace("$(POD_NAME)", name).replace("//lockstep:", "//127.0.0.1:") for each in pod["containers"][0]["args"]]
            environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
            agent = running.start(name, arguments, environment)
            running.until(name, agent, lambda name=name: running.is_online("lockstep-0", name))
        assert "2 classes" in running.shell(dataset)


def write_pictures(folder):
    """Writes two classes of two pictures each, of one pixel."""
    for split in ("train", "val"):
        for each in ("rose", "tulip"):
            (folder / split / each).mkdir(parents=True)
            for number in range(2):
                (folder / split / each / f"{number}.gif").write_bytes(ONE_PIXEL_GIF)


def check_compose(program):
    """Runs the profile `cluster` with SQLite in place of Postgres."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    with containers(program) as running:
        server = running.start("server", [expand(each) for each in services["server"]["command"]], {})
        health = [running.localize(each, "server") for each in services["server"]["healthcheck"]["test"][1:]]
        assert health[0] == "lockstep", health
        running.until("server", server, lambda: subprocess.run([program, *health[1:]], env=clean_environment(), capture_output=True).returncode == 0)
        # `join` and the agent share the volume /agent; `join` uses the server's volume as /data.
        (running.folder / "server/agent").mkdir()
        join = services["join"]
        text = "\n".join(running.localize(expand(each), "server") for each in join["command"])
        stubs = running.folder / "stubs"
        stubs.mkdir()
        (stubs / "lockstep").symlink_to(running.program)
        tokens = []
        for _ in range(2):
            subprocess.run([*join["entrypoint"], text], env=clean_environment() | {"PATH": f"{stubs}:{os.environ['PATH']}"}, check=True, capture_output=True)
            tokens.append((running.folder / "server/agent/cpu-agent").read_text())
        assert tokens[0] and tokens[0] == tokens[1], "the token is created once"
        (running.folder / "cpu-agent").mkdir()
        (running.folder / "cpu-agent/agent").symlink_to(running.folder / "server/agent")
        environment = {name: expand(value) for name, value in services["cpu-agent"]["environment"].items()}
        agent = running.start("cpu-agent", services["cpu-agent"]["command"], environment)
        running.until("cpu-agent", agent, lambda: running.is_online("server", "cpu-agent"))
        # Prepares the folder of another machine's agent with the comment's commands, which name the agent node-2, and starts it.
        commands = script(ROOT / "docker-compose.yml", "docker compose --profile cluster exec|mkdir")
        assert f"https://127.0.0.1:{running.port}/login?code=" in running.shell(commands)
        (running.folder / "agent").mkdir()
        shutil.copytree(running.folder / "work/agent", running.folder / "agent/agent")
        environment = {"LOCKSTEP_SERVER": "https://127.0.0.1:7070", "LOCKSTEP_CA_FILE": "/agent/ca.crt"}
        agent = running.start("agent", [*services["agent"]["command"], "--name", "node-2"], environment)
        running.until("agent", agent, lambda: running.is_online("server", "node-2"))


def stub(tool, arguments):
    """Does what `kubectl` or `docker` would do for a command of a comment."""
    # Only `localize` is used, so `__init__`, which chooses a new port, is not called.
    running = Containers.__new__(Containers)
    running.folder, running.port = pathlib.Path.cwd().parent, int(os.environ["DEPLOY_PORT"])
    if tool == "docker":
        assert arguments[:2] == ["compose", "--profile"] and arguments[3:5] == ["exec", "-T"], arguments
        container, command = arguments[5], arguments[6:]
    else:
        arguments = arguments[2:] if arguments[0] == "-n" else arguments
        if arguments[0] == "exec":
            container, separator, command = arguments[1], arguments[2], arguments[3:]
            assert separator == "--", arguments
        elif arguments[0] == "create" and arguments[1] in ("configmap", "secret"):
            name = arguments[3] if arguments[1] == "secret" else arguments[2]
            folder = pathlib.Path(arguments[1], name)
            folder.mkdir(parents=True)
            for option in (each for each in arguments if each.startswith("--from-")):
                shutil.copy(option.split("=")[1], folder)
            return
        elif arguments[0] == "apply":
            assert (ROOT / arguments[2]).is_file(), arguments
            return
        else:
            assert arguments[:2] == ["create", "namespace"], arguments
            return
    assert command[0] == "lockstep", command
    os.execv(os.environ["DEPLOY_PROGRAM"], [running.localize(each, container) for each in command])


if __name__ == "__main__":
    stub(sys.argv[1], sys.argv[2:])
