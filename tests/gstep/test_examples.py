"""The examples of ``gstep/examples`` run as they stand."""

from tests.examples import run_example


def test_methods_are_compared(capsys):
    run_example("gstep/examples/compare_methods.py")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("gstep    keeps 784 of 3136:  784 of gstep's") and len(others) == 6
    assert all(" keeps 784 of 3136: " in line for line in others)
