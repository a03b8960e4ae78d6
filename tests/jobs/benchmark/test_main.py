"""The command of all benchmarks: what it refuses, what they share, the whole job beside a plain loop, and answering.

``test_serving_vllm.py`` has the ways of answering by vLLM.
"""

import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import pipeline, serving, shared
from jobs.benchmark.pipeline import make_videos, run_child
from jobs.benchmark.pipeline_work import FRAME_BYTES, JOB, LOOP, PipelineWork, encode_slice
from jobs.benchmark.serving import choose_modes, split_work
from jobs.benchmark.serving_ways import MODES, PRUNING, ServingWork, list_whole_files
from jobs.benchmark.shared import MAIN, OTHER, ProcessTree, classify_process, run_in_turn
from jobs.benchmark.tokens import INPUTS
from pipeline import TokenCache
from pipeline.errors import RunFailed, UsageError
from tests.builders import checkpoints
from tests.builders.answers import SHAPE, tiny_cache
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.builders.runs import forbid_models
from tests.interpreter import run_python
from tests.waiting import wait_until


def test_help_loads_no_torch():
    done = run_python("-X", "importtime", "-m", "jobs.benchmark", "--help", check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "rich" in loaded and not loaded & {"torch", "ray", "pyarrow", "transformers", "matplotlib"}
    assert all(name in done.stdout for name in benchmark.MEASUREMENTS)


REFUSED = [
    ("selection --frames 0", "at least 1"),
    ("selection --retention-ratios 2", "in (0, 1], got 2.0; did you mean 2%?"),
    ("selection --inputs noise", "noise"),
    ("selection --device cuda", "sees no CUDA device"),
    ("serving --plot no-such-folder/ways.png", "there is no folder"),
    ("decode --fps 0", "not a positive number"),
    ("decode --clips mpeg1-720p-10s-g30", "such as h264-720p-10s-g250"),
    ("pipeline --driver 100 100", "--driver takes two different numbers"),
    ("generic --model smolvlm", "nothing to compare"),  # it has no code of its own
    ("efficiency --model tiny --method fastv", "this model has 2 layers"),
    ("efficiency --method gstep --siglip tiny", "none of the methods takes anything from a SigLIP"),
    ("efficiency --method gstep,positions=original", "positions change no cost"),
    ("efficiency --device cpu --attn flash_attention_2", "runs on cuda"),
    ("efficiency --videos /no/such/folder", "no such folder"),
]


@pytest.mark.parametrize(("argv", "said"), REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    if "smolvlm" in argv:
        checkpoints.make("smolvlm", tmp_path / "smolvlm")
    forbid_models(monkeypatch)
    try:
        code = benchmark.main(argv.split())
    except SystemExit as ended:  # argparse's
        code = ended.code
    assert code == (1 if "--videos" in argv else 2)
    assert said in " ".join(capsys.readouterr().err.split())


RAY = "/venv/lib/python3.11/site-packages/ray"


def test_ways_run_in_turn_and_their_last_results_are_kept():
    calls = []
    turns = run_in_turn({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 3)
    assert calls == [*"ababab"] and (turns["a"].result, turns["b"].result) == (5, 6)
    assert len(turns["a"].wall_s) == len(turns["a"].cpu_s) == 3 and turns["a"].median_s > 0


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::MapWorker(MapBatches(Decoder)).submit", "decode actor"),
        ("ray::worker-1248:MapWorker(MapBatches(Encoder)).__init__", "encode actor"),
        ("ray::Writer.write", "write actor"),
        ("/venv/bin/python -c from multiprocessing.forkserver import main; main(48, 50, ['numpy'])", "decode child"),
        ('/venv/bin/python -c from jobs.benchmark.pipeline_work {"kind": "plain loop"}', "DataLoader worker"),
        (f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/r/sockets/raylet", "raylet"),
        (f"/venv/bin/python {RAY}/_private/workers/default_worker.py --raylet-name=/tmp/r/sockets/raylet", OTHER),
    ],
)
def test_a_process_is_known_by_its_command_line(command, kind):
    assert classify_process(command) == kind


BUSY = "import time; end = time.process_time() + .3\nwhile time.process_time() < end: pass\ntime.sleep(60)"


def test_a_tree_counts_children_whose_parent_has_ended_and_ends_them(monkeypatch):
    monkeypatch.setitem(shared.KINDS, "process_time", "busy child")
    start = f"subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdin=subprocess.DEVNULL)"
    works = "import subprocess, sys, time\nwhile time.process_time() < .1: pass"  # a tick of the clock is 10 ms
    code = f"{works}\nprint({start}.pid, flush=True); sys.stdin.read()"
    root = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tree = ProcessTree(root.pid)
    try:
        child = Path(f"/proc/{int(root.stdout.readline())}/cmdline")

        def used() -> float:
            tree.look(memory=True)
            return tree.cpu_s().get("busy child", 0.0)

        wait_until(lambda: used() > 0.1, "the child works")
        root.stdin.close()
        root.wait(timeout=30)
        wait_until(lambda: used() >= 0.25, "the child goes on")
        assert tree.cpu_s()[MAIN] > 0 and tree.peak_mb > 1
    finally:
        tree.end()
        root.kill()
        root.stdout.close()
    wait_until(lambda: not child.exists() or not child.read_bytes(), "the child has ended")  # a zombie's is empty


def test_made_up_tokens_are_seeded_finite_and_no_two_are_the_same():
    for make in INPUTS.values():
        tokens = make(20, 36, 48)
        assert torch.equal(tokens, make(20, 36, 48)) and tokens.isfinite().all()
        assert len(torch.unique(tokens.flatten(0, 1), dim=0)) == 20 * 36


@pytest.fixture
def works(monkeypatch):
    """Let child processes end at once: a video takes as long as it is encoded, and starting a second. The works run."""
    works = []

    def run_child(work):
        works.append(work)
        seconds = 1 + work.videos * (work.encode_s or 0.001) / work.encoders
        figures = {"seconds": seconds, "peak MB": 9.0 + work.videos, "store MB": 1.0 + work.videos}
        return figures | {"store objects": 1.0, "CPU ms: main process": 1e3 * seconds, "CPU ms: ended": 1.0}

    monkeypatch.setattr(pipeline, "run_child", run_child)
    return works


WORK = ("pipeline", "--encode-ms", 50, "--seconds", 10)


def test_loop_and_job_take_turns_and_starting_cancels_out(measure, works):
    found = measure(*WORK, "--frames", 2, 32, "--workers", 3, "--repeats", 2)[0]["cells"]
    assert [cell["MB"] for cell in found] == pytest.approx([0.885, 14.156], abs=1e-3)
    for cell in found:
        shares = [cell[name] for name in ("plain loop, busy", "job, busy", "job / plain loop")]
        assert shares == pytest.approx([1.0] * 3)
        assert cell["job, CPU ms: main process"] == pytest.approx(50) and cell["job, CPU ms: ended"] == 0
        assert cell["store MB a video"] == pytest.approx(1) and cell["job, peak MB (PSS)"] == 259
    assert [work.kind for work in works[::2]] == [LOOP, JOB] * 4
    assert {(work.workers, work.encoders, work.videos) for work in works} == {(3, 1, 50), (3, 1, 250)}


def test_logical_nodes_have_a_worker_of_each_kind(measure, works):
    found = measure(*WORK, "--nodes", 4, 1, "--frames", 2)[0]["cells"]
    for kind in (JOB, LOOP):
        sizes = [(work.nodes, work.workers, work.encoders, work.videos) for work in works if work.kind == kind]
        assert sizes == [(1, 1, 1, 50), (1, 1, 1, 250), (4, 4, 4, 200), (4, 4, 4, 1000)]
    assert [cell.get("job / nodes x the first") for cell in found] == [None, pytest.approx(1.0)]


def test_the_driver_is_shown_by_what_a_video_more_takes(capsys, works):
    assert benchmark.main(["pipeline", "--driver", "300", "100", "--encoders", "3"]) == 0
    sizes = {(work.kind, work.encode_s, work.encoders, work.nodes, work.videos) for work in works}
    assert sizes == {(JOB, 0.0, 3, 1, 100), (JOB, 0.0, 3, 1, 300)}
    assert "3 encoders, a video more from 100 to 300" in " ".join(capsys.readouterr().out.split())


def test_times_that_cannot_be_told_are_no_figure(capsys, monkeypatch):
    took = {"seconds": 9.0, "peak MB": 1.0, "CPU ms: main process": 1e3}
    monkeypatch.setattr(pipeline, "run_child", lambda work: took | {"seconds": float(work.videos)})
    assert benchmark.main(["pipeline", "--driver", "5", "6"]) == 1
    assert "1 more videos took the driver no more CPU time" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(pipeline, "run_child", lambda work: took)
    with pytest.raises(RunFailed, match="--seconds"):
        pipeline.measure_growth(PipelineWork(JOB, 2, 0.1, 1), 16, 32)


def test_loops_of_several_encoders_share_the_videos(tmp_path):
    loop = PipelineWork(LOOP, 2, 0.01, 1, encoders=2, folder=str(tmp_path), videos=20)
    make_videos(loop)
    loop.out.mkdir()
    for encoder in range(2):
        encode_slice(loop, encoder)
    written = [pq.read_table(file)["video_id"].to_pylist() for file in sorted(loop.out.iterdir())]
    assert [len(ids) for ids in written] == [10, 10] and len({*written[0], *written[1]}) == 20


def test_a_child_process_is_measured_and_says_why_it_fails(tmp_path, monkeypatch):
    loop = PipelineWork(LOOP, 2, 0.01, 1, folder=str(tmp_path), videos=8)
    done = run_child(loop)
    assert done["seconds"] > 8 * 0.01 and done["CPU ms: main process"] > 0 and done["peak MB"] > 10
    monkeypatch.setattr(pipeline, "_CHILD", "raise ValueError('no sleep')")
    with pytest.raises(RunFailed, match="the plain loop over 8 videos failed: ValueError: no sleep"):
        run_child(loop)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_job_runs_with_an_encoder_that_sleeps(tmp_path):
    done = run_child(PipelineWork(JOB, 2, 0.02, 1, nodes=1, folder=str(tmp_path), videos=16))
    assert done["seconds"] > 16 * 0.02 and done["peak MB"] > 100
    assert done["store objects"] >= 16 and 16 <= done["store MB"] * 1e6 / (2 * FRAME_BYTES) < 40
    kinds = ("main process", "decode actor", "decode child", "encode actor", "raylet", "gcs")
    assert all(done[f"CPU ms: {kind}"] > 0 for kind in kinds)


@pytest.mark.slow
def test_transformers_answers_from_a_cache_cold_and_again_and_a_way_that_fails_says_why(tmp_path, measure):
    tiny_cache(tmp_path / "cache", ("a", "b"))
    argv = ["--model", "tiny", "--cache", tmp_path / "cache", "--modes", "cached-transformers", "--repeats", 1]
    argv += ["--retention-ratio", 0.25, 0.1, "--questions", 1, 2, "--max-new-tokens", 2]
    start_s = time.perf_counter()
    record, shown = measure("serving", *argv, "--plot", tmp_path / "ways.png")
    command_s, found = time.perf_counter() - start_s, record["measured"]
    sizes = [(one["retention_ratio"], one["questions"], one["requests"]) for one in found]
    assert sizes == [(0.25, 1, 2), (0.25, 2, 4), (0.1, 1, 2), (0.1, 2, 4)]
    assert all(one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0 and one["peak_mb"] > 100 for one in found)
    assert sum(one["requests"] / one["requests_per_s"] for one in found) < command_s  # of which the passes are a part
    assert found[0]["visual_tokens"] > found[2]["visual_tokens"] and found[0]["sent_kb"] is None
    assert "cached-transformers" in shown and (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")
    job = ServingWork("tiny", str(tmp_path), 2, (0.25,), (1,), 2, 1)
    with pytest.raises(RunFailed, match=r"cached-transformers: NotACache: .*not a pruned-token cache"):
        serving.measure("cached-transformers", job)


def test_ways_with_pruning_inside_vllm_need_a_model_that_it_prunes_and_a_process_for_each_ratio():
    assert choose_modes(None, "tiny-qwen3-vl") == list(MODES)
    assert choose_modes(None, "tiny") == [mode for mode in MODES if mode not in PRUNING]
    assert choose_modes(["text-vllm"], "tiny") == ["text-vllm"]
    with pytest.raises(UsageError, match="vLLM has no pruning for llava_onevision"):
        choose_modes(["text-vllm", "live-vllm"], "tiny")
    job = ServingWork("tiny-qwen3-vl", "c", 2, (1.0, 0.5, 0.25), (1,), 2, 1)
    ratios = {mode: [part.ratios for part in split_work(mode, job)] for mode in MODES}
    assert ratios["online-vllm"] == [(1.0,)] and ratios["cached-vllm"] == [(1.0, 0.5, 0.25)]
    assert all(ratios[mode] == [(0.5,), (0.25,)] for mode in PRUNING)


@pytest.mark.parametrize("more", [{"uri": "s3://bucket/c.mp4"}, {"uri": "gone.mp4"}, {"end_s": 2.0}])
def test_the_way_from_the_videos_refuses_what_is_no_whole_local_file(tmp_path, more):
    store, file = tiny_cache(tmp_path / "cache", ()), tmp_path / "c.mp4"
    file.touch()
    for number, (name, source) in enumerate({"whole": {"uri": str(file)}, "c": {"uri": str(file), **more}}.items()):
        assert list_whole_files(TokenCache(tmp_path / "cache")) == [file] * number
        write_shard(store, name, encoded(name, random_tokens(number, SHAPE), 0.25, "gstep", **source))
    with pytest.raises(UsageError, match=r"online-vllm reads whole local files, and video c .* --modes cached-vllm"):
        list_whole_files(TokenCache(tmp_path / "cache"))
