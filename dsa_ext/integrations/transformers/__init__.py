"""DeepSeek Sparse Attention of Hugging Face transformers, computed by the operators of this package.

`enable` replaces the attention layers of a model, `register` those of models that are made later. No mask
of queries times keys is made: the model hands each layer the first and the last key that a query may see.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.monkey_patching import register_patch_mapping

from dsa_ext.integrations.transformers.layers import REPLACEMENTS, LossWithIndexer, Options, Precision, misfit
from dsa_ext.integrations.transformers.masks import NAME

__all__ = ["Handle", "enable", "register"]


class Handle:
    """An enabled model: reads the loss of its indexers, records and replays selections, and restores the model, by
    `disable()` or at the end of a `with` block."""

    def __init__(
        self, options: Options, undo: list[Callable[[], None]], selecting: Sequence[int], enabled: Sequence[str]
    ) -> None:
        self._options, self._undo, self._selecting, self._layers = options, undo, sorted(selecting), enabled

    def __repr__(self) -> str:
        disabled = self._layers and not self._undo
        return f"<Handle of {', '.join(self._layers) or 'no layer'}{', disabled' if disabled else ''}>"

    def indexer_loss(self) -> Tensor:
        """The loss of the indexers in the last forward pass: a scalar in nats, the mean over queries that see a key and
        over layers that have an indexer.

        Raises:
            RuntimeError: there is none, since `train_indexer` is False, the last forward ran without gradients, or it
                ran in transformers because of its mask.
        """
        loss = self._options.indexer_loss()
        if loss is None:
            why = "run a forward with gradients, and with a mask whose keys are one interval for each query"
            why = why if self._options.train_indexer else "pass train_indexer=True to enable"
            raise RuntimeError(f"Handle.indexer_loss: there is no loss: {why}")
        return loss

    def _check_enabled(self, where: str) -> None:
        if not self._undo:
            why = "the handle is disabled" if self._layers else "no layer of the model is enabled"
            raise RuntimeError(f"Handle.{where}: {why}")

    @contextmanager
    def record(self) -> Iterator[dict[int, Tensor]]:
        """In the block, the selections of the last sequence: ids [B, S, K] by the index of each layer that has an
        indexer, int32, ascending, then -1. They count positions of the input, padding included.

        Forward passes that continue a cache, as in generation, add their queries; any other begins a new record.

        Raises:
            RuntimeError: the handle is disabled or has no layer, or the block is within another one of `record`.
        """
        self._check_enabled("record")
        if self._options.recorded is not None:
            raise RuntimeError("Handle.record: selections are being recorded already")
        self._options.recorded = {}
        try:
            yield self._options.recorded
        finally:
            self._options.recorded = None

    @contextmanager
    def replay(self, ids: Mapping[int, Tensor]) -> Iterator[None]:
        """In the block, layers use these selections, like those of `record`, instead of their indexers': in
        reinforcement learning, those with which tokens were generated. The indexers still learn, on these keys. Ids of
        keys that a query may not see are ignored.

        Raises:
            RuntimeError: the handle is disabled or has no layer.
            TypeError: `ids` is not a mapping from indices of layers to tensors.
            ValueError: `ids` are not those of all layers that have an indexer.
        """
        self._check_enabled("replay")
        if not isinstance(ids, Mapping) or not all(isinstance(tensor, Tensor) for tensor in ids.values()):
            raise TypeError(f"Handle.replay: ids must be a dict of tensors by layer index, got {type(ids).__name__}")
        if sorted(ids) != self._selecting:
            raise ValueError(f"Handle.replay: ids must be of the layers {self._selecting}, got {sorted(ids)}")
        before, self._options.replayed = self._options.replayed, ids
        try:
            yield
        finally:
            self._options.replayed = before

    def disable(self) -> None:
        """Restores the model. Further calls do nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def enable(
    model: PreTrainedModel,
    *,
    indexer: Precision = "bf16",
    train_indexer: bool = False,
    loss_coeff: float = 1.0,
    deterministic: bool | None = None,
    strict: bool = True,
) -> Handle:
    """Makes the attention layers of a DeepSeek-V3.2 or GLM-MoE-DSA model run on the operators of this package.

    Parameters, caches and outputs are those of the model: checkpoints, generation, gradient checkpointing, autocast and
    adapters work as before.

    Args:
        model: a model of transformers, or one that contains such layers.
        indexer: precision of the scores that select keys, "bf16" or "fp8".
        train_indexer: the indexers get gradients of their loss, from the selected keys (arXiv 2512.02556, section
            2.1). Otherwise they get none, as in transformers.
        loss_coeff: with train_indexer, `loss_coeff` times the mean of the layers' losses is added to the loss that the
            model computes from labels. 0 if you add `Handle.indexer_loss` yourself.
        deterministic: if True, the gradients of attention and of the indexers are deterministic (bitwise). None and
            False leave the choice to `torch.use_deterministic_algorithms`.
        strict: raise an error if a layer does not fit the operators. Otherwise such layers stay as they are, and there
            is a warning if none fits.

    Returns:
        a handle that restores the model. In a `with` statement it does so at the end of the block.

    Raises:
        ValueError: there is no such layer, `model` contains several models, it is enabled already or was made after
            `register`, or `strict` and a layer does not fit; the message says why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"enable: model must be a model of transformers, got {type(model).__name__}")
    if indexer not in ("bf16", "fp8"):
        raise ValueError(f"enable: indexer must be 'bf16' or 'fp8', got {indexer!r}")
    if not isinstance(train_indexer, bool):
        raise TypeError(f"enable: train_indexer must be a bool, got {train_indexer!r}")
    if not isinstance(loss_coeff, (int, float)) or not 0 <= loss_coeff < float("inf"):
        raise ValueError(f"enable: loss_coeff must be a finite number of at least 0, got {loss_coeff!r}")
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if type(layer) in REPLACEMENTS}
    replaced = [layer for layer in model.modules() if type(layer) in REPLACEMENTS.values()]
    if any(hasattr(layer, "_dsa_options") for layer in replaced):
        raise ValueError(
            "enable: the model is enabled already: disable() its handle. A copy of an enabled model has none: "
            "disable the original before it is copied"
        )
    if replaced:
        text = "the model was made after register() and cannot be enabled: to train the indexer, do not call register()"
        raise ValueError(f"enable: {text}")
    if not layers:
        raise ValueError(f"enable: {type(model).__name__} has no layer of DeepseekV32 or GlmMoeDsa")
    if len({layer.layer_idx for layer in layers.values()}) < len(layers):
        raise ValueError(f"enable: {type(model).__name__} contains several models: enable each of them")
    reasons = {name: reason for name, layer in layers.items() if (reason := misfit(layer)) is not None}
    if reasons and strict:
        raise ValueError("enable: these layers do not fit:\n" + "\n".join(f"{n}: {r}" for n, r in reasons.items()))

    if deterministic not in (None, False, True):
        raise ValueError(f"enable: deterministic must be True, False or None, got {deterministic!r}")
    fitting = {name: layer for name, layer in layers.items() if name not in reasons}
    if not fitting:
        warnings.warn(f"enable: no layer fits, so nothing changes: {next(iter(reasons.values()))}", stacklevel=2)
    bases = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    heads = [base for base in bases if base.get_output_embeddings() is not None]  # type: ignore[no-untyped-call]
    if train_indexer and loss_coeff != 0 and not heads:
        raise ValueError("enable: loss_coeff must be 0, since the model has no head that computes a loss")

    options, undo = Options(indexer, train_indexer, bool(deterministic)), list[Callable[[], None]]()
    selecting = [layer.layer_idx for layer in fitting.values() if layer.indexer is not None]
    handle = Handle(options, undo, selecting, list(fitting))
    for layer in fitting.values():
        _replace(layer, options, undo)
    if not reasons and bases:  # otherwise other layers of the model need masks
        _set_implementation(model, fitting.values(), undo)
    if train_indexer and loss_coeff != 0:
        _set(heads[0], "loss_function", LossWithIndexer(heads[0].loss_function, options, loss_coeff), undo)
    return handle


def register() -> None:
    """Makes models that are created from now on by `from_pretrained` or `from_config` run on the operators, as far as
    their layers fit. Their indexers select in bf16 and do not learn. Such a model cannot be enabled, and there is no
    unregister: to train the indexer, do not call `register`."""
    register_patch_mapping({kind.__name__: replacement for kind, replacement in REPLACEMENTS.items()}, overwrite=True)


def _set(target: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    before = getattr(target, name)
    setattr(target, name, value)
    undo.append(lambda: setattr(target, name, before))


def _set_implementation(model: nn.Module, layers: Iterable[Any], undo: list[Callable[[], None]]) -> None:
    """Gives the model configs of its own, since those that it has may be another model's too. Other changes that are
    made to them stay."""
    shared = {id(layer.config): layer.config for layer in layers}
    own = {key: copy.copy(config) for key, config in shared.items()}
    for key, config in own.items():
        config._attn_implementation = NAME
        undo.append(partial(_keep_changes, shared[key], config))
    for module in model.modules():
        key = id(vars(module).get("config"))
        if key in own:
            _set(module, "config", own[key], undo)


def _keep_changes(before: Any, now: Any) -> None:
    implementation = "_attn_implementation_internal"
    vars(before).update({name: value for name, value in vars(now).items() if name != implementation})


def _replace(layer: nn.Module, options: Options, undo: list[Callable[[], None]]) -> None:
    kind = type(layer)
    layer.__class__ = REPLACEMENTS[kind]
    layer._dsa_options = options  # type: ignore[assignment]

    def restore() -> None:
        layer.__class__ = kind
        del layer._dsa_options

    undo.append(restore)
