"""Messages of an OpenAI client -> the prompt that jobs.generate would make of the same question."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from gstep.backbones import ModelSource
from pipeline import TokenCache, vllm_input
from pipeline.errors import UnknownVideo, UsageError
from pipeline.generate.prompts import count_bytes
from pipeline.serve.config import ServeConfig
from pipeline.serve.prompts import CachedPrompts, CacheLink, ServedCache
from pipeline.serve.server import make_served_cache
from pipeline.serve.videos import StoreAway, TooLarge, VideoGone
from tests.builders.answers import tiny_cache
from tests.builders.caches import cache_of, encode_clip, encoded, random_tokens, write_shard
from tests.builders.clips import uneven_clip
from tests.waiting import wait_until

SHAPE = (4, 49, 64)


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c", ("a", "dir/b.mp4"), failed=("bad",))
    return tmp_path / "c"


def served(cache, **more):
    return CachedPrompts(ServedCache(cache=str(cache), model="tiny", **more))


@pytest.fixture
def prompts(cache):
    """Of the cache, which is looked at again when a test says so."""
    return served(cache, refresh_seconds=3600)


def built(prompts, messages):
    """The prompt of messages, as the renderer makes it."""
    conversation = prompts.read(messages)
    return prompts.prompt(conversation, [prompts.find(link).result() for link in conversation.links])


def video(url):
    return {"type": "video_url", "video_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def test_a_video_that_the_engine_has_no_room_for_names_the_remedies(prompts):
    small = video("cache://dir/b.mp4?retention_ratio=0.1")
    conversation = prompts.read([user(video("cache://a"), small, text("Why?"))])
    videos = [prompts.find(link).result() for link in conversation.links]
    n_tokens = prompts.builder.n_visual([videos[0].visual])
    assert n_tokens == prompts.largest_video == 50  # 49 and the newline
    prompts.prompt(conversation, videos, n_tokens)
    with pytest.raises(TooLarge, match=r"'a' has 50 tokens .* memory for 49: restart the server.*retention_ratio"):
        prompts.prompt(conversation, videos, n_tokens - 1)


def test_a_question_has_the_prompt_of_jobs_generate(cache, prompts):
    opened = TokenCache(cache)
    visuals = [opened.get("dir/b.mp4", 0.1).visual, opened.get("a").visual]
    expected = prompts.builder.build("Why?", visuals, system="Be brief.")
    question = user(video("cache://dir/b.mp4?retention_ratio=0.1"), video("cache://a"), text("Why?"))
    prompt = built(prompts, [{"role": "system", "content": "Be brief."}, question])
    assert torch.equal(prompt.input_ids, expected.input_ids)
    for mine, theirs in zip(prompt.visuals, visuals, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.index, theirs.index)


def test_the_servers_ratio_is_that_of_links_without_one_and_what_does_not_fit_is_refused_at_the_start(cache, tmp_path):
    prompts = served(cache, retention_ratio=0.1)
    (default,) = built(prompts, [user(video("cache://a"), text("x"))]).visuals
    (all_stored,) = built(prompts, [user(video("cache://a?retention_ratio=0.25"), text("x"))]).visuals
    assert (len(default.index), len(all_stored.index)) == (19, 49)
    with pytest.raises(UsageError, match=r"--retention-ratio 0.5: the cache stores 0.25"):
        served(cache, retention_ratio=0.5)
    tiny_cache(tmp_path / "v", ("a",), method="vidcom2")
    with pytest.raises(UsageError, match=r"vidcom2, which pruned .*, has no order of selection, so only 0.25 can be"):
        served(tmp_path / "v", retention_ratio=0.1)
    assert len(built(served(tmp_path / "v", retention_ratio=0.25), [user(video("cache://a"))]).visuals) == 1
    tiny_cache(tmp_path / "q", source=ModelSource.resolve("tiny-qwen2-5-vl"), newline=None)
    with pytest.raises(UsageError, match="understands the tokens of its own vision encoder"):
        served(tmp_path / "q")


def test_a_conversation_goes_on(prompts):
    first = [user(video("cache://a"), text("Who?"))]
    second = user(text("And "), video("cache://dir/b.mp4"), text("?"))
    one, two = built(prompts, first), built(prompts, [*first, {"role": "assistant", "content": "A dog."}, second])
    assert len(two.visuals) == len(two.spans) == 2
    assert torch.equal(two.input_ids[: one.prefix_length], one.input_ids[: one.prefix_length])
    assert "A dog." in prompts.builder.tokenizer.decode(two.input_ids)
    system, developer = (
        built(prompts, [{"role": role, "content": "Be brief."}, *first]).input_ids for role in ("system", "developer")
    )
    assert torch.equal(system, developer)
    for turn, why in (  # a template would write them otherwise
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls of a message"),
        ({"role": "tool", "content": "42"}, "a message of role 'tool'"),
    ):
        with pytest.raises(ValueError, match=why):
            built(prompts, [*first, turn])


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (video("cache://nope"), "'nope' is not in the cache"),
        (video("cache://bad"), "corrupt: damaged"),
        (video("cache://a?retention_ratio=0.9"), "stored at retention ratio 0.25; 0.9 is larger"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "'image_url': this server takes text"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "'image_embeds'"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "'prompt_embeds'"),
        ({"no": "type"}, "'None'"),
        (text("a \U0010fffe of mine"), "no character"),
        (text("half \ud800 a pair"), "the text is not valid: .* surrogates not allowed"),
        ({"type": "text"}, "a part of a message lacks its 'text'"),
        ({"type": "video_url"}, "lacks its 'video_url'"),
        ({"type": "video_url", "video_url": {}}, "lacks its 'url'"),
    ],
)
def test_whatever_is_no_cached_video_is_refused_with_the_reason(prompts, part, why):
    with pytest.raises((ValueError, UnknownVideo), match=why):
        built(prompts, [user(video("cache://a"), part)])


def test_a_client_learns_no_ids_of_other_videos(cache, prompts):
    with pytest.raises(UnknownVideo, match=r"did you mean dir/b\.mp4"):
        TokenCache(cache).get("b.mp4")
    with pytest.raises(UnknownVideo) as refused:
        built(prompts, [user(video("cache://b.mp4"), text("x"))])
    assert str(refused.value) == "'b.mp4' is not in the cache"


def test_a_video_that_was_added_since_is_found_after_a_while(cache):
    prompts = served(cache, refresh_seconds=0.1)
    asked = [user(video("cache://new"), text("x"))]
    with pytest.raises(UnknownVideo, match="not in the cache"):
        built(prompts, asked)
    write_shard(TokenCache(cache).store, "later", encoded("new", random_tokens(9, SHAPE), 0.25, "gstep"))
    wait_until(lambda: "new" in prompts.caches[""].cache, "the new video")
    assert len(built(prompts, asked).visuals[0].index) == 49


def test_videos_that_were_asked_about_long_ago_are_let_go(cache):
    one = served(cache).find(CacheLink("a")).result()
    prompts = served(cache, held_bytes=count_bytes(one.visual))
    first = prompts.find(CacheLink("a")).result()
    assert prompts.find(CacheLink("a")).result() is first
    prompts.find(CacheLink("dir/b.mp4")).result()
    assert prompts.find(CacheLink("a")).result().visual is not first.visual


def test_another_cache_in_the_same_place_is_not_served(cache, prompts):
    videos = prompts.caches[""]
    other = {**TokenCache(cache).identity, "model": {"type": "llava_onevision", "weights": "files:another"}}
    shutil.rmtree(cache)
    tiny_cache(cache, ("a", "new"), identity=other)
    videos.refresh()
    with pytest.raises(StoreAway):
        videos.find("new", None).result()


def test_a_redone_video_is_fresh_in_every_link_and_says_so(cache, prompts):
    videos, links = prompts.caches[""], [CacheLink("a"), CacheLink("a", 0.25), CacheLink("a", 0.1)]
    old = [prompts.find(link).result() for link in links]
    other = prompts.find(CacheLink("dir/b.mp4")).result()
    redone = encoded("a", random_tokens(9, SHAPE), 0.25, "gstep", attempts=2)
    write_shard(TokenCache(cache).store, "later", redone)
    videos.refresh()
    row = TokenCache(cache).metadata("a")
    new = [prompts.find(link).result() for link in links]
    names, old_names = ({video.content_name for video in videos} for videos in (new, old))
    assert names == {f"a={row['token_shard']}:{row['first_row_group']}:{row['checksum']}"} != old_names
    assert torch.equal(new[0].visual.tokens, TokenCache(cache).get("a").visual.tokens)
    assert prompts.find(CacheLink("dir/b.mp4")).result().visual is other.visual  # was not done again: still held


def test_held_videos_are_served_while_the_store_is_away(cache):
    write_shard(TokenCache(cache).store, "later", encoded("new", random_tokens(9, SHAPE), 0.25, "gstep"))
    prompts = served(cache, refresh_seconds=3600)
    videos = prompts.caches[""]
    held = prompts.find(CacheLink("a")).result()
    cache.rename(cache.with_name("away"))
    for link in (CacheLink("new"), CacheLink("new", 0.1)):
        with pytest.raises(StoreAway):
            prompts.find(link).result()
    assert prompts.find(CacheLink("a")).result() is held
    videos.refresh()
    assert videos.away and prompts.find(CacheLink("a")).result() is held
    cache.with_name("away").rename(cache)
    videos.refresh()
    assert not videos.away and len(prompts.find(CacheLink("new")).result().visual.index) == 49
    for shard in (cache / "tokens").glob("run-*"):
        shard.unlink()
    with pytest.raises(VideoGone, match="missing"):  # the store is there: it is no fault of the client
        prompts.find(CacheLink("dir/b.mp4")).result()
    assert not videos.away


def test_a_text_that_no_prompt_holds_is_refused_before_it_is_tokenized(prompts):
    prompts.builder.tokenizer = None  # so that nothing can be
    with pytest.raises(ValueError, match="5,000,000 characters; this server takes 262,144"):
        built(prompts, [user(video("cache://a"), text("a" * 5_000_000))])


def test_links_name_one_of_several_caches(cache, tmp_path):
    tiny_cache(tmp_path / "more", ("c",))
    prompts = served(cache, others=(("more", str(tmp_path / "more")),))
    assert len(prompts.find(CacheLink.parse("cache://c?cache=more")).result().visual.index) == 49
    with pytest.raises(UnknownVideo):
        prompts.find(CacheLink.parse("cache://c")).result()
    with pytest.raises(ValueError, match="no cache 'other'; by name it has more"):
        prompts.find(CacheLink.parse("cache://c?cache=other"))


def test_threads_share_it(prompts):
    def ask(name):
        return built(prompts, [user(video(f"cache://{name}"), text("x"))]).visuals[0]

    with ThreadPoolExecutor(16) as pool:
        visuals = list(pool.map(ask, ["a", "dir/b.mp4"] * 8))
    assert len({id(visual) for visual in visuals}) == 2  # each was read once


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("cache://bikes.mp4", CacheLink("bikes.mp4")),
        ("cache://a/b/c.mp4?retention_ratio=0.1", CacheLink("a/b/c.mp4", 0.1)),
        ("cache://50%25%20off%3F%23.mp4", CacheLink("50% off?#.mp4")),
        ("cache://d%C3%ADa/%C3%B1.mp4?retention_ratio=1&cache=b%26c", CacheLink("día/ñ.mp4", 1.0, "b&c")),
        ("cache:///y%3Fretention_ratio=0.5", CacheLink("/y?retention_ratio=0.5")),
        ("cache://../../etc/passwd", CacheLink("../../etc/passwd")),  # an id like any other: looked up, never opened
    ],
)
def test_a_link_names_a_video_a_ratio_and_a_cache(url, link):
    assert CacheLink.parse(url) == link


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "no files and no addresses"),
        ("http://example.org/v.mp4", "is not a cached video"),
        ("CACHE://a", "is not a cached video"),
        ("data:video/mp4;base64,AAAA", "is not a cached video"),
        ("cache://", "names no video"),
        ("cache://?retention_ratio=0.1", "names no video"),
        ("cache://a?ratio=0.1", "unknown option 'ratio'"),
        ("cache://a?retention_ratio=0.1&retention_ratio=0.9", "says an option twice"),
        *((f"cache://a?retention_ratio={ratio}", "in \\(0, 1\\]") for ratio in ("nan", "", "0", "1.5")),
    ],
)
def test_what_is_no_link_says_why(url, why):
    with pytest.raises(ValueError, match=why):
        CacheLink.parse(url)


def test_the_flag_decides_the_times_of_every_prompt(tmp_path):
    source = ModelSource.resolve("tiny-qwen3-vl")
    _, uneven = encode_clip(source, uneven_clip(tmp_path / "uneven.mp4"), 5, "none", 1.0)
    cache_of(tmp_path / "c", source, uneven)

    def times(config):
        prompts = CachedPrompts(config)
        ids = built(prompts, [user(video("cache://v"))]).input_ids
        return re.findall(r"<([0-9.]+) seconds>", prompts.builder.tokenizer.decode(ids))

    place = str(tmp_path / "c")
    settings = json.loads(json.dumps(asdict(make_served_cache(ServeConfig(cache=place, frame_times="stock")))))
    assert settings["frame_times"] == "stock"  # as it reaches the renderer
    assert times(ServedCache(**settings)) == ["0.3", "1.4", "2.2"]
    assert times(ServedCache(cache=place, model="tiny-qwen3-vl")) == ["0.2", "1.0", "2.2"]


def test_one_video_of_another_model_is_refused_among_several(cache, tmp_path):
    tiny_cache(tmp_path / "other", ("x",), source=ModelSource.resolve("tiny-qwen2-5-vl"), newline=None)
    own, other = TokenCache(str(cache)), TokenCache(str(tmp_path / "other"))
    with pytest.raises(ValueError, match="caches of different models"):
        vllm_input([own.get("a"), own.get("dir/b.mp4"), other.get("x")], "What?")
