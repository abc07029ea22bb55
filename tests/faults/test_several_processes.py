"""Storage of several processes: what one of them cannot do, all of them say."""

import os
import re

import pytest
from faults import victim
from helpers import processes
from helpers.tiny import TINY_MODEL, command_line

SETTINGS = TINY_MODEL | {"per_device_batch_size": 1, "enable_rampup_batch_size": False, "dataset_type": "synthetic"}
SETTINGS |= {"run_name": "run", "checkpoint_period": 4, "steps": 400, "jax_cache_dir": None}


def command(number, port, folder, settings):
    """Run `rampup train` as one of two processes in a folder."""
    from rampup.cli import main
    from rampup.loop import lock

    os.chdir(folder)
    victim.use_cpus(1)
    lock._VISIBLE_SECONDS = 2.0
    words = command_line(settings | {"num_processes": 2, "process_id": number, "coordinator_address": f"localhost:{port}"})
    return main(["train", "base.yml", *words])


def end_of_both(folders, tmp_path, **settings):
    """Run two processes in folders of their own until they end; return exit codes and outputs."""
    port = processes.free_port()
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    settings = SETTINGS | settings
    started = [processes.start(command, n, port, str(folders[n]), settings, log=logs[n]) for n in range(2)]
    for process in started:
        process.join(200)
        assert process.exitcode is not None, "a process hangs"
    return [process.exitcode for process in started], [log.read_text() for log in logs]


@pytest.mark.slow
def test_folders_that_are_not_shared_are_named_before_anything_is_trained(tmp_path):
    """Both processes say which one does not see the folder, and no checkpoint is called damaged."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for _ in range(2):
        codes, printed = end_of_both(folders, tmp_path, base_output_directory="out")
        assert codes == [2, 2], printed
        for output in printed:
            assert re.search(r"process 1 on \S+ does not see the folder out/run of process 0 on \S+: it must be on", output)
            assert "Traceback" not in output
            assert "damaged" not in output
    assert not (folders[0] / "out/run/metrics.jsonl").exists()
