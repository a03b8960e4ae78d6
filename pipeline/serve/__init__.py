"""What ``python -m jobs.serve`` does: it runs vLLM's OpenAI server.

On a cache, messages name cached videos by ``cache://`` links. With live pruning, messages bring their videos.
"""

from __future__ import annotations

#: The name under which vLLM finds the tokenizer (its own) and the renderer (ours) of a server.
MODE = "cached-videos"
#: The key of a ServedCache in vLLM's ``additional_config``; a server with live pruning has none.
CONFIG = "served"
#: The key of RequestLimits in ``additional_config``.
LIMITS = "limits"


def register() -> None:
    """Register the renderer and tokenizer of cached videos in vLLM, as its entry point ``vllm.general_plugins``.

    Later calls do nothing.
    """
    from vllm.renderers.registry import RENDERER_REGISTRY  # noqa: PLC0415 - this package is imported without vLLM, too
    from vllm.tokenizers.registry import TokenizerRegistry  # noqa: PLC0415

    if MODE not in RENDERER_REGISTRY.renderers:
        TokenizerRegistry.register(MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
        RENDERER_REGISTRY.register(MODE, "pipeline.serve.renderer", "CachedVideosRenderer")
