#!/usr/bin/env python3
"""Tests the packages of deploy/package in empty environments. The system for the archive and the Debian package contains only the Debian
package's dependencies. The wheel is tested in an empty Python environment, with no other program on the PATH.

The tests mount file systems in a namespace of their own. A container must permit this, for example with `docker run --privileged`.

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

# A shell script that runs a command with the folder $0 as its root, which also has this machine's /dev and /proc.
INSIDE = 'for each in dev proc; do mount --rbind "/$each" "$0/$each"; done; exec chroot "$0" "$@"'
SYSTEM_PATH = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
# Only root may create a mount namespace without a user namespace.
AS_ROOT = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]


def run(command, folder, environment):
    """Runs a command with only these environment variables and returns its standard output."""
    command = [str(word) for word in command]
    result = subprocess.run(command, cwd=folder, env={"HOME": str(folder)} | environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def check_program(command, folder, environment):
    """Runs the program's demo, and checks that the package has the GPU kernels where the program looks for them."""
    assert re.fullmatch(r"lockstep \d+\.\d+\.\d+\n", run([*command, "--version"], folder, environment))
    # Copies the compiled kernels. This fails if the package lacks one of them, because without NVRTC the program cannot compile it.
    run([*command, "kernels", "copied-kernels"], folder, environment)
    # The last line has the accuracy.
    demo = run([*command, "demo", "--exit-when-done"], folder, environment)
    assert re.search(r"validation accuracy [89]", demo.splitlines()[-1]), demo


def create_system(folder, packages):
    """Creates a system with nothing but these Debian packages of this machine, and returns the command that runs a program there."""
    for name in ("dev", "proc", "usr/lib", "usr/lib64", "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers"):
        (folder / name).mkdir(parents=True)
    for name in ("lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    # Skips folders, and files that `dpkg` lists but the system does not have: container images leave out documentation.
    files = [file for file in run(["dpkg", "--listfiles", *packages], folder, SYSTEM_PATH).splitlines() if os.path.isfile(file)]
    run(["cp", "--archive", "--parents", *files, folder], folder, SYSTEM_PATH)
    (folder / "var/lib/dpkg/status").write_text(run(["dpkg", "--status", *packages], folder, SYSTEM_PATH))
    return [*AS_ROOT, "sh", "-ec", INSIDE, folder]


def check_archive(archive, folder):
    system = create_system(folder, ["libc6", "libgcc-s1"])
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    [files] = folder.glob("lockstep-*")
    check_program([*system, f"/{files.name}/bin/lockstep"], folder, SYSTEM_PATH)
    for name in ("README.md", "LICENSE-MIT", "LICENSE-APACHE", "man/lockstep-serve.1", "completions/_lockstep", "examples/sharded.toml"):
        assert (files / name).stat().st_size > 500, name


def check_debian_package(package, folder):
    """Installs the package in a system with nothing but its dependencies, and removes it."""
    depends = run(["dpkg-deb", "--field", package, "Depends"], folder, SYSTEM_PATH)
    system = create_system(folder, [dependency.split()[0] for dependency in depends.split(",")])
    dpkg = [*AS_ROOT, "dpkg", f"--root={folder}"]
    run([*dpkg, "--install", package], folder, SYSTEM_PATH)
    check_program([*system, "lockstep"], folder, SYSTEM_PATH)
    for name in ("man/man1/lockstep-serve.1.gz", "bash-completion/completions/lockstep", "doc/lockstep/copyright", "doc/lockstep/examples/sharded.toml"):
        assert (folder / "usr/share" / name).stat().st_size > 500, name
    run([*dpkg, "--purge", "lockstep"], folder, SYSTEM_PATH)
    assert not list((folder / "usr").rglob("*lockstep*")), "files remain after the package's removal"
    assert (folder / "lockstep-demo/lockstep.db").is_file(), "the package's removal deleted a data directory"


def check_wheel(wheel, folder):
    venv = folder / "venv"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, env=environment)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, wheel], check=True, env=environment)
    program, environment = venv / "bin/lockstep", {"PATH": str(venv / "bin")}
    check_program([program], folder, environment)

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
