"""Library of the end-to-end scripts: a server with its agent, a client of its REST API and streams, and functions that
list processes and GPU memory. Standard library only."""

import base64
import hashlib
import json
import os
import pathlib
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request

FINAL = {"succeeded", "failed", "cancelled"}


class Failure(Exception):
    """An expectation failed; the message says what happened instead."""


def expect(condition, message):
    if not condition:
        raise Failure(message)


def wait(seconds, what, check, every=0.05):
    """Waits until `check` returns a true value and returns the value. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise Failure(f"{what}: not within {seconds} s")
        time.sleep(every)


class Stream:
    """A websocket client (RFC 6455) that reads JSON in text frames."""

    def __init__(self, port, path, timeout, token=None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{authorization}\r\n".encode()
        )
        self.buffer = b""
        head = self._read_until(b"\r\n\r\n").decode()
        expect(" 101 " in head.splitlines()[0], f"no websocket at {path}: {head.splitlines()[0]}")

    def _receive(self):
        part = self.socket.recv(1 << 16)
        expect(part, "the stream ended without a close")
        self.buffer += part

    def _read_until(self, mark):
        while mark not in self.buffer:
            self._receive()
        head, self.buffer = self.buffer.split(mark, 1)
        return head

    def _read(self, count):
        while len(self.buffer) < count:
            self._receive()
        part, self.buffer = self.buffer[:count], self.buffer[count:]
        return part

    def frame(self):
        """Returns the next frame, decoded from JSON."""
        text = b""
        while True:
            first, second = self._read(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack(">H", self._read(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self._read(8))
            payload = self._read(length)
            kind = first & 0x0F
            if kind == 8:
                raise Failure(f"the stream was closed: {payload!r}")
            if kind == 9:
                # A ping. The pong is empty; clients must mask their frames, here with zeroes.
                self.socket.sendall(b"\x8a\x80\0\0\0\0")
            if kind in (0, 1):
                text += payload
                if first & 0x80:
                    return json.loads(text)

    def close(self):
        self.socket.close()


class Job:
    """A submitted job, whose stream is read from the first event on."""

    def __init__(self, server, created, timeout):
        self.server, self.id, self.timeout = server, created["id"], timeout
        self.stream = Stream(server.port, f"/api/v1/jobs/{self.id}/stream?since=0", timeout, server.token)
        hello = self.stream.frame()
        expect(hello["type"] == "hello" and hello["job"]["id"] == self.id, f"no hello: {hello}")
        self.events, self.state, self.reason = [], "queued", None

    def next(self):
        """Returns the next event. The events' numbers must be consecutive."""
        while True:
            frame = self.stream.frame()
            # These frames are not events: `live` names the last event, `progress` and `changed` have no number.
            if frame["type"] == "live" or "seq" not in frame:
                continue
            last = self.events[-1]["seq"] if self.events else 0
            expect(frame["seq"] == last + 1, f"event {frame['seq']} after {last}")
            self.events.append(frame)
            if frame["type"] == "state":
                self.state, self.reason = frame["state"], frame.get("reason")
            return frame

    def until(self, matches, what):
        end = time.monotonic() + self.timeout
        while True:
            frame = self.next()
            if matches(frame):
                return frame
            expect(self.state not in FINAL, f"{what}: the job is {self.state} already: {self.reason}")
            expect(time.monotonic() < end, f"{what}: not within {self.timeout} s")

    def until_step(self, step, attempt=1):
        def matches(frame):
            is_loss = frame["type"] == "metrics" and frame["name"] == "loss" and frame["attempt"] == attempt
            return is_loss and frame["steps"][-1] >= step

        return self.until(matches, f"step {step} of attempt {attempt}")

    def until_checkpoint(self, step):
        """Waits for the report of a checkpoint of this step or a later step."""
        return self.until(lambda f: f["type"] == "checkpoint" and f.get("checkpoint", f)["step"] >= step, f"a checkpoint of step {step}")

    def until_attempt(self, number):
        """Waits until an attempt runs."""

        def matches(frame):
            return frame["type"] == "state" and frame["state"] == "running" and frame["attempt"] == number

        return self.until(matches, f"attempt {number} runs")

    def end(self):
        """Reads events up to the job's end, and returns the final state."""
        while self.state not in FINAL:
            self.next()
        self.stream.close()
        return self.state

    def expect_success(self):
        expect(self.end() == "succeeded", f"the job is {self.state}: {self.reason}")

    def final_checkpoint(self, step):
        """Waits for the job's success, and returns the folder of its checkpoint of the last step."""
        self.expect_success()
        return next((self.server.data / "jobs" / self.id / "checkpoints").glob(f"*-{step}"))

    def first_step(self, attempt):
        """Returns the first step of an attempt."""
        return min(step for (_, number), steps in self.loss_steps().items() if number == attempt for step in steps)

    def loss_steps(self):
        """Returns for each (rank, attempt) the steps with a loss, in the order of their reports."""
        reported = {}
        for event in self.events:
            if event["type"] == "metrics" and event["name"] == "loss":
                reported.setdefault((event["rank"], event["attempt"]), []).extend(event["steps"])
        return reported

    def log(self):
        lines = [line for event in self.events if event["type"] == "log" for line in event["lines"]]
        return "\n".join(line["text"] for line in lines)

    def ranks(self, attempt):
        """Returns the running processes of an attempt, by rank."""
        processes = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if b"rank" not in words[1:2] or state in "ZX":
                continue
            options = {name: value for name, value in zip(words, words[1:]) if name.startswith(b"--")}
            if options.get(b"--job") == self.id.encode() and options.get(b"--attempt") == str(attempt).encode():
                processes[int(options[b"--rank"])] = int(entry.name)
        return processes


class ServerUnderTest:
    """`lockstep serve` with its agent, in its own folder."""

    def __init__(self, program, folder, device, ranks, local_agent=True, warm="off"):
        self.program, self.folder = program, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        arguments = ["--cpu-slots", str(ranks)] if device == "cpu" else []
        # By default, there are no spare processes: they use GPU memory, and `Job.ranks` cannot find a rank that started as a spare process,
        # because its arguments do not name its job.
        arguments = [*arguments, "--warm", warm] if local_agent else ["--no-local-agent"]
        self.errors = open(folder / "serve.log", "ab")
        self.process = subprocess.Popen(
            [program, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(self.data), *arguments],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            # Ctrl-C must end only this script, which then stops the server.
            start_new_session=True,
        )
        line = self.process.stdout.readline().decode()
        expect("http://" in line, f"the server does not start: {self.log_end()}")
        self.port = int(line.strip().rsplit(":", 1)[1])
        # The server writes its token before it prints its URL.
        self.token = (self.data / "token").read_text().strip()
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        if not local_agent:
            return
        kind = "cpu" if device == "cpu" else "cuda"
        self.slots = wait(30, "an agent is online", lambda: self.online_slots(kind))
        expect(len(self.slots) >= ranks, f"{ranks} ranks, but these slots: {self.slots}\n{self.log_end()}")

    def log_end(self):
        return (self.folder / "serve.log").read_text(errors="replace")[-3000:]

    def online_slots(self, kind):
        """Returns the slots of agents that are online, including occupied slots."""
        agents = self.get("/agents")["agents"]
        return [s for a in agents if a["online"] for s in a["slots"] if s["device"] == kind]

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1{path}", data=data, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            raise Failure(f"{method} {path}: {error.code} {error.read().decode()[:1000]}") from None

    def get(self, path):
        return self.request("GET", path)

    def cli(self, *arguments):
        environment = dict(os.environ, LOCKSTEP_SERVER=f"http://127.0.0.1:{self.port}", LOCKSTEP_TOKEN=self.token)
        result = subprocess.run([self.program, *arguments], env=environment, capture_output=True, text=True, timeout=300)
        expect(result.returncode == 0, f"lockstep {' '.join(arguments)}: {result.stderr}")
        return result.stdout

    def submit(self, spec, timeout=120):
        return Job(self, self.request("POST", "/jobs", spec), timeout)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Failure("the server did not end within 30 s of SIGTERM") from None
        finally:
            self.errors.close()


def tensor_digests(checkpoint):
    """Returns the SHA-256 of each tensor in a checkpoint's files, without metadata."""
    digests = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        data = file.read_bytes()
        head = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + head])
        for name in sorted(entries.keys() - {"__metadata__"}):
            begin, end = (8 + head + offset for offset in entries[name]["data_offsets"])
            digests[file.name, name] = hashlib.sha256(data[begin:end]).hexdigest()
    return digests


def expect_same_tensors(checkpoint, expected):
    """Expects that a checkpoint has the tensors of another checkpoint, bit for bit. Returns the number of tensors."""
    expected, actual = tensor_digests(expected), tensor_digests(checkpoint)
    differ = [name for name in expected if actual.get(name) != expected[name]]
    expect(not differ and len(actual) == len(expected), f"{len(differ)} of {len(expected)} tensors of {checkpoint} differ: {differ[:5]}")
    return len(expected)


def expect_last_steps_kept(stage, job, kills):
    """Expects that the attempt after each kill begins within two steps of the last step that the surviving ranks reported. `kills`: pairs of an
    attempt and the rank that was killed in this attempt. `stage` receives notes."""
    reported = job.loss_steps()
    for attempt, victim in kills:
        last = max(max(listed) for (rank, number), listed in reported.items() if number == attempt and rank != victim)
        first = job.first_step(attempt + 1)
        stage.note(f"attempt {attempt} reported step {last}, attempt {attempt + 1} began with step {first}")
        expect(abs(first - 1 - last) <= 2, f"attempt {attempt + 1} began with step {first}, but attempt {attempt} had reported step {last}")


def gpu_memory():
    """Returns the memory in use in MiB of each GPU; empty without nvidia-smi."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in text.split()]
