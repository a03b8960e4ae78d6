"""Brace patterns: expanded as bash does, on names that bash leaves alone too."""

import shutil
import subprocess

import pytest

from pipeline.errors import ManifestError
from pipeline.inputs import listings
from pipeline.inputs.listings import expand_braces
from tests.builders.manifests import read_manifest

PATTERNS = [
    "shard-{000..010}.tar", "{a,b}{1..3}.tar", "a{b{c,d},e}f", "{3..1}", "{-2..2..2}", "{01..3}", "x{}y",
    "x{a}y", "{a,}", "{a,b", "a}b", "{1..2}{", "{{1,2},3}", "plain.tar", "{0..10..5}", "{5..-5..3}", "{-01..2}",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_to_bash(pattern):
    said = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" s3://b/{pattern}'], capture_output=True, text=True, check=True
    )
    assert expand_braces([f"s3://b/{pattern}"]) == said.stdout.splitlines()


def test_a_pattern_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(listings, "_MAX_NAMES", 1000)
    with pytest.raises(ManifestError, match="too many names"):
        expand_braces(["s3://b/{0..99999999999}.tar"])


def test_a_pattern_may_be_longer_than_a_file_s_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{number:03}.mp4" for number in range(90)]
    for name in names:
        (tmp_path / name).touch()
    assert read_manifest(f"{{{','.join(names)}}}")["video_id"].to_pylist() == names


def test_several_names_are_listed_one_after_the_other_and_ids_are_unique_over_them(tmp_path):
    for name in ("a/x.mp4", "a/y.mp4", "b/z.mp4", "c1.mp4", "c2.mp4", "d/x.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    named = [f"{tmp_path}/b", f"{tmp_path}/a/*.mp4", f"{tmp_path}/c{{2,1}}.mp4"]
    assert read_manifest(named)["video_id"].to_pylist() == ["z.mp4", "x.mp4", "y.mp4", "c2.mp4", "c1.mp4"]
    with pytest.raises(ManifestError, match=r"no such folder.*"):
        read_manifest([f"{tmp_path}/a", f"{tmp_path}/missing"])
    with pytest.raises(ManifestError, match=r"several VIDEOS.*1 rows repeat a video_id.*'x.mp4'"):
        read_manifest([f"{tmp_path}/a", f"{tmp_path}/d"])
