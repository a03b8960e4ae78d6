"""Serve a cache over HTTP: an OpenAI chat API by vLLM, whose messages name cached videos as cache://VIDEO_ID."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import Parser, run_command
from pipeline.serve.config import ServeConfig, check_port

EPILOG = """\
A message names a cached video, and the share of its visual tokens, as a video_url:
  {"type": "video_url", "video_url": {"url": "cache://bikes.mp4?retention_ratio=0.1"}}
Ids are percent-encoded if needed. Other files and addresses are never read.

examples:
  python -m jobs.serve cache
  python -m jobs.serve s3://bucket/cache --model Qwen/Qwen2.5-VL-72B-Instruct --tensor-parallel 8 --api-key KEY
"""

#: The options that --help shows.
USUAL = (
    *("cache", "caches", "model", "retention_ratio", "tensor_parallel"),
    *("host", "port", "api_key", "no_key", "print_command"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the chat server on a cache; return the exit code."""
    parser = Parser("python -m jobs.serve", description=__doc__, epilog=EPILOG)
    return run_command(parser, ServeConfig, _serve, argv, usual=USUAL)


def _serve(config: ServeConfig, console: Console) -> int:
    """Check that the port is free, and serve until interrupted; return 0.

    With ``--print-command`` it only prints vLLM's command.
    """
    if not config.print_command:
        check_port(config.host, config.port)
    from pipeline.serve.server import serve  # noqa: PLC0415 - --help and a mistyped flag answer at once

    serve(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
