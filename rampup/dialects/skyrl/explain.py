"""A SkyRL file in words: what its sizes mean, how a step flows, what each size costs, and which advice is true of it."""

from __future__ import annotations

from rampup.dialects.rules import counted
from rampup.dialects.skyrl.job import SkyRLJob
from rampup.dialects.verdict import Advice, Meaning

MINI, TRAIN = "trainer.policy_mini_batch_size", "trainer.train_batch_size"
MICRO, FORWARD = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
GUIDE, DOCUMENTATION = "SkyRL's guide to batch sizes", "SkyRL's documentation of its keys"


def meanings(job: SkyRLJob) -> tuple[Meaning, ...]:
    """Return what the file says and what it means."""
    said, policy = job.settings.said, job.role("policy")
    updates = job.prompts // policy.mini
    evaluated = job.settings["trainer.eval_batch_size"] * job.settings["generator.eval_n_samples_per_prompt"]
    passes = "as many passes as the token budget needs" if job.by_tokens else counted(policy.passes, "pass")
    lines = [
        Meaning(says=said(TRAIN), means=f"{counted(job.prompts, 'prompt')} per training step"),
        Meaning(
            says=said("generator.n_samples_per_prompt"),
            means=f"{counted(job.samples, 'sample')} per training step, generated in one call of the engines",
        ),
        Meaning(
            says=said(MINI),
            means=f"prompts, whole job: {counted(policy.mini_samples, 'sample')} per optimizer step, "
            f"{counted(updates, 'mini batch')} per pass over the step's samples",
        ),
        Meaning(
            says=said("trainer.update_epochs_per_batch"),
            means=f"{counted(updates * job.epochs, 'optimizer step')} per training step",
        ),
        Meaning(
            says=f"{counted(job.devices('policy'), 'policy device')} / {job.model_size('policy'):,} that share a sample",
            means=f"{counted(policy.data_parallel_size, 'replica')} of the policy; {counted(policy.per_replica, 'sample')} "
            "of each mini batch on each" + (f", {policy.padding:,} of the mini batch empty" if policy.padding else ""),
        ),
        Meaning(says=said(MICRO), means=f"samples per replica: {passes} per optimizer step"),
        Meaning(
            says=said(FORWARD),
            means="samples per replica in forward-only passes (log-probabilities, values)",
        ),
        Meaning(
            says=said("trainer.eval_batch_size"),
            means=f"{counted(evaluated, 'sample')} per evaluation batch; the last may be smaller",
        ),
    ]
    if job.has_critic:
        critic = job.role("critic")
        lines.insert(
            4,
            Meaning(
                says=said("trainer.critic_mini_batch_size"),
                means=f"prompts: {counted(critic.mini_samples, 'sample')} per critic update, "
                f"{counted(job.prompts // critic.mini * job.epochs, 'critic update')} per training step",
            ),
        )
    return tuple(lines)


def flow(job: SkyRLJob) -> tuple[str, ...]:
    """Return a training step, stage by stage."""
    policy, updates = job.role("policy"), job.prompts // job.role("policy").mini
    per_replica = -(-job.samples // policy.data_parallel_size)
    models = ", ".join(["the policy", *(["the critic"] if job.has_critic else []), *(["the reference"] if job.has_ref else [])])
    lines = [
        f"load {counted(job.prompts, 'prompt')}; an incomplete last batch of the data set is dropped",
        f"generate {counted(job.samples_per_prompt, 'response')} for each: {counted(job.samples, 'sample')}, "
        "a prompt's responses next to each other",
        f"forward passes of {models}: about {counted(per_replica, 'sample')} per replica, {job.settings[FORWARD]:,} at a time",
        f"advantages over each prompt's {counted(job.samples_per_prompt, 'response')}",
    ]
    if job.has_critic:
        critic = job.role("critic")
        lines.append(
            f"train the critic first: {counted(job.prompts // critic.mini, 'mini batch')} of "
            f"{counted(critic.mini_samples, 'sample')}, {_times(job.epochs)}"
        )
    share = policy.per_replica
    passes = "token-budget passes" if job.by_tokens else counted(policy.passes, "pass")
    lines += [
        f"mini batch j is samples j * {policy.mini_samples:,} to (j + 1) * {policy.mini_samples:,} - 1"
        + (f", filled up with {counted(policy.padding, 'empty sample')}" if policy.padding else "")
        + f"; replica r takes the {share:,} from r * {share:,} on, in order",
        f"train the policy: {counted(updates, 'mini batch')}, each {passes} on every replica and one optimizer step, "
        f"{_times(job.epochs)} = {counted(updates * job.epochs, 'optimizer step')}",
        "send the policy's weights to the engines, once",
    ]
    return tuple(lines)


def advice(job: SkyRLJob) -> tuple[Advice, ...]:
    """Return the guides' rules, each with what is true of this file."""
    policy = job.role("policy")
    mini, updates = policy.mini, job.prompts // policy.mini
    products = policy.micro * policy.data_parallel_size
    rules = [
        Advice(
            rule="train_batch_size is a multiple of policy_mini_batch_size",
            source=GUIDE,
            holds=job.prompts % mini == 0,
            because=f"{job.prompts:,} % {mini:,} = {job.prompts % mini:,}",
        ),
        Advice(
            rule="train_batch_size * n_samples_per_prompt is a multiple of policy_mini_batch_size",
            source=GUIDE,
            holds=job.samples % mini == 0,
            because=f"{job.samples:,} % {mini:,} = {job.samples % mini:,}; it follows from the rule before and adds nothing",
        ),
        Advice(
            rule="optimizer steps = train_batch_size * n_samples_per_prompt / policy_mini_batch_size",
            source=GUIDE,
            holds=None,
            because=f"policy_mini_batch_size counts prompts, not samples: {updates:,} and not {job.samples // mini:,}",
        ),
        Advice(
            rule="policy_mini_batch_size is a multiple of micro_train_batch_size_per_gpu * devices; that gives the passes",
            source=GUIDE,
            holds=None,
            because=f"the samples of a mini batch are divided, not its prompts: {policy.passes:,} passes and not "
            f"{mini / products:,.6g}",
        ),
        Advice(
            rule="for an out-of-memory error, lower policy_mini_batch_size",
            source=GUIDE,
            holds=None,
            because=f"it changes the number of passes, not their size; lower {MICRO}, now {policy.micro:,}",
        ),
        Advice(
            rule="policy_mini_batch_size equal to train_batch_size keeps training on-policy",
            source=GUIDE,
            holds=updates * job.epochs == 1,
            because=f"{counted(updates * job.epochs, 'update')} per rollout",
        ),
    ]
    return (*rules, *_critic_advice(job))


def _critic_advice(job: SkyRLJob) -> list[Advice]:
    if not job.has_critic:
        return []
    critic, policy = job.role("critic"), job.role("policy")
    return [
        Advice(
            rule="critic_mini_batch_size is smaller than policy_mini_batch_size, so that the critic is updated more often",
            source=DOCUMENTATION,
            holds=critic.mini < policy.mini,
            because=f"{critic.mini:,} against {policy.mini:,} prompts",
        )
    ]


def notes(job: SkyRLJob) -> tuple[str, ...]:
    """Return what is legal but surprising."""
    settings = job.settings
    found = [f"{TRAIN}, {MINI} and the critic's count prompts; micro sizes count samples of one data-parallel replica."]
    found += [
        f"the {name}'s {job.devices(name):,} devices are no multiple of the {job.model_size(name):,} that share a sample: "
        f"SkyRL counts {job.data_parallel_size(name):,} replicas, rounded down, without a word."
        for name in job.roles
        if job.devices(name) % job.model_size(name)
    ]
    for role in [job.role("policy"), *([job.role("critic")] if job.has_critic else [])]:
        if role.padding:
            found.append(
                f"{role.name}: {role.mini_samples:,} samples of a mini batch over {role.data_parallel_size:,} replicas: the "
                f"run adds {counted(role.padding, 'empty sample')} to each."
            )
        if role.per_replica % role.micro and not job.by_tokens:
            found.append(_uneven(role.per_replica, role.micro, settings["trainer.algorithm.loss_reduction"], role.name))
    if job.by_tokens:
        found.append(
            f"trainer.max_tokens_per_microbatch={settings['trainer.max_tokens_per_microbatch']:,} fills the passes by tokens; "
            f"a longer sequence still makes a pass of its own. {MICRO} is then ignored, but its rules are still enforced."
        )
    num_prompts = settings["num_prompts"]
    if num_prompts is not None and num_prompts % job.prompts:
        found.append(
            f"the last {counted(num_prompts % job.prompts, 'prompt')} of {num_prompts:,} are dropped each time the data set "
            "is read."
        )
    if settings["trainer.placement.colocate_all"] and job.engine_devices is None:
        found.append(
            "trainer.placement.colocate_all is on and the file does not size the inference engines: engines * tensor * "
            f"pipeline * data parallel size must be {job.devices('policy'):,}, and so must every other model's devices."
        )
    return (
        *found,
        *_names(job),
        "the learning rate schedule advances with every optimizer step.",
    )


def _uneven(samples: int, micro: int, reduction: str, role: str) -> str:
    text = f"{role}: the last pass of each mini batch has {samples % micro:,} samples instead of {micro:,}"
    if reduction == "token_mean_legacy":
        return f"{text}, which trainer.algorithm.loss_reduction=token_mean_legacy weights wrongly."
    return f"{text}; the loss is weighted so that it does not matter."


def _names(job: SkyRLJob) -> list[str]:
    old = {
        "fsdp2": "trainer.strategy=fsdp2 is an old name of fsdp.",
        "packing": "trainer.use_sample_packing is now called trainer.remove_microbatch_padding.",
    }
    found = [old["fsdp2"]] if job.settings["trainer.strategy"] == "fsdp2" else []
    if job.settings["trainer.use_sample_packing"] is not None:
        found.append(old["packing"])
    return found


def _times(epochs: int) -> str:
    return "once" if epochs == 1 else f"{epochs:,} times over"
