"""Times of the selection, measured on few tokens; no time is asserted."""

from jobs.benchmark.selection_times import Settings, measure


def test_without_the_plain_form_there_is_nothing_to_compare_with():
    settings = Settings(["iid"], [4], 16, 32, [0.5, 0.25], ["lazy"], 2)
    said = []
    measured = list(measure(settings, said.append))
    assert [[(t.form, t.n_tokens, t.budget, len(t.runs)) for t in m.times] for m in measured] == [
        [("lazy", 64, 32, 2)],
        [("lazy", 64, 16, 2)],
    ]
    assert all(t.to_plain is None and not t.extrapolated and t.products > 0 for m in measured for t in m.times)
    assert not any(m.agreements for m in measured)
    assert said[0] == "warming up" and "iid, 64 tokens, ratio 0.25, lazy: run 2 of 2" in said
