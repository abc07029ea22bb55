"""The vision transformer of the JAX AI Stack, small, on synthetic images: `python
vit.py`. With a ramp: vit_ramp.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

train_steps, batch_size = 60, 32
num_classes, image_size, patch_size, width = 5, 16, 4, 32


def make_images(seed, number):
    """Return images with one of five textures, and which one each has, row by row."""
    noise = np.random.default_rng(seed)
    x, y = np.mgrid[:image_size, :image_size]
    for label in noise.integers(num_classes, size=number):
        image = np.sin((x + label * y) * (label + 1) / 2)[..., None] + noise.normal(
            0, 0.5, (image_size, image_size, 3)
        )
        yield {"image": image.astype(np.float32), "label": np.int32(label)}


def make_batches(rows, size):
    """Yield full batches."""
    for start in range(0, len(rows) - size + 1, size):
        yield jax.tree.map(
            lambda *leaves: np.stack(leaves), *rows[start : start + size]
        )


class Encoder(nnx.Module):
    """A block of attention and a feed-forward network."""

    def __init__(self, *, rngs):
        self.norm1, self.norm2 = (
            nnx.LayerNorm(width, rngs=rngs),
            nnx.LayerNorm(width, rngs=rngs),
        )
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.linear1, self.linear2 = (
            nnx.Linear(width, 2 * width, rngs=rngs),
            nnx.Linear(2 * width, width, rngs=rngs),
        )

    def __call__(self, x):
        """Return the tokens of the next layer."""
        x = x + self.attention(self.norm1(x))
        return x + self.linear2(nnx.gelu(self.linear1(self.norm2(x))))


class VisionTransformer(nnx.Module):
    """Patches and a class token, encoder blocks, and a classifier on the class
    token.
    """

    def __init__(self, *, rngs):
        self.patches = nnx.Conv(
            3,
            width,
            (patch_size, patch_size),
            strides=(patch_size, patch_size),
            padding="VALID",
            rngs=rngs,
        )
        num_patches = (image_size // patch_size) ** 2
        self.positions = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (1, num_patches + 1, width))
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.encoder = nnx.Sequential(Encoder(rngs=rngs), Encoder(rngs=rngs))
        self.norm, self.classifier = (
            nnx.LayerNorm(width, rngs=rngs),
            nnx.Linear(width, num_classes, rngs=rngs),
        )

    def __call__(self, images):
        """Return the logits of images."""
        patches = self.patches(images).reshape(len(images), -1, width)
        tokens = jnp.concatenate(
            [jnp.tile(self.class_token[...], (len(images), 1, 1)), patches], axis=1
        )
        return self.classifier(
            self.norm(self.encoder(tokens + self.positions[...]))[:, 0]
        )


def loss_fn(model, batch):
    """Return the mean loss of a batch, and its logits."""
    logits = model(batch["image"])
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(),
        logits,
    )


@nnx.jit
def train_step(optimizer, batch):
    """Train on one batch, and return its loss."""
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(optimizer.model, batch)
    optimizer.update(grads)
    return loss


rows = list(make_images(0, train_steps * batch_size))
tx = optax.sgd(optax.linear_schedule(0.05, 0.0, train_steps), 0.8, nesterov=True)
optimizer = nnx.ModelAndOptimizer(VisionTransformer(rngs=nnx.Rngs(0)), tx)
losses = [
    float(train_step(optimizer, batch)) for batch in make_batches(rows, batch_size)
]
(test,) = make_batches(list(make_images(1, 64)), 64)
accuracy = jnp.mean(optimizer.model(test["image"]).argmax(-1) == test["label"])
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, test accuracy {float(accuracy):.2f}")
