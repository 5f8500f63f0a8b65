#!/usr/bin/env python3
"""Tests the packages of deploy/package in an empty environment: no Rust, no other program on the PATH, no other Python package.

    deploy/package && python3 tests/deploy/packages.py target/packages
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from commands import ROOT

# Prepares what the quick start of docs/python.md assumes: the bundled dataset, and a picture.
PREPARATION = """
import base64, pathlib, lockstep
with lockstep.Client() as client:
    client.register_bundled()
    page = client.request("GET", "/datasets/fashion-mnist/samples", split="test", limit=1)
pathlib.Path("shoe.png").write_bytes(base64.b64decode(page["samples"][0]["png"]))
"""


def run(command, folder, environment):
    """Runs a command with only these environment variables and returns its standard output."""
    command = [str(word) for word in command]
    result = subprocess.run(command, cwd=folder, env={"HOME": str(folder)} | environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def check_program(program, folder):
    assert re.fullmatch(r"lockstep \d+\.\d+\.\d+\n", run([program, "--version"], folder, {"PATH": ""}))


def check_archive(archive, folder):
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    [files] = folder.iterdir()
    check_program(files / "bin/lockstep", folder)
    for name in ("README.md", "LICENSE-MIT", "LICENSE-APACHE", "man/lockstep-serve.1", "completions/_lockstep", "examples/sharded.toml"):
        assert (files / name).stat().st_size > 500, name


def check_debian_package(package, folder):
    subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    check_program(folder / "usr/bin/lockstep", folder)
    for name in ("man/man1/lockstep-serve.1.gz", "bash-completion/completions/lockstep", "doc/lockstep/copyright", "doc/lockstep/examples/sharded.toml"):
        assert (folder / "usr/share" / name).stat().st_size > 500, name
    # Debian has the package's dependencies.
    assert "Inst lockstep " in subprocess.run(["apt-get", "install", "--simulate", package], check=True, capture_output=True, text=True).stdout


def check_wheel(wheel, folder):
    venv = folder / "venv"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, env=environment)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, wheel], check=True, env=environment)
    program, environment = venv / "bin/lockstep", {"PATH": str(venv / "bin")}
    check_program(program, folder)
    # The last line has the accuracy.
    demo = run([program, "demo", "--exit-when-done", "--data-dir", "demo"], folder, environment)
    assert re.search(r"validation accuracy [89]", demo.splitlines()[-1]), demo

    page = (ROOT / "docs/python.md").read_text()
    [job] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (folder / "fashion.toml").write_text(re.sub(r"steps = \d+", "steps = 20", job))
    quick_start = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    serve = [program, "serve", "--listen", "127.0.0.1:0", "--no-open"]
    with subprocess.Popen(serve, cwd=folder, env={"HOME": str(folder)} | environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            environment["LOCKSTEP_SERVER"] = server.stdout.readline().split()[-1]
            output = run([venv / "bin/python", "-c", PREPARATION + quick_start], folder, environment)
        finally:
            server.terminate()
    assert "Ankle boot" in output and (folder / "model.safetensors").stat().st_size > 1e6, output


if __name__ == "__main__":
    packages = pathlib.Path(sys.argv[1]).resolve()
    for pattern, check in (("*.tar.gz", check_archive), ("*.deb", check_debian_package), ("*.whl", check_wheel)):
        [package] = packages.glob(pattern)
        with tempfile.TemporaryDirectory() as folder:
            check(package, pathlib.Path(folder))
        print(package.name, "works in an empty environment")
