"""`check_loss`: no false alarm for forty right losses, wrong ones by their kind, and
the warning of a training step.
"""

import functools
import gc
import warnings

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.toy import mesh_of, rows, slow, start, train

import rampup
from rampup.errors import ConfigError, DataError
from rampup.lm.transformer import LanguageModel

D, T, V = 4, 6, 7
_rng = np.random.default_rng(3)
LENGTHS = np.array([5, 3, 6, 2, 4, 6, 1, 5])
BATCH = {
    "x": _rng.normal(size=(8, D)).astype(np.float32),
    "z": _rng.normal(size=(8, D)).astype(np.float32),
    "y": _rng.normal(size=8).astype(np.float32),
    "c": (np.arange(8) % 3).astype(np.int32),
    "t": (
        np.where(
            np.arange(T) < LENGTHS[:, None], _rng.integers(1, V, (8, T)), 0
        ).astype(np.int32)
    ),
    "u": _rng.integers(1, V, (8, T)).astype(np.int32),
    "n": np.arange(8),
    "weight": np.array([1, 2, 0.5, 3, 1, 2, 1, 0.1], np.float32),
}
PARAMS = {
    name: jnp.asarray(_rng.normal(size=shape).astype(np.float32) * 0.5)
    for name, shape in {
        "w": (D,),
        "a": (D, 5),
        "b": (5, D),
        "e": (V, D),
        "o": (D, V),
        "k": (D, 3),
    }.items()
}
CE, KEY = optax.softmax_cross_entropy_with_integer_labels, jax.random.key(0)


def num_tokens(b):
    """Return the number of tokens that count."""
    return (b["t"] > 0).sum()


def errors(p, b):
    """Return squared errors per row."""
    return (jnp.tanh(b["x"] @ p["a"]) @ p["b"] @ p["w"] - b["y"]) ** 2


def tokens(p, b):
    """Return losses per token, and which of them count."""
    return CE(p["e"][b["t"]] @ p["o"], b["u"]), b["t"] > 0


def logits(p, b):
    """Return the logits of three classes."""
    return b["x"] @ p["k"]


def whole(sum_of, weight_of=lambda b: len(b["y"])):
    """Return a loss without random numbers and aux: a sum, and by default the number of
    rows.
    """
    return lambda p, b, k: (sum_of(p, b), weight_of(b), {})


def by_row(row_loss):
    """Return a loss whose rows are mapped, each with its key."""
    return lambda p, b, k: (jax.vmap(row_loss, (None, 0, 0))(p, b, k).sum(), len(k), {})


def drawn_until(key, limit, draw=jax.random.uniform):
    """Draw a number again until it is above a limit."""

    def again(carry):
        key, own = jax.random.split(carry[0])
        return key, draw(own)

    return jax.lax.while_loop(
        lambda carry: carry[1] < limit, again, (key, jnp.float32(-1))
    )[1]


def noisy(p, b, noise):
    """Return squared errors of noisy inputs."""
    return ((b["x"] + noise) @ p["w"] - b["y"]) ** 2


def vae(p, b, noise):
    """Return the losses of a variational autoencoder."""
    mean, log_scale = b["x"] @ p["a"], 0.1 * (b["x"] @ p["a"])
    decoded = (mean + jnp.exp(log_scale) * noise) @ p["b"]
    return ((decoded - b["x"]) ** 2).sum(-1) + 0.5 * (
        jnp.exp(2 * log_scale) + mean**2 - 1 - 2 * log_scale
    ).sum(-1)


def log_ratio(p, b):
    """Return how much more probable one text is than another, per row."""
    chosen, rejected = (
        (tokens(p, b | {"u": b[name]})[0] * (b["t"] > 0)).sum(-1) for name in ("u", "t")
    )
    return rejected - chosen


def routed(p, b):
    """Return gates of experts, and which one each row takes."""
    gates = jax.nn.softmax(b["x"] @ p["k"])
    return gates, jax.nn.one_hot(gates.argmax(-1), 3)


def normalized(x):
    """Return rows of length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def pairwise(p, b):
    """Return the similarities of all pairs of rows."""
    left, right = normalized(b["x"] @ p["a"]), normalized(b["z"] @ p["a"])
    return 5 * left @ right.T


def crf(p, b):
    """Return the negative log-likelihood of a chain per row, by a scan over time."""
    scores = p["e"][b["t"]] @ p["k"]

    def forward(alpha, s):
        return (
            jax.nn.logsumexp(alpha[:, :, None] + p["b"][:3, :3], 1) + s,
            None,
        )

    alpha, _ = jax.lax.scan(forward, scores[:, 0], scores.swapaxes(0, 1)[1:])
    return jax.nn.logsumexp(alpha, -1) - scores.sum(1)[jnp.arange(len(b["c"])), b["c"]]


def ctc(p, b):
    """Return the losses of alignments."""
    padding = jnp.zeros((len(b["t"]), T))
    return optax.ctc_loss(
        p["e"][b["u"]] @ p["o"], padding, b["t"][:, :2] % (V - 1) + 1, padding[:, :2]
    )


def in_type(dtype):
    """Return a loss that computes in a type."""

    def loss(p, b, k):
        p, b = jax.tree.map(
            lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, (p, b)
        )
        return (
            errors(p, b).astype(jnp.float32).sum(),
            len(k),
            {"large": (errors(p, b) > 100).sum()},
        )

    return loss


def ppo(p, b, advantage):
    """Return clipped policy losses per row."""
    ratio = jnp.exp(log_ratio(p, b) - jax.lax.stop_gradient(log_ratio(p, b)))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


RIGHT = {
    "regression": whole(lambda p, b: errors(p, b).sum()),
    "regression, mean over features": whole(
        lambda p, b: ((b["x"] @ p["a"] @ p["b"] - b["x"]) ** 2).mean(-1).sum()
    ),
    "weighted rows": whole(
        lambda p, b: (errors(p, b) * b["weight"]).sum(), lambda b: b["weight"].sum()
    ),
    "huber": whole(lambda p, b: optax.huber_loss(b["x"] @ p["w"], b["y"]).sum()),
    "quantile": whole(
        lambda p, b: (lambda e: jnp.maximum(0.9 * e, -0.1 * e).sum())(
            b["x"] @ p["w"] - b["y"]
        )
    ),
    "poisson": whole(
        lambda p, b: (jnp.exp(b["x"] @ p["w"]) - b["c"] * (b["x"] @ p["w"])).sum()
    ),
    "classification": lambda p, b, k: (
        CE(logits(p, b), b["c"]).sum(),
        len(k),
        {"right": (logits(p, b).argmax(-1) == b["c"]).sum()},
    ),
    "label smoothing": whole(
        lambda p, b: optax.softmax_cross_entropy(
            logits(p, b), optax.smooth_labels(jax.nn.one_hot(b["c"], 3), 0.1)
        ).sum()
    ),
    "focal": whole(
        lambda p, b: optax.sigmoid_focal_loss(
            logits(p, b), jax.nn.one_hot(b["c"], 3)
        ).sum()
    ),
    "hinge": whole(
        lambda p, b: jnp.maximum(0, 1 - jnp.sign(b["y"]) * (b["x"] @ p["w"])).sum()
    ),
    "language model": whole(
        lambda p, b: (lambda x, m: (x * m).sum())(*tokens(p, b)), num_tokens
    ),
    "language model, mean of tokens times weight, guarded": lambda p, b, k: (
        lambda x, m: (
            (x * m).sum() / jnp.maximum(m.sum(), 1) * m.sum(),
            m.sum(),
            {"tokens": m.sum(), "nested": [{"nll": (x * m).sum()}]},
        )
    )(*tokens(p, b)),
    "mean over tokens of each row": whole(
        lambda p, b: (lambda x, m: ((x * m).sum(-1) / m.sum(-1)).sum())(*tokens(p, b))
    ),
    "where instead of a product": whole(
        lambda p, b: (lambda x, m: jnp.where(m, x, 0).sum())(*tokens(p, b)), num_tokens
    ),
    "z-loss": whole(
        lambda p, b: (
            lambda z: (CE(z, b["u"]) + 1e-4 * jax.nn.logsumexp(z, -1) ** 2).sum()
        )(p["e"][b["t"]] @ p["o"]),
        lambda b: b["t"].size,
    ),
    "L2 times weight": whole(
        lambda p, b: (
            errors(p, b).sum() + 0.1 * optax.tree.norm(p, squared=True) * len(b["y"])
        )
    ),
    "L1 times tokens": whole(
        lambda p, b: (
            lambda x, m: (x * m).sum() + 0.01 * jnp.abs(p["e"]).sum() * m.sum()
        )(*tokens(p, b)),
        num_tokens,
    ),
    "vae, noise by row": by_row(lambda p, b, k: vae(p, b, jax.random.normal(k, (5,)))),
    "dropout by row": by_row(
        lambda p, b, k: errors(
            p, b | {"x": b["x"] * jax.random.bernoulli(k, 0.9, (D,)) / 0.9}
        )
    ),
    "diffusion, time by row": by_row(
        lambda p, b, k: (lambda t, n: ((b["x"] * t + n) @ p["a"] @ p["b"] - n) ** 2)(
            jax.random.uniform(k), jax.random.normal(jax.random.fold_in(k, 1), (D,))
        ).sum()
    ),
    "gumbel softmax by row": by_row(
        lambda p, b, k: (
            jax.nn.softmax(b["x"] @ p["k"] + jax.random.gumbel(k, (3,)))
            @ (b["x"] @ p["k"])
        )
    ),
    "gamma noise by row": by_row(
        lambda p, b, k: noisy(p, b, jax.random.gamma(k, 2.0, (D,)))
    ),
    "layer norm": whole(
        lambda p, b: (jax.nn.standardize(b["x"] @ p["a"]) @ p["b"]).sum()
    ),
    "ctc": whole(lambda p, b: ctc(p, b).sum()),
    "crf": whole(lambda p, b: crf(p, b).sum()),
    "bfloat16": in_type(jnp.bfloat16),
    "float16": in_type(jnp.float16),
    "distillation": whole(
        lambda p, b: optax.kl_divergence(
            jax.nn.log_softmax(logits(p, b)),
            jax.lax.stop_gradient(jax.nn.softmax(b["x"] @ p["a"][:, :3])),
        ).sum()
    ),
    "dpo": whole(lambda p, b: -jax.nn.log_sigmoid(0.1 * log_ratio(p, b)).sum()),
    "ppo": whole(lambda p, b: ppo(p, b, b["y"]).sum()),
    "reinforce, zero in value": whole(lambda p, b: ppo(p, b, b["y"] - b["y"]).sum()),
    "mixture of experts, entropy of each row": whole(
        lambda p, b: (
            lambda g, hard: (
                errors(p, b) * (g * hard).sum(-1) - (g * jnp.log(g)).sum(-1)
            ).sum()
        )(*routed(p, b))
    ),
    "gan": whole(
        lambda p, b: (
            jax.nn.softplus(-(b["z"] @ p["w"]))
            + jax.nn.softplus(b["x"] @ p["a"] @ p["b"] @ p["w"])
        ).sum()
    ),
    "triplet in a row": whole(
        lambda p, b: (
            lambda d: jnp.maximum(d(b["x"] - b["z"]) - d(b["x"] + b["z"]) + 1, 0).sum()
        )(lambda x: ((x @ p["a"]) ** 2).sum(-1))
    ),
    "simclr in a row": whole(
        lambda p, b: optax.losses.cosine_distance(
            b["x"] @ p["a"], b["z"] @ p["a"]
        ).sum()
    ),
    "bias that no loss feels": whole(
        lambda p, b: CE(logits(p, b) + p["w"][0], b["c"]).sum()
    ),
    "sorted features": whole(lambda p, b: (jnp.sort(b["x"] * p["w"], -1)[:, :2]).sum()),
    "cumulative sum over time": whole(
        lambda p, b: (jnp.cumsum(p["e"][b["t"]], 1) @ p["w"]).sum()
    ),
    "scan over rows": whole(
        lambda p, b: jax.lax.scan(
            lambda s, row: (
                s + errors(p, jax.tree.map(lambda x: x[None], row))[0],
                None,
            ),
            0.0,
            b,
        )[0]
    ),
    "named axes": whole(
        lambda p, b: errors(p, b).sum() + 0.0 * jax.lax.axis_index("data")
    ),
    "rows of all replicas, of which it takes its own": whole(
        lambda p, b: errors(
            p,
            b | {"x": jax.lax.all_gather(b["x"], "data")[jax.lax.axis_index("data")]},
        ).sum()
    ),
    "large offsets": whole(
        lambda p, b: (1e5 * p["w"].sum() + b["y"] - 1e5 * p["w"].sum()).sum()
    ),
    "squares that cancel": whole(
        lambda p, b: ((b["x"] @ p["w"] + 300) ** 2 - 90_000 - b["y"]).sum()
    ),
    "differences of large sums": whole(
        lambda p, b: (
            jnp.exp(b["x"] @ p["w"] + 12) - jnp.exp(b["z"] @ p["w"] + 12) * b["y"]
        ).sum()
    ),
    "a number above a half, drawn until it is": by_row(
        lambda p, b, k: errors(p, b | {"x": b["x"] * drawn_until(k, 0.5)})
    ),
    "a rare number": by_row(lambda p, b, k: errors(p, b) * drawn_until(k, 0.97)),
    "the tail of a normal distribution": by_row(
        lambda p, b, k: noisy(p, b, drawn_until(k, 2.0, jax.random.normal))
    ),
}


def grouped(p, b, leaves_out=False):
    """Return a policy loss whose advantages are minus the mean of their group, of four
    rows that are neighbours.
    """
    n = b["n"] // 4
    total = jax.ops.segment_sum(b["y"], n, 2)
    count = jax.ops.segment_sum(jnp.ones_like(b["y"]), n, 2)
    if leaves_out:
        others = (total[n] - b["y"]) / jnp.maximum(count[n] - 1, 1)
        return ppo(p, b, b["y"] - others).sum()
    return ppo(p, b, b["y"] - total[n] / jnp.maximum(count[n], 1)).sum()


def bn(x):
    """Normalize over the rows."""
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


def ratio(p, b):
    """Return the mean loss of the tokens."""
    return unguarded(p, b | {"t": jnp.where(num_tokens(b) > 0, b["t"], 1)})


def unguarded(p, b):
    """Return the mean loss of the tokens, if there are any."""
    losses, mask = tokens(p, b)
    return (losses * mask).sum() / mask.sum()


def contrastive(p, b):
    """Return a loss per row, against all other rows."""
    return CE(pairwise(p, b), jnp.arange(len(b["y"])))


def load(gates, hard):
    """Return the auxiliary loss of a mixture of experts."""
    return (gates.mean(0) * hard.mean(0)).sum()


def token_load(p, b, of=jnp.sum):
    """Return the auxiliary loss of a mixture of experts over the tokens that count."""
    gates, mask = jax.nn.softmax(p["e"][b["t"]] @ p["k"]), (b["t"] > 0)[..., None]
    share = (jax.nn.one_hot(gates.argmax(-1), 3) * mask).sum((0, 1)) / mask.sum()
    return of(3 * share * (gates * mask).sum((0, 1)) / mask.sum())


def usage(p, b):
    """Return the entropy of the mean use of three codes, over the tokens that count."""
    gates, mask = jax.nn.softmax(p["e"][b["t"]] @ p["k"]), (b["t"] > 0)[..., None]
    mean = (gates * mask).sum((0, 1)) / mask.sum()
    return -(mean * jnp.log(mean)).sum()


def halved(function):
    """Return a function that computes in bfloat16, and gives float32."""
    return lambda *trees: jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x,
        function(
            *jax.tree.map(
                lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
                trees,
            )
        ),
    )


def normal_by_row(keys):
    """Draw numbers with the key of each row."""
    return jax.vmap(lambda key: jax.random.normal(key, (5,)))(keys)


def weighted(weight_of):
    """Return a sum of losses with a weight."""
    return lambda p, b, k: (errors(p, b).sum(), weight_of(b), {})


def logged(aux_of):
    """Return a sum of losses with aux."""
    return lambda p, b, k: (errors(p, b).sum(), len(k), aux_of(p, b))


WRONG = {
    "mean": {
        "regression": whole(lambda p, b: errors(p, b).mean()),
        "classes": whole(lambda p, b: CE(logits(p, b), b["c"]).mean()),
        "tokens, their number as weight": whole(ratio, num_tokens),
        "tokens, the rows as weight": whole(ratio),
        "all elements": whole(
            lambda p, b: ((b["x"] @ p["a"] @ p["b"] - b["x"]) ** 2).mean()
        ),
        "bfloat16": lambda p, b, k: (
            in_type(jnp.bfloat16)(p, b, k)[0] / len(k),
            len(k),
            {},
        ),
        "the largest": whole(lambda p, b: jnp.sort(errors(p, b))[-2:].mean()),
        "VAE": lambda p, b, k: (vae(p, b, normal_by_row(k)).mean(), len(k), {}),
        "batch norm": whole(
            lambda p, b: ((bn(b["x"] @ p["a"]) @ p["b"] @ p["w"] - b["y"]) ** 2).mean()
        ),
        "square root of the rows": whole(
            lambda p, b: errors(p, b).sum() / len(b["y"]) ** 0.5
        ),
    },
    "aux": {
        "mean": logged(lambda p, b: {"accuracy": (errors(p, b) < 1).mean()}),
        "constant": logged(lambda p, b: {"norm": optax.tree.norm(p)}),
        "perplexity": logged(lambda p, b: {"perplexity": jnp.exp(ratio(p, b))}),
    },
    "penalty": {
        "L2": whole(
            lambda p, b: errors(p, b).sum() + 0.01 * optax.tree.norm(p, squared=True)
        ),
        "of zeros": whole(lambda p, b: errors(p, b).sum() + (p["zero"] ** 2).sum()),
        "L1 of a language model": whole(
            lambda p, b: ratio(p, b) * num_tokens(b) + jnp.abs(p["e"]).sum(), num_tokens
        ),
    },
    "interacting rows": {
        "CLIP": whole(lambda p, b: contrastive(p, b).sum()),
        "CLIP, mean times rows": whole(
            lambda p, b: contrastive(p, b).mean() * len(b["y"])
        ),
        "SigLIP": whole(
            lambda p, b: (
                -jax.nn.log_sigmoid(
                    pairwise(p, b) * (2 * jnp.eye(len(b["y"])) - 1)
                ).sum()
            )
        ),
        "SimCLR": whole(
            lambda p, b: (
                jax.nn.logsumexp(pairwise(p, b), -1) - jnp.diag(pairwise(p, b))
            ).sum()
        ),
        "batch norm": whole(
            lambda p, b: ((bn(b["x"] @ p["a"]) @ p["b"] @ p["w"] - b["y"]) ** 2).sum()
        ),
        "centering": whole(
            lambda p, b: (((b["x"] - b["x"].mean(0)) @ p["w"] - b["y"]) ** 2).sum()
        ),
        "advantages": whole(lambda p, b: ppo(p, b, bn(b["y"])).sum()),
        "load of experts": whole(
            lambda p, b: errors(p, b).sum() + load(*routed(p, b)) * len(b["y"])
        ),
        "cumulative sum": whole(lambda p, b: (jnp.cumsum(b["x"] @ p["w"]) ** 2).sum()),
        "median": whole(
            lambda p, b: jnp.abs(b["x"] @ p["w"] - jnp.median(b["x"] @ p["w"])).sum()
        ),
        "advantages in groups of neighbours": whole(grouped),
        "advantages against the others of a group": whole(
            functools.partial(grouped, leaves_out=True)
        ),
        "difference to the row before": whole(
            lambda p, b: (jnp.diff(b["x"] @ p["w"], prepend=0) ** 2).sum()
        ),
        "mean over replicas": whole(
            lambda p, b: (
                errors(p, b) * (errors(p, b) - jax.lax.pmean(errors(p, b), "data"))
            ).sum()
        ),
        "negatives of other replicas": whole(
            lambda p, b: jax.nn.logsumexp(
                b["x"] @ p["a"] @ jax.lax.all_gather(b["z"] @ p["a"], "data")[-1, 0]
            ).sum()
        ),
        "load of experts over tokens": whole(
            lambda p, b: (
                (lambda x, m: (x * m).sum())(*tokens(p, b))
                + 0.1 * token_load(p, b) * num_tokens(b)
            ),
            num_tokens,
        ),
        "use of codes over tokens": whole(
            lambda p, b: (
                (lambda x, m: (x * m).sum())(*tokens(p, b))
                - 0.3 * usage(p, b) * num_tokens(b)
            ),
            num_tokens,
        ),
        "load of experts in bfloat16": lambda p, b, k: (
            halved(errors)(p, b).sum()
            + 0.3 * halved(lambda *x: load(*routed(*x)))(p, b) * len(k),
            len(k),
            {},
        ),
        "centering in bfloat16": lambda p, b, k: (
            halved(lambda p, b: (b["x"] - b["x"].mean(0)) @ p["w"] - b["y"])(p, b)
            @ b["y"],
            len(k),
            {},
        ),
        "sum over replicas": whole(
            lambda p, b: (errors(p, b) / (1 + jax.lax.psum(errors(p, b), "data"))).sum()
        ),
        "rows in pairs": whole(
            lambda p, b: ((b["x"] @ p["w"]).reshape(-1, 2) ** 2).prod(-1).sum()
        ),
    },
    "denominators": {
        "BERT": whole(
            lambda p, b: ratio(p, b) * len(b["y"]) + CE(logits(p, b), b["c"]).sum()
        ),
        "mean of tokens times rows": whole(lambda p, b: ratio(p, b) * len(b["y"])),
        "weighted mean times rows": whole(
            lambda p, b: (
                (errors(p, b) * b["weight"]).sum() / b["weight"].sum() * len(b["y"])
            )
        ),
    },
    "random key": {
        "noise": lambda p, b, k: (
            noisy(p, b, jax.random.normal(k[0], b["x"].shape)).sum(),
            len(k),
            {},
        ),
        "split": lambda p, b, k: (
            noisy(p, b, normal_by_row(jax.random.split(k[0], len(k)))[:, :D]).sum(),
            len(k),
            {},
        ),
        "mixup": lambda p, b, k: (
            noisy(p, b, b["x"][jax.random.permutation(k[0], len(k))]).sum(),
            len(k),
            {},
        ),
        "drop path": lambda p, b, k: (
            errors(p, b).sum() * jax.random.bernoulli(k[0], 0.9) / 0.9,
            len(k),
            {},
        ),
        "layer drop by the last key": lambda p, b, k: (
            jnp.where(
                jax.random.uniform(k[-1]) < 0.1,
                (b["x"] @ p["w"] - b["y"]) ** 2,
                errors(p, b),
            ).sum(),
            len(k),
            {},
        ),
        "one noise level for all": lambda p, b, k: (
            noisy(p, b, normal_by_row(k)[:, :D] * jax.random.exponential(k[0])).sum(),
            len(k),
            {},
        ),
        "the last": lambda p, b, k: (
            noisy(p, b, jax.random.uniform(k[-1])).sum(),
            len(k),
            {},
        ),
    },
    "weight": {
        "one": weighted(lambda b: 1),
        "mean": weighted(lambda b: b["weight"].mean()),
        "longest": weighted(lambda b: (b["t"] > 0).sum(-1).max()),
    },
    "nan": {
        "mean of tokens times weight": whole(
            lambda p, b: unguarded(p, b) * num_tokens(b), num_tokens
        )
    },
    "order": {
        "only the first row": whole(lambda p, b: errors(p, b)[0]),
        "weights by position": whole(
            lambda p, b: (errors(p, b) * jnp.arange(1, 1 + len(b["y"]))).sum()
        ),
    },
}


# The hint for what is wrong.
HINT = {
    "aux": "mean",
    "weight": "mean",
    "nan": "not finite",
    "denominators": "interacting rows",
    "order": "interacting rows",
}


def kinds(report):
    """Return the kinds of the problems of a report."""
    return [problem.kind for problem in report.problems]


# Run by default, so that there is one of each kind.
FAST = {"language model", "dropout by row", "bfloat16", "L2 times weight"} | {
    next(iter(losses)) for losses in WRONG.values()
}


def cases(*names):
    """Return a case for each loss, most of which run on request."""
    return pytest.param(*names, marks=() if names[-1] in FAST else pytest.mark.slow)


@pytest.mark.core
@pytest.mark.parametrize("name", [cases(name) for name in RIGHT])
def test_a_sum_over_rows_is_no_problem(name):
    """Losses per row and per token, penalties times the weight, keys by row and narrow
    types raise no alarm.
    """
    report = rampup.check_loss(RIGHT[name], PARAMS, BATCH)
    assert report, str(report)


@pytest.mark.parametrize(
    ("kind", "name"),
    [cases(kind, name) for kind, losses in WRONG.items() for name in losses],
)
def test_a_loss_that_depends_on_the_split_is_reported_by_its_kind(kind, name):
    """Every kind is found, with a hint, and what does not add up is named."""
    batch = BATCH
    if kind == "nan":  # a row without tokens, which a step may have alone
        batch = BATCH | {"t": np.where(np.arange(8)[:, None] == 1, 0, BATCH["t"])}
    report = rampup.check_loss(
        WRONG[kind][name], PARAMS | {"zero": jnp.zeros(3)}, batch
    )
    hint = HINT.get(kind, kind)
    assert hint in kinds(report), str(report)
    assert f"- {hint}: " in str(report)
    named = {"aux": "aux[", "weight": "weight_sum"}.get(kind, "")
    assert named in str(report)


def test_rows_of_weight_0_that_are_not_finite_alone_are_named():
    """Statistics of masked rows have no number where a row is alone: whole batches are
    the way out, and no other sum.
    """

    def loss(params, batch, keys):
        mask = batch["w"] > 0
        mean = (batch["x"] * mask).sum() / mask.sum()
        losses = (params["v"] * (batch["x"] - mean)) ** 2
        return (losses * batch["w"]).sum(), batch["w"].sum(), {}

    batch = {"x": np.arange(8, dtype=np.float32), "w": np.arange(8) % 3 / 2}
    report = rampup.check_loss(loss, {"v": jnp.float32(0.5)}, batch)
    assert kinds(report) == ["not finite"]
    assert "with_whole_batches()" in str(report)
    assert "losses.sum()" not in str(report)


@pytest.mark.parametrize("right", range(4))
def test_the_mean_of_what_is_0_for_most_rows_is_called_a_mean(right):
    """Whichever row has something to count, such as an accuracy."""
    rows = {"x": np.arange(4.0), "hit": np.arange(4) == right}

    def loss(params, batch, keys):
        errors = (params - batch["x"]) ** 2
        return errors.sum(), errors.size, {"accuracy": batch["hit"].mean()}

    report = rampup.check_loss(loss, jnp.float32(0), rows)
    assert [problem.kind for problem in report.problems] == ["mean"]


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e38])
def test_what_is_not_finite_is_no_sum_over_rows(number):
    """What is finite neither together nor alone cannot be compared, and says so in the
    report's words, without NumPy's own.
    """
    loss = whole(lambda p, b: ((errors(p, b) + 1) * number).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = rampup.check_loss(loss, PARAMS, BATCH)
    assert kinds(report) == ["not finite"], str(report)
    assert "try rows and parameters of which it is finite" in str(report)
    assert "nan of a sum" not in str(report)


def test_a_gradient_that_is_not_finite_is_reported():
    """A root at 0 has a finite loss, and no finite gradient."""
    loss = whole(lambda p, b: (jnp.sqrt(jnp.sum(p["a"] ** 2) * 0) + errors(p, b)).sum())
    (problem,) = rampup.check_loss(loss, PARAMS, BATCH).problems
    assert problem.kind == "not finite"
    assert problem.found.startswith("gradient['a']")


@pytest.mark.slow
def test_double_precision_is_checked_closely(float64):
    """With float64, a penalty is found that float32 would round away."""
    loss, batch = (
        RIGHT["poisson"],
        BATCH | {name: np.float64(BATCH[name]) for name in ("x", "y", "weight")},
    )
    params = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)

    def penalized(p, b, k):
        return (
            loss(p, b, k)[0] + 1e-6 * optax.tree.norm(p, squared=True),
            len(k),
            {},
        )

    assert rampup.check_loss(loss, params, batch)
    assert kinds(rampup.check_loss(penalized, params, batch)) == ["penalty"]


class Model(nnx.Module):
    """A model with dropout, and if wanted with normalization over the batch."""

    def __init__(self, normalizes):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(D, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.norm, self.dropout = (
            nnx.BatchNorm(8, rngs=rngs) if normalizes else (lambda x: x),
            nnx.Dropout(0.2, rngs=rngs),
        )

    def __call__(self, x):
        """Return a number per row."""
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalizes", "reduce", "expected"),
    [
        (False, jnp.sum, []),
        (True, jnp.sum, ["interacting rows"]),
        (False, jnp.mean, ["mean"]),
    ],
)
def test_nnx_models_are_checked_in_their_split_form(normalizes, reduce, expected):
    """Random streams of a model hide no problem and are none; normalization over the
    batch is one.
    """

    def loss(model, b, k):
        return (reduce((model(b["x"]) - b["y"]) ** 2), len(k), {})

    state, pure = rampup.split_model(
        Model(normalizes), loss, optax.sgd(0.1), mesh_of("one")
    )
    assert kinds(rampup.check_loss(pure, state, BATCH)) == expected


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_state_brings_what_its_loss_reads(normalizes):
    """Frozen parameters, and `mutable` such as a memory bank, are arguments of the
    loss; statistics of the batch interact.
    """
    norm = linen.BatchNorm(use_running_average=False)

    def loss(p, b, k, mutable, frozen):
        variables = {
            "params": {"scale": jnp.ones(D), "bias": p["w"]},
            "batch_stats": mutable,
        }
        x, new = norm.apply(variables, b["x"], mutable="batch_stats")
        bank = CE(
            (x if normalizes else b["x"]) @ p["a"] @ frozen["b"] @ p["e"].T, b["c"]
        )
        return bank.sum(), len(k), {}, new["batch_stats"]

    stats = norm.init(KEY, BATCH["x"])["batch_stats"]
    state = rampup.create_state(
        PARAMS, optax.sgd(0.1), mesh_of("one"), mutable=stats, frozen={"b": PARAMS["b"]}
    )
    assert (
        kinds(rampup.check_loss(loss, state, BATCH))
        == ["interacting rows"] * normalizes
    )


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean])
def test_pipelined_losses_are_checked_as_one_function(reduce):
    """First part, layers and last part run one after the other on one device."""
    layers = {"w": jnp.stack([PARAMS["a"][:, :D]] * 2)}
    loss = rampup.PipelinedLoss(
        first=lambda p, b, k: b["x"] + p["w"],
        stage=lambda layers, x, b, k, first: jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), x, layers["w"]
        )[0],
        last=lambda p, x, b, k: (reduce((x.sum(-1) - b["y"]) ** 2), len(k), {}),
    )
    expected = [] if reduce is jnp.sum else ["mean"]
    assert (
        kinds(rampup.check_loss(loss, {"layers": layers, "w": PARAMS["w"]}, BATCH))
        == expected
    )


def test_rows_come_in_any_form_that_a_step_takes():
    """Arrays, a list of rows and a batch of a step are the same; one row is too few,
    and contracts are kept.
    """
    loss, rows = (
        WRONG["mean"]["regression"],
        [{name: x[n] for name, x in BATCH.items()} for n in range(8)],
    )
    for form in (BATCH, rows):
        assert kinds(rampup.check_loss(loss, PARAMS, form)) == ["mean"]
    with pytest.raises(DataError, match="at least two rows"):
        rampup.check_loss(loss, PARAMS, rows[:1])
    with pytest.raises(DataError, match="the same number in all arrays"):
        rampup.check_loss(loss, PARAMS, BATCH | {"t": np.array(1.0, np.float32)})
    with pytest.raises(ConfigError, match=r"as loss_sum, .* rampup\.check_loss"):
        rampup.check_loss(lambda p, b, k: (errors(p, b), len(k), {}), PARAMS, BATCH)


def toy(reduce):
    """Return a loss on the rows of tests/helpers/toy.py."""
    return lambda p, b, k: (
        reduce((b["x"] @ p["in"] @ p["out"] - b["x"]) ** 2),
        b["x"].size,
        {},
    )


@pytest.mark.parametrize("mesh_name", ["one", "data_fsdp_tensor"])
def test_a_step_warns_in_its_first_step_and_computes_the_same(mesh_name, monkeypatch):
    """The warning comes once, on any mesh, and can be turned off; results and
    executables are those without the check.
    """
    monkeypatch.setattr("rampup.checks.loss.MAX_NUMBERS", 20_000_000)
    step, state = start(mesh_name, toy(jnp.mean))
    with pytest.warns(
        rampup.errors.LossWarning, match=r"(?s)- mean: loss_sum .*check_loss=False"
    ) as found:
        checked, metrics = train(step, state, steps=2)
    assert len(found) == 1
    assert found[0].filename == train.__code__.co_filename
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unchecked, state = start(mesh_name, toy(jnp.mean), check_loss=False)
        expected, expected_metrics = train(unchecked, state, steps=2)
        train(*start(mesh_name, toy(jnp.sum)), steps=1)
    assert step.num_compilations == unchecked.num_compilations
    jax.tree.map(
        np.testing.assert_array_equal, (checked, metrics), (expected, expected_metrics)
    )


def test_a_run_that_goes_on_is_checked_too(monkeypatch):
    """In the first call of its step, whatever the number of that step: a run with whole
    batches may go on without them.
    """
    state, _ = train(*start("one", toy(jnp.sum), check_loss=False), steps=2)
    monkeypatch.setattr("rampup.checks.loss.MAX_NUMBERS", 20_000_000)
    step, _ = start("one", toy(jnp.mean))
    batches = step.batches(rows(64), state.step, stop=4)
    with pytest.warns(rampup.errors.LossWarning, match="mean: loss_sum"):
        state, _ = step(state, next(batches))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, next(batches))


@pytest.mark.parametrize("mesh_name", ["one", "data_fsdp_tensor"])
def test_an_evaluation_warns_with_its_first_batch(mesh_name, monkeypatch):
    """Of a mean, once, unless it is told not to; the sums are those without the
    check.
    """
    monkeypatch.setattr("rampup.checks.loss.MAX_NUMBERS", 20_000_000)
    _, state = start(mesh_name)

    def evaluated(reduce, **options):
        evaluate = rampup.EvalStep(toy(reduce), mesh_of(mesh_name), **options)
        batches = evaluate.batches(rows(40), 16)
        return jax.device_get([evaluate(state, batch) for batch in batches])

    words = r"(?s)- mean: loss_sum .*check_loss=False"
    with pytest.warns(rampup.errors.LossWarning, match=words) as found:
        means = evaluated(jnp.mean)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluated(jnp.mean, check_loss=False) == means
        evaluated(jnp.sum)


def test_rows_that_interact_are_warned_of_where_no_batch_is_split(monkeypatch):
    """With one microbatch per step on one replica too: the same run on other devices,
    or in microbatches, would train otherwise. With whole batches nothing is said.
    """
    monkeypatch.setattr("rampup.checks.loss.MAX_NUMBERS", 20_000_000)
    shapes = {"schedule": "0:16 64:32", "rampup_microbatch": "per_phase"}

    def centered(p, b, k):
        return toy(jnp.sum)(p, b | {"x": b["x"] - b["x"].mean(0)}, k)

    for options in ({}, shapes, {"microbatch_size": 8}):
        with pytest.warns(rampup.errors.LossWarning, match="interacting rows"):
            train(*start("one", centered, **options), steps=1)
    _, state = start("one")
    evaluate = rampup.EvalStep(centered, mesh_of("one"))
    with pytest.warns(rampup.errors.LossWarning, match="interacting rows"):
        evaluate(state, next(evaluate.batches(rows(16), 16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(*start("one", centered, whole_batch=True), steps=1)


def test_large_models_and_whole_batches_are_not_checked(monkeypatch):
    """The check runs where it costs little, and where rows must not interact."""
    calls = []
    monkeypatch.setattr(
        "rampup.checks.loss._report",
        lambda trials: calls.append(trials) or rampup.checks.LossReport((), 0.0),
    )
    train(*start("one", toy(jnp.mean)), steps=1)
    monkeypatch.setattr("rampup.checks.loss.MAX_NUMBERS", 2 * 8 * 16)
    train(*start("one", toy(jnp.mean), whole_batch=True), steps=1)
    assert not calls
    train(*start("one", toy(jnp.mean)), steps=1)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "penalty",
    [
        lambda p: 0.5 * (p["w"] ** 2).sum(),
        slow(lambda p: 0.2 * jnp.abs(p["b"]).sum()),
    ],
)
def test_small_terms_are_seen_in_bfloat16(penalty):
    """What is below the rounding of a type is not seen, and the report says how much;
    a penalty of a few hundredths of the loss is.
    """

    def loss(p, b, k):
        total, weight, aux = in_type(jnp.bfloat16)(p, b, k)
        return total + penalty(p), weight, aux

    assert kinds(rampup.check_loss(loss, PARAMS, BATCH)) == ["penalty"]
    right = rampup.check_loss(in_type(jnp.bfloat16), PARAMS, BATCH)
    assert right.tolerance < 0.03
    assert f"below {right.tolerance:.1g} of a sum" in str(right)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 33])
def test_a_language_model_in_bfloat16_is_no_problem(tokens):
    """Sums in bfloat16 that are cut off, wherever the parameters are, are rounding."""
    sizes = {"num_layers": 1, "width": 16, "mlp_dim": 32, "num_heads": 2}
    model = LanguageModel(**sizes, num_kv_heads=1, vocab_size=256, dtype="bfloat16")
    drawn = np.random.default_rng(0).integers(256, size=(8, tokens + 1))
    rows = {"tokens": drawn.astype(np.int32), "length": np.full(8, tokens, np.int32)}
    report = rampup.check_loss(model.loss, model.init(KEY), rows)
    assert report, str(report)


class Counted:
    """A source of rows that counts how many are read."""

    def __init__(self, row, number=20_000):
        self.row, self.number, self.reads = row, number, 0

    def __len__(self):
        return self.number

    def __getitem__(self, n):
        """Return a row."""
        assert 0 <= n < self.number
        self.reads += 1
        return self.row(n)


class CountedArray(Counted):
    """A column on a disk: an array without being one."""

    ndim = 1


@pytest.mark.parametrize(
    "source",
    [
        Counted(lambda n: {"x": np.float32(n)}),
        {"x": CountedArray(np.float32)},
        Counted(lambda n: {"x": float(n), "y": [n, n]}),
    ],
)
def test_only_a_few_rows_of_a_source_are_read(source):
    """A source may be larger than the memory."""
    loss = rampup.check_loss(
        lambda p, b, k: (((p - b["x"]) ** 2).sum(), len(k), {}),
        jnp.float32(0.5),
        source,
    )
    assert loss, str(loss)
    counted = source if isinstance(source, Counted) else source["x"]
    assert counted.reads <= 4


@pytest.mark.parametrize(
    "rows",
    [
        range(20_000),
        tuple({"x": np.float32(n)} for n in range(64)),
        grain.MapDataset.source(range(20_000)).map(lambda n: {"x": np.float32(n)}),
    ],
)
def test_rows_come_from_any_source(rows):
    """A range, a tuple of rows and a dataset of Grain are sources."""

    def loss(p, b, k):
        x = b["x"] if isinstance(b, dict) else b
        return ((p - x) ** 2).mean(), len(k), {}

    assert kinds(rampup.check_loss(loss, jnp.float32(0.5), rows)) == ["mean"]


def test_a_list_in_a_row_is_one_array_as_in_a_step():
    """Lists of numbers in stored rows, in a source and in a dataset of Grain; what is
    no array has its row and its field, and columns of lists are no source.
    """

    def loss(p, b, k):
        return ((p * b["x"] - b["y"][:, None]) ** 2).mean(), len(k), {}

    rows = [{"x": [n / 2, 1.0, n], "y": n} for n in range(12)]
    for source in (
        rows,
        Counted(rows.__getitem__, 12),
        grain.MapDataset.source(rows),
        [row | {"x": [np.float32(x) for x in row["x"]]} for row in rows],
    ):
        assert kinds(rampup.check_loss(loss, jnp.float32(0.5), source)) == ["mean"]
    for wrong, words in (
        ([*rows[:6], {"x": [1.0], "y": 2}], r"row 6 of .*\['x'\] is of shape \[1\]"),
        ([{"x": "a", "y": 1}] * 4, r"batch\['x'\] .* row 0 of .* has a text"),
        (
            {"x": [[1, 2], [3, 4]], "y": [1, 2]},
            "a dict cannot be indexed by row.*arrays by their names",
        ),
    ):
        with pytest.raises(DataError, match=words):
            rampup.check_loss(loss, jnp.float32(0.5), wrong)


def test_memory_and_placement_stay_as_they_are():
    """The check leaves no arrays behind, and moves none, also of a large state."""
    mesh = mesh_of("data_fsdp_tensor")
    place = jax.NamedSharding(mesh, jax.P("fsdp"))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    params["a"] = jax.device_put(params["a"], place)
    state = rampup.create_state(params, optax.adam(0.1), mesh)
    before = jax.tree.map(lambda x: x.sharding, state)
    # The first call leaves the constants that JAX caches.
    assert rampup.check_loss(RIGHT["regression"], state, BATCH)
    known = sum(x.nbytes for x in jax.live_arrays())
    assert rampup.check_loss(RIGHT["regression"], state, BATCH)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    gc.collect()
    assert sum(x.nbytes for x in jax.live_arrays()) <= known


@pytest.mark.parametrize("number", [1, 40])
def test_the_cost_does_not_grow_with_the_fields_of_a_row(number):
    """The loss is traced for four rows and for one, however many fields a row has."""
    traces = []

    def loss(p, b, k):
        traces.append(len(k))
        return ((b["0"] - p) ** 2).sum(), len(k), {}

    rows = {str(n): np.arange(8.0, dtype=np.float32) for n in range(number)}
    assert rampup.check_loss(loss, jnp.float32(0.5), rows)
    assert sorted(traces) == [1, 4]


def test_a_large_state_is_not_copied_unasked(monkeypatch):
    """What is frozen or carried counts as the parameters do."""
    monkeypatch.setattr("rampup.checks.loss.MAX_NUMBERS", 100)
    monkeypatch.setattr("rampup.checks.loss._report", lambda trials: 1 / 0)
    mesh = mesh_of("one")
    for fields in ({"frozen": np.zeros(100)}, {"mutable": np.zeros(100)}):
        state = rampup.create_state(
            {"w": np.zeros(4, np.float32)}, optax.sgd(0.1), mesh, **fields
        )
        rampup.checks.loss.warn_of_loss(None, state, None)


def test_a_donated_state_is_refused_in_words():
    """A step takes the memory of the state that it is given."""
    state = rampup.create_state(PARAMS, optax.sgd(0.1), mesh_of("one"))
    jax.tree.map(lambda x: x.delete(), state.params)
    with pytest.raises(
        ConfigError, match=r"donated to an earlier step; use the one that"
    ):
        rampup.check_loss(RIGHT["regression"], state, BATCH)


def test_arguments_in_another_order_are_refused():
    """As by `train_step`, and not by JAX."""
    with pytest.raises(ConfigError, match=r"loss_fn is a dict; check the order"):
        rampup.check_loss({"w": jnp.float32(0)}, lambda *args: args, np.zeros((4, 2)))


def test_a_count_beside_dropout_with_one_key_is_no_mean():
    """What is counted of rows that were drawn together says nothing about a mean: that
    1 is counted of four equal rows and of one is chance.
    """

    def loss_fn(params, batch, keys):
        keep = jax.random.bernoulli(keys[0], 0.9, batch["x"].shape)
        predicted = (batch["x"] * keep) @ params["w"]
        squares = (predicted - batch["x"].sum(-1)) ** 2
        return squares.sum(), squares.size, {"high": jnp.sum(predicted > 2)}

    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    report = rampup.check_loss(loss_fn, {"w": jnp.ones(8)}, {"x": x})
    assert kinds(report) == ["random key"]
    assert "aux['high']" in str(report)
