"""A server for measurements, with its data in a temporary folder."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Server:
    """A running server. `options` has the `program` and the `database`, which is empty for SQLite."""

    def __init__(self, options, *arguments):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
        self.database, self.port = options.database, free_port()
        database = ["--database", self.database] if self.database else []
        self.command = [options.program, "serve", "--listen", f"127.0.0.1:{self.port}", "--data-dir", self.directory, *database, *arguments]
        self.log = open(self.directory / "server.log", "w")
        self.start()
        self.wait()

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT)

    def wait(self):
        for _ in range(300):
            try:
                self.token = (self.directory / "token").read_text().strip()
                self.ask("/jobs?limit=1")
                return
            except OSError:
                time.sleep(0.1)
        sys.exit((self.directory / "server.log").read_text())

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        head = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1{path}", data, head)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def jobs(self, state):
        """Returns all jobs in a state, by id."""
        jobs, cursor = {}, ""
        while cursor is not None:
            page = self.ask(f"/jobs?limit=500&state={state}" + (f"&cursor={cursor}" if cursor else ""))
            jobs.update((job["id"], job) for job in page["jobs"])
            cursor = page.get("next_cursor")
        return jobs

    def cpu_secs(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()
        shutil.rmtree(self.directory)
