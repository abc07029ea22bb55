"""configs/rl.yml and its JSON schema, written from the keys; `python -m rampup.rl.template configs` writes both."""

from __future__ import annotations

import sys

from rampup.config.files import ConfigFile
from rampup.rl.config import RolloutConfig

# By default nothing is split, so that a file of a few keys has no mini batches unless it sets them; rl.yml shows some.
ROLLOUT_FILE = ConfigFile(
    name="rl.yml",
    schema_name="rl.schema.json",
    title="A rollout's configuration of rampup",
    head="""\
# A step of reinforcement learning, for `rampup plan configs/rl.yml`: every key, its documentation and its value.
# Names and meanings are those of MaxText RL, if it has the key. If its default differs, the comment ends with it.
# A size in prompts counts prompts of the whole job; each prompt has rl.num_generations samples.
""",
    settings=RolloutConfig,
    overrides={"mini_batch_size": 16, "train_micro_batch_size": 8},
)

if __name__ == "__main__":
    ROLLOUT_FILE.write(sys.argv[1])
