"""The model of a cache: the model that its tokens were made for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gstep.backbones import ModelSource
from gstep.checkpoints.files import SHIPPED
from gstep.checkpoints.tensors import tower_hash
from gstep.checkpoints.tiny import TINY
from gstep.language import PromptBuilder, prompt_builder
from pipeline.cache.header import CacheHeader, ModelIdentity, deepstack_levels, fingerprint, identify_model
from pipeline.cache.live import LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.generate.config import GenerateConfig
from pipeline.storage.stores import Store


def choose_model(model: str | None, revision: str | None, weights: str) -> tuple[str, str | None]:
    """Return the (model, revision) to use: the given model, else the model of the ``weights`` that the cache names.

    A ``revision`` that is not given is the cache's, if the model is the same. Raises UsageError if neither names a
    model.
    """
    kind, _, checkpoint = weights.partition(":")
    hub_id, _, sha = checkpoint.rpartition("@") if kind == "hub" else ("", "", "")
    if model is not None:
        # The weights that the cache was made with, wherever the branch is now.
        return model, revision or (sha if model == hub_id else None)
    if kind == "hub":
        return hub_id, revision or sha
    if kind in SHIPPED or kind in TINY:
        return kind, revision
    raise UsageError(f"--model is missing: the cache was made with a folder ({weights}), and does not say where it is")


def choose_family(identity: ModelIdentity, family: str | None = None) -> str | None:
    """Return the family to resolve the model of a cache with; None for the family of its model type.

    ``family`` is the family that the user names, if any. Raises UsageError if a cache of a user's own family is read
    without its name: what a cache says chooses no code.
    """
    cached_family = identity.get("family")
    if cached_family is not None and ":" in cached_family and family != cached_family:
        raise UsageError(
            f"the cache was made with the family {cached_family}, which is no part of this package; what a cache says "
            f"chooses no code: give --family {cached_family} where the command has that flag"
        )
    return family or cached_family


def refuse_vllm(identity: ModelIdentity) -> None:
    """Raise UsageError for a model of the family generic or of a user's own: vLLM cannot answer from their tokens."""
    if (family := identity.get("family")) is not None:
        raise UsageError(
            f"vLLM has no class that takes cached tokens of {identity['type']} (family {family}): answer with python "
            "-m jobs.generate --engine transformers"
        )


def find_model(
    cache: Store | str,
    identity: ModelIdentity,
    model: str | None = None,
    revision: str | None = None,
    read_tower: Callable[[], str | None] | None = None,
    family: str | None = None,
) -> ModelSource:
    """Return the checkpoint that a cache was made with, or the ``model`` that is named if it fits the cache.

    ``read_tower`` is as of ``check_model``, and ``family`` as of ``choose_family``.

    Raises UsageError where the model is missing or does not fit, ModelError where it is not there.
    """
    if read_tower is not None:
        refuse_vllm(identity)
    source = ModelSource.resolve(
        *choose_model(model, revision, identity["weights"]),
        quantized=read_tower is not None,
        family=choose_family(identity, family),
    )
    check_model(cache, identity, source, read_tower)
    return source


def make_prompt_builder(source: ModelSource, options: GenerateConfig, positions: str | None = None) -> PromptBuilder:
    """Return the prompt builder of a model by the options; ``positions`` replaces the positions of the options."""
    default = None if options.positions == "auto" else options.positions
    thought = "closed" if options.close_thought else "open"
    return prompt_builder(source, positions or default, options.rule, options.frame_times, thought)


def model_source(cache: TokenCache, model: str | None = None, family: str | None = None) -> ModelSource:
    """Return the checkpoint that a cache was made with; no weights are read.

    Its ``pretrained()`` gives the name and revision for ``from_pretrained`` of transformers.

    Args:
        model: the folder with these weights, if the cache does not name it.
        family: your own family, ``module:Class``, if the cache was made with it.

    Raises UsageError where the model is missing or another one, ModelError where it is not there.
    """
    return find_model(cache.store, cache.identity["model"], model, family=family)


def check_model(
    cache: Store | str, identity: ModelIdentity, source: ModelSource, read_tower: Callable[[], str | None] | None = None
) -> None:
    """Raise IdentityMismatch if the cache was made with other weights than the model's.

    Args:
        cache: only named in the error.
        identity: of the model in the cache's header.
        read_tower: reads the hash of the vision encoder that the cache was made with. It is given for vLLM: other
            weights (quantized weights too) are accepted then if they have the same encoder.

    Raises ModelError if that encoder is quantized or incomplete.
    """
    model = identify_model(source)
    if (identity["type"], identity["weights"]) == (model["type"], model["weights"]):
        if identity.get("family") == model.get("family"):
            return
        raise IdentityMismatch(
            f"{cache} was made with the family {identity.get('family', identity['type'])}, and --model {source.name} "
            f"was resolved to the family {source.family}: "
            + (f"--family {identity['family']}" if "family" in identity else "leave out --family")
        )
    remedy = ""
    if read_tower is not None and identity["type"] == source.model_type:
        cache_tower, model_tower = read_tower(), tower_hash(source)
        if cache_tower is not None and cache_tower == model_tower:
            return
        remedy = (
            ". The vision tower and projector of the cache are "
            f"{cache_tower or 'not known: it was made before they were'}, of --model {model_tower}: use a checkpoint "
            "made from the cache's that left both as they were, or prune again with the vision encoder of this one"
        )
    raise IdentityMismatch(
        f"{cache} was made with the weights {identity['weights']} ({identity['type']}), --model {source.name} has "
        f"{source.identity} ({source.model_type}): an LLM understands the tokens of its own vision encoder only{remedy}"
    )


def read_tower_hash(cache: Store, header: CacheHeader) -> str | None:
    """Return the hash of the vision encoder that a cache was made with, from its rows; None where none says it.

    All rows of a cache are of the same weights. Raises CorruptShard and OSError.
    """
    _, rows = LiveVideos.read(cache, fingerprint(header["identity"]), ("tower_hash",))
    return next(filter(None, rows["tower_hash"].unique().to_pylist()), None)


def check_tokens(cache: Store, header: CacheHeader, widths: Collection[int], builder: PromptBuilder) -> None:
    """Raise UsageError if the cached tokens do not fit the model: ``widths``, deepstack levels, newline row."""
    remedy = "prune into another --out with the same model"
    levels = deepstack_levels(header)
    if levels != builder.deepstack_levels:
        raise UsageError(
            f"{cache}: it holds {levels} deepstack levels, the model takes {builder.deepstack_levels}: {remedy}"
        )
    if builder.needs_newline and header.get("newline") is None:
        raise UsageError(f"{cache}: it has no newline row, which this model puts after a video: {remedy}")
    if wrong := [width for width in widths if width != builder.hidden_size]:
        raise UsageError(f"{cache}: its tokens have {wrong[0]} values, the model takes {builder.hidden_size}: {remedy}")
