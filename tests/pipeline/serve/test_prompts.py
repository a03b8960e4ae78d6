"""Messages of an OpenAI client -> the prompt that jobs.generate would make of the same question."""

import threading

import pytest
import torch

from gstep.backbones import ModelSource
from pipeline import TokenCache
from pipeline.errors import UsageError
from pipeline.generate.held_videos import to_visual
from pipeline.serve.prompts import CachedPrompts, ServedCache
from tests.pipeline.asking import tiny_cache
from tests.pipeline.caches import encoded, random_tokens, write_shard

SHAPE = (4, 49, 64)


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c", ("a", "dir/b.mp4"), failed=("bad",))
    return tmp_path / "c"


def served(cache, **more):
    return CachedPrompts(ServedCache(cache=str(cache), model="tiny", **more))


def video(url):
    return {"type": "video_url", "video_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("ratio", [None, 0.1])
def test_a_question_has_the_prompt_of_jobs_generate(cache, ratio):
    prompts, opened = served(cache), TokenCache(cache)
    link = "" if ratio is None else f"?retention_ratio={ratio}"
    names = ("dir/b.mp4", "a")
    visuals = [to_visual(opened.get(name, ratio), opened.newline) for name in names]
    expected = prompts.builder.build("Why?", visuals, system="Be brief.")
    asked = [
        {"role": "system", "content": "Be brief."},
        user(*(video(f"cache://{n}{link}") for n in names), text("Why?")),
    ]
    prompt = prompts.build(asked)
    assert torch.equal(prompt.input_ids, expected.input_ids)
    for mine, theirs in zip(prompt.visuals, visuals, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.index, theirs.index)


def test_the_servers_ratio_is_that_of_links_without_one(cache):
    prompts = served(cache, retention_ratio=0.1)
    (default,) = prompts.build([user(video("cache://a"), text("x"))]).visuals
    (all_stored,) = prompts.build([user(video("cache://a?retention_ratio=0.25"), text("x"))]).visuals
    assert (len(default.index), len(all_stored.index)) == (19, 49)
    with pytest.raises(UsageError, match=r"--retention-ratio 0.5: the cache stores 0.25"):
        served(cache, retention_ratio=0.5)


def test_a_conversation_goes_on(cache):
    prompts = served(cache)
    first = [user(video("cache://a"), text("Who?"))]
    more = [
        *first,
        {"role": "assistant", "content": "A dog."},
        user(text("And "), video("cache://dir/b.mp4"), text("?")),
    ]
    one, two = prompts.build(first), prompts.build(more)
    assert len(two.visuals) == len(two.spans) == 2
    assert torch.equal(two.input_ids[: one.prefix_length], one.input_ids[: one.prefix_length])
    assert "A dog." in prompts.builder.tokenizer.decode(two.input_ids)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (video("cache://nope"), "'nope' is not in the cache"),
        (video("cache://bad"), "corrupt: damaged"),
        (video("cache://a?retention_ratio=0.9"), "stored at retention ratio 0.25; 0.9 is larger"),
        (video("file:///etc/passwd"), "no files"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "'image_url': this server takes text"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "'image_embeds'"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "'prompt_embeds'"),
        ({"no": "type"}, "'None'"),
        (text("a <video> of mine"), "placeholder"),
    ],
)
def test_whatever_is_no_cached_video_is_refused_with_the_reason(cache, part, why):
    with pytest.raises(ValueError, match=why):
        served(cache).build([user(video("cache://a"), part)])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls of a message"),
        ({"role": "tool", "content": "42"}, "a message of role 'tool'"),
    ],
)
def test_turns_that_a_template_would_write_otherwise_are_refused(cache, more, why):
    with pytest.raises(ValueError, match=why):
        served(cache).build([user(video("cache://a"), text("x")), more])


def test_a_developer_is_the_system(cache):
    asked = user(video("cache://a"), text("x"))
    ids = [
        served(cache).build([{"role": role, "content": "Be brief."}, asked]).input_ids
        for role in ("system", "developer")
    ]
    assert torch.equal(*ids)


def test_a_video_that_was_added_since_is_found_after_a_while(cache, monkeypatch):
    """Not at once for every mistyped name: it reads the whole index."""
    prompts = served(cache)
    with pytest.raises(ValueError, match="not in the cache"):
        prompts.build([user(video("cache://new"), text("x"))])
    write_shard(TokenCache(cache).store, "later", encoded("new", random_tokens(9, SHAPE), 0.25, "gstep"))
    with pytest.raises(ValueError, match="not in the cache"):
        prompts.build([user(video("cache://new"), text("x"))])
    monkeypatch.setattr("pipeline.serve.prompts._OPEN_AGAIN_S", 0.0)
    assert len(prompts.build([user(video("cache://new"), text("x"))]).visuals[0].index) == 49


def test_threads_share_it(cache):
    prompts, built = served(cache), []

    def ask(name: str) -> None:
        built.append((name, prompts.build([user(video(f"cache://{name}"), text("x"))]).visuals[0]))

    threads = [threading.Thread(target=ask, args=(("a", "dir/b.mp4")[i % 2],)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 16
    assert len({id(visual) for _, visual in built}) == 2  # each was read once


def test_another_model_is_refused(tmp_path):
    tiny_cache(tmp_path / "c", source=ModelSource.resolve("tiny-qwen2-5-vl"), newline=None)
    with pytest.raises(UsageError, match="understands the tokens of its own vision encoder"):
        served(tmp_path / "c")
