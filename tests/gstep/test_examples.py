"""The examples of ``gstep/examples`` run as they stand."""

from tests.examples import run_example


def test_methods_are_compared(capsys):
    run_example("gstep/examples/compare_methods.py")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("gstep    keeps 784 of 3136:  784 of gstep's") and len(others) == 6
    assert all(" keeps 784 of 3136: " in line for line in others)


def test_a_live_model_answers_from_pruned_tokens(capsys):
    run_example("gstep/examples/live_model.py")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("all tokens: ") and first.endswith("after a prompt of 595 tokens")
    assert [line.partition(":")[0] for line in others] == ["25% by gstep", "5% by gstep", "5% by random"]
    assert not any(line.endswith(" 0.0") for line in others)
