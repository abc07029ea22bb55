"""Storage of several processes: what one of them cannot do, all of them say."""

import contextlib
import errno
import io
import json
import os
import re
import resource
import time

import jax
import numpy as np
import pytest
from faults import victim
from helpers import processes, toy
from helpers.runs import metrics_of
from helpers.tiny import TINY_MODEL, command_line

from rampup.errors import StorageError
from rampup.loop.checkpoint import Checkpoints
from rampup.loop.distributed import join

SETTINGS = TINY_MODEL | {
    "per_device_batch_size": 1,
    "enable_rampup_batch_size": False,
    "dataset_type": "synthetic",
}
SETTINGS |= {
    "run_name": "run",
    "checkpoint_period": 4,
    "steps": 400,
    "jax_cache_dir": None,
}


def see_late(seconds):
    """Let this process see what others have made in folders of runs some seconds later,
    as with cached attributes of NFS.
    """
    stat, scandir, listdir, opened = os.stat, os.scandir, os.listdir, io.open

    def is_hidden(path):
        if "/run" not in os.fspath(path) or "process_1" in os.fspath(path):
            return False
        with contextlib.suppress(OSError):
            return time.time() - stat(path).st_ctime < seconds
        return False

    def late(function):
        def call(path, *arguments, **options):
            if (
                isinstance(path, str | os.PathLike)
                and is_hidden(path)
                and "w" not in "".join(map(str, arguments))
            ):
                raise FileNotFoundError(
                    errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)
                )
            return function(path, *arguments, **options)

        return call

    os.stat, io.open = late(stat), late(opened)
    os.listdir = lambda path=".": [
        name for name in listdir(path) if not is_hidden(os.path.join(path, name))
    ]
    os.scandir = lambda path=".": contextlib.nullcontext(
        e for e in scandir(path) if not is_hidden(e.path)
    )


def command(number, port, folder, settings, most_bytes, late):
    """Run `rampup train` as one of two processes in a folder, with a limit of files and
    a late view of those of others.
    """
    from rampup.cli import main
    from rampup.loop import lock

    os.chdir(folder)
    victim.use_cpus(1)
    if late and number == 1:
        see_late(late)
    elif not late:
        lock._VISIBLE_SECONDS = 2.0
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    words = command_line(
        settings
        | {
            "num_processes": 2,
            "process_id": number,
            "coordinator_address": f"localhost:{port}",
        }
    )
    return main(["train", "base.yml", *words])


def end_of_both(
    folders, tmp_path, limits=(resource.RLIM_INFINITY,) * 2, late=0, **settings
):
    """Run two processes in folders of their own until they end; return exit codes and
    outputs.
    """
    port = processes.free_port()
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    for log in logs:
        log.unlink(missing_ok=True)
    settings = SETTINGS | settings
    started = [
        processes.start(
            command, n, port, str(folders[n]), settings, limits[n], late, log=logs[n]
        )
        for n in range(2)
    ]
    for process in started:
        process.join(200)
        assert process.exitcode is not None, "a process hangs"
    return [process.exitcode for process in started], [log.read_text() for log in logs]


@pytest.mark.slow
def test_folders_that_are_not_shared_are_named_before_anything_is_trained(tmp_path):
    """Both processes say which one does not see the folder, and no checkpoint is called
    damaged.
    """
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for _ in range(2):
        codes, printed = end_of_both(folders, tmp_path, base_output_directory="out")
        assert codes == [2, 2], printed
        for output in printed:
            assert re.search(
                r"process 1 on \S+ does not see the folder out/run of process 0 on \S+:"
                r" it must be on",
                output,
            )
            assert "Traceback" not in output
            assert "damaged" not in output
    assert not (folders[0] / "out/run/metrics.jsonl").exists()


def save_with_limit(number, port, folder, path, limited):
    """Save in both processes, of which one has a limit of files from the second
    checkpoint on; write the error, and the steps that are saved, into a file.
    """
    victim.use_cpus(1)
    join(coordinator_address=f"localhost:{port}", num_processes=2, process_id=number)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    w = [
        jax.make_array_from_callback(
            (10_000,), sharding, lambda index: np.arange(10_000.0)[index]
        )
        for _ in range(9)
    ]

    def save(checkpoints, step):
        checkpoints.save(step, toy.Arrays(w), {})
        checkpoints.wait()

    with Checkpoints(folder / "checkpoints") as checkpoints:
        save(checkpoints, 1)
        if limited == number:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(StorageError) as caught:
            save(checkpoints, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    saved = sorted(
        path.name
        for path in (folder / "checkpoints").iterdir()
        if path.name.isdecimal()
    )
    path.write_text(json.dumps([str(caught.value), saved]))


@pytest.mark.parametrize("limited", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_write_that_fails_midway_in_one_process_fails_in_both(tmp_path, limited):
    """Whichever it is, both have the same error, which names it, and the checkpoint
    before stays.
    """
    port, files = (
        processes.free_port(),
        [tmp_path / f"{number}.json" for number in range(2)],
    )
    processes.run_all(
        save_with_limit,
        [(number, port, tmp_path, files[number], limited) for number in range(2)],
        tmp_path,
        100,
    )
    (error, steps), other = (json.loads(file.read_text()) for file in files)
    assert other == [error, steps]
    assert steps == ["1"]
    assert error.startswith(
        f"the checkpoint of step 2 could not be written: process {limited} on "
    )
    folder = tmp_path / "checkpoints"
    assert error.endswith(f": File too large in {folder}; the newest is {folder / '1'}")
    with Checkpoints(
        tmp_path
    ) as checkpoints:  # what tensorstore was doing may stand before the code
        assert (
            checkpoints._reason(ValueError("... [spec='w'] [os_error_code='27']"))
            == f"File too large in {tmp_path}"
        )


@pytest.mark.slow
def test_a_run_whose_write_fails_midway_in_one_process_ends_in_both(tmp_path):
    """Both say the reason in their last line, after what Orbax logs, and the run
    resumes.
    """
    keys = {
        "base_output_directory": tmp_path,
        "ici_data_parallelism": 1,
        "ici_fsdp_parallelism": 2,
        "base_emb_dim": 128,
    }
    keys |= {"learning_rate_schedule_steps": 12}
    assert end_of_both([tmp_path] * 2, tmp_path, **keys, steps=4)[0] == [0, 0]
    # The limit is also that of the log, in which Orbax writes a trace.
    codes, printed = end_of_both(
        [tmp_path] * 2, tmp_path, (resource.RLIM_INFINITY, 65_536), **keys, steps=12
    )
    assert codes == [1, 1], printed
    for output in printed:
        assert re.search(
            r"the checkpoint of step 8 could not be written: process 1 on \S+: File too"
            r" large in .*; the newest is \S+/4$",
            output.splitlines()[-1],
        )
        assert "Assert" not in output
    codes, printed = end_of_both([tmp_path] * 2, tmp_path, **keys, steps=12)
    assert codes == [0, 0], printed
    assert "resumed after step" in printed[0]


@pytest.mark.faults
def test_a_process_with_a_late_view_of_the_folder(tmp_path):
    """A process that sees the files of the other one 8 s later waits for them at the
    start; nothing is called damaged.
    """
    keys = {
        "base_output_directory": tmp_path,
        "learning_rate_schedule_steps": 12,
        "eval_interval": -1,
    }
    for steps in (6, 12):
        codes, printed = end_of_both(
            [tmp_path] * 2, tmp_path, late=8, **keys, steps=steps
        )
        assert codes == [0, 0], printed
        assert "damaged" not in "".join(printed)
    assert "resumed after step 5 " in printed[0]
    lines = metrics_of(tmp_path / "run")
    assert end_of_both(
        [tmp_path] * 2, tmp_path, **keys | {"run_name": "whole"}, steps=12
    )[0] == [0, 0]
    assert lines == metrics_of(tmp_path / "whole")
