"""Tests of what starts a run: Slurm, MPI, xpk, Kubernetes, base files, scripts of other
machines, and which command and key count.
"""

import re

import pytest
from helpers.dialect_files import expect

from rampup.contrib.check import check_file
from rampup.errors import ConfigError

GPT = (
    "pretrain_gpt.py --micro-batch-size 2 --global-batch-size 256"
    " --tensor-model-parallel-size 2"
)
HEADER = (
    "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=mi250:8\n#SBATCH"
    " --ntasks-per-node 8 # one for each device\n"
)
MAXTEXT = "python3 MaxText/train.py MaxText/configs/base.yml per_device_batch_size=2"
PPO = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=64 critic.enable=false"
    " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"
)
SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.policy_mini_batch_size=8"
    " trainer.train_batch_size=32"
)
LOADED = "global_batch_size_to_load"
BRANCHES = (
    f"if [ -d /opt/big ]; then TP=4; else TP=2; fi\ntorchrun --nproc_per_node 8 {GPT}"
    " --tensor-model-parallel-size $TP\n"
)
JOB = f"""apiVersion: jobset.x-k8s.io/v1alpha2
spec:
  replicatedJobs:
  - template:
      spec:
        containers:
        - env: [{{name: SIZE, value: "4"}}]
          command: [bash, -c]
          args: ["set -e\\n{MAXTEXT.replace("=2", "=$SIZE")}"]
---
kind: Service
"""
TORCH_JOB = """apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec: {containers: [{command: [torchrun, --nproc_per_node=8], env: [{name: MBS, value: 4}],
  args: [pretrain_gpt.py, --micro-batch-size, $(MBS), --global-batch-size, "64"]}]}
"""
CONTAINERS = "a manifest with containers, which is not read; paste the command"
VERTEX = (
    '{"jobSpec": {"workerPoolSpecs": [{"containerSpec": {"command": ["sh", "-c", "'
    + MAXTEXT
    + '"]}}]}}'
)
DEVICES = (
    'DEVICE=$(probe)\nif [ "$DEVICE" = npu ]; then A=(trainer.train_batch_size=8); else'
    ' A=(trainer.train_batch_size=32); fi\nif [ "$DEVICE" = npu ]; then'
    " B=(trainer.logger=x); else B=(trainer.logger=y); fi\npython -m"
    ' skyrl.train.entrypoints.main_base trainer.policy_mini_batch_size=8 "${B[@]}"'
    ' "${A[@]}"\n'
)
CONVERT = (
    "python tools/checkpoint/convert.py --micro-batch-size 1 --global-batch-size 8"
    " --tensor-model-parallel-size 8 --seq-length 4"
)
DPO, TRAINED_ON = (
    "base_config: post_train/dpo.yml\nsteps: 100\n",
    "global_batch_size_to_train_on",
)
OWN_DPO = {"post_train/dpo.yml": "per_device_batch_size: 3\nbase_config: base.yml\n"}
MAIN_PPO = "python3 -m verl.trainer.main_ppo"
REST = (
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "critic.enable=false",
)
GSM8K = "defaults: [gsm8k_multiturn_grpo, _self_]\ndata: {max_prompt_length: 64}\n"
OWN_GSM8K = {
    "gsm8k_multiturn_grpo.yaml": (
        "defaults: [ppo_trainer]\ndata: {train_batch_size: 32}\n"
    )
}
OTHER = f"{MAIN_PPO} --config-path=$HERE/config --config-name other {' '.join(REST)}\n"
LARGE = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 2"
    " --global-batch-size 64 "
)
TORCHRUN = f"{LARGE.replace('64', '$b')}--train-iters 10 --seq-length 8"
OPEN, MAXTEXT8, WORLD8 = "--num-layers $LAYERS", "num_devices=8", "world_size=8"
# The system, its file and those beside it, the settings, and what the verdict is, or
# the error.
SKY = """resources:
  accelerators: H100:8
num_nodes: 2
envs:
  MBS: 4
run: |
  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE COMMAND --micro-batch-size $MBS
"""
RAY_JOB = """apiVersion: ray.io/v1
kind: RayJob
spec:
  entrypoint: COMMAND data.train_batch_size=$BATCH
  rayClusterSpec:
    workerGroupSpecs:
    - replicas: 2
      template: {spec: {containers: [{resources: {limits: {nvidia.com/gpu: 8}}}]}}
"""
FILES = {
    # Options that differ between branches of an unknown condition are not left out.
    "options": ("skyrl", DEVICES, {}, [], r"what \$DEVICE is.*add DEVICE="),
    "options that are decided": ("skyrl", DEVICES, {}, ["DEVICE=gpu"], {"samples_per_step": 160}),
    # Conversion and evaluation are not the run; of several runs the first counts, and a
    # note names the others.
    "conversion before training": ("megatron", f"{CONVERT}\nfor b in 64 128; do {TORCHRUN}; done\n{TORCHRUN}\n", {}, [], {"num_microbatches": [4], "note": ["line 2", "similar commands in line 3"]}),
    "conversion alone": ("megatron", f"{CONVERT}\n", {}, [], r"starts tools/checkpoint/convert\.py, which the rules of Megatron do not"),
    # A program whose output is an argument is not the one that the command starts.
    "output of a tool": ("megatron", f"{LARGE} --data-path $(python3 $DIR/tools/list.py) --train-iters 9 --seq-length 8", {}, [], {"num_microbatches": [4]}),
    # Without `--from`, a program without rules and a command with open sizes are
    # refused for what they are.
    "trainer without rules": (None, "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_batch_size=8", {}, [], "starts sft_trainer"),
    "evaluation": (None, "deepspeed evaluate.py --micro-batch-size 64 --tensor-model-parallel-size 2", {}, [], r"evaluate\.py, .* of Megatron do not cover"),
    "open sizes": (None, f"if [ -d /npu ]; then RUN=({MAIN_PPO} data.train_batch_size=8); else RUN=({MAIN_PPO}); fi\n${{RUN[@]}} actor_rollout_ref.rollout.n=2 data.train_batch_size=64", {}, [], "does not say what"),
    # Without `--from`, a command under a condition that does not hold, and the name of
    # a base file, tell whose file it is.
    "system of a run that is off": (None, f"#!/bin/bash\nif [ $NODE_RANK == 0 ]; then\n  {SKYRL}\nfi", {}, [], r"does not start SkyRL itself.*if a condition decides, add VARIABLE="),
    "system of a run that is on": (None, f"#!/bin/bash\nif [ $NODE_RANK == 0 ]; then\n  {SKYRL}\nfi", {}, ["NODE_RANK=0"], {"samples_per_step": 160}),
    "system of a base file": (None, "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\n", {}, [], {"samples_per_step": 1024, "note": "ppo_trainer: the sizes of veRL"}),
    "no command": ("megatron", "echo hello\n", {}, [], "no command in it is like `torchrun"),
    # A `base_config` beside the file wins over MaxText's own of that name; one that is
    # nowhere is an error, not base.yml.
    "shipped base_config": ("maxtext", DPO, {}, [MAXTEXT8], {TRAINED_ON: 16, "note": "post_train/dpo.yml"}),
    "own base_config": ("maxtext", DPO, OWN_DPO, [MAXTEXT8], {TRAINED_ON: 24}),
    "missing base_config": ("maxtext", "base_config: nowhere.yml\nsteps: 100\n", {}, [MAXTEXT8], r"nowhere\.yml is neither beside this file nor one that MaxText ships"),
    "given base_config": ("maxtext", "base_config: nowhere.yml\n", {}, [MAXTEXT8, "base_config=base.yml"], {TRAINED_ON: 96}),
    # `--config-name` and `defaults` name a base file: one beside the source wins,
    # veRL's own gives its sizes.
    "shipped defaults": ("verl", GSM8K, {}, REST, {"samples_per_step": 256}),
    "own defaults": ("verl", GSM8K, OWN_GSM8K, REST, {"samples_per_step": 32}),
    "missing --config-name": ("verl", OTHER, {}, [], r"base file other\.yaml is neither beside this file nor one that veRL ships"),
    "own --config-name": ("verl", OTHER, {"config/other.yaml": "data: {train_batch_size: 16}\n"}, [], {"samples_per_step": 16}),
    "shipped --config-name": ("verl", f"{MAIN_PPO} --config-name=ppo_megatron_trainer.yaml {' '.join(REST)} data.train_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", {}, [], {"data_parallel_size": 2}),
    # A mandatory key is no misspelling of another; a repeated key is refused; a mapping
    # is no value.
    "unrelated keys": ("verl", "actor_rollout_ref: {rollout: {name: vllm}}\ndata.train_batch_size: 64\nhydra: {run: {dir: .}}\ndefaults: [actor, _self_]\n", {}, [], {"samples_per_step": 64}),
    "repeated key": (None, "M_ARGS:\n  --init: 1\n  --init: 2\n  --micro-batch-size: 2\n  --global-batch-size: 64\n", {}, [WORLD8], "--init is given twice, first in line 2"),
    "repeated size": ("megatron", "--micro-batch-size: 2\n--micro-batch-size: 4\n", {}, [WORLD8], "micro-batch-size is given twice, first in line 1"),
    "a key in two forms": ("verl", "data.n: 2\ndata: {n: 4}\n", {}, [], "data.n is given twice, first in line 1"),
    "reference": ("megatron", "model: {micro_batch_size: 2}\nref: {micro_batch_size: '${model.micro_batch_size}'}\n", {}, [WORLD8], {"micro_batch_size": 2}),
    "further runs": ("megatron", "ARGS: {--micro-batch-size: 2}\nARGS_2: {--micro-batch-size: 4}\n", {}, [WORLD8], "given twice, as 2 and as ARGS_2.--micro-batch-size=4"),
    "mapping": ("trlx", "method: {num_rollouts: {strategy: choice, values: [1, 2]}}\ntrain: {batch_size: 4}\n", {}, [], r"method\.num_rollouts is a mapping; it must be a whole number"),
    # Layers and the length of a run may be unknown, with a note; not if a ramp or a
    # chunk depends on them. An unknown value of an option is no unknown option.
    "open length": ("megatron", f"{LARGE}{OPEN} --train-iters $(($1 / 64)) --save $FOLDER --node-rank $SLURM_PROCID --bf16 $MOE_ARGS\n", {}, [], {"num_microbatches": [4], "no_note": ["FOLDER", "SLURM_PROCID"]} | {"note": ["train_iters", "does not say what $MOE_ARGS adds", "num_layers=$LAYERS: the script does not say what $LAYERS is; add LAYERS=..., or num_layers=..."]}),
    "open samples of a ramp": ("megatron", f"{LARGE}{OPEN} --train-samples $N --rampup-batch-size 16 16 1000\n", {}, [], r"train_samples=\$N: the script does not say"),
    "open layers of a chunk": ("megatron", f"{LARGE}{OPEN} --num-layers-per-virtual-pipeline-stage 2\n", {}, [], r"num_layers=\$LAYERS: the script does not say"),
    "header": ("megatron", f"{HEADER}torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE {GPT}", {}, [], {"data_parallel_size": 16}),
    "tasks of a header": ("megatron", f"{HEADER}srun python {GPT}", {}, [], {"data_parallel_size": 16}),
    "tasks of srun": ("megatron", f"{HEADER}srun -N 2 --ntasks-per-node=4 python {GPT}", {}, [], {"data_parallel_size": 4}),
    "tasks in quotes": ("megatron", f"{HEADER}srun --ntasks 8 bash -c 'python {GPT}'", {}, [], {"data_parallel_size": 4}),
    "tasks that are given": ("megatron", f"#!/bin/bash\nsrun python {GPT}", {}, ["SLURM_NTASKS=64"], {"data_parallel_size": 32}),
    "tasks of mpirun": ("megatron", f"mpirun -np 16 python {GPT}", {}, [], {"data_parallel_size": 8}),
    "a task for each launcher": ("megatron", f"{HEADER}srun --ntasks-per-node=1 torchrun --nnodes 4 --nproc_per_node 4 {GPT}", {}, [], {"data_parallel_size": 8}),
    "tasks nowhere": ("megatron", f"#!/bin/bash\nsrun python {GPT}", {}, [], "number of devices"),
    "gres": ("megatron", f"#SBATCH -N2\n#SBATCH --gres=gpu:a100:4\ntorchrun --nnodes $SLURM_JOB_NUM_NODES --nproc_per_node $SLURM_GPUS_ON_NODE {GPT}", {}, [], {"data_parallel_size": 4}),
    "document": ("maxtext", f"N=2\nread -r -d '' CMD <<EOF\n{MAXTEXT[:-1]}$N \\\n  num_target_devices=4\nEOF\nsrun bash -c \"$CMD\"", {}, [], "does not start MaxText itself"),
    "substitution": ("skyrl", f"CMD=$(cat <<'EOS'\nset -e\n{SKYRL}\nEOS\n)\nbash -lc \"${{CMD}}\"", {}, [], "does not start SkyRL itself"),
    "xpk": ("maxtext", f"python3 xpk.py workload create --tpu-type=v5litepod-256 --num-slices=64 --command \"{MAXTEXT}\"", {}, [], "add num_devices=N"),
    "chips of xpk": ("maxtext", f"xpk workload create --device-type v6e-4x4 --num-slices 2 --command='{MAXTEXT}'", {}, [], "add num_devices=N"),
    "module that launches": ("megatron", f"python -m torch.distributed.launch --nproc_per_node 8 {GPT}", {}, [], {"data_parallel_size": 4}),
    "deepspeed": ("megatron", f"deepspeed --num_nodes 2 --num_gpus 8 {GPT}", {}, [], {"data_parallel_size": 8}),
    "deepspeed around quotes": ("megatron", f"deepspeed --num_gpus 8 --no_python bash -c 'python {GPT}'", {}, [], "number of devices"),
    "deepspeed on a file of hosts": ("megatron", f"deepspeed --hostfile=hosts --num_gpus 8 {GPT}", {}, [], "number of devices"),
    "generation of an example": ("skyrl", "python -m examples.terminal_bench.main_tbench_generate trainer.train_batch_size=1", {}, [], "which the rules of SkyRL do not cover"),
    "search path": ("verl", f"{PPO} hydra.searchpath=[pkg://plugin.config] actor_rollout_ref.actor.engine.tp=2", {}, [], {"note": "hydra.searchpath adds base files"}),
    "nodes of xpk": ("maxtext", f"xpk workload create --device-type h100-mega-80gb-8 --num-nodes 2 --command='{MAXTEXT}'", {}, [], "add num_devices=N"),
    "JobSet": ("maxtext", JOB, {}, ["num_devices=8"], CONTAINERS),
    "PyTorchJob": ("megatron", TORCH_JOB, {}, [], CONTAINERS),
    "a manifest without a system": (None, TORCH_JOB, {}, [], CONTAINERS),
    "one process": ("megatron", f"python -u {GPT} --tensor-model-parallel-size 1", {}, [], "add world_size=N"),
    "nodes of NeMo": ("megatron", "apiVersion: 1\ntrainer: {devices: 8}\nmodel: {micro_batch_size: 1, global_batch_size: 64}\n", {}, [], {"num_devices": 8, "note": "one node is taken"}),
    "torchrun of one": ("megatron", f"torchrun --master_port 6000 {GPT.replace('size 2', 'size 1')}", {}, ["world_size=1"], {"num_devices": 1}),
    "a module that generates": ("megatron", f"torchrun --nproc_per_node 8 -m examples.gpt_static_inference {GPT[15:]}", {}, [], "which the rules of Megatron do not cover"),
    "processes of another script": ("megatron", f"python {GPT}", {}, [], "number of devices"),
    "devices of deepspeed": ("megatron", f"deepspeed --include=a:0,1@b:2,3 {GPT}", {}, [], "add world_size=N"),
    "validation": ("verl", f"{PPO} +trainer.val_only=true actor_rollout_ref.actor.use_dynamic_bsz=true", {}, [], {"note": "trains on nothing"}),
    "tasks": ("megatron", f"torchrun --nproc_per_node 8 tasks/main.py {GPT[15:]}", {}, ["megatron_version=legacy"], {"data_parallel_size": 4}),
    "SkyPilot": ("megatron", SKY.replace("COMMAND", "pretrain_gpt.py --global-batch-size 128"), {}, [], {"num_devices": 16, "num_microbatches": [2], "note": "the manifest asks for 16 devices"}),
    "SkyPilot without devices": ("megatron", SKY.replace("COMMAND", "pretrain_gpt.py --global-batch-size 128").replace(": H100:8", ": tpu-v5e-8"), {}, [], "number of devices"),
    "RayJob": ("verl", RAY_JOB.replace("COMMAND", PPO.replace("data.train_batch_size=64", "")), {}, ["BATCH=96"], {"samples_per_step": 96}),
    "RayJob with a variable": ("verl", RAY_JOB.replace("COMMAND", PPO.replace("data.train_batch_size=64", "")), {}, [], r"add BATCH="),
    "Vertex": ("maxtext", VERTEX, {}, ["num_devices=8"], CONTAINERS),
    "another root": ("skyrl", f"ROOT=/lustre/me/project\nsource $ROOT/conf/sizes.sh\n{SKYRL} generator.n_samples_per_prompt=$N",
        {"conf/sizes.sh": "N=1"}, ["ROOT=."], {"samples_per_step": 32, "note": "read from line 3"}),
    "another root that is not given": ("skyrl", f"source $HERE/sizes.sh\n{SKYRL} generator.n_samples_per_prompt=$N", {"sizes.sh": "N=1"}, [], r"does not say what \$N is"),
    "base file of a module": ("verl", f"{PPO.replace('verl.trainer', 'recipe.own')} --config-path=settings --config-name=own",
        {"recipe/own/settings/own.yaml": "actor_rollout_ref: {rollout: {n: 4}}"}, [], {"samples_per_step": 256}),
    "base file of another machine": ("verl", f"{PPO} --config-path=/root/me/settings --config-name=own",
        {"settings/own.yaml": "actor_rollout_ref: {rollout: {n: 2}}"}, [], {"samples_per_step": 128}),
    "base file nowhere": ("verl", f"{PPO} --config-name=own", {}, [], r"add defaults=ppo_trainer for its defaults"),
    "base file that is given": ("verl", f"{PPO} --config-name=own", {}, ["defaults=ppo_trainer"], {"samples_per_step": 64}),
    "equal branches": ("megatron", BRANCHES.replace("TP=4", "TP=2"), {}, [], {"data_parallel_size": 4}),
    "open branches": ("megatron", BRANCHES, {}, [], r"does not say what \$TP is; add TP="),
    "branches of an argument": ("megatron", BRANCHES.replace("-d /opt/big", "$1 -eq 7"), {}, [], r"what \$TP is; add TP="),
    "decided branches": ("megatron", BRANCHES, {}, ["TP=4"], {"data_parallel_size": 2}),
    "a run that is off": ("skyrl", f"#!/bin/bash\nif [ \"${{RUN_TRAINING:-0}}\" = 1 ]; then\n  {SKYRL}\nfi", {}, [], r"does not start SkyRL itself.*if a condition decides, add VARIABLE="),
    "a run that is switched on": ("skyrl", f"#!/bin/bash\nif [ \"${{RUN_TRAINING:-0}}\" = 1 ]; then\n  {SKYRL}\nfi", {}, ["RUN_TRAINING=1"], {"samples_per_step": 160}),
    "a comment after a backslash": ("skyrl", f"#!/bin/bash\n{SKYRL} \\\n  # the rest\n  generator.n_samples_per_prompt=2", {}, [], {"samples_per_step": 160, "note": "line 4 begins with generator.n_samples_per_prompt=2, so it is not part"}),
    "a blank after a backslash": ("skyrl", f"#!/bin/bash\n{SKYRL} \\ \n  generator.n_samples_per_prompt=2", {}, [], {"samples_per_step": 160, "note": "line 3 begins with generator.n_samples_per_prompt=2, so it is not part"}),
    "a last comment": ("skyrl", f"#!/bin/bash\n{SKYRL} \\\n  # generator.n_samples_per_prompt=2\n\necho done", {}, [], {"samples_per_step": 160}),
    "decoding": ("maxtext", f"#!/bin/bash\n{MAXTEXT.replace('train.py', 'decode.py')}", {}, [], r"starts MaxText/decode\.py, which the rules of MaxText do not cover"),
    "generation": ("verl", PPO.replace("main_ppo", "main_generation"), {}, [], "main_generation, which the rules of veRL do not cover"),
    "no compilation": ("maxtext", "ici_fsdp_parallelism: 8\nper_device_batch_size: 2\nnum_slices: 1\ninternal_compile_num_devices: -1\n", {}, ["num_devices=8"], {LOADED: 16}),
    "topology": ("maxtext", "ici_fsdp_parallelism: 8\nper_device_batch_size: 2\ncompile_topology: v5e-16\ncompile_topology_num_slices: 2\n", {}, [], "add num_devices=N"),
    "topology of given devices": ("maxtext", "ici_fsdp_parallelism: 8\nper_device_batch_size: 2\ncompile_topology: v5e-16\n", {}, ["num_devices=16", "num_slices=2"], {LOADED: 32, "note": "compile_topology=v5e-16 gives a compilation its devices"}),
    "open slices": ("maxtext", "ici_fsdp_parallelism: 8\nper_device_batch_size: 2\n", {}, [], "add num_devices=N"),
    "slices": ("maxtext", "ici_fsdp_parallelism: 8\nper_device_batch_size: 2\nnum_slices: 2\n", {}, [], "add num_devices=N"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_starts_a_run_is_read(tmp_path, name):
    """The devices, the base file and the command come from what the launcher says; what
    is not known is asked as it is.
    """
    system, text, others, settings, wanted = FILES[name]
    path = tmp_path / ("run.yaml" if re.match(r"[\w.-]+:|\{", text) else "run.sh")
    for file, content in {path.name: text, **others}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted) as error:
            check_file(path, system, settings)
        assert error.value.key == {
            "options": "DEVICE",
            "missing base_config": "base_config",
        }.get(name, error.value.key)
    else:
        expect(check_file(path, system, settings), **wanted)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("launch.py", "a Python program"), ("README.md", "a text with commands in it")],
)
def test_files_that_are_not_read_are_named(tmp_path, name, kind):
    """A launcher in Python and a description say what they are, and to paste the
    command.
    """
    (tmp_path / name).write_text(f"import os\nos.system('{SKYRL}')\n")
    with pytest.raises(
        ConfigError, match=f"this is {kind}, which is not read; paste its command"
    ):
        check_file(tmp_path / name, "skyrl")


def test_a_base_file_elsewhere_on_this_machine_is_read(tmp_path):
    """Where `--config-path` names its folder from the root."""
    elsewhere = tmp_path / "settings"
    elsewhere.mkdir()
    (elsewhere / "own.yaml").write_text("data: {train_batch_size: 16}\n")
    run = tmp_path / "repository" / "run.sh"
    run.parent.mkdir()
    (run.parent / ".git").mkdir()
    text = f"{MAIN_PPO} --config-path={elsewhere} --config-name=own {' '.join(REST)}\n"
    run.write_text(text)
    assert check_file(run, "verl").derived["samples_per_step"] == 16
