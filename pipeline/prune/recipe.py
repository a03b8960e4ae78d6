"""The recipe of a cache's rows: model, sampling of frames and pruning method, checked before anything starts."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from rich.console import Console

from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES, ModelSource, StaticParts, family_class, family_of
from gstep.errors import ModelError
from gstep.evidence import (
    EVIDENCE_SHAPES,
    HEAD_SOURCES,
    PER_FRAME,
    SOURCES,
    get_evidence_name,
    make_label,
    make_name_source_pairs,
)
from gstep.families import describe_family
from gstep.lazy import format_suggestion
from gstep.methods import METHODS
from gstep.pruners import get_method_name, read_pruner
from gstep.pruners.base import Pruner
from pipeline.cache.changed_code import REDO, check_cache_code
from pipeline.cache.header import (
    HEADER,
    CacheHeader,
    CacheIdentity,
    PrunerIdentity,
    describe_method,
    identify_model,
    read_header,
)
from pipeline.cache.schema import CODED_VERSIONS, SCHEMA_VERSION, VIDEOS
from pipeline.errors import UsageError, convert_usage_errors
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup, check_decoder_device, plan_video
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.prune.facts import COLUMN_BYTES
from pipeline.runner.cluster.connection import can_have_gpus
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store
from pipeline.video.decoders import DECODERS, load_decoder
from pipeline.video.sampling import ROUNDED, TIME_RULE, TRUNCATE, Sampling

DEFAULT_FRAMES = 32
#: The evidence that encoders compute per token, [T,N] or [T,N,width], or per frame.
STORED_EVIDENCE = tuple(name for name, axes in EVIDENCE_SHAPES.items() if axes[:2] == ("T", "N") or name in PER_FRAME)
_NOT_NEEDED = {
    "image_embedding": "this model needs none: methods compare the tokens themselves with the language model's own "
    "embedding of the question"
}


@dataclass(frozen=True)
class PruneStages:
    """The settings of the decode and encode workers of a run, or of a user's own pipeline."""

    decode: DecodeSetup
    encode: EncodeSetup


@dataclass(frozen=True)
class Recipe:
    """The checked settings that determine the rows of a cache: model, sampling of frames and pruning method.

    Attributes:
        retention_ratio: the nominal share of tokens to keep, which a method may derive from ``--retention-ratio``.
        dtype: the compute dtype of the encoder; "auto" until the cluster decides or a cache is matched.
        evidence: the evidence to store beside the tokens, label -> source in the encoder.
        is_restarted: True if the cache was made by other code of a user method, and all its videos are encoded again.
    """

    config: PruneConfig
    source: ModelSource
    pruner: Pruner
    retention_ratio: float
    dtype: str
    sampling: Sampling
    evidence: dict[str, str]
    objects: Objects
    identity_entry: PrunerIdentity
    is_restarted: bool = False

    @property
    def method(self) -> str:
        """The method's name in the table of methods, or ``module:Class`` for a user method."""
        return get_method_name(type(self.pruner))

    def make_decode_setup(self) -> DecodeSetup:
        """Return the settings of decode workers."""
        return DecodeSetup(
            self.sampling,
            family_of(self.source).preprocessor(),
            self.config.decoder,
            timeout_s=self.config.decode_timeout,
            memory_mb=self.config.decode_memory,
            objects=self.objects,
            fetch_mb=self.config.fetch_memory,
        )

    def make_encode_setup(self, device: str, dtype: str) -> EncodeSetup:
        """Return the settings of encode workers, without ``tower_hash``, which takes reading the weights."""
        return EncodeSetup(
            source=self.source,
            pruner=self.method,
            pruner_params=self.pruner.params(),
            pruner_code=self.identity_entry.get("code"),
            retention_ratio=self.retention_ratio,
            seed=self.config.seed,
            evidence=self.evidence,
            device=device,
            dtype=dtype,
            attn=self.config.attn,
            codec=self.config.token_codec,
            batch_frames=self.config.encode_batch_frames,
            shape=self.make_decode_setup().plan_largest_frames(),
            even=self.sampling.fps is not None and self.sampling.snap_to_keyframes_s is None,
        )

    def stages(self, device: str, dtype: str) -> PruneStages:
        """Return the settings of all workers; encode workers use this device and dtype."""
        return PruneStages(self.make_decode_setup(), self.make_encode_setup(device, dtype))

    def identity(self, dtype: str) -> CacheIdentity:
        """Return the identity that all rows of a cache share; a cache with a different identity is refused.

        It consists of the model (with the pooling head, if one is used), preprocessing, sampling, the pruner with its
        parameters (and the seed of a seeded method), the stored ratio, the dtypes, and the stored evidence, if any.
        """
        model = identify_model(self.source)
        if self.source.pooling_head is not None:
            model["pooling_head"] = self.source.pooling_head.identity
        pruner = self.identity_entry.copy()
        if self.pruner.seeded:
            pruner["seed"] = self.config.seed
        identity: CacheIdentity = {
            "model": model,
            "preprocessing": family_of(self.source).preprocessor().settings(),
            "sampling": make_sampling_identity(self.sampling),
            "pruner": pruner,
            "retention_ratio": self.retention_ratio,
            "dtype": {"compute": dtype, "stored": self.config.token_codec},
        }
        if self.evidence:
            identity["evidence"] = self.evidence
        if self.evidence or self.pruner.sources:
            identity["dtype"]["evidence"] = "bfloat16"
        return identity

    def header(self, dtype: str, static: StaticParts) -> CacheHeader:
        """Return the content of cache.json for a new cache.

        ``newline``, the row that LLaVA-OneVision puts after a video's tokens, is stored as the base64 of its bfloat16
        bits; None for other models.
        """
        newline = static.newline
        bits = None if newline is None else newline.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        return {
            "schema_version": CODED_VERSIONS.get(self.config.token_codec, SCHEMA_VERSION),
            "identity": self.identity(dtype),
            "newline": None if bits is None else base64.b64encode(bits).decode(),
            "hidden_size": static.hidden_size,
            "deepstack_levels": static.deepstack_levels,
        }

    def match_cache(self, store: Store, console: Console) -> Recipe:
        """Return this recipe adapted to the cache in ``store``; unchanged if there is no cache or it has no rows.

        A dtype of "auto" becomes the dtype of the cache. With a nested method, a ratio below the stored ratio becomes
        the stored ratio, and a note is printed. If other code of a user method made the cache, ``is_restarted`` is set;
        that is accepted if the cache has no tokens, or with ``--on-changed redo``.

        Raises:
            IdentityMismatch: any other setting of the identity differs, or the change of code is not accepted.
            NotACache, CorruptShard: the header, or a file of the videos table, cannot be read.
        """
        if not store.exists(HEADER):
            return self
        cached_identity = read_header(store)["identity"]
        if not store.names(VIDEOS, ".parquet"):
            return self
        recipe = self
        stored_ratio = cached_identity["retention_ratio"]
        if self.dtype == "auto":
            recipe = replace(recipe, dtype=cached_identity["dtype"]["compute"])
        if self.pruner.nested and self.retention_ratio < stored_ratio:
            console.print(
                f"note: this cache stores retention ratio {stored_ratio}, which serves {self.retention_ratio} too; "
                f"new videos are stored at {stored_ratio}",
                highlight=False,
            )
            recipe = replace(recipe, retention_ratio=stored_ratio)
        identity = recipe.identity(recipe.dtype)
        how = "with other settings"
        if (family := cached_identity["model"].get("family")) != identity["model"].get("family"):
            how = f"with --family {family}" if family else "without --family"
        refusal = f"{store} was made {how}, and one cache holds one kind of rows"
        redo = self.config.on_changed == REDO
        is_restarted = check_cache_code(store, cached_identity, identity, refusal, redo=redo)
        return replace(recipe, is_restarted=is_restarted)

    def token_bytes(self) -> float:
        """Estimate the stored bytes of a kept token with its columns, from the largest planned video."""
        shape = self.make_decode_setup().plan_largest_frames()
        video_bytes = self.make_encode_setup(self.config.device, self.dtype).estimate_stored_bytes(*shape)
        return COLUMN_BYTES + video_bytes / self.retention_ratio / math.prod(
            family_of(self.source).token_counts(*shape)
        )


def resolve_recipe(config: PruneConfig, objects: Objects | None = None, source: ModelSource | None = None) -> Recipe:
    """Resolve and check model, sampling, method and decoder, without reading a cache or a video.

    This imports a user method, user decoder or user family, and downloads small files of a Hugging Face model if they
    are missing.

    Args:
        objects: the access to S3; None creates it from the options and the environment.
        source: the model if it is already resolved.

    Raises:
        UsageError: the model, its frames, the method, the evidence or the decoder cannot be used, or do not fit
            together.
        RunFailed: with ``--decoder nvdec``, RAY_ADDRESS names no cluster.
    """
    with convert_usage_errors():
        read_pruner(config.pruner, config.pruner_params())  # checked first, since its errors do not depend on the model
        source = source or ModelSource.resolve(config.model, config.revision, quantized=True, family=config.family)
        limits = (config.min_pixels, config.max_pixels, config.max_video_tokens)
        if limits != (None, None, None):
            source = family_of(source).with_limits(*limits)
        family = family_of(source)
        sampling = make_sampling(config, family.default_max_frames, family.min_frames(), family.min_rule)
        # Raises for a number of frames that the model never accepts. For the generic family, raises if the model's
        # processor, which counts the tokens, cannot be loaded.
        video = plan_video(family.preprocessor(), sampling.num_frames or sampling.max_frames or 0)
        family.token_counts(*video.shape)
        pruner = _make_pruner(config, source)
        identity_entry = describe_method(pruner)  # raises if the method cannot be recorded in a cache's identity
        evidence = parse_evidence(config.evidence, source.family, pruner, source.model_type)
        source = _add_pooling_head(source, pruner, evidence, config)
    _check_decoder(config.decoder)
    if config.decoder == "nvdec" and not config.plan and (config.device == "cpu" or not can_have_gpus()):
        check_decoder_device(config.decoder, "cpu")
    return Recipe(
        config=config,
        objects=objects or Objects.from_environment(config.s3_endpoint, config.s3_requester_pays),
        source=source,
        pruner=pruner,
        retention_ratio=pruner.nominal_ratio(config.retention_ratio),
        dtype=config.dtype,
        sampling=sampling,
        evidence=evidence,
        identity_entry=identity_entry,
    )


def _make_pruner(config: PruneConfig, source: ModelSource) -> Pruner:
    """Create the pruning method with the rules of the model's family.

    UsageError is raised if the method depends on the question; ValueError if the method or a parameter is invalid.
    """
    pruner = read_pruner(config.pruner, config.pruner_params(), family=family_of(source).variant)
    if not pruner.cacheable:
        raise UsageError(
            f"--pruner {config.pruner} selects anew for every question, so its tokens cannot be cached; instead: "
            f"--pruner none, then python -m jobs.generate --pruner {config.pruner}"
        )
    return pruner


def _add_pooling_head(
    source: ModelSource, pruner: Pruner, stored_evidence: dict[str, str], config: PruneConfig
) -> ModelSource:
    """Check that the model can compute the needed evidence; return it with the pooling head of ``--siglip``, if given.

    Raises:
        UsageError: the model cannot compute evidence that the method needs or the cache stores, or nothing needs the
            head.
    """
    if unknown := sorted(pruner.needs - pruner.sources.keys()):
        raise UsageError(
            f"--pruner {config.pruner} needs {' and '.join(unknown)} besides the tokens, and does not say where in an "
            "encoder to get it (Pruner.sources); gstep.prune(..., evidence=) takes it from elsewhere"
        )
    rules = pruner.family_parameter or ""
    chosen_rules = config.pruner_params().get(rules)  # rules of another family may be the reason for the error
    flags = f"--pruner {config.pruner}" + (f" with {rules}={chosen_rules}" if chosen_rules is not None else "")
    try:
        family_of(source).check_gives(pruner.sources)
        if config.siglip is not None:
            if not HEAD_SOURCES & {*pruner.sources.values(), *stored_evidence.values()}:
                raise UsageError(
                    f"--siglip is for methods that ask SigLIP's pooling head; this --pruner {config.pruner} does not, "
                    "and no --evidence does"
                )
            source = family_of(source).with_pooling_head(config.siglip)
        family_of(source).check_evidence(pruner.sources)
        if stored_evidence:
            flags = "--evidence " + ",".join(
                sorted({get_evidence_name(key, where) for key, where in stored_evidence.items()})
            )
            family_of(source).check_evidence(stored_evidence)
    except ModelError as error:
        raise UsageError(f"{flags}: {error}{_describe_alternatives(pruner, source)}") from error
    return source


def _describe_alternatives(pruner: Pruner, source: ModelSource) -> str:
    """Return the end of an error message: the model types that compute the evidence, and the methods that need none.

    "" if this model's family computes it.
    """
    able_models = [name for name in BACKBONES if BACKBONES[name].gives >= set(pruner.sources.items())]
    if source.family in able_models:
        return ""
    methods_without_evidence = [name for name in PRUNERS if PRUNERS[name].cacheable and not make_pruner(name).needs]
    models = f"models of type {' or '.join(able_models)} do" if able_models else "no model here does"
    return f"; {models}, and {', '.join(methods_without_evidence)} need nothing but tokens"


def _check_decoder(name: str) -> None:
    """Import the decoder that ``--decoder`` names, unless it is "auto".

    Raises:
        UsageError: the name is unknown, the import fails, or the object is not a class with ``read`` and ``close``.
    """
    names = ("auto", *DECODERS)
    if name == "auto":
        return
    try:
        decoder = load_decoder(name)
        if not (isinstance(decoder, type) and hasattr(decoder, "read") and hasattr(decoder, "close")):
            raise AttributeError("it is not a decoder, which is a class with read and close")
    except (KeyError, ImportError, AttributeError, OSError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]  # torchcodec's message is very long
        if ":" not in name and name not in names:
            reason = f"unknown{format_suggestion(name, names)}"
        raise UsageError(f"--decoder {name}: {reason}; known: {', '.join(names)}, module:Class") from error


def make_sampling(config: PruneConfig, max_frames: int, min_frames: int = 1, min_rule: str = ROUNDED) -> Sampling:
    """Return the sampling that the options describe; by default 32 frames per video.

    Args:
        max_frames: the family's maximum with ``--fps``, which ``--max-frames`` overrides.
        min_frames: the family's minimum with ``--fps``.
        min_rule: how a shorter clip is filled up to the minimum.
    """
    snap = config.snap_to_keyframes
    if config.fps is None:
        n_frames = config.num_frames or DEFAULT_FRAMES
        return Sampling(num_frames=n_frames, rule=config.frame_rule, snap_to_keyframes_s=snap)
    limit = config.max_frames or max_frames
    return Sampling(None, config.fps, limit, snap_to_keyframes_s=snap, min_frames=min_frames, min_rule=min_rule)


def make_sampling_identity(sampling: Sampling) -> dict[str, int | float | str | None]:
    """Return the sampling's entry in the cache's identity.

    Defaults are left out: the rule "truncate", a minimum of 1 frame, and no keyframes. With ``fps``, ``max_frames`` and
    the version of the rule are always present.
    """
    snap = sampling.snap_to_keyframes_s
    snap_setting = {} if snap is None else {"snap_to_keyframes_s": snap}
    if sampling.fps is None:
        rule = {} if sampling.rule == TRUNCATE else {"rule": sampling.rule}
        return {"num_frames": sampling.num_frames, **rule, **snap_setting}
    limits: dict[str, int | float | str | None] = {"max_frames": sampling.max_frames}
    if sampling.min_frames > 1:
        limits |= {"min_frames": sampling.min_frames, "min_rule": sampling.min_rule}
    return {"fps": sampling.fps, **limits, **snap_setting, "time_rule": TIME_RULE}


def parse_evidence(items: Sequence[str], family: str, pruner: Pruner, model_type: str | None = None) -> dict[str, str]:
    """Parse ``--evidence`` into the evidence to store, label -> source in the encoder (gstep.evidence).

    Args:
        items: texts of comma-separated entries. Each is NAME or NAME=SOURCE of evidence, or a method, which stands for
            all evidence that it needs. A method given as module:Class is imported.
        pruner: the method that makes the cache.

    Raises:
        UsageError: an entry is unknown or ambiguous, the encoder does not compute the evidence, or ``pruner`` does not
            keep the tokens that it describes.
        ValueError: a user method cannot be imported.
    """
    pairs = set[tuple[str, str]]()
    for item in (item.strip() for text in items for item in text.split(",")):
        if item in METHODS or ":" in item:
            pairs |= list_needed_evidence(item, family, model_type=model_type)
        else:
            pairs.add(_parse_evidence_item(item, family, model_type))
    _check_evidence_survives({name for name, _ in pairs}, pruner)
    return {make_label(name, source): source for name, source in sorted(pairs)}


def list_needed_evidence(
    method: str, family: str, params: Mapping[str, str] = MappingProxyType({}), model_type: str | None = None
) -> set[tuple[str, str]]:
    """Return the (name, source) pairs of the evidence that a method needs from the vision encoder of a family.

    Args:
        method: its name, or module:Class, which is imported.

    Raises:
        UsageError: the encoder does not compute the evidence.
        ValueError: the method or a parameter is invalid.
    """
    pruner = read_pruner(method, params, family=family_class(family).variant)
    return list_method_evidence(pruner, f"--evidence {method}", family, model_type)


def list_method_evidence(pruner: Pruner, flag: str, family: str, model_type: str | None = None) -> set[tuple[str, str]]:
    """Return the (name, source) pairs of the evidence that a method object needs from the vision encoder of a family.

    For a method that needs ``text_embedding``, ``image_embedding`` is left out if the family does not have it: the
    tokens replace it.

    Args:
        flag: the beginning of the error message, such as ``--evidence fastvid``.

    Raises:
        UsageError: the encoder does not compute the evidence.
    """
    kind = family_class(family)
    pairs = set(make_name_source_pairs(pruner.sources))
    if "text_embedding" in pruner.needs:  # the tokens replace patch embeddings that a family lacks
        pairs = {pair for pair in pairs if pair[0] != "image_embedding" or pair in kind.gives}
    if missing_pairs := sorted(pairs - kind.gives):
        names = " and ".join(f"{name} from {SOURCES.get(source, source)}" for name, source in missing_pairs)
        raise UsageError(f"{flag}: the encoder of {describe_family(family, model_type)} does not give {names}")
    return pairs


def _check_evidence_survives(names: set[str], pruner: Pruner) -> None:
    """Raise UsageError if evidence (``names``) is to be stored that the method does not keep tokens for.

    That is any evidence if the method merges tokens, and evidence of whole frames unless the method is "none".
    """
    if names and pruner.merges:
        raise UsageError(
            f"--evidence {', '.join(sorted(names))}: --pruner {pruner.name} merges tokens, and a merged token has no "
            "evidence of its own; use a method that keeps tokens as they are, or --pruner none for all"
        )
    if names & PER_FRAME and pruner.name != "none":
        raise UsageError(
            f"--evidence {', '.join(sorted(names & PER_FRAME))} describes frames and can only be stored with all "
            f"tokens, since --pruner {pruner.name} may keep none of a frame: use --pruner none"
        )


def _parse_evidence_item(item: str, family: str, model_type: str | None) -> tuple[str, str]:
    """Parse NAME or NAME=SOURCE into (name, source). SOURCE may be omitted if the family has only one.

    Raises:
        UsageError: the name is unknown, the family does not compute the evidence, SOURCE is not one of its sources, or
            SOURCE is missing and the family has several.
    """
    name, _, chosen_source = item.partition("=")
    if name not in STORED_EVIDENCE:
        why = (
            "comes from no vision encoder"
            if name in EVIDENCE_SHAPES
            else f"is no evidence and no method{format_suggestion(name, (*STORED_EVIDENCE, *METHODS))}"
        )
        raise UsageError(f"--evidence: {name!r} {why}; known: {', '.join(STORED_EVIDENCE)}, {', '.join(METHODS)}")
    sources = sorted(source for evidence, source in family_class(family).gives if evidence == name)
    if not sources:
        able_models = [kind for kind in BACKBONES if any(name == evidence for evidence, _ in BACKBONES[kind].gives)]
        instead = _NOT_NEEDED.get(
            name, f"models of type {' or '.join(able_models)} do" if able_models else "no model does"
        )
        kind_name = describe_family(family, model_type)
        raise UsageError(f"--evidence {name}: the encoder of {kind_name} does not give it; {instead}")
    if chosen_source and chosen_source not in sources:
        raise UsageError(f"--evidence {name}={chosen_source}: {family} gives it from {' or '.join(sources)}")
    if not chosen_source and len(sources) > 1:
        choices = " or ".join(f"{source} ({SOURCES[source]})" for source in sources)
        raise UsageError(f"--evidence {name} may be from {choices}: name one, --evidence {name}={sources[0]}")
    return name, chosen_source or sources[0]
