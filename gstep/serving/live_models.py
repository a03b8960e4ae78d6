"""vLLM's model classes of the Qwen families, modified to prune each video as it is encoded by a method of this package.

They reuse vLLM's pruning, but replace the functions that count and choose tokens. They follow vLLM 0.32.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe
from vllm.model_executor.models.interfaces import supports_multimodal_pruning
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

from gstep.serving.live import (
    DIGIT_COLUMNS,
    LivePruning,
    PromptStarts,
    compute_grid_positions,
    compute_timed_positions,
    encode_digits,
    find_runs,
    update_positions,
)
from gstep.serving.options import check_live_engine
from gstep.serving.prompts import compute_mrope_positions

# The names of vLLM's functions that count tokens beforehand, and that choose them, for evs and vidcom2.
_COUNTS = ("compute_retained_tokens_count", "vidcom2_compute_retained_tokens_count")
_MASKS = ("compute_retention_mask", "vidcom2_compute_retention_mask")


def replace_names(function: Any, names: tuple[str, ...], replacement: Callable[..., Any]) -> Any:
    """Return a copy of ``function`` in which ``replacement`` takes the place of the globals ``names`` that it reads.

    The copy does not see later changes of the module's globals.

    Raises:
        ImportError: the function reads none of ``names``: this version of vLLM is not supported.
    """
    read_names = set(_iter_code_names(function.__code__)) & set(names)
    if not read_names:
        raise ImportError(f"{function.__qualname__} of this vLLM reads none of {', '.join(names)}")
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(read_names, replacement)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _iter_code_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a code object reads, including those of functions nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iter_code_names(constant)


def enable_pruning_on_cpus() -> None:
    """Make vLLM's CPU model runner report whether its model prunes; without this, the engine fails at its first step.

    On a CPU, replaces ``CPUModelRunner.is_multimodal_pruning_enabled`` in this process by a property, for existing
    runners too; otherwise does nothing.
    """
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415 - not on GPUs

    def is_enabled(runner: Any) -> bool:
        """Return whether the runner's model prunes, by the rule of vLLM's GPU runner."""
        config = runner.model_config.multimodal_config
        return (
            supports_multimodal_pruning(getattr(runner, "model", None))
            and config is not None
            and config.is_multimodal_pruning_enabled()
        )

    CPUModelRunner.is_multimodal_pruning_enabled = property(is_enabled, lambda runner, value: None)


class PruningWorker:
    """An extension of vLLM's worker (``worker_extension_cls``) with which vLLM's own methods prune on CPUs too."""

    def enable_pruning(self) -> None:
        """Make this worker's CPU model runner report whether its model prunes."""
        enable_pruning_on_cpus()


class _LiveModel:
    """The mixin of a model that prunes its videos by the LivePruning in its configuration."""

    config: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        """Build vLLM's model, and enable pruning in the model runner.

        Raises:
            ModelError: the engine has a connector, a pipeline or a LoRA of the vision tower, which could cause wrong
                answers.
        """
        check_live_engine(
            {
                "kv_transfer_config": vllm_config.kv_transfer_config,
                "ec_transfer_config": vllm_config.ec_transfer_config,
                "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size,
                "enable_tower_connector_lora": getattr(vllm_config.lora_config, "enable_tower_connector_lora", False),
            }
        )
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        # vLLM does not set it on Qwen3.5, but its pruning function reads it.
        self.video_pruning_method = vllm_config.model_config.multimodal_config.video_pruning_method
        self._starts = PromptStarts()
        self._live = LivePruning.from_config(self.config)
        enable_pruning_on_cpus()

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        """Return a prompt's positions [3,L] and their delta, and store where its videos and images start.

        Positions of images, and of text outside of videos, are final, whatever tokens will be kept: vLLM does not
        compute them again for a video that its prefix cache has. All tokens of a video have the position of its start,
        until their positions arrive with its rows.
        """
        spans = [
            (
                feature.mm_position.offset,
                self._compute_span_positions(feature.modality, feature.data, feature.mm_position),
            )
            for feature in mm_features
        ]
        self._starts.store(torch.as_tensor(input_tokens).cpu(), sorted(offset for offset, _ in spans))
        return compute_mrope_positions(spans, len(input_tokens))

    def recompute_mrope_positions(
        self, input_ids: Any, multimodal_embeddings: Sequence[Tensor], mrope_positions: Tensor, num_computed_tokens: int
    ) -> tuple[list[Tensor], Tensor, int]:
        """Split the rows of a step from the digits that they carry, and put the digits' positions into the prompt's.

        If the starts of the prompt's videos have been forgotten, they are guessed from its placeholders.

        Returns:
            The rows without digits, the prompt's positions [3,L], and their delta.
        """
        ids = torch.as_tensor(input_ids).cpu()
        columns = [part[:, -DIGIT_COLUMNS:] for part in multimodal_embeddings]
        starts = self._starts.find(ids)
        if starts is None:  # forgotten after thousands of other prompts
            starts = self._guess_starts(ids)
        positions = update_positions(mrope_positions, columns, starts, num_computed_tokens)
        rows = [part[:, :-DIGIT_COLUMNS] for part in multimodal_embeddings]
        return rows, positions, int(positions[:, len(ids) - 1].max()) + 1 - len(ids)

    def _select_mask(self, video_embeds: Tensor, video_size_thw: Any, **_: object) -> Tensor:
        """Select the kept tokens of a video: a bool mask [M] over its rows, whose deepstack levels are ignored."""
        n_frames, height, width = self._merge_grid(video_size_thw)
        tokens = video_embeds[:, : getattr(self, "visual_dim", None)]
        return self._live.select_mask(tokens.reshape(n_frames, height * width, -1))

    def _postprocess_image_embeds_evs(self, images: Sequence[Tensor], image_input: Any) -> tuple[Tensor, ...]:
        """Return the rows of each image, all kept, with the digits of their positions appended."""
        grids = image_input["image_grid_thw"].tolist()
        return tuple(
            _append_digits(rows, compute_grid_positions(*self._merge_grid(grid)))
            for rows, grid in zip(images, grids, strict=True)
        )

    def _merge_grid(self, grid: Any) -> tuple[int, int, int]:
        """Convert a grid (T, height, width) in patches to tokens."""
        n_frames, height, width = (int(value) for value in grid)
        size = self.config.vision_config.spatial_merge_size
        return n_frames, height // size, width // size

    def _compute_span_positions(self, modality: str, data: Any, span: Any) -> Tensor:
        """Compute the positions [3,S+1] of a video or image from its start; the last is that of the text after it.

        For a video, all others are 0, because its kept tokens are not known yet.

        Args:
            modality: "video" or "image".
            data: the item's fields from vLLM's processor, with its grid in patches.
            span: its PlaceholderRange.
        """
        n_frames, height, width = self._merge_grid(data[f"{modality}_grid_thw"].data.flatten().tolist())
        if modality == "video":
            positions = torch.zeros(3, span.length, dtype=torch.long, device="cpu")
            extent = self._compute_video_extent(n_frames, height, width, span.length)
        else:
            positions = compute_grid_positions(n_frames, height, width).T
            extent = max(height, width)
        return torch.cat([positions, torch.full((3, 1), extent, device="cpu")], dim=1)

    def _compute_video_extent(self, n_frames: int, height: int, width: int, length: int) -> int:
        """Return the number of positions that a video takes; ``length`` is the number of its prompt tokens."""
        raise NotImplementedError

    def _guess_starts(self, ids: Tensor) -> list[int]:
        """Return the first token of each video and image in a prompt, ascending, found by placeholders.

        The result is wrong if the prompt's text contains placeholders too.
        """
        raise NotImplementedError


def _round_rows(rows: Tensor) -> Tensor:
    """Round rows to bfloat16, as a cache stores them; the dtype stays."""
    return rows.to(torch.bfloat16).to(rows.dtype)


def _append_digits(rows: Tensor, positions: Tensor) -> Tensor:
    """Append the digits of their positions to rows."""
    return torch.cat([rows, encode_digits(positions.to(rows.device)).to(rows.dtype)], dim=1)


class _LiveQwen2(_LiveModel):
    """The mixin of Qwen2.5-VL, with the positions of transformers 5.

    vLLM itself truncates the seconds of a temporal patch to an integer before it multiplies them, and after a video of
    upright frames continues the text at too low a position.
    """

    def _postprocess_video_embeds_evs(self, videos: Sequence[Tensor], video_input: Any) -> tuple[Tensor, ...]:
        """Return the kept rows of each video, rounded to bfloat16, with the digits of their positions appended."""
        grids, seconds = video_input["video_grid_thw"].tolist(), video_input["second_per_grid_ts"].tolist()
        per_second = self.config.vision_config.tokens_per_second
        kept_rows = list[Tensor]()
        for rows, grid, patch_seconds in zip(map(_round_rows, videos), grids, seconds, strict=True):
            mask = self._select_mask(rows, grid)
            positions = compute_grid_positions(*self._merge_grid(grid), per_second * patch_seconds)
            kept_rows.append(_append_digits(rows[mask], positions[mask.cpu()]))
        return tuple(kept_rows)

    def _compute_video_extent(self, n_frames: int, height: int, width: int, length: int) -> int:
        """Return the longer side of the video's grid."""
        return max(height, width)

    def _guess_starts(self, ids: Tensor) -> list[int]:
        """Return the first placeholder of each video and image in a prompt, ascending."""
        return sorted(find_runs(ids, self.config.video_token_id) + find_runs(ids, self.config.image_token_id))


class _LiveQwen3(_LiveModel):
    """The mixin of Qwen3-VL and Qwen3.5, whose videos have a text with the time before each temporal patch.

    vLLM takes the marker before the whole video for the marker of the first patch, so its own positions are too low by
    the tokens of one time.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        """Build vLLM's model; its pruning function then selects tokens by the LivePruning.

        Raises:
            ModelError: an engine option is not supported (``_LiveModel``).
            ImportError: this version of vLLM is not supported.
        """
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        stock = qwen3_vl.Qwen3VLForConditionalGeneration._postprocess_video_embeds_evs
        self._prune = types.MethodType(replace_names(stock, _MASKS, self._select_mask), self)

    def _postprocess_video_embeds_evs(self, videos: Sequence[Tensor], video_input: Any) -> tuple[Tensor, ...]:
        """Return each video's rows, of kept tokens and the text between them, with their positions' digits appended."""
        kept_rows: tuple[Tensor, ...] = self._prune(tuple(map(_round_rows, videos)), video_input)
        return kept_rows

    def _get_expanded_positions(
        self,
        *,
        video_grid_thw: Any,
        is_video_embed: Tensor,
        is_vision_start: Tensor,
        retention_mask: Tensor,
        **_: object,
    ) -> Tensor:
        """Return the digits [S,12] of the positions of a video's rows, in place of vLLM's own positions."""
        height, width = self._merge_grid(video_grid_thw)[1:]
        index = retention_mask.nonzero()[:, 0]
        return encode_digits(compute_timed_positions(is_video_embed, is_vision_start, index, height, width))

    def _compute_video_extent(self, n_frames: int, height: int, width: int, length: int) -> int:
        """Return the number of positions of the video's text and of all its temporal patches."""
        n_text = length - self._live.budget(n_frames * height * width)
        return n_text + n_frames * max(height, width)

    def _guess_starts(self, ids: Tensor) -> list[int]:
        """Return the index of the first token of each video and image in a prompt, ascending.

        An image starts at its first placeholder. A video starts with the text of its first time: at the token after the
        last vision start marker before its placeholders, or at 0 without one. A marker directly before the placeholders
        does not count, since vLLM puts it after the time.
        """
        config = self.config
        markers = [-1, *(ids == config.vision_start_token_id).nonzero()[:, 0].tolist()]
        videos = [
            max(marker for marker in markers if marker < max(first - 1, 0)) + 1
            for first in find_runs(ids, config.video_token_id)
        ]
        return sorted(videos + find_runs(ids, config.image_token_id))


class _LiveProcessor:
    """The mixin of vLLM's processor that counts kept tokens, and names videos in caches, by the LivePruning."""

    info: Any

    @functools.cached_property
    def _live(self) -> LivePruning:
        """The settings of the server."""
        return LivePruning.from_config(self.info.get_hf_config())

    @functools.cached_property
    def _make_updates(self) -> Any:
        """The function of vLLM that puts placeholders into prompts, with the token counts of this package."""

        def count(tokens_per_frame: int, num_frames: int, q: float) -> int:
            """Return the number of kept tokens of a video; vLLM's rounded rate ``q`` is ignored."""
            return self._live.budget(tokens_per_frame * num_frames)

        stock = super()._get_prompt_updates.__func__  # type: ignore[misc]
        return types.MethodType(replace_names(stock, _COUNTS, count), self)

    def _get_prompt_updates(self, *arguments: Any, **named: Any) -> Any:
        """Return the changes to a prompt that put placeholders into it."""
        return self._make_updates(*arguments, **named)

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        """Return the items' names in vLLM's caches, prefixed by the LivePruning's name."""
        hashes: dict[str, list[str]] = super()._get_mm_hashes(inputs)  # type: ignore[misc]
        return {modality: [f"{self._live.name}-{name}" for name in names] for modality, names in hashes.items()}


class _Qwen2Processor(_LiveProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):  # type: ignore[misc]
    """vLLM's processor of Qwen2.5-VL with live pruning."""


class _Qwen3Processor(_LiveProcessor, qwen3_vl.Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    """vLLM's processor of Qwen3-VL and Qwen3.5 with live pruning."""

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        """Process images and videos with all frames that the loader took; vLLM would sample them again."""
        return super()._apply_hf_processor_main(mm_items, {**hf_kwargs, "do_sample_frames": False})


@MULTIMODAL_REGISTRY.register_processor(
    _Qwen2Processor, info=qwen2_5_vl.Qwen2_5_VLProcessingInfo, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder
)
class LiveQwen2_5VL(_LiveQwen2, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """vLLM's Qwen2.5-VL with live pruning."""


@MULTIMODAL_REGISTRY.register_processor(
    _Qwen3Processor, info=qwen3_vl.Qwen3VLProcessingInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class LiveQwen3VL(_LiveQwen3, qwen3_vl.Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3-VL with live pruning."""


@MULTIMODAL_REGISTRY.register_processor(
    _Qwen3Processor, info=qwen3_vl_moe.Qwen3VLMoeProcessingInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class LiveQwen3VLMoe(_LiveQwen3, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """vLLM's Qwen3-VL mixture of experts with live pruning."""


@MULTIMODAL_REGISTRY.register_processor(
    _Qwen3Processor, info=qwen3_5.Qwen3_5ProcessingInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class LiveQwen3_5(_LiveQwen3, qwen3_5.Qwen3_5ForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """vLLM's Qwen3.5 with live pruning."""


@MULTIMODAL_REGISTRY.register_processor(
    _Qwen3Processor, info=qwen3_5.Qwen3_5MoeProcessingInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class LiveQwen3_5Moe(_LiveQwen3, qwen3_5.Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]  # noqa: N801
    """vLLM's Qwen3.5 mixture of experts with live pruning."""
