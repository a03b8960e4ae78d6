"""Options: from Python in its types, refused by name, recorded without secrets; and what --max-failed allows."""

import pytest

from jobs.reprune import RepruneConfig
from pipeline.errors import UsageError
from pipeline.evaluate.config import EvaluateConfig
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import describe_engine
from pipeline.options import make_config
from pipeline.prune.config import PruneConfig


def test_options_are_those_of_the_command_in_pythons_types(tmp_path):
    given = {"out": tmp_path, "video_root": [tmp_path], "retention_ratio": 1, "pruner_param": {"alpha": 0.5, "e": None}}
    config = make_config(PruneConfig, "f", given)
    assert (config.out, config.video_root) == (str(tmp_path), [str(tmp_path)])
    assert (config.retention_ratio, config.pruner_params()) == (1.0, {"alpha": "0.5", "e": "none"})


@pytest.mark.parametrize(("given", "ratio"), [("25%", 0.25), ("12.5 %", 0.125), (0.1, 0.1), ("100%", 1.0)])
def test_a_share_may_be_a_percentage(given, ratio):
    assert make_config(PruneConfig, "f", {"retention_ratio": given}).retention_ratio == ratio
    both = make_config(EvaluateConfig, "f", {"benchmark": "shapes", "data": "d", "retention_ratio": [given, 0.05]})
    assert both.retention_ratio == [ratio, 0.05]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retention_ration": 0.5}, r"f\(\): unknown option retention_ration; did you mean retention_ratio\?"),
        ({"pruner_param": "alpha=1"}, r"f\(\): pruner_param must be a list of texts"),
        ({"retention_ratio": "0.25"}, r"f\(\): retention_ratio must be a number, got '0.25'"),
        ({"retention_ratio": "x%"}, r"f\(\): retention_ratio must be a number, got 'x%'"),
        ({"fps": "25%"}, r"f\(\): fps must be a number, got '25%'"),
        ({"decode_timeout": 10**400}, r"f\(\): decode_timeout must be a number, got 10000"),
        ({"retention_ratio": 2.0}, r"--retention-ratio must be in \(0, 1\], got 2.0"),
        ({"dry_run": True}, r"f\(\) takes no dry_run, which is for the command"),
    ],
)
def test_other_options_and_values_are_refused_by_name(options, said):
    with pytest.raises(UsageError, match=said):
        make_config(PruneConfig, "f", options)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PruneConfig, {"retention_ratio": 25}),
        (EvaluateConfig, {"benchmark": "shapes", "retention_ratio": [0.1, 25]}),
        (RepruneConfig, {"whole": "w", "out": "o", "retention_ratio": 25}),
    ],
)
def test_a_percentage_without_its_sign_is_named(config, options):
    with pytest.raises(UsageError, match=r"--retention-ratio must be in \(0, 1\], got 25(.0)?; did you mean 25%\?"):
        config(**options)


@pytest.mark.parametrize(
    ("text", "total", "limit", "from_outside"),
    [
        (None, 10, 9, 10), (None, 20, 19, 10), (None, 200, 199, 10), (None, 400, 399, 20), ("0", 10, 0, 0),
        ("3", 400, 3, 3), ("0.25", 10, 2, 2), ("50%", 400, 200, 200), ("1.0", 10, 10, 10),
        ("1e-05", 10**6, 10, 10), ("2.5E-1", 10, 2, 2),
    ],
)  # fmt: skip
def test_so_many_videos_may_fail_and_so_many_from_outside(text, total, limit, from_outside):
    config = PruneConfig(max_failed=text)
    assert (config.compute_failure_limit(total), config.compute_infrastructure_limit(total)) == (limit, from_outside)


def test_a_model_that_takes_more_gpus_than_a_run_may_is_refused():
    options = {"questions": "q", "engine": "vllm", "tensor_parallel": 8}
    assert GenerateConfig(**options, max_gpus=8).max_gpus == 8
    with pytest.raises(UsageError, match="--max-gpus 4 does not suffice for one model of --tensor-parallel 8"):
        GenerateConfig(**options, max_gpus=4)


def test_a_record_tells_no_secret():
    for endpoint, shown in ("http://store.example:9000", "(set)"), (None, None):
        assert PruneConfig(s3_endpoint=endpoint).as_record()["s3_endpoint"] == shown
    params = ["hf_token=hf_abc", "hf-token=x", "max_num_batched_tokens=8192"]
    config = GenerateConfig(questions="q", engine="vllm", engine_param=params)
    shown = ["hf_token=(set)", "hf-token=(set)", "max_num_batched_tokens=8192"]
    assert config.as_record()["engine_param"] == config.list_changed_values()["engine_param"] == shown
    assert config.engine_params()["hf_token"] == "x"
    assert describe_engine(config) == {"engine": {"name": "vllm"}}  # which the header of the answers has
