"""The jitted training step and the loop around it; the same seed gives the same batches, in the same order."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dsv4_fusions.config import TrainConfig
from dsv4_fusions.layers import Decoder
from dsv4_fusions.training.text import Rows, batch_order


@dataclasses.dataclass(frozen=True)
class State:
    """Where a run stands. With the configuration and the text it decides every further bit; switches are not in it.

    Attributes:
      step: how many steps are done; with the seed it tells which rows come next.
      params: the parameters.
      opt_state: the optimizer's state.
    """

    step: int
    params: nnx.State
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Run:
    """What a call of `train` leaves.

    Attributes:
      losses: [steps] float32, loss of each step that it took, in nats a byte, before the step's update.
      params: the final parameters.
      training_loss: of the final parameters on as many training rows as there are held-out ones.
      held_out_loss: of the final parameters on the held-out rows.
    """

    losses: np.ndarray
    params: nnx.State
    training_loss: float
    held_out_loss: float


@functools.cache  # one object per configuration, so that a second run finds the first one's compiled step
def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipping, linear warm-up and cosine decay to zero; vectors and scalars are not decayed.

    With `train_only`, the gradients of all other parameters are dropped before anything sees them.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, config.steps)
    if config.warmup_steps == 0:
        schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    adamw = optax.adamw(
        schedule,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda array: array.ndim >= 2, params),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip), adamw)
    if config.train_only is None:
        return optimizer

    def label(path, _):
        return (
            "trained"
            if config.train_only in jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            else "kept"
        )

    return optax.partition(
        {"trained": optimizer, "kept": optax.set_to_zero()}, lambda params: jax.tree.map_with_path(label, params)
    )


def loss_sum(graphdef: nnx.GraphDef, params: nnx.State, batch: Rows):
    """Cross entropy of the next byte, summed over the bytes that have one.

    Args:
      graphdef: structure of the decoder, switches included.
      params: its parameters.
      batch: rows of text.

    Returns:
      The sum in nats (f32), the number of predicted bytes (int32), and the model's auxiliary losses by name.
    """
    logits, aux = nnx.merge(graphdef, params)(batch.tokens, batch.segment_ids)
    nats = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(nats, where=batch.has_target), jnp.sum(batch.has_target), aux


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "opt_state"))
def train_step(graphdef, params, opt_state, batch: Rows, *, optimizer: optax.GradientTransformation):
    """One update. The parameters and the optimizer's state are donated.

    Returns:
      The new parameters, the optimizer's new state, and of before the update: the batch's loss in nats a byte and the
      auxiliary losses by name.
    """

    def objective(params):
        total, count, aux = loss_sum(graphdef, params, batch)
        loss = total / jnp.maximum(count, 1)
        return loss + sum(aux.values()), (loss, aux)

    grads, (loss, aux) = jax.grad(objective, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, aux


_loss_sum = jax.jit(loss_sum)


def evaluate(graphdef: nnx.GraphDef, params: nnx.State, rows: Rows, batch_size: int) -> float:
    """Loss over all rows, in nats a byte.

    Args:
      graphdef: structure of the decoder, switches included.
      params: its parameters.
      rows: text.
      batch_size: rows a batch; empty rows fill the last one.

    Returns:
      The mean over all predicted bytes; NaN where no byte has another before it.
    """
    missing = -len(rows) % batch_size
    rows = jax.tree.map(lambda array: np.pad(array, ((0, missing), (0, 0))), rows)
    total, count = 0.0, 0
    for start in range(0, len(rows), batch_size):
        nats, predicted, _ = _loss_sum(graphdef, params, rows.take(slice(start, start + batch_size)))
        total, count = total + float(nats), count + int(predicted)
    return total / count if count else math.nan


def initial_state(model: Decoder, config: TrainConfig) -> State:
    """Where a run of a decoder starts: its parameters and a fresh optimizer.

    Raises:
      ValueError: `train_only` is "indexer" and nothing teaches one.
    """
    if config.train_only and not any(map(model.cfg.teaches, model.cfg.compress_ratios)):
        wanted = "a model with an indexer and an indexer_loss_coeff above 0"
        raise ValueError(f"train_only: got {config.train_only!r}, wanted {wanted} with it")
    params = nnx.state(model, nnx.Param)
    return State(0, params, make_optimizer(config).init(params))


def train(
    model: Decoder,
    config: TrainConfig,
    training: Rows,
    held_out: Rows,
    on_step: Callable[[State, np.ndarray, dict[str, np.ndarray], float | None, float], None] = lambda *report: None,
    start: State | None = None,
) -> Run:
    """Trains a decoder.

    Args:
      model: the decoder; its parameters are consumed.
      config: batch size, steps, optimizer.
      training: rows to train on.
      held_out: rows to evaluate on.
      on_step: called after every step with the state, which the next step consumes, the step's loss (float32), its
        auxiliary losses by name, the held-out loss if one is due (it is after the last step), and the seconds that the
        step took.
      start: where an earlier run stood, consumed as well; None: the decoder's initial state.

    Returns:
      The losses and the final parameters.
    """
    optimizer = make_optimizer(config)
    graphdef, _ = nnx.split(model, nnx.Param)
    state = initial_state(model, config) if start is None else start
    order = batch_order(len(training), config.batch_size, config.steps, config.seed)
    losses, held_out_loss = [], None
    for step, rows in enumerate(itertools.islice(order, state.step, None), start=state.step + 1):
        began = time.perf_counter()
        params, opt_state, loss, aux = train_step(
            graphdef, state.params, state.opt_state, training.take(rows), optimizer=optimizer
        )
        state = State(step, params, opt_state)
        losses.append(np.asarray(loss))  # waits for the step
        seconds = time.perf_counter() - began
        due = step == config.steps or (config.eval_interval and step % config.eval_interval == 0)
        held_out_loss = evaluate(graphdef, state.params, held_out, config.batch_size) if due else None
        on_step(state, losses[-1], jax.device_get(aux), held_out_loss, seconds)
    if not losses:  # the start was the end
        held_out_loss = evaluate(graphdef, state.params, held_out, config.batch_size)
    return Run(
        np.array(losses, np.float32),
        state.params,
        evaluate(graphdef, state.params, training.take(slice(len(held_out))), config.batch_size),
        held_out_loss,
    )
