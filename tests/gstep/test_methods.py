"""The table of methods: no name twice, every class by its own name, and no torch for a list of names."""

import subprocess
import sys

from gstep.lazy import load_object
from gstep.methods import METHODS, OF_A_QUESTION, OF_A_VIDEO


def test_every_line_names_a_class_by_its_own_name():
    assert not OF_A_VIDEO.keys() & OF_A_QUESTION.keys()
    for name, target in METHODS.items():
        assert load_object(target).name == name


def test_listing_the_methods_loads_no_torch():
    code = "import sys, gstep.methods; print(len(gstep.methods.METHODS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(METHODS)), "False"]
