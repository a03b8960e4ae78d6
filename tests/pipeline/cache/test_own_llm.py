"""An LLM of one's own: pipeline/examples/own_llm.py runs as it stands, and gives the answer of jobs.generate."""

import pytest

from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.language import Decoding, load_language_model, prompt_builder
from pipeline import TokenCache
from tests.builders.answers import decode_newline
from tests.builders.caches import cache_of, encode_clip
from tests.builders.clips import sample
from tests.examples import run_example
from tests.gstep.llms import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_the_example_answers_as_jobs_generate_does(name, tmp_path, capsys):
    source = ModelSource.resolve(name)
    _, video = encode_clip(source, sample("bikes.mp4"), 4, "gstep", 0.25, video_id="bikes.mp4")
    newline = None if family_of(source).static().newline is None else decode_newline(source)
    cache_of(tmp_path / "cache", source, video, method="gstep", ratio=0.25, newline=newline)
    names = run_example("pipeline/examples/own_llm.py", tmp_path / "cache", "bikes.mp4")
    said = capsys.readouterr().out.strip()
    visual = TokenCache(tmp_path / "cache").get("bikes.mp4", 0.10).visual
    prompt = prompt_builder(source).build("What happens in this video?", [visual])
    model = load_language_model(source, choose_runtime("cpu", "float32"))
    (answer,) = model.generate([prompt], [Decoding(max_new_tokens=32)])
    assert said == answer.text.strip() and said
    assert len(names["visual"].index) == 4 * names["visual"].tokens_per_frame // 10 or name != "tiny"
