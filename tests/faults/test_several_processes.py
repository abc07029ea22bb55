"""Storage of several processes: folders that are not shared, writes that fail."""

import contextlib
import errno
import io
import os
import re
import resource
import time

import pytest
from faults import victim
from helpers import processes
from helpers.runs import metrics_of
from helpers.tiny import TINY_MODEL, command_line

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
                r"process 1 on \S+ does not see the folder out/run of process 0 on \S+,"
                r" process \d+, since \S+ \S+: it must be on",
                output,
            )
            assert "Traceback" not in output
            assert "damaged" not in output
    assert not (folders[0] / "out/run/metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_whose_write_fails_midway_in_one_process_ends_in_both(tmp_path):
    """That one says the reason in its last line, after what Orbax logs; JAX ends the
    other, and the run resumes.
    """
    keys = {
        "base_output_directory": tmp_path,
        "ici_data_parallelism": 1,
        "ici_fsdp_parallelism": 2,
        "base_emb_dim": 128,
    }
    keys |= {"learning_rate_schedule_steps": 12}
    keys |= {"jax_distributed_heartbeat_timeout_seconds": 5}
    assert end_of_both([tmp_path] * 2, tmp_path, **keys, steps=4)[0] == [0, 0]
    # The limit is also that of the log, in which Orbax writes a trace.
    codes, printed = end_of_both(
        [tmp_path] * 2, tmp_path, (resource.RLIM_INFINITY, 65_536), **keys, steps=12
    )
    assert codes[1] == 1, printed
    assert codes[0] != 0, printed
    assert re.search(
        r"the checkpoint of step 8 could not be written: File too large in .*; the"
        r" newest is \S+/4$",
        printed[1].splitlines()[-1],
    )
    assert "Assert" not in printed[1]
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
