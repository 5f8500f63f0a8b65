"""A server with its agent, a client of its REST interface and streams, and what is seen of its processes
and of the GPUs' memory: what the end-to-end scripts are written in. Standard library only."""

import base64
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
    """What was expected did not happen; the words say what did."""


def expect(condition, words):
    if not condition:
        raise Failure(words)


def wait(seconds, words, look, every=0.05):
    """The first true value of `look` within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise Failure(f"{words}: not within {seconds} s")
        time.sleep(every)


class Stream:
    """A websocket client (RFC 6455) that reads text frames of JSON."""

    def __init__(self, port, path, timeout, token=None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{authorization}\r\n".encode()
        )
        self.buffer = b""
        head = self._until(b"\r\n\r\n").decode()
        expect(" 101 " in head.splitlines()[0], f"no websocket at {path}: {head.splitlines()[0]}")

    def _more(self):
        part = self.socket.recv(1 << 16)
        expect(part, "the stream ended without a close")
        self.buffer += part

    def _until(self, mark):
        while mark not in self.buffer:
            self._more()
        head, self.buffer = self.buffer.split(mark, 1)
        return head

    def _take(self, count):
        while len(self.buffer) < count:
            self._more()
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def frame(self):
        """The next frame, as an object."""
        text = b""
        while True:
            first, second = self._take(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack(">H", self._take(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self._take(8))
            payload = self._take(length)
            kind = first & 0x0F
            if kind == 8:
                raise Failure(f"the stream was closed: {payload!r}")
            if kind == 9:
                # A client's frames are masked; a pong of nothing with a mask of zeroes.
                self.socket.sendall(b"\x8a\x80\0\0\0\0")
            if kind in (0, 1):
                text += payload
                if first & 0x80:
                    return json.loads(text)

    def close(self):
        self.socket.close()


class Job:
    """A submitted job, followed by its stream from the first event on."""

    def __init__(self, server, made, patience):
        self.server, self.id, self.patience = server, made["id"], patience
        self.stream = Stream(server.port, f"/api/v1/jobs/{self.id}/stream?since=0", patience, server.token)
        hello = self.stream.frame()
        expect(hello["type"] == "hello" and hello["job"]["id"] == self.id, f"no hello: {hello}")
        self.events, self.state, self.reason = [], "queued", None

    def next(self):
        """The next event; their numbers must follow each other."""
        while True:
            frame = self.stream.frame()
            # No events: `live` names the last one, `progress` and `changed` have no number.
            if frame["type"] == "live" or "seq" not in frame:
                continue
            last = self.events[-1]["seq"] if self.events else 0
            expect(frame["seq"] == last + 1, f"event {frame['seq']} after {last}")
            self.events.append(frame)
            if frame["type"] == "state":
                self.state, self.reason = frame["state"], frame.get("reason")
            return frame

    def until(self, fits, words):
        end = time.monotonic() + self.patience
        while True:
            frame = self.next()
            if fits(frame):
                return frame
            expect(self.state not in FINAL, f"{words}: but the job has {self.state}: {self.reason}")
            expect(time.monotonic() < end, f"{words}: not within {self.patience} s")

    def until_step(self, step, attempt=1):
        def fits(frame):
            there = frame["type"] == "metrics" and frame["name"] == "loss" and frame["attempt"] == attempt
            return there and frame["steps"][-1] >= step

        return self.until(fits, f"step {step} of attempt {attempt}")

    def until_checkpoint(self, step):
        """A checkpoint of this step or a later one is whole and reported."""
        return self.until(lambda f: f["type"] == "checkpoint" and f.get("checkpoint", f)["step"] >= step, f"a checkpoint of step {step}")

    def end(self):
        """Reads to the job's end; the state it ended in."""
        while self.state not in FINAL:
            self.next()
        self.stream.close()
        return self.state

    def succeeds(self):
        expect(self.end() == "succeeded", f"the job has {self.state}: {self.reason}")

    def losses(self):
        """By rank and attempt: the steps that have a loss, in the order they were reported."""
        reported = {}
        for event in self.events:
            if event["type"] == "metrics" and event["name"] == "loss":
                reported.setdefault((event["rank"], event["attempt"]), []).extend(event["steps"])
        return reported

    def log(self):
        lines = [line for event in self.events if event["type"] == "log" for line in event["lines"]]
        return "\n".join(line["text"] for line in lines)

    def ranks(self, attempt):
        """The processes of an attempt that are alive, by rank."""
        found = {}
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
            value = {a: b for a, b in zip(words, words[1:]) if a.startswith(b"--")}
            if value.get(b"--job") == self.id.encode() and value.get(b"--attempt") == str(attempt).encode():
                found[int(value[b"--rank"])] = int(entry.name)
        return found


class TestServer:
    """`lockstep serve` with its agent, in a folder of its own."""

    def __init__(self, program, folder, device, ranks, local_agent=True, warm="off"):
        self.program, self.folder, self.device, self.size = program, folder, device, ranks
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        slots = ["--cpu-slots", str(ranks)] if device == "cpu" else []
        # A process that waits takes GPU memory, and as a rank it does not name its job in its arguments.
        slots = [*slots, "--warm", warm] if local_agent else ["--no-local-agent"]
        self.errors = open(folder / "serve.log", "ab")
        self.process = subprocess.Popen(
            [program, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(self.data), *slots],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            # A Ctrl-C ends the script, which ends the server.
            start_new_session=True,
        )
        line = self.process.stdout.readline().decode()
        expect("http://" in line, f"the server does not start: {self.said()}")
        self.port = int(line.strip().rsplit(":", 1)[1])
        # The server's own, which it has made before it answers.
        self.token = (self.data / "token").read_text().strip()
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        if not local_agent:
            return
        kind = "cpu" if device == "cpu" else "cuda"
        self.slots = wait(30, "an agent is online", lambda: self.free_slots(kind))
        expect(len(self.slots) >= ranks, f"{ranks} ranks, but these slots: {self.slots}\n{self.said()}")

    def said(self):
        return (self.folder / "serve.log").read_text(errors="replace")[-3000:]

    def free_slots(self, kind):
        agents = self.get("/agents")["agents"]
        return [s for a in agents if a["online"] for s in a["slots"] if s["device"] == kind]

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1{path}", data=data, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise Failure(f"{method} {path}: {error.code} {error.read().decode()[:1000]}") from None

    def get(self, path):
        return self.request("GET", path)

    def cli(self, *arguments):
        environment = dict(os.environ, LOCKSTEP_SERVER=f"http://127.0.0.1:{self.port}", LOCKSTEP_TOKEN=self.token)
        done = subprocess.run([self.program, *arguments], env=environment, capture_output=True, text=True, timeout=300)
        expect(done.returncode == 0, f"lockstep {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def submit(self, spec, patience=120):
        return Job(self, self.request("POST", "/jobs", spec), patience)

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


def gpu_memory():
    """MiB in use by GPU; nothing where there is no nvidia-smi."""
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
