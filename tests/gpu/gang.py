"""One job over two agents, which simulate two machines: each has its own GPU, and NCCL uses sockets. To simulate the loss of a machine, an
agent and its ranks are killed."""

import os
import pathlib
import signal
import subprocess
import time

from server_under_test import ServerUnderTest, expect, expect_last_steps_kept, expect_same_tensors, gpu_memory, wait


class Machine:
    """An agent in its own process group."""

    def __init__(self, stage, server, number):
        self.stage, self.server, self.number = stage, server, number
        self.data = stage.folder.parent / f"agent-{number}"
        self.log = open(stage.folder / f"agent-{number}.log", "ab")
        name = f"machine-{number}"
        self.token = stage.folder / f"{name}.token"
        self.token.touch(mode=0o600)
        self.token.write_text(server.request("POST", "/tokens", {"name": name, "scope": "agent", "agent": name})["secret"])
        self.start()

    def start(self):
        slots = ["--cpu-slots", "1"]
        # On CPU cores, ranks with shared memory do not keep the last step.
        environment = dict(os.environ, LOCKSTEP_SHARED_MEMORY="0")
        if self.stage.device == "cuda":
            slots = []
            environment |= {"CUDA_VISIBLE_DEVICES": str(self.number), "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        address = f"http://127.0.0.1:{self.server.port}"
        self.process = subprocess.Popen(
            [self.stage.program, "agent", "--server", address, "--token-file", self.token, "--name", f"machine-{self.number}", "--data-dir", self.data, "--warm", "off", *slots],
            stdout=self.log, stderr=self.log, env=environment, start_new_session=True,
        )

    def kill(self, ranks):
        """Kills the agent and these ranks at once."""
        self.process.kill()
        for process in ranks:
            os.kill(process, signal.SIGKILL)
        self.process.wait()


def ancestors(process):
    """Returns a process, its parent and so on, except process 1."""
    processes = []
    while process > 1:
        processes.append(process)
        process = int(pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return processes


def gang(stage):
    """A job over two agents continues after the agent with the last rank, then the agent with rank 0, is killed and started again. The final weights are those of an undisturbed job."""
    server = ServerUnderTest(stage.program, stage.folder, stage.device, 0, local_agent=False)
    machines = [Machine(stage, server, number) for number in range(2)]
    kind = "cpu" if stage.device == "cpu" else "cuda"
    wait(30, "both agents are online", lambda: len(server.online_slots(kind)) == 2)
    server.cli("dataset", "add", "pictures", stage.dataset)
    baseline = gpu_memory()

    spec, steps = stage.reproducible_job(300, 2)
    undisturbed = server.submit(spec).final_checkpoint(steps)
    job = server.submit({**spec, "name": "gang"})
    kills = ((1, 1), (2, 0))
    for attempt, victim in kills:
        job.until_step(steps * attempt // 3, attempt)
        ranks = job.ranks(attempt)
        owner = {rank: next(m for m in machines if m.process.pid in ancestors(process)) for rank, process in ranks.items()}
        expect(len(set(owner.values())) == 2, f"the ranks are not on two agents: {ranks}")
        machine = owner[victim]
        machine.kill([ranks[victim]])
        killed = time.monotonic()
        machine.start()
        job.until_attempt(attempt + 1)
        stage.note(f"attempt {attempt + 1} ran {time.monotonic() - killed:.1f} s after the agent of rank {victim} was killed with the rank and started again")
    count = expect_same_tensors(job.final_checkpoint(steps), undisturbed)
    expect_last_steps_kept(stage, job, kills)
    stage.note(f"{count} tensors of step {steps} are those of the undisturbed job")
    stage.check_memory(baseline)
    for machine in machines:
        machine.process.terminate()
        machine.process.wait(30)
        machine.log.close()
    server.stop()
