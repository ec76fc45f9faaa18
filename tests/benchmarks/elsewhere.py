"""The contenders that are not torch: JAX with optax, and Keras on JAX. The MLP only.

Import after ``XLA_FLAGS`` and ``KERAS_BACKEND`` are set (``step.py`` does): both are read once.
"""

from __future__ import annotations

import time
from typing import Any

from models import LEARNING_RATE, Model
from turns import Contender


def jax_step(model: Model) -> Contender:
    """A ``jit`` step with optax's adamw and donated parameters and state, called directly."""
    import jax
    import jax.numpy as jnp
    import optax

    weights = [value.detach().numpy().copy() for value in model.module().net.parameters()]
    params = [
        (jnp.asarray(w.T), jnp.asarray(b)) for w, b in zip(weights[::2], weights[1::2], strict=True)
    ]
    batches = [(jnp.asarray(x.numpy()), jnp.asarray(y.numpy())) for x, y in model.batches]
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)
    state: Any = optimizer.init(params)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        *hidden, (last, bias) = params
        for weight, b in hidden:
            x = jax.nn.relu(x @ weight + b)
        return optax.softmax_cross_entropy_with_integer_labels(x @ last + bias, y).mean()

    def update(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(update, donate_argnums=(0, 1))

    def run(steps: int) -> float:
        nonlocal params, state
        began = time.perf_counter()
        for i in range(steps):
            params, state, loss = step(params, state, *batches[i % len(batches)])
        loss.block_until_ready()  # once a round: waiting after each step costs 20 µs (measured)
        return (time.perf_counter() - began) / steps * 1e6

    return run


def keras_fit(model: Model, steps_per_execution: int) -> Contender:
    """``fit`` with accuracy over arrays, from the end of the first execution to the last's end."""
    import keras
    import numpy

    assert keras.backend.backend() == "jax"
    layers = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
    net = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    net.compile(
        optimizer=keras.optimizers.AdamW(LEARNING_RATE, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    x, y = (numpy.concatenate([b[i].numpy() for b in model.batches]) for i in (0, 1))
    rows = len(model.batches[0][0])

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[tuple[int, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append((batch, time.perf_counter()))

    clock = Clock()

    def run(steps: int) -> float:
        count = (steps + 2 * steps_per_execution) // steps_per_execution * steps_per_execution
        copies = -(-count // len(model.batches))
        clock.ends.clear()
        net.fit(
            numpy.concatenate([x] * copies)[: count * rows],
            numpy.concatenate([y] * copies)[: count * rows],
            batch_size=rows,
            shuffle=False,
            verbose=0,
            callbacks=[clock],
        )
        (first, began), (last, ended) = clock.ends[0], clock.ends[-1]
        return (ended - began) / (last - first) * 1e6

    return run
