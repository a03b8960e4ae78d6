"""Options of a server with live pruning: what is refused before vLLM loads, and what the gate takes from them."""

import pytest

from jobs.serve import LIVE_USUAL, main
from pipeline.errors import UsageError
from pipeline.serve.config import KEY, LiveConfig, ServeConfig
from pipeline.serve.server import check_live, make_server_words
from tests.ports import free_ports

MODEL = "tiny-qwen3-vl"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": None}, "--model is missing"),
        ({"retention_ratio": 1.0}, "--retention-ratio must be below 1.*vllm serve MODEL alone"),
        ({"retention_ratio": 0.0}, r"--retention-ratio must be in \(0, 1\], got 0.0"),
        ({"retention_ratio": 25.0}, "did you mean 25%"),
        ({"num_frames": 1}, "--num-frames must be at least 2"),
        ({"seed": -1}, "--seed must be at least 0"),
        *(
            ({"media_domain": ["b.org", name]}, "--media-domain must be a host name without a port")
            for name in ("https://a.org", "a.org:80", "*.a.org", "a.org.", "a b", " ", "")
        ),
        ({"media_path": "/nowhere"}, "there is no such folder"),
        ({"method_param": ["alpha"]}, "--method-param takes NAME=VALUE"),
        ({"method_param": [" =1"]}, "--method-param takes NAME=VALUE, got ' =1'"),
        ({"host": "0.0.0.0"}, "other machines can reach"),
        ({"port": 0}, "--port must be"),
        ({"tensor_parallel": 0}, "--tensor-parallel must be"),
        ({"engine_param": ["config=vllm.yaml"]}, "--engine-param config: vLLM would not read the file"),
    ],
)
def test_options_that_make_no_sense_are_refused(monkeypatch, options, why):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(UsageError, match=why):
        LiveConfig(**{"model": MODEL, **options})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": "tiny"}, "vLLM has no pruning for llava_onevision"),
        ({"model": "tiny-internvl"}, "vLLM has no pruning for internvl"),
        ({"method": "evs"}, "--video-pruning-method evs --video-pruning-rate 0.75"),
        ({"method": "fastv"}, "looks at the question"),
        ({"method_param": ["alph=1"]}, "did you mean alpha"),
        *(
            ({"engine_param": [f"{name}=x"]}, "it follows from the model and the other flags")
            for name in ("hf_overrides", "media-io-kwargs.video", "allowed_local_media_path", "middleware")
        ),
        ({"engine_param": ['ec_transfer_config={"ec_connector": "A"}']}, "another server has pruned"),
        ({"engine_param": ["ec-transfer-config.ec_connector=A"]}, "another server has pruned"),
        ({"engine_param": ["kv_offloading_size=4"]}, "not tested"),
        ({"engine_param": ["pipeline_parallel_size=2"]}, "do not see the kept tokens"),
        ({"engine_param": ["enable_tower_connector_lora=true"]}, "enable_tower_connector_lora: "),
    ],
)
def test_what_vllm_would_not_prune_right_is_refused_before_it_loads(options, why):
    with pytest.raises(UsageError, match=why):
        check_live(LiveConfig(**{"model": MODEL, **options}))


def test_hosts_are_compared_in_lower_case():
    assert LiveConfig(model=MODEL, media_domain=["Videos.A.org", "b"]).list_media_hosts() == ["videos.a.org", "b"]


def test_the_server_that_has_no_gate_is_refused(monkeypatch):
    config = LiveConfig(model=MODEL, port=8001)
    assert "--port=8001" in make_server_words(config, {"model": "m"}, "m")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UsageError, match="Unset VLLM_USE_RUST_FRONTEND"):
        make_server_words(config, {"model": "m"}, "m")


def test_a_good_request_is_resolved():
    source, live = check_live(LiveConfig(model=MODEL, method="novelty", retention_ratio=0.1, seed=3))
    assert (source.model_type, live.method, live.retention_ratio, live.seed) == ("qwen3_vl", "novelty", 0.1, 3)


def test_the_command_takes_options_of_its_own_behind_live(capsys):
    assert main(["--live", "--model", "tiny", "--port", str(*free_ports(1))]) == 2
    assert "vLLM has no pruning" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit, match="2"):
        main(["--live", "--refresh-seconds", "3"])
    with pytest.raises(UsageError, match="--live: write it on the command line"):
        ServeConfig(cache="c", live=True)


def test_help_is_a_screen(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--live", "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    assert all(f"--{name.replace('_', '-')}" in text for name in LIVE_USUAL)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--live" in capsys.readouterr().out
