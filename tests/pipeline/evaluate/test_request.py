"""A request to evaluate: checked against benchmark, model, cache and results before anything is started or written."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import ray

from gstep.backbones import ModelSource
from gstep.language import prompt_builder
from pipeline.cache.header import read_header, serialize_header
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.errors import IdentityMismatch, NotResults, UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.request import choose_frame_options, match_results, prepare, write_results_header
from pipeline.evaluate.run import make_answers_config
from pipeline.generate.answers import PRUNINGS, commit_answers, write_answers_header
from pipeline.generate.late_pruning import PruningSpec, describe_prunings, resolve_pruning
from pipeline.generate.questions import QUESTION_SCHEMA
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import resolve_recipe
from pipeline.storage.stores import LocalStore
from tests.builders.answers import thinking_model, tiny_cache, write_questions
from tests.jobs.poison import Poison
from tests.pipeline.evaluate.layouts import QUIET, own_request, whole
from tests.pipeline.evaluate.videomme import write_videomme

ROWS = [
    {"question_id": 1, "video_id": "a", "prompt": "What?", "choices": ["x", "y"], "answer": "y"},
    {"question_id": 2, "video_id": ["a", "b"], "prompt": "Why?", "answer": "because"},
]


@dataclass(frozen=True, kw_only=True)
class Copy(Poison):
    """A method that still has the name of the method that it was copied from."""

    name: ClassVar[str] = "gstep"


def own(folder, **options):
    return own_request(folder, ROWS, **options)


def videomme(folder, **options):
    """A checked request to evaluate a small VideoMME, whose videos are there by name only."""
    data = write_videomme(folder / "d", n_videos=2, videos=False)
    given = {"benchmark": "videomme", "data": str(data), "out": str(folder / "r"), "method": ["gstep"]}
    return prepare(EvaluateConfig(**{**given, **options}), QUIET)


def test_every_protocol_can_be_asked_of_the_family_generic_and_its_results_say_that_sizes_are_the_processors():
    """A protocol's sizes and stock times are of the family of the model type."""
    model = "tiny-qwen3-vl"
    table, generic = ModelSource.resolve(model), ModelSource.resolve(model, family="generic")
    for name, benchmark in BENCHMARKS.items():
        for protocol in benchmark.protocols:
            options = choose_frame_options(EvaluateConfig(benchmark=name), protocol, generic)
            resolve_recipe(PruneConfig(model=model, **options), source=generic)
            rules = protocol.get_rules(generic.model_type, generic.family)
            prompt_builder(generic, None, frame_times=rules.frame_times)
            of_table, of_generic = (protocol.describe(source.model_type, source.family) for source in (table, generic))
            differs = {key for key in {*of_table, *of_generic} if of_table.get(key) != of_generic.get(key)}
            assert of_generic["pixels"] is None
            assert differs == (set() if name == "shapes" else {"pixels", "frame_times"})


def test_own_questions_go_to_the_model_of_the_cache_under_the_grid_and_nothing_is_started_or_written(tmp_path):
    whole(tmp_path, source=ModelSource.resolve("tiny-qwen2-5-vl"), newline=None)
    request = own(tmp_path)
    assert request.source.name == "tiny-qwen2-5-vl" and request.title == "q, tiny-qwen2-5-vl"
    assert list(request.grid) == ["none@1", "gstep@0.25"] and request.grid["none@1"] is None
    assert request.questions.schema == QUESTION_SCHEMA and request.questions["question_id"].to_pylist() == ["1", "2"]
    assert request.videos is None and request.cache == str(tmp_path / "c")  # nothing says where videos are
    assert not (tmp_path / "r").exists() and not ray.is_initialized()
    with pytest.raises(IdentityMismatch):
        own(tmp_path, model="tiny-qwen3-vl")


def test_texts_of_own_questions_may_have_no_placeholder_of_the_model_and_changed_turns_are_other_annotations(tmp_path):

    def ask(row):
        file = write_questions(tmp_path / "q3.jsonl", [ROWS[0], {**ROWS[1], **row}])
        return own(tmp_path, benchmark=str(file))

    def talk(said):
        texts = (("user", "Who?"), ("assistant", said), ("user", "Why?"))
        return {"prompt": None, "messages": [{"role": role, "content": text} for role, text in texts]}

    requests = [ask(talk(said)) for said in ("It.", "He.")]
    assert requests[0].questions["conversation"].to_pylist()[0] is None
    assert "It." in requests[0].questions["conversation"].to_pylist()[1]
    assert requests[0].about["annotations"] != requests[1].about["annotations"]
    for row in ({"prompt": "What is a <image>?"}, {"choices": ["x", "<image>"]}, talk("<image>")):
        with pytest.raises(UsageError, match=r"q3\.jsonl, question 2: the text has <image>, which stands for a video"):
            ask(row)
    assert ask({"prompt": "What is a <|video_pad|>?"})  # of another model
    with pytest.raises(UsageError, match=r"line 2: no column option is read \(did you mean choices\?\)"):
        ask({"option": ["x", "y"]})


FASTV = "fastv,K=1"  # prunes inside the model, which sees every token where it was


@pytest.mark.parametrize(
    ("methods", "positions", "labels"),
    [
        (["gstep"], "contiguous", ["gstep@0.25"]),  # the family's own, which the names do not say
        (["gstep"], "original", ["gstep,positions=original@0.25"]),
        (["gstep"], "both", ["gstep@0.25", "gstep,positions=original@0.25"]),
        (["gstep", "gstep,positions=original"], "auto", ["gstep@0.25", "gstep,positions=original@0.25"]),
    ],
)
def test_methods_are_asked_at_the_positions_that_were_named(tmp_path, methods, positions, labels):
    request = own(tmp_path, method=[*methods, f"{FASTV},positions=original"], positions=positions)
    assert list(request.grid) == ["none@1", *labels, f"{FASTV}@0.25"]
    assert all(request.grid[label].positions == "original" for label in labels if "original" in label)


def test_a_method_that_cannot_prune_inside_the_model_is_refused_and_a_protocol_may_be_named(tmp_path):
    with pytest.raises(UsageError, match="fastv with K=2 prunes before layer 2"):
        videomme(tmp_path, method=["fastv"], model="tiny")
    assert videomme(tmp_path, protocol="paper").protocol.name == "lmms-eval-0.5"


def test_videos_are_cached_whole_with_the_protocols_frames_and_their_sizes_go_by_the_model(tmp_path):
    videos = videomme(tmp_path).videos
    assert (videos.pruner, videos.retention_ratio, videos.out) == ("none", 1.0, str(tmp_path / "r" / "cache"))
    assert (videos.num_frames, videos.frame_rule, videos.max_pixels) == (32, "truncate", None)
    assert videos.video_root == [str(tmp_path / "d")] and videos.evidence == []
    # The limits of Qwen3-VL are of all frames together.
    for model, max_pixels in (("tiny-qwen2-5-vl", 768 * 28 * 28), ("tiny-qwen3-vl", 32 * 768 * 32 * 32)):
        videos = videomme(tmp_path, model=model).videos
        assert (videos.num_frames, videos.frame_rule, videos.max_pixels) == (32, "round-even", max_pixels)


def by_time(folder, **options):
    """Options of a VideoMME whose frames are sampled by time, as the authors of Qwen-VL do."""
    return videomme(folder, **{"fps": 2.0, "max_frames": 768, "model": "tiny-qwen2-5-vl", **options})


def test_frames_by_time_replace_the_protocols_frames_in_the_cache_and_in_the_identity(tmp_path):
    request, plain = by_time(tmp_path), videomme(tmp_path, model="tiny-qwen2-5-vl")
    videos = request.videos
    assert (videos.fps, videos.max_frames, videos.num_frames, videos.frame_rule) == (2.0, 768, None, "truncate")
    job = resolve_recipe(videos, request.objects)
    sampling = job.identity("float32")["sampling"]
    assert (sampling["fps"], sampling["max_frames"], "num_frames" in sampling) == (2.0, 768, False)
    same = {name: value for name, value in plain.identity.items() if name not in ("num_frames", "frames", "pixels")}
    assert request.identity == {**same, "num_frames": None, "frames": {"fps": 2.0, "max_frames": 768}, "pixels": None}
    assert plain.identity["num_frames"] == 32 and plain.identity["pixels"]["max_pixels"] == 768 * 28 * 28
    capped = by_time(tmp_path, max_frames=None, max_video_tokens=24_576)
    assert capped.identity["frames"] == {"fps": 2.0, "max_frames": 768, "max_video_tokens": 24_576}
    assert (capped.videos.max_video_tokens, capped.videos.max_pixels) == (24_576, None)
    assert by_time(tmp_path, max_frames=None, model="tiny").identity["frames"]["max_frames"] == 32  # the family's


def test_a_cache_of_frames_by_time_is_not_taken_for_another(tmp_path):
    request = by_time(tmp_path)
    job = resolve_recipe(request.videos, request.objects)
    source = ModelSource.resolve("tiny-qwen2-5-vl")
    cache = str(whole(tmp_path, source=source, newline=None, identity=job.identity("float32")))
    assert by_time(tmp_path, cache=cache).videos.fps == 2.0
    with pytest.raises(IdentityMismatch, match=r"sampling\.max_frames: the cache has 768, this run 64"):
        by_time(tmp_path, cache=cache, max_frames=64)
    assert own(tmp_path, fps=2.0).identity["frames"] == {"fps": 2.0, "max_frames": 768}  # read alone
    with pytest.raises(IdentityMismatch, match=r"letter needs \{'fps': 1\.0, .* --fps and --max-frames"):
        own(tmp_path, fps=1.0)


@pytest.fixture
def thinking(tmp_path) -> Path:
    return thinking_model(tmp_path / "thinking")


def test_a_model_that_reasons_is_refused_without_room_for_it(tmp_path, thinking):
    why = r"ends with <think>.* lmms-eval-0\.7\.3 gives a reply 16 tokens.* --max-new-tokens 2048 or more.* </think>"
    with pytest.raises(UsageError, match=why):
        videomme(tmp_path, model=str(thinking))
    with pytest.raises(UsageError, match="gives a reply 2047 tokens"):
        videomme(tmp_path, model=str(thinking), max_new_tokens=2047)
    assert not (tmp_path / "r").exists()
    request = videomme(tmp_path, model=str(thinking), max_new_tokens=2048)
    assert request.identity["max_new_tokens"] == 2048 == make_answers_config(request).max_new_tokens
    assert json.loads(request.questions["decoding"][0].as_py())["max_new_tokens"] == 2048
    assert "thought" not in request.identity and not make_answers_config(request).close_thought
    closed, plain = (videomme(tmp_path, model=name, close_thought=True) for name in (str(thinking), "tiny"))
    assert closed.identity == {**plain.identity, "model": closed.identity["model"], "thought": "closed"}
    assert plain.identity == videomme(tmp_path, model="tiny").identity  # which opens no thought
    assert make_answers_config(closed).close_thought and make_answers_config(closed).max_new_tokens == 16


def test_options_are_not_scored_inside_a_thought(tmp_path, thinking):
    whole(tmp_path, source=ModelSource.resolve(thinking))
    asked = {"model": str(thinking), "max_new_tokens": 4096}
    with pytest.raises(UsageError, match=r"letter scores the options there.* --close-thought") as refused:
        own(tmp_path, **asked)
    assert "--max-new-tokens" not in str(refused.value)
    assert own(tmp_path, **asked, close_thought=True).thought == "closed"


BOTH = ["token_attention=last_layer", "token_key=last_layer"]


def test_what_the_methods_look_at_is_stored_with_the_tokens(tmp_path):
    assert videomme(tmp_path, method=["vidcom2", "fastv,K=1"]).videos.evidence == []
    videos = videomme(tmp_path, method=["gstep", "visionzip"]).videos
    assert videos.evidence == BOTH and videos.siglip is None
    videos = videomme(tmp_path, method=["cdpruner", "visionzip"], siglip="tiny").videos
    assert "image_embedding=single_patches" in videos.evidence and len(videos.evidence) == 3
    assert videos.siglip == "tiny"
    with pytest.raises(UsageError, match="has no token_attention and token_key for visionzip: name another"):
        own(tmp_path, method=["gstep", "visionzip"])


def test_a_cache_goes_on_as_it_was_begun(tmp_path):
    """Methods that need less evidence must not make it another cache; a pooling head that is not named is only read."""

    def begin(name, **options):
        request = videomme(tmp_path, **options)
        recipe = resolve_recipe(request.videos, request.objects)
        tiny_cache(tmp_path / name, ("x",), ratio=1.0, method="none", identity=recipe.identity("float32"))
        return str(tmp_path / name)

    attended = begin("attended", method=["visionzip"])
    for methods in (["gstep"], ["visionzip"]):
        assert videomme(tmp_path, cache=attended, method=methods).videos.evidence == BOTH
    headed = begin("headed", method=["cdpruner"], siglip="tiny")
    assert videomme(tmp_path, cache=headed).videos is None
    assert videomme(tmp_path, cache=headed, siglip="tiny").videos.siglip == "tiny"
    fewer = begin("fewer", num_frames=4)
    with pytest.raises(IdentityMismatch, match=r"sampling\.num_frames: the cache has 4, this run 32"):
        videomme(tmp_path, cache=fewer)
    assert videomme(tmp_path, cache=fewer, num_frames=4).videos.num_frames == 4
    assert not (tmp_path / "r").exists()


def answers_of(request) -> None:
    """Results with an answer to the first question without pruning; their header describes the whole grid."""
    write_results_header(request.store, request.identity)
    store, held = LocalStore(f"{request.config.out}/answers"), read_header(LocalStore(request.cache))["identity"]
    builder = prompt_builder(request.source)
    prunings = {
        label: None if one is None else resolve_pruning(one, held, request.source, builder)
        for label, one in request.grid.items()
    }
    write_answers_header(store, {PRUNINGS: describe_prunings(prunings, held)})
    asked = request.questions.to_pylist()[:1]
    commit_answers(store, "run", 0, [{**row, "pruning": "none@1", "status": "ok", "attempts": 1} for row in asked])


def test_two_seeds_stand_in_one_place_and_methods_that_draw_nothing_have_none(tmp_path):
    answers_of(own(tmp_path, method=["random", "gstep"]))
    for method, labels in (
        ("random,seed=0..1", ["random@0.25", "random,seed=1@0.25"]),
        ("random", ["random,seed=5@0.25"]),
    ):
        assert list(own(tmp_path, method=[method, "gstep"], seed=5).grid) == ["none@1", *labels, "gstep@0.25"]
    for method, why in (("gstep,seed=1", "unknown parameter seed of method"), ("random,seed=x", "seed must be a")):
        with pytest.raises(UsageError, match=why):
            own(tmp_path, method=[method])


def test_answers_of_a_seed_that_their_label_does_not_say_are_those_of_the_recorded_seed(tmp_path):
    """Once --seed was no part of a label, and a place had one seed."""
    first = own(tmp_path, method=["random"], seed=3)
    answers_of(replace(first, grid={"none@1": None, "random@0.25": first.grid["random,seed=3@0.25"]}))
    again = own(tmp_path, method=["random,seed=0..3"])
    named = [f"random,seed={seed}@0.25" for seed in range(3)]
    assert list(again.grid) == ["none@1", *named, "random@0.25"]
    found = [one.method_label for one in again.grid.values() if one]
    assert found == ["random", "random,seed=1", "random,seed=2", "random,seed=3"]


def test_a_method_that_means_something_else_than_in_the_answers_is_refused(tmp_path):
    """Nothing might be left to ask under it, and old answers would be shown as those of another parameter."""
    request = own(tmp_path, method=["gstep"])
    other = PruningSpec("gstep", 0.25, {"alpha": "0.3"})
    answers_of(replace(request, grid={"none@1": None, "gstep@0.25": other}))
    with pytest.raises(IdentityMismatch, match=r"prunings\.gstep@0\.25\.params\.alpha: the answers have 0\.3"):
        own(tmp_path, method=["gstep"])


def test_an_own_method_is_named_as_its_class_says_where_no_other_has_the_name(tmp_path):
    request = own(tmp_path, method=["tests.jobs.poison:Poison", f"{__name__}:Copy"])
    assert request.names == request.about["names"] == {"tests.jobs.poison:Poison": "poison"}
    assert "names" not in own(tmp_path).about


def test_a_cache_of_what_a_method_kept_is_refused(tmp_path):
    tiny_cache(tmp_path / "c", method="vidcom2", ratio=1.0)
    with pytest.raises(UsageError, match=r"has only the tokens of vidcom2 at 1, .* jobs\.prune --pruner none"):
        own(tmp_path)


def test_the_identity_is_of_what_decides_a_score(tmp_path):
    plain = own(tmp_path).identity
    assert (plain["benchmark"], plain["protocol"], plain["parser"]) == ("q.jsonl", "letter", "letter")
    assert plain["model"]["weights"] == ModelSource.resolve("tiny").identity
    assert json.loads(json.dumps(plain)) == plain
    same = {"method": ["uniform"], "retention_ratio": [0.1], "seed": 1, "draws": 500, "batch_size": 2, "limit": 1}
    assert own(tmp_path, **same).identity == plain  # more methods and more questions join those that are there
    assert own(tmp_path, num_frames=4).identity != plain
    first, second = (videomme(tmp_path, protocol=name).identity for name in ("lmms-eval-0.7.3", "official"))
    assert {name for name in first if first[name] != second[name]} == {"protocol", "prompt", "parser"}


def test_results_bind_the_place_they_are_in_and_a_place_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "r").mkdir()
    request = own(tmp_path)
    match_results(request.store, request.identity)  # nothing is there
    (tmp_path / "r" / "letter.txt").write_text("mine")
    with pytest.raises(NotResults, match=r"holds no results \(it has no evaluation\.json\)"):
        own(tmp_path)
    write_results_header(request.store, request.identity)
    assert own(tmp_path, method=["uniform"]).identity == request.identity
    with pytest.raises(IdentityMismatch, match=r"(?s)num_frames: the results have 32, this run 4.*another --out"):
        own(tmp_path, num_frames=4)


def test_a_cache_that_is_only_read_has_the_frames_that_the_results_name(tmp_path):
    held = json.loads(LocalStore(whole(tmp_path)).read("cache.json"))["identity"]
    header = {"schema_version": SCHEMA_VERSION, "newline": None, "identity": {**held, "sampling": {"num_frames": 3}}}
    LocalStore(tmp_path / "c").put("cache.json", serialize_header(header))
    assert own(tmp_path, num_frames=3).identity["num_frames"] == 3
    with pytest.raises(IdentityMismatch, match=r"the frames \{'num_frames': 3\}, but letter needs \{'num_frames': 4"):
        own(tmp_path, num_frames=4)
