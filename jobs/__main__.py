"""The command gstep-cache, which runs every command by its name, from any folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from jobs.command import Parser

#: Command name -> the module whose ``main`` runs it, and its purpose.
COMMANDS = {
    "prune": ("jobs.prune", "encode videos, prune their visual tokens and cache them"),
    "generate": ("jobs.generate", "answer questions about cached videos"),
    "evaluate": ("jobs.evaluate", "score pruning methods on a benchmark"),
    "inspect": ("jobs.inspect", "show a cache's contents, a video's kept tokens, or answers"),
    "verify": ("jobs.verify", "check every file of a cache, and repair or clean it"),
    "compact": ("jobs.compact", "merge the small files of a cache's table"),
    "recode": ("jobs.recode", "store the tokens of a cache by another codec"),
    "reprune": ("jobs.reprune", "prune a cache of all tokens by another method, without videos"),
    "merge": ("jobs.merge", "merge caches that were made alike into one"),
    "remove": ("jobs.remove", "remove videos from a cache, answers or results for good"),
    "doctor": ("jobs.doctor", "check a machine or a cluster before a run: slow or wrong parts, and their remedies"),
    "serve": ("jobs.serve", "an OpenAI chat API on a cache, by vLLM"),
    "benchmark": ("jobs.benchmark.__main__", "measure this package on this machine"),
    "testbed": ("jobs.testbed", "make synthetic videos with questions"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names with the other words; return its exit code.

    Only the module of that command is imported. Without a word, the help is printed and 0 is returned; an unknown
    command ends the process with code 2. The current folder is appended to ``sys.path``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # A console script has its own folder first on the path; ``module:Class`` may be a file in the current folder.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    if words and words[0] in COMMANDS:
        command = import_module(COMMANDS[words[0]][0])
        return cast(int, command.main(words[1:]))
    parser = Parser(
        "gstep-cache",
        description=__doc__,
        epilog="commands:\n" + "\n".join(f"  {name:10} {purpose}" for name, (_, purpose) in COMMANDS.items()),
    )
    if not words:
        parser.print_help()
        return 0
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="COMMAND --help shows its flags")
    parser.parse_args(words)
    return 2  # unreachable: argparse has ended the process, because the first word is no command


if __name__ == "__main__":
    sys.exit(main())
