"""The MaxText of maxtext_train.py with a ramp in one executable: `python
maxtext_train_ramp.py FOLDER`.
"""

import os
import sys

os.environ |= {
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_PLATFORMS": "cpu",
}  # before MaxText is imported: without Google Cloud's packages

import maxtext

from rampup.contrib.maxtext import main

keys = f"""
    {maxtext.__path__[0]}/configs/base.yml
    run_name=run
    base_output_directory={sys.argv[1]}
    metrics_file={sys.argv[1]}.jsonl
    hardware=cpu
    skip_jax_distributed_system=true
    enable_goodput_recording=false
    monitor_goodput=false
    enable_checkpointing=false
    jax_cache_dir=
    dataset_type=synthetic
    base_emb_dim=8
    base_num_query_heads=4
    base_num_kv_heads=4
    base_mlp_dim=32
    base_num_decoder_layers=2
    head_dim=16
    vocab_size=256
    max_target_length=32
    learning_rate=0.01
    steps=26
    enable_rampup_batch_size=true
    global_rampup_samples=72
    per_device_batch_size_start=0.5
    per_device_batch_size_increment=0.5
    per_device_batch_size=2
    gradient_accumulation_steps=4
"""
main([sys.argv[0], *keys.split()])
