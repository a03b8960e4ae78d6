"""vLLM's own server with live pruning, by the command that jobs.serve --live prints, asked by the official client."""

import base64

import pytest

from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.pipeline.serve.live_cases import N_FRAMES, NAMES, pruned_cache
from tests.pipeline.serve.served import KEY, ask, expected, fetched, parts, same, serving

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODEL = "tiny-qwen3-vl"


def test_it_prunes_what_requests_bring_and_reads_nothing_else(tmp_path):
    videos, cache = pruned_cache(tmp_path, MODEL)
    flags = ("--model", MODEL, "--served-model-name", "tiny", "--dtype", "float32", "--num-frames", str(N_FRAMES))
    limits = ("--max-request-bytes", "8000000", "--engine-param", "max_model_len=4096")
    with serving(cache, *flags, *limits, stock=True, live=True) as (server, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300)
        for name in (*NAMES, NAMES[0]):
            url = f"data:video/mp4;base64,{base64.b64encode((videos / name).read_bytes()).decode()}"
            n_tokens, text = expected(cache, "Who?", [name], None, MODEL)
            answer = ask(client, parts("Who?", url))
            assert answer.usage.prompt_tokens == n_tokens
            assert same(answer.choices[0].message.content, text)
        for url in ((videos / NAMES[0]).as_uri(), f"{address}/health", "cache://a"):
            with pytest.raises(openai.APIStatusError):
                ask(client, parts("Who?", url))
        assert fetched(f"{address}/v1/models")[0] == 401
        assert fetched(f"{address}/v1/chat/completions", {"messages": "x" * 9_000_000}, "POST", key=KEY)[0] == 413
        server.terminate()
        assert server.wait(60) == 0
