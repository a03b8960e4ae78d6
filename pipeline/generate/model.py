"""Which model goes with a cache: the one that its tokens were made for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gstep.backbones import ModelSource
from gstep.checkpoints.files import SHIPPED
from gstep.checkpoints.tensors import tower_hash
from gstep.checkpoints.tiny import TINY
from gstep.language import PromptBuilder
from pipeline.cache.header import CacheHeader, ModelIdentity, deepstack_levels, fingerprint
from pipeline.cache.live import LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.storage.stores import Store


def model_of(model: str | None, revision: str | None, weights: str) -> tuple[str, str | None]:
    """Return the (model, revision) to use: the given ones, else those of the ``weights`` that the cache names.

    Raises UsageError where neither names a model.
    """
    kind, _, rest = weights.partition(":")
    hub_id, _, sha = rest.rpartition("@") if kind == "hub" else ("", "", "")
    if model is not None:
        # The weights that the cache was made with, wherever the branch is now.
        return model, revision or (sha if model == hub_id else None)
    if kind == "hub":
        return hub_id, revision or sha
    if kind in SHIPPED or kind in TINY:
        return kind, revision
    raise UsageError(f"--model is missing: the cache was made with a folder ({weights}), and does not say where it is")


def model_source(cache: TokenCache, model: str | None = None) -> ModelSource:
    """Return the checkpoint that a cache was made with; no weights are read.

    Its ``pretrained()`` gives the name and revision for ``from_pretrained`` of transformers.

    Args:
        model: where the cache does not name it: the folder with those weights.

    Raises UsageError where the model is missing or another one, ModelError where it is not there.
    """
    held = cache.identity["model"]
    source = ModelSource.resolve(*model_of(model, None, held["weights"]))
    check_model(cache.store, held, source)
    return source


def check_model(
    cache: Store | str, held: ModelIdentity, source: ModelSource, stored: Callable[[], str | None] | None = None
) -> None:
    """Raise IdentityMismatch if the cache was made with other weights than the model's.

    ``stored`` reads the hash of the vision encoder that the cache was made with: other weights, also quantized ones,
    are then taken if they come with the same encoder. Raises ModelError where that is quantized or not all there.
    """
    if (held["type"], held["weights"]) == (source.model_type, source.identity):
        return
    same = ""
    if stored is not None and held["type"] == source.model_type:
        theirs, ours = stored(), tower_hash(source)
        if theirs is not None and theirs == ours:
            return
        same = (
            f". The vision tower and projector of the cache are {theirs or 'not known: it was made before they were'}, "
            f"of --model {ours}: use a checkpoint made from the cache's that left both as they were, or prune again "
            "with the vision encoder of this one"
        )
    raise IdentityMismatch(
        f"{cache} was made with the weights {held['weights']} ({held['type']}), --model {source.name} has "
        f"{source.identity} ({source.model_type}): an LLM understands the tokens of its own vision encoder only{same}"
    )


def stored_tower(cache: Store, header: CacheHeader) -> str | None:
    """Return the hash of the vision encoder that a cache was made with, from its rows; None where none says it.

    All rows of a cache are of the same weights. Raises CorruptShard and OSError.
    """
    rows = LiveVideos.open(cache, fingerprint(header["identity"])).live(("tower_hash",))
    return next(filter(None, rows["tower_hash"].unique().to_pylist()), None)


def check_tokens(cache: Store, header: CacheHeader, widths: Collection[int], builder: PromptBuilder) -> None:
    """Raise UsageError if the cached tokens, of these ``widths``, do not have the model's width and levels."""
    again = "prune into another --out with the same model"
    levels = deepstack_levels(header)
    if levels != builder.deepstack_levels:
        raise UsageError(
            f"{cache}: it holds {levels} deepstack levels, the model takes {builder.deepstack_levels}: {again}"
        )
    if builder.needs_newline and header.get("newline") is None:
        raise UsageError(f"{cache}: it has no newline row, which this model puts after a video: {again}")
    if wrong := [width for width in widths if width != builder.hidden_size]:
        raise UsageError(f"{cache}: its tokens have {wrong[0]} values, the model takes {builder.hidden_size}: {again}")
