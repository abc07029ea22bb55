"""The tiny configuration that the tests of training share: small enough to compile
fast, large enough for its loss to fall.
"""

from __future__ import annotations

TINY_MODEL = {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 2,
    "base_mlp_dim": 32,
}
TINY_MODEL |= {"max_target_length": 16, "learning_rate": 0.01, "eval_interval": -1}
# The model with a ramp of three phases: 1, 2 and 3 samples per device.
TINY = TINY_MODEL | {
    "enable_rampup_batch_size": True,
    "global_rampup_samples": 80,
    "steps": 12,
}
TINY |= {
    "per_device_batch_size_start": 1,
    "per_device_batch_size_increment": 1,
    "per_device_batch_size": 3,
}
# The model with a batch that follows the noise: at the first weights, on random tokens,
# it is large and stays as it is.
AUTO = TINY_MODEL | {
    "batch_size_schedule": "auto",
    "per_device_batch_size_start": 1,
    "per_device_batch_size": 4,
}
AUTO |= {
    "gradient_noise_half_life_samples": 60,
    "opt_type": "sgd",
    "learning_rate": 1e-4,
    "dataset_type": "synthetic",
}
# The model with a ramp of two phases for one device: what `tune` tries.
TUNED = TINY_MODEL | {
    "batch_size_schedule": "0:2 4:4",
    "dataset_type": "synthetic",
    "steps": 6,
}


def command_line(settings):
    """Return settings as `key=value` words of a command line."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]


# The same for a run of reinforcement learning.
RL_TINY = {
    "batch_size": 4,
    "num_generations": 2,
    "num_iterations": 2,
    "mini_batch_size": 2,
    "train_micro_batch_size": 1,
}
RL_TINY |= {
    "num_batches": 3,
    "num_test_batches": 2,
    "max_operand": 9,
    "warm_start_steps": 3,
    "warm_start_batch_size": 8,
}
RL_TINY |= {
    "base_emb_dim": 8,
    "base_num_decoder_layers": 1,
    "base_mlp_dim": 8,
    "base_num_query_heads": 2,
}
RL_TINY |= {
    "checkpoint_period": 4,
    "max_num_checkpoints_to_keep": None,
    "async_checkpointing": False,
    "eval_interval": 4,
}
RL_TINY |= {"jax_cache_dir": None, "ici_data_parallelism": 1, "ici_fsdp_parallelism": 1}
