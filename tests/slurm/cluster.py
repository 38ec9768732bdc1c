"""A real Slurm for a few minutes: munged, slurmctld and a slurmd for each pretended node, all of them our own processes."""
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

CONFIGURATION = """
ClusterName=facenb
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its credential has expired, two minutes by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
TaskProlog={folder}/prolog.sh
Epilog={folder}/epilog.sh
# neither cgroups nor accounting, and nodes larger than this machine
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
MailProg=/bin/true
MinJobAge=3600
KillWait=3
ReturnToService=2
"""


class NoCluster(RuntimeError):
    "Slurm is not installed or does not start here"


def free_ports(count: int) -> list[int]:
    "Ports that nobody listens on now"
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def end_with_parent():
    "In a child: the system sends SIGTERM when the tests end, however they end"
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Cluster:
    "Nodes g1, g2 ... of 32 CPUs, 200 GB and two H100 that are no such thing"

    def __init__(self, folder: Path, nodes: int = 2, **environment: str):
        self.folder, self.nodes = Path(folder), [f"g{i + 1}" for i in range(nodes)]
        own = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
        self.environment = own | {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), **environment}
        self.daemons = []

    def start(self, limit: float = 60) -> None:
        "Raise NoCluster with the reason when it cannot be"
        missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
        plugins = list(Path("/usr").glob("lib*/**/proctrack_linuxproc.so")) if not missing else []
        if not plugins:
            raise NoCluster(f"no {', '.join(missing) or 'plugins of Slurm'}: apt-get install slurm-wlm munge")
        self._write(plugins[0].parent)
        try:
            self._daemon("munged", "--foreground", "--force", *(f"--{name}={self.folder}/munge.{end}" for name, end in (
                ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))))
            self._until(lambda: (self.folder / "munge.socket").exists(), limit)
            self._daemon("slurmctld", "-D", "-c")
            for node in self.nodes:
                self._daemon("slurmd", "-D", "-N", node)
            self._until(lambda: self.run("sinfo", "-hN", "-o%T", check=False).split() == ["idle"] * len(self.nodes), limit)
        except (OSError, TimeoutError) as error:
            said = {log.name: log.read_text().splitlines()[-3:] for log in sorted(self.folder.glob("*.log"))}
            self.stop()
            raise NoCluster(f"Slurm does not start as {self._user()}: {error} {said}") from error

    def _write(self, plugins: Path) -> None:
        for name in ("state", "spool", "scratch"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        port, *ports = free_ports(1 + len(self.nodes))
        host, gpu = socket.gethostname().split(".")[0], self.folder / "gpu"
        lines = [CONFIGURATION.format(folder=self.folder, host=host, port=port, plugins=plugins, user=self._user())]
        lines += [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=32 RealMemory=200000 "
                  "Gres=gpu:h100:2 State=UNKNOWN" for node, port in zip(self.nodes, ports)]
        lines += [f"PartitionName=gpu Nodes={','.join(self.nodes)} Default=YES MaxTime=1-0 State=UP\n"]
        (self.folder / "slurm.conf").write_text("\n".join(lines))
        for i in range(2):  # Slurm wants one character device for each GPU
            (self.folder / f"gpu{i}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName={node} Name=gpu Type=h100 File={gpu}[0-1]\n" for node in self.nodes))
        scratch = f"{self.folder}/scratch/$SLURM_JOB_ID"
        self._script("prolog.sh", f"mkdir -p {scratch}; echo export SLURM_TMPDIR={scratch}")
        self._script("epilog.sh", f"rm -rf {scratch}")

    def _script(self, name: str, line: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (self.folder / name).chmod(0o755)

    def _user(self) -> str:
        return subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()

    def _daemon(self, *command: str) -> None:
        output = open(self.folder / f"{command[0]}.{len(self.daemons)}.log", "w")
        self.daemons.append(subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            preexec_fn=end_with_parent, start_new_session=True))

    def _until(self, happens, limit: float) -> None:
        end = time.monotonic() + limit
        while not happens():
            dead = [daemon.args[0] for daemon in self.daemons if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                raise TimeoutError(f"{dead[0]} ended" if dead else f"nothing for {limit} s")
            time.sleep(0.1)

    def stop(self) -> None:
        "Cancel what runs, then end the daemons we started"
        if len(self.daemons) > 1:
            self.run("scancel", "--full", "-u", self._user(), check=False)
            try:
                self._until(lambda: not self.run("squeue", "-h", check=False), 20)
            except TimeoutError:
                pass  # a daemon is dead already
        for daemon in reversed(self.daemons):  # slurmctld would take its five seconds to save what nobody reads
            daemon.kill() if daemon.args[0] == "slurmctld" else daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()

    def run(self, *command, check: bool = True, **options) -> str:
        "What a command of Slurm says"
        done = subprocess.run([str(word) for word in command], env=self.environment, stdin=subprocess.DEVNULL,
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stdout}")
        return done.stdout.strip()

    def jobs(self, job: str) -> list[dict]:
        "What Slurm knows about a job; several for an array"
        lines = self.run("scontrol", "show", "job", "-o", job).splitlines()
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]

    def wait(self, job: str, limit: float = 240) -> list[dict]:
        "The same, when all have ended"
        self._until(lambda: all(one["JobState"] in ENDED for one in self.jobs(job)), limit)
        return self.jobs(job)
