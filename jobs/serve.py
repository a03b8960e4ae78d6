"""Serve a cache over HTTP: an OpenAI chat API by vLLM, whose messages name cached videos as cache://VIDEO_ID.

With --live there is no cache: messages bring their videos, which are pruned as vLLM encodes them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import Parser, run_command
from pipeline.serve.config import LiveConfig, ServeConfig, check_port

EPILOG = """\
A message names a cached video, and the share of its visual tokens, as a video_url:
  {"type": "video_url", "video_url": {"url": "cache://bikes.mp4?retention_ratio=0.1"}}
Ids are percent-encoded if needed. Other files and addresses are never read.

examples:
  python -m jobs.serve cache
  python -m jobs.serve s3://bucket/cache --model Qwen/Qwen2.5-VL-72B-Instruct --tensor-parallel 8 --api-key KEY
  python -m jobs.serve --live --help
"""

LIVE_DESCRIPTION = """\
Serve an OpenAI chat API by vLLM without a cache: messages bring their videos, of which vLLM's language model
reads a share of the visual tokens.
"""

LIVE_EPILOG = """\
A message brings its video as a data URL; --media-domain and --media-path allow other URLs:
  {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA..."}}

example:
  python -m jobs.serve --live --model Qwen/Qwen3-VL-8B-Instruct --method gstep --retention-ratio 0.25
"""

#: The options that --help shows.
USUAL = (
    *("cache", "caches", "model", "retention_ratio", "tensor_parallel"),
    *("host", "port", "api_key", "no_key", "print_command", "live"),
)

#: The options that --live --help shows.
LIVE_USUAL = (
    *("live", "num_frames", "media_domain", "media_path", "method", "method_param", "retention_ratio", "model"),
    *("tensor_parallel", "host", "port", "api_key", "no_key", "print_command"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the chat server on a cache, or without one if ``--live`` is among the words; return the exit code."""
    if "--live" in (sys.argv[1:] if argv is None else argv):
        parser = Parser("python -m jobs.serve --live", description=LIVE_DESCRIPTION, epilog=LIVE_EPILOG)
        return run_command(parser, LiveConfig, _serve, argv, usual=LIVE_USUAL, interrupt_message="interrupted")
    parser = Parser("python -m jobs.serve", description=__doc__, epilog=EPILOG)
    return run_command(parser, ServeConfig, _serve, argv, usual=USUAL, interrupt_message="interrupted")


def _serve(config: ServeConfig | LiveConfig, console: Console) -> int:
    """Serve until interrupted, and return 0; with ``--print-command`` only print vLLM's command.

    Raises:
        UsageError: the port is in use, or an option, the cache or the model cannot be used.
        CorruptShard: a file of the cache's table is damaged.
    """
    if not config.print_command:
        check_port(config.host, config.port)
    from pipeline.serve.server import serve  # noqa: PLC0415 - --help and a mistyped flag answer at once

    serve(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
