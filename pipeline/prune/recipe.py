"""The recipe of a cache's rows: model, frames and method, checked before anything is started."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from rich.console import Console

from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES, ModelSource, StaticParts, family_of
from gstep.errors import ModelError
from gstep.evidence import EVIDENCE_SHAPES, HEAD_SOURCES, PER_FRAME, SOURCES, make_label, name_of
from gstep.lazy import did_you_mean
from gstep.methods import METHODS
from gstep.pruners import method_name, read_pruner
from gstep.pruners.base import Pruner
from pipeline.cache.changed_code import REDO, has_tokens, match_identity, refuse_changed_code
from pipeline.cache.header import (
    HEADER,
    CacheHeader,
    CacheIdentity,
    ModelIdentity,
    PrunerIdentity,
    describe_method,
    read_header,
)
from pipeline.cache.schema import CODED_VERSIONS, SCHEMA_VERSION, VIDEOS
from pipeline.errors import UsageError, usage_errors
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup, check_decoder_device
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.prune.facts import COLUMN_BYTES
from pipeline.runner.cluster import gpus_can_be_had
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store
from pipeline.video.decoders import DECODERS, load_decoder
from pipeline.video.sampling import ROUNDED, TIME_RULE, TRUNCATE, Sampling

DEFAULT_FRAMES = 32
#: The evidence that an encoder gives: of each token, [T,N] or [T,N,width], or of each frame.
STORED = tuple(name for name, axes in EVIDENCE_SHAPES.items() if axes[:2] == ("T", "N") or name in PER_FRAME)
_NOT_NEEDED = {
    "image_embedding": "none is needed there: methods compare the tokens themselves with the language model's own "
    "embedding of the question"
}


@dataclass(frozen=True)
class PruneStages:
    """The settings that travel to the workers that decode and encode, a user's own (``prune_stages``) too."""

    decode: DecodeSetup
    encode: EncodeSetup


@dataclass(frozen=True)
class Recipe:
    """The checked settings that make the rows of a cache from videos: the model, its frames and the method.

    Attributes:
        dtype: the number format of the encoder; "auto" only where no cache is there yet and the cluster decides.
        evidence: the evidence to store besides the tokens: label -> where in the encoder it is from.
        objects: how S3 is reached.
        described: the method as the cache's identity describes it.
        begins_anew: whether a cache is there that other code of the method made, and whose videos are encoded again.
    """

    config: PruneConfig
    source: ModelSource
    pruner: Pruner
    retention_ratio: float
    dtype: str
    sampling: Sampling
    evidence: dict[str, str]
    objects: Objects
    described: PrunerIdentity
    begins_anew: bool = False

    @property
    def method(self) -> str:
        """The name of the method in the table of methods, or ``module:Class``."""
        return method_name(type(self.pruner))

    def decode_setup(self) -> DecodeSetup:
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

    def encode_setup(self, device: str, dtype: str) -> EncodeSetup:
        """Return the settings of encode workers, on the chosen device and dtype."""
        return EncodeSetup(
            source=self.source,
            pruner=self.method,
            pruner_params=self.pruner.params(),
            pruner_code=self.described.get("code"),
            retention_ratio=self.retention_ratio,
            seed=self.config.seed,
            evidence=self.evidence,
            device=device,
            dtype=dtype,
            attn=self.config.attn,
            codec=self.config.token_codec,
            batch_frames=self.config.encode_batch_frames,
            shape=self.decode_setup().largest_frames(),
            even=self.sampling.fps is not None and self.sampling.snap_to_keyframes_s is None,
        )

    def stages(self, device: str, dtype: str) -> PruneStages:
        """Return the settings of the workers, which encode on the chosen device and dtype."""
        return PruneStages(self.decode_setup(), self.encode_setup(device, dtype))

    def identity(self, dtype: str) -> CacheIdentity:
        """Return the identity that all rows of the cache share; rows of another identity are refused."""
        model: ModelIdentity = {"type": self.source.model_type, "weights": self.source.identity}
        if self.source.pooling_head is not None:
            model["pooling_head"] = self.source.pooling_head.identity
        pruner = self.described.copy()
        if self.pruner.seeded:
            pruner["seed"] = self.config.seed
        identity: CacheIdentity = {
            "model": model,
            "preprocessing": family_of(self.source).preprocessor().settings(),
            "sampling": sampling_settings(self.sampling),
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
        """Return the content of cache.json of an empty cache whose tokens are made in ``dtype``."""
        newline = static.newline
        bits = None if newline is None else newline.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
        return {
            "schema_version": CODED_VERSIONS.get(self.config.token_codec, SCHEMA_VERSION),
            "identity": self.identity(dtype),
            "newline": None if bits is None else base64.b64encode(bits).decode(),
            "hidden_size": static.hidden_size,
            "deepstack_levels": static.deepstack_levels,
        }

    def matched(self, store: Store, console: Console) -> Recipe:
        """Return the recipe completed from the cache in ``store``: its dtype, and its ratio if a nested method allows.

        A cache without a row, from a run that ended before its first commit, restricts nothing, and one without tokens
        no code. Raises IdentityMismatch where the cache has another identity.
        """
        if not store.exists(HEADER):
            return self
        cached = read_header(store)["identity"]
        if not store.names(VIDEOS, ".parquet"):
            return self
        recipe, stored = self, cached["retention_ratio"]
        if self.dtype == "auto":
            recipe = replace(recipe, dtype=cached["dtype"]["compute"])
        if self.pruner.nested and self.retention_ratio < stored:
            console.print(
                f"note: this cache stores retention ratio {stored}, which serves {self.retention_ratio} too; "
                f"new videos are stored at {stored}",
                highlight=False,
            )
            recipe = replace(recipe, retention_ratio=stored)
        redo = self.config.on_changed == REDO
        refusal = f"{store} was made with other settings, and one cache holds one kind of rows"
        changed = match_identity(cached, recipe.identity(recipe.dtype), refusal, redo=redo)
        if not redo and changed and has_tokens(store, cached):
            refuse_changed_code(store, changed, "tokens")
        return replace(recipe, begins_anew=bool(changed))

    def token_bytes(self) -> float:
        """Return the stored bytes of a kept token with its columns, whatever the shape of its video."""
        shape = self.decode_setup().largest_frames()
        stored = self.encode_setup(self.config.device, self.dtype).stored_bytes_per_video(*shape)
        return COLUMN_BYTES + stored / self.retention_ratio / math.prod(family_of(self.source).token_counts(*shape))


def resolve(config: PruneConfig, objects: Objects | None = None, source: ModelSource | None = None) -> Recipe:
    """Resolve the model, its frames and the method. Raise UsageError. No cache and no video is looked at.

    Args:
        objects: how S3 is reached, if not as the options and the environment say.
        source: the model, if it was resolved already.
    """
    with usage_errors():
        read_pruner(config.pruner, config.pruner_params())  # checked first, since its errors do not depend on the model
        source = _with_limits(source or ModelSource.resolve(config.model, config.revision, quantized=True), config)
        family = family_of(source)
        sampling = sampling_of(config, family.default_max_frames, family.min_frames(), family.min_rule)
        # Raises for a number of frames that the model accepts of no video.
        family.preprocessor().target_size(sampling.num_frames or sampling.max_frames or 0, 1080, 1920)
        pruner = _pruner_for(config, source)
        described = describe_method(pruner)  # raises if the method cannot be part of a cache's identity
        evidence = evidence_sources(config.evidence, source.model_type, pruner)
        source = _with_evidence(source, pruner, evidence, config)
    _check_decoder(config.decoder)
    if config.decoder == "nvdec" and not config.plan and (config.device == "cpu" or not gpus_can_be_had()):
        check_decoder_device(config.decoder, "cpu")
    return Recipe(
        config=config,
        objects=objects or Objects.from_environment(config.s3_endpoint),
        source=source,
        pruner=pruner,
        retention_ratio=pruner.nominal_ratio(config.retention_ratio),
        dtype=config.dtype,
        sampling=sampling,
        evidence=evidence,
        described=described,
    )


def _with_limits(source: ModelSource, config: PruneConfig) -> ModelSource:
    """Return the model with the pixel and token limits of the options, if any are set."""
    limits = (config.min_pixels, config.max_pixels, config.max_video_tokens)
    return source if limits == (None, None, None) else family_of(source).with_limits(*limits)


def _pruner_for(config: PruneConfig, source: ModelSource) -> Pruner:
    """Make the pruning method, with the model family's rules. Raise UsageError if its selection cannot be stored."""
    pruner = read_pruner(config.pruner, config.pruner_params(), family=family_of(source).variant)
    if not pruner.cacheable:
        raise UsageError(
            f"--pruner {config.pruner} selects anew for every question, so its tokens cannot be cached; instead: "
            f"--pruner none, then python -m jobs.generate --pruner {config.pruner}"
        )
    return pruner


def _with_evidence(source: ModelSource, pruner: Pruner, stored: dict[str, str], config: PruneConfig) -> ModelSource:
    """Return the model, with the pooling head of ``--siglip`` if that is given.

    Raise UsageError for evidence that the method or the cache needs and the model cannot give.
    """
    if unknown := sorted(pruner.needs - pruner.sources.keys()):
        raise UsageError(
            f"--pruner {config.pruner} needs {' and '.join(unknown)} besides the tokens, and does not say where in an "
            "encoder to get it (Pruner.sources); gstep.prune(..., evidence=) takes it from elsewhere"
        )
    rules = pruner.family_parameter or ""
    chosen = config.pruner_params().get(rules)  # rules of another family may be the reason for the error
    who = f"--pruner {config.pruner}" + (f" with {rules}={chosen}" if chosen is not None else "")
    try:
        family_of(source).check_gives(pruner.sources)
        if config.siglip is not None:
            if not HEAD_SOURCES & {*pruner.sources.values(), *stored.values()}:
                raise UsageError(
                    f"--siglip is for methods that ask SigLIP's pooling head; this --pruner {config.pruner} does not, "
                    "and no --evidence does"
                )
            source = family_of(source).with_pooling_head(config.siglip)
        family_of(source).check_evidence(pruner.sources)
        if stored:
            who = "--evidence " + ",".join(sorted({name_of(key, where) for key, where in stored.items()}))
            family_of(source).check_evidence(stored)
    except ModelError as error:
        raise UsageError(f"{who}: {error}{_alternatives(pruner, source)}") from error
    return source


def _alternatives(pruner: Pruner, source: ModelSource) -> str:
    """Return advice for a method that needs evidence which the model's encoder does not give."""
    able = [name for name in BACKBONES if BACKBONES[name].gives >= set(pruner.sources.items())]
    if source.model_type in able:
        return ""
    free = [name for name in PRUNERS if PRUNERS[name].cacheable and not make_pruner(name).needs]
    models = f"models of type {' or '.join(able)} do" if able else "no model here does"
    return f"; {models}, and {', '.join(free)} need nothing but tokens"


def _check_decoder(name: str) -> None:
    """Raise UsageError unless ``--decoder`` names a decoder that can be imported here."""
    names = ("auto", *DECODERS)
    if name == "auto":
        return
    try:
        decoder = load_decoder(name)
        if not (isinstance(decoder, type) and hasattr(decoder, "read") and hasattr(decoder, "close")):
            raise AttributeError("it is no decoder: a class with read and close")
    except (KeyError, ImportError, AttributeError, OSError, RuntimeError) as error:
        said = str(error).strip().split("\n", 1)[0]  # the message of torchcodec has pages
        if ":" not in name and name not in names:
            said = f"unknown{did_you_mean(name, names)}"
        raise UsageError(f"--decoder {name}: {said}; known: {', '.join(names)}, module:Class") from error


def sampling_of(config: PruneConfig, max_frames: int, min_frames: int = 1, min_rule: str = ROUNDED) -> Sampling:
    """Return the frame sampling that the options describe; the limits are the family's, ``max_frames`` by default."""
    snap = config.snap_to_keyframes
    if config.fps is None:
        n_frames = config.num_frames or DEFAULT_FRAMES
        return Sampling(num_frames=n_frames, rule=config.frame_rule, snap_to_keyframes_s=snap)
    most = config.max_frames or max_frames
    return Sampling(None, config.fps, most, snap_to_keyframes_s=snap, min_frames=min_frames, min_rule=min_rule)


def sampling_settings(sampling: Sampling) -> dict[str, int | float | str | None]:
    """Return the sampling as the cache's identity holds it; a limit without effect is left out."""
    snap = sampling.snap_to_keyframes_s
    moved = {} if snap is None else {"snap_to_keyframes_s": snap}
    if sampling.fps is None:
        rule = {} if sampling.rule == TRUNCATE else {"rule": sampling.rule}
        return {"num_frames": sampling.num_frames, **rule, **moved}
    limits: dict[str, int | float | str | None] = {"max_frames": sampling.max_frames}
    if sampling.min_frames > 1:
        limits |= {"min_frames": sampling.min_frames, "min_rule": sampling.min_rule}
    return {"fps": sampling.fps, **limits, **moved, "time_rule": TIME_RULE}


def evidence_sources(asked: Sequence[str], model_type: str, pruner: Pruner) -> dict[str, str]:
    """Return the evidence to store, as label -> source in the encoder (gstep.evidence).

    Args:
        asked: each NAME or NAME=SOURCE of evidence, or a method, whose evidence is stored, or several of these with
            commas between.
        pruner: the method of the cache itself.

    Raises UsageError if the model's encoder does not give an evidence, or the method drops the tokens that it
    describes.
    """
    pairs = set[tuple[str, str]]()
    for item in (item.strip() for items in asked for item in items.split(",")):
        if item in METHODS or ":" in item:
            pairs |= needed_by(item, model_type)
        else:
            pairs.add(_evidence_and_source(item, model_type))
    _check_kept({name for name, _ in pairs}, pruner)
    return {make_label(name, source): source for name, source in sorted(pairs)}


def needed_by(method: str, model_type: str, params: Mapping[str, str] = MappingProxyType({})) -> set[tuple[str, str]]:
    """Return the (name, source) pairs of evidence that a method needs from a family's vision encoder.

    ``params`` are the method's. Raises UsageError where that encoder does not give one, ValueError for an unknown
    method or parameter.
    """
    family = BACKBONES[model_type]
    pruner = read_pruner(method, params, family=family.variant)
    pairs = set(pruner.sources.items())
    if "text_embedding" in pruner.needs:  # if a family has no embedding of patches, its tokens are used instead
        pairs = {pair for pair in pairs if pair[0] != "image_embedding" or pair in family.gives}
    if missing := sorted(pairs - family.gives):
        names = " and ".join(f"{name} from {SOURCES.get(source, source)}" for name, source in missing)
        raise UsageError(f"--evidence {method}: the encoder of {model_type} does not give {names}")
    return pairs


def _check_kept(names: set[str], pruner: Pruner) -> None:
    """Raise UsageError if the pruning method loses the tokens that the evidence describes."""
    if names and pruner.merges:
        raise UsageError(
            f"--evidence {', '.join(sorted(names))}: --pruner {pruner.name} merges tokens, and a merged one has no "
            "evidence of its own; use a method that keeps tokens as they are, or --pruner none for all"
        )
    if names & PER_FRAME and pruner.name != "none":
        raise UsageError(
            f"--evidence {', '.join(sorted(names & PER_FRAME))} is of frames and stored with all tokens alone, since "
            f"--pruner {pruner.name} may keep none of a frame: use --pruner none"
        )


def _evidence_and_source(item: str, model_type: str) -> tuple[str, str]:
    """Parse NAME or NAME=SOURCE. Raise UsageError where the model type does not give it, or from several sources."""
    name, _, chosen = item.partition("=")
    if name not in STORED:
        why = (
            "comes from no vision encoder"
            if name in EVIDENCE_SHAPES
            else f"is no evidence and no method{did_you_mean(name, (*STORED, *METHODS))}"
        )
        raise UsageError(f"--evidence: {name!r} {why}; known: {', '.join(STORED)}, {', '.join(METHODS)}")
    given = sorted(source for evidence, source in BACKBONES[model_type].gives if evidence == name)
    if not given:
        able = [kind for kind in BACKBONES if any(name == evidence for evidence, _ in BACKBONES[kind].gives)]
        instead = _NOT_NEEDED.get(name, f"models of type {' or '.join(able)} do" if able else "no model does")
        raise UsageError(f"--evidence {name}: the encoder of {model_type} does not give it; {instead}")
    if chosen and chosen not in given:
        raise UsageError(f"--evidence {name}={chosen}: {model_type} gives it from {' or '.join(given)}")
    if not chosen and len(given) > 1:
        listed = " or ".join(f"{source} ({SOURCES[source]})" for source in given)
        raise UsageError(f"--evidence {name} may be from {listed}: name one, --evidence {name}={given[0]}")
    return name, chosen or given[0]
