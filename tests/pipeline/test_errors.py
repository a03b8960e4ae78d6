"""Every class of faults has its meaning and remedy in one place, which the page of prune repeats word by word."""

import pickle
import re
from typing import get_args

from pipeline.errors import FAULTS, QUESTION_FAULTS, FaultClass, QuestionFaultClass, VideoFault
from tests.paths import ROOT


def test_every_class_has_an_entry():
    assert list(FAULTS) == list(get_args(FaultClass))
    assert list(QUESTION_FAULTS) == list(get_args(QuestionFaultClass))
    for fault in (*FAULTS.values(), *QUESTION_FAULTS.values()):
        assert fault.meaning and fault.remedy


def test_readme_lists_them():
    text = (ROOT / "pipeline/prune/README.md").read_text()
    rows = re.findall(r"^\| ([a-z-]+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    listed = {name: (meaning, remedy) for name, meaning, remedy in rows if name in FAULTS}
    assert listed == {name: (fault.meaning, fault.remedy) for name, fault in FAULTS.items()}


def test_a_fault_survives_the_way_between_processes():
    fault = VideoFault("timeout", "too\x00slow", stage="decode", backend="pyav", exit_signal=9, attempts=2)
    again = pickle.loads(pickle.dumps(fault))  # noqa: S301 - what multiprocessing does
    assert vars(again) == vars(fault) and str(again) == "timeout: too slow"
