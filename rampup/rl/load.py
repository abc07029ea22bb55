"""`rampup.load`: the trained model of any run of `rampup train`, on text or by reinforcement learning."""

from __future__ import annotations

from pathlib import Path

from rampup.lm.load import LoadedRun, check_identity, load_run, named_checkpoint
from rampup.lm.transformer import LanguageModel
from rampup.loop.checkpoint import read_record, restore_tree
from rampup.loop.run_folder import CONFIG_FILE
from rampup.rl.config import load_rollout_config
from rampup.rl.tasks import END_TOKEN, VOCAB_SIZE

# Values that only a checkpoint of reinforcement learning records.
RECORDED = {"max_prompt_length", "max_response_length", "warm_start_steps"}


def load(path: str | Path) -> LoadedRun:
    """Return the model, the parameters and the training state of a run, on the first device.

    Args:
        path: the folder of a run, for its newest intact checkpoint; or a checkpoint, such as `runs/demo/checkpoints/100`.

    Raises:
        ConfigError: there is no checkpoint.
        ResumeMismatchError: the checkpoint is damaged, or the configuration in the folder is of another model.
    """
    run, folder = named_checkpoint(path)
    record = read_record(folder)
    # The file alone does not tell: a loop of one's own may have a config.yml of any kind.
    if not record.keys() >= RECORDED or not (run / CONFIG_FILE).is_file():
        return load_run(run, folder)
    config = load_rollout_config(run / CONFIG_FILE)
    check_identity(config, record, run, folder)
    state = restore_tree(folder)
    return LoadedRun(
        folder=folder,
        step=int(folder.name),
        params=state["params"],
        state=state,
        config=config,
        model=LanguageModel.from_config(config, vocab_size=VOCAB_SIZE),
        context=config.max_prompt_length + config.max_response_length,
        end_token=END_TOKEN,
    )
