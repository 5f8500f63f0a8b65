"""All-reduces over a slow network, compared with the minimum time given by bandwidth and delay.

    python3 tests/bench/ring.py target/release/lockstep [--ranks 3] [--delays 0 0.1 1 10] [--gigabits 1]

Needs root. Each rank has its own network namespace. All are connected by links of 1 Gbit/s, and each packet is delayed before it leaves its
host. Rate and delay are set by netem if the kernel has it. Otherwise each host has a tap device, and a process of this program per host
forwards the packets. The figures then include the limits of these processes, which the row without an added delay shows.

`lockstep doctor` starts the ranks, which connect over TCP as the ranks of a job do. Two all-reduces are measured: 16 MiB, like gradients (the
best of five), and 1 KiB, like votes and statistics (the mean of 200). The minimum times, with n ranks, V bytes and B bytes/s of the link:

    long:   2 (n - 1) (d + V / n / B)      each part of the vector makes 2 (n - 1) hops around the ring
    short:  (n - 1) (d + V / B)            each rank gets the vectors of all others

d is half of the round trip between two of the namespaces, measured without other traffic. B excludes the headers of TCP and IP. A step is a
long and a short all-reduce; the goal is at most 1.15 times the minimum. The short all-reduce alone has no goal, because with small delays it
depends on the times in which processes wake up.
"""

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import uuid

parser = argparse.ArgumentParser()
parser.add_argument("program")
parser.add_argument("--ranks", type=int, default=3)
parser.add_argument("--delays", type=float, nargs="+", default=[0, 0.1, 1, 10], help="milliseconds")
parser.add_argument("--gigabits", type=float, default=1)
parser.add_argument("--line", choices=["netem", "tap"], help="default: netem if the kernel has it")
parser.add_argument("--most", type=float, default=1.15, help="largest time of a step, as a multiple of the minimum")
options = parser.parse_args()
options.program = os.path.abspath(options.program)
# A large MTU of the tap devices gives few packets, as segmentation in a network card does.
TAP_MTU = 32000
LONG, SHORT = 16 << 20, 1 << 10
NAME = f"lkr{os.getpid() % 100000}"
namespaces = [f"{NAME}-{rank}" for rank in range(options.ranks)]
address = lambda rank: f"10.79.{os.getpid() % 250}.{rank + 1}"


def run(*words, **settings):
    return subprocess.run(words, check=True, capture_output=True, text=True, **settings).stdout


def has_netem():
    result = subprocess.run(
        ["ip", "netns", "exec", namespaces[0], "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"],
        capture_output=True,
    )
    if result.returncode == 0:
        run("ip", "netns", "exec", namespaces[0], "tc", "qdisc", "del", "dev", "lo", "root")
    return result.returncode == 0


def delay_line(taps, delay_ms, bits_per_second, rank):
    """Forwards packets from one host's tap to the others' at the link's rate and after the delay. Never returns."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    own_tap, delay = taps[rank], delay_ms / 1e3
    waiting, free_at, number = [], 0.0, 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            try:
                os.write(taps[target], packet)
            except BlockingIOError:
                pass
        wait = None if not waiting else max(waiting[0][0] - time.monotonic(), 0)
        # The kernel wakes a process some tens of microseconds late, so the end of a wait is spent polling.
        if wait is not None and wait < 1e-4:
            wait = 0
        elif wait is not None:
            wait -= 1e-4
        if not select.select([own_tap], [], [], wait)[0]:
            continue
        for _ in range(64):
            try:
                packet = os.read(own_tap, 65536)
            except BlockingIOError:
                break
            # The last byte of the destination's MAC address gives the host. Broadcasts (ARP) go to all.
            mac = packet[:6]
            targets = [mac[5] - 1] if not mac[0] & 1 else [r for r in range(len(taps)) if r != rank]
            now = time.monotonic()
            free_at = max(free_at, now) + 8 * len(packet) / bits_per_second
            for target in targets:
                if 0 <= target < len(taps):
                    number += 1
                    heapq.heappush(waiting, (free_at + delay, number, target, packet))


class Network:
    def __init__(self, kind):
        self.kind, self.lines, self.taps = kind, [], []
        if kind == "netem":
            run("ip", "link", "add", NAME, "type", "bridge")
            run("ip", "link", "set", NAME, "up")
        for rank, space in enumerate(namespaces):
            if kind == "netem":
                cable = f"{NAME}v{rank}"
                run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
                run("ip", "link", "set", cable, "master", NAME, "up")
            else:
                self.taps.append(self.tap(space, rank))
            run("ip", "-n", space, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def tap(self, space, rank):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        IFF_TAP, IFF_NO_PI, TUNSETIFF = 0x0002, 0x1000, 0x400454CA
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", f"{NAME}t{rank}".encode(), IFF_TAP | IFF_NO_PI))
        run("ip", "link", "set", f"{NAME}t{rank}", "address", f"02:00:00:00:00:{rank + 1:02x}", "mtu", str(TAP_MTU))
        # The queue holds all of TCP's packets in flight, as netem's queue below.
        run("ip", "link", "set", f"{NAME}t{rank}", "txqueuelen", "10000")
        run("ip", "link", "set", f"{NAME}t{rank}", "netns", space, "name", "eth0")
        return descriptor

    def set_delay(self, delay_ms):
        """Sets a new delay, for which the links are set up again."""
        for line in self.lines:
            os.kill(line, signal.SIGKILL)
            os.waitpid(line, 0)
        self.lines = []
        for rank, space in enumerate(namespaces):
            if self.kind == "netem":
                run(*f"ip netns exec {space} tc qdisc replace dev eth0 root netem delay {delay_ms}ms rate {options.gigabits}gbit limit 20000".split())
                continue
            line = os.fork()
            if line == 0:
                try:
                    delay_line(self.taps, delay_ms, options.gigabits * 1e9, rank)
                finally:
                    os._exit(1)
            self.lines.append(line)

    def close(self):
        for line in self.lines:
            os.kill(line, signal.SIGKILL)
            os.waitpid(line, 0)
        if self.kind == "netem":
            subprocess.run(["ip", "link", "del", NAME], capture_output=True)


ECHO = """
import socket, sys, time
if sys.argv[1] == "serve":
    listener = socket.create_server((sys.argv[2], 7))
    print("ready", flush=True)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1): connection.send(b"x")
else:
    connection = socket.create_connection((sys.argv[2], 7))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(200):
        began = time.monotonic()
        connection.send(b"x"); connection.recv(1)
        trips.append(time.monotonic() - began)
    print(min(trips))
"""


def half_round_trip():
    """Measures half of a round trip in seconds, the best of 200."""
    command = lambda rank, *words: ["ip", "netns", "exec", namespaces[rank], sys.executable, "-c", ECHO, *words]
    server = subprocess.Popen(command(0, "serve", address(0)), stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    trip = float(run(*command(1, "call", address(0)), timeout=60))
    server.wait(10)
    return trip / 2


def measure(port):
    """Measures the short and the long all-reduce, in seconds."""
    secret, ranks = uuid.uuid4().hex, []
    for rank, space in enumerate(namespaces):
        member = {
            "rank": rank, "world_size": options.ranks, "addr": address(0), "port": port, "secret": secret, "gpu": None,
        }
        environment = {**os.environ, "LOCKSTEP_LOCAL_GROUP": json.dumps(member)}
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", space, options.program, "doctor"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )
        )
    out = [rank.communicate(timeout=300) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(errors for _, errors in out))
    report = json.loads(out[0][0])
    return report["short_us"] / 1e6, LONG / report["bytes_per_second"]


def main():
    n, worst = options.ranks, 0
    for space in namespaces:
        run("ip", "netns", "add", space)
    network = None
    try:
        kind = options.line or ("netem" if has_netem() else "tap")
        network = Network(kind)
        mtu = 1500 if kind == "netem" else TAP_MTU
        # Headers: 20 bytes of IP, 32 of TCP with time stamps, 14 of Ethernet.
        link = options.gigabits * 125e6 * (mtu - 52) / (mtu + 14)
        print(f"{n} ranks, links of {options.gigabits:g} Gbit/s by {kind}, {mtu} bytes per packet; times in ms")
        print("| added delay | d | 16 MiB | minimum | ratio | 1 KiB | minimum | ratio | step: ratio |\n|---|---|---|---|---|---|---|---|---|")
        for i, delay in enumerate(options.delays):
            network.set_delay(delay)
            d = half_round_trip()
            short, long = measure(20000 + i)
            min_long = 2 * (n - 1) * (d + LONG / n / link)
            min_short = (n - 1) * (d + SHORT / link)
            ratios = long / min_long, short / min_short
            cells = [f"{delay:g}", f"{d * 1e3:.3f}", f"{long * 1e3:.1f}", f"{min_long * 1e3:.1f}", f"{ratios[0]:.2f}"]
            cells += [f"{short * 1e3:.2f}", f"{min_short * 1e3:.2f}", f"{ratios[1]:.2f}"]
            step = (long + short) / (min_long + min_short)
            print("| " + " | ".join([*cells, f"{step:.2f}"]) + " |", flush=True)
            worst = max(worst, step)
    finally:
        if network:
            network.close()
        for space in namespaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
    print(f"a step takes at most {worst:.2f} times the minimum given by bandwidth and delay; goal: {options.most}")
    sys.exit(worst > options.most)


main()
