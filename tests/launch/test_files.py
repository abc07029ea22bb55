"""Tests of the files in launch/: each is read as its program would, and the command in
it is one that rampup takes.
"""

import ast
import inspect
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.snippets import ROOT

import rampup

LAUNCH = ROOT / "launch"
FILES = {
    "slurm.sbatch",
    "tpu_vm.sh",
    "xpk.sh",
    "jobset.yml",
    "skypilot.yml",
    "ray_train.py",
}
BUCKET = {"BUCKET": "my-bucket", "ZONE": "us-west4-a"}


def run_script(command, folder, programs, code=0, **variables):
    """Run a shell command that ends with `code`, with programs that note their
    arguments and do what they are said to do in shell; return each call's words.
    """
    calls = folder / "calls"
    for name, action in programs.items():
        (folder / name).write_text(
            f'#!/bin/sh\nprintf "%s\\037" {name} "$@" >> {calls}\necho >>'
            f" {calls}\n{action}\n"
        )
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
    } | variables
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return [line.split("\037") for line in calls.read_text().split("\037\n")[:-1]]


def configured(words):
    """Return the configuration that the words of `rampup train` describe."""
    assert Path(words[0]).name == "rampup"
    assert words[1] == "train"
    return rampup.load_config(words[2], words[3:])


def option(words, name):
    """Return the value of an option `name=value` among words."""
    return dict(word.split("=", 1) for word in words if "=" in word)[name]


def test_every_file_is_tested():
    """The files of launch/ are those that the tests here read, and the shell scripts
    have no syntax errors.
    """
    assert {path.name for path in LAUNCH.iterdir() if path.is_file()} == FILES
    for path in LAUNCH.iterdir():
        if path.suffix in (".sh", ".sbatch"):
            assert os.access(path, os.X_OK)
            subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (130, True)])
def test_slurm_requeues_what_a_signal_stopped(code, requeued, tmp_path):
    """The script runs one command under srun, with a name, and requeues the job only
    after exit code 130.
    """
    programs = {"srun": f"exit {code}", "scontrol": ""}
    words = [
        "bash",
        str(LAUNCH / "slurm.sbatch"),
        "base",
        "base_output_directory=/shared/my runs",
    ]
    calls = run_script(
        words, tmp_path, programs, code, SLURM_JOB_ID="17", SLURM_JOB_NAME="rampup"
    )
    config = configured(calls[0][calls[0].index("rampup") :])
    assert (config.run_name, config.base_output_directory) == (
        "rampup-17",
        "/shared/my runs",
    )
    assert [call for call in calls if call[0] == "scontrol"] == (
        [["scontrol", "requeue", "17"]] if requeued else []
    )


@pytest.mark.parametrize("exists", [False, True])
def test_tpu_vm_starts_one_command_on_all_hosts(exists, tmp_path):
    """The slice is created if it is not there, and every host gets the same command,
    with a name and a bucket.
    """
    programs = {"gcloud": f'[ "$4" != describe ] || exit {0 if exists else 1}'}
    words = [
        "bash",
        str(LAUNCH / "tpu_vm.sh"),
        "llama_1b_v5e",
        "grain_train_files=/data/a b.txt",
    ]
    calls = run_script(words, tmp_path, programs, **BUCKET)
    assert [call[4] for call in calls] == [
        "describe",
        *([] if exists else ["create"]),
        "scp",
        "ssh",
        "ssh",
    ]
    assert all(option(call, "--zone") == "us-west4-a" for call in calls)
    assert all("--worker=all" in call for call in calls if call[4] in ("scp", "ssh"))
    config = configured(shlex.split(option(calls[-1], "--command")))
    assert (config.run_name, config.base_output_directory) == (
        "rampup",
        "gs://my-bucket/runs",
    )
    assert config.grain_train_files == "/data/a b.txt"
    run_script(words, tmp_path, programs, code=1)  # without a bucket


def test_xpk_gets_one_command(tmp_path):
    """The workload says what xpk needs, with the command as one word, and slices that
    the configuration knows.
    """
    variables = BUCKET | {"PROJECT": "p", "CLUSTER": "c", "IMAGE": "i", "SLICES": "2"}
    words = ["bash", str(LAUNCH / "xpk.sh"), "llama_1b_v5e", "run_name=mine"]
    (call,) = run_script(words, tmp_path, {"xpk": ""}, **variables)
    assert call[:3] == ["xpk", "workload", "create"]
    needed = (
        "--project",
        "--zone",
        "--cluster",
        "--workload",
        "--tpu-type",
        "--docker-image",
        "--max-restarts",
    )
    assert all(option(call, name) for name in needed)
    config = configured(shlex.split(option(call, "--command")))
    assert (config.run_name, config.num_slices, option(call, "--num-slices")) == (
        "mine",
        2,
        "2",
    )


def test_jobset_has_what_kubernetes_and_jax_need():
    """Indexed pods behind a headless service of the JobSet's name, with the right to
    look themselves up and time to save.
    """
    documents = {
        part["kind"]: part
        for part in yaml.safe_load_all((LAUNCH / "jobset.yml").read_text())
    }
    access, jobset = "rbac.authorization.k8s.io/v1", "jobset.x-k8s.io/v1alpha2"
    versions = {kind: part["apiVersion"] for kind, part in documents.items()}
    assert versions == {
        "ServiceAccount": "v1",
        "Role": access,
        "RoleBinding": access,
        "JobSet": jobset,
    }
    spec = documents["JobSet"]["spec"]
    # JAX takes process 0 for POD.JOBSET, also if the service has another name.
    assert spec["network"] == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
    }
    (group,) = spec["replicatedJobs"]
    assert group["replicas"] == 1
    job = group["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["backoffLimit"]) == (
        "Indexed",
        job["parallelism"],
        0,
    )
    pod, binding = job["template"]["spec"], documents["RoleBinding"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"] >= 120) == (
        "Never",
        True,
    )
    assert pod["serviceAccountName"] == documents["ServiceAccount"]["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": pod["serviceAccountName"]}
    ]
    assert binding["roleRef"]["name"] == documents["Role"]["metadata"]["name"]
    allowed = {
        (rule["resources"][0], verb)
        for rule in documents["Role"]["rules"]
        for verb in rule["verbs"]
    }
    assert allowed == {("pods", "list"), ("jobs", "get")}
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    config = configured(container["command"])
    assert (
        config.run_name != "",
        config.base_output_directory.startswith("/shared/"),
    ) == (True, True)


def test_skypilot_runs_one_command_on_every_node(tmp_path):
    """The task has only fields of SkyPilot, asks for a bucket, and its command has a
    name and the bucket.
    """
    task = yaml.safe_load((LAUNCH / "skypilot.yml").read_text())
    assert set(task) == {
        "name",
        "num_nodes",
        "resources",
        "envs",
        "workdir",
        "setup",
        "run",
    }
    assert set(task["resources"]) == {
        "infra",
        "accelerators",
        "use_spot",
        "job_recovery",
    }
    assert task["envs"]["BUCKET"] is None
    variables = {name: value or "my-bucket" for name, value in task["envs"].items()}
    config = configured(
        run_script(["bash", "-c", task["run"]], tmp_path, {"rampup": ""}, **variables)[
            0
        ]
    )
    assert (config.run_name, config.base_output_directory) == (
        "demo",
        "gs://my-bucket/runs",
    )
    assert run_script(["bash", "-c", task["setup"]], tmp_path, {"pip": ""})[-1][:2] == [
        "pip",
        "install",
    ]


def test_ray_train_calls_what_rampup_has():
    """Every name of rampup in the file exists, and so does every argument that it is
    called with.
    """
    tree = ast.parse((LAUNCH / "ray_train.py").read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in attributes if ast.unparse(node.value) == "rampup"}
    assert {"build_plan", "load_config", "train"} <= names
    assert names <= set(rampup.__all__)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "rampup.train"
    ]
    (keywords,) = [{keyword.arg for keyword in call.keywords} for call in calls]
    assert keywords <= set(inspect.signature(rampup.train).parameters)
