"""The model of a cache: which checkpoint it is, and whether a given one fits the cached tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gstep.backbones import ModelSource
from gstep.checkpoints.files import SHIPPED
from gstep.checkpoints.tensors import compute_tower_hash
from gstep.checkpoints.tiny import TINY
from gstep.language import PromptBuilder, prompt_builder
from pipeline.cache.header import CacheHeader, ModelIdentity, compute_fingerprint, get_deepstack_levels, identify_model
from pipeline.cache.live import LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.generate.config import GenerateConfig
from pipeline.storage.stores import Store


def choose_model(model: str | None, revision: str | None, weights: str) -> tuple[str, str | None]:
    """Return the (model, revision) to load: the given model, or the one that the cache names.

    Without a given ``revision``, it is the commit that made the cache if the model is the same Hugging Face id.

    Args:
        weights: the weights in the cache's identity: ``hub:ID@COMMIT``, a model of this package, or a folder's hash.

    Raises:
        UsageError: no model is given, and the cache was made with a folder.
    """
    kind, _, checkpoint = weights.partition(":")
    hub_id, _, sha = checkpoint.rpartition("@") if kind == "hub" else ("", "", "")
    if model is not None:
        # Use the commit that made the cache, even if the branch has moved since.
        return model, revision or (sha if model == hub_id else None)
    if kind == "hub":
        return hub_id, revision or sha
    if kind in SHIPPED or kind in TINY:
        return kind, revision
    raise UsageError(f"--model is missing: the cache was made with a folder ({weights}), and does not say where it is")


def choose_family(identity: ModelIdentity, family: str | None = None) -> str | None:
    """Return the user's ``family``, or the one that the cache names; None for the default of the model type.

    Raises:
        UsageError: the cache was made with a user family that is not named here, since a cache never selects code to
            import.
    """
    cached_family = identity.get("family")
    if cached_family is not None and ":" in cached_family and family != cached_family:
        raise UsageError(
            f"the cache was made with the family {cached_family}, which is no part of this package; what a cache says "
            f"chooses no code: give --family {cached_family} where the command has that flag"
        )
    return family or cached_family


def refuse_vllm(identity: ModelIdentity) -> None:
    """Raise UsageError for a model of the generic or a user family, which vLLM does not support."""
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
    """Return the checkpoint that a cache was made with, or ``model`` if it fits the cache; weights are not loaded.

    For the family generic, its gate may compare a reduced model first, which takes a minute or two.

    Args:
        model: None uses the one that the cache names.
        revision: of the model; None uses the commit that made the cache, if ``model`` is None or the same id.
        read_tower: reads the hash of the vision encoder that made the cache. If given, vLLM must support the model, and
            other or quantized weights with this vision encoder fit too.
        family: the user family with which the cache was made; it is imported.

    Raises:
        UsageError: no model is named, vLLM does not support it, or the cache's user family is not given.
        IdentityMismatch: the model does not fit the cache.
        ModelError: there is no such checkpoint, or it cannot be used.
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
    """Create the prompt builder of a model; ``positions`` replaces the positions of the options."""
    default = None if options.positions == "auto" else options.positions
    thought = "closed" if options.close_thought else "open"
    return prompt_builder(source, positions or default, options.rule, options.frame_times, thought)


def model_source(cache: TokenCache, model: str | None = None, family: str | None = None) -> ModelSource:
    """Return the checkpoint that a cache was made with; no weights are loaded.

    Its ``pretrained()`` returns the name and revision for ``from_pretrained``.

    Args:
        model: the folder with the weights, if the cache does not name the model.

    Raises:
        UsageError: no model is named, or it is not the one that made the cache.
        ModelError: there is no such checkpoint, or it cannot be used.
    """
    return find_model(cache.store, cache.identity["model"], model, family=family)


def check_model(
    cache: Store | str, identity: ModelIdentity, source: ModelSource, read_tower: Callable[[], str | None] | None = None
) -> None:
    """Raise IdentityMismatch if a model's weights or family are not those that made the cache.

    Args:
        read_tower: reads the hash of the vision encoder that made the cache. If given, other weights of the same model
            type are accepted if their vision encoder has this hash.

    Raises:
        ModelError: the vision encoder of ``source`` is quantized or incomplete.
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
    remedy = ". Name the model that the cache was made with, or prune the videos again with this one"
    if read_tower is not None and identity["type"] == source.model_type:
        cache_tower, model_tower = read_tower(), compute_tower_hash(source)
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
    """Read the hash of the vision encoder that made a cache, from the first row that has it; None if no row does."""
    _, rows = LiveVideos.read(cache, compute_fingerprint(header["identity"]), ("tower_hash",))
    return next(filter(None, rows["tower_hash"].unique().to_pylist()), None)


def check_tokens(cache: Store, header: CacheHeader, widths: Collection[int], builder: PromptBuilder) -> None:
    """Raise UsageError if the cached tokens do not fit the model: hidden sizes, deepstack levels or newline row."""
    remedy = "prune into another --out with the same model"
    levels = get_deepstack_levels(header)
    if levels != builder.deepstack_levels:
        raise UsageError(
            f"{cache}: it holds {levels} deepstack levels, the model takes {builder.deepstack_levels}: {remedy}"
        )
    if builder.needs_newline and header.get("newline") is None:
        raise UsageError(f"{cache}: it has no newline row, which this model puts after a video: {remedy}")
    if other_widths := [width for width in widths if width != builder.hidden_size]:
        raise UsageError(
            f"{cache}: its tokens have {other_widths[0]} values, the model takes {builder.hidden_size}: {remedy}"
        )
