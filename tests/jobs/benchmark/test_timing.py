"""Seconds of pieces of work that take turns."""

from time import sleep

from jobs.benchmark.timing import median_seconds, medians_in_turn, seconds_of


def test_forms_take_turns_and_have_medians_and_last_results():
    asked, waits = [], []

    def form(name):
        asked.append(name)
        sleep(0.2 if asked == ["a"] else 0.001)  # the first time is no median
        return f"{name}{len(asked)}"

    found = medians_in_turn({name: lambda name=name: form(name) for name in "ab"}, 3, waits.append)
    assert asked == ["a", "b"] * 3 and waits == ["a1", "b2", "a3", "b4", "a5", "b6"]
    assert [done for _, done in found.values()] == ["a5", "b6"]
    assert all(0.001 <= seconds < 0.2 for seconds, _ in found.values())


def test_one_piece_of_work_is_timed_once_or_often():
    assert seconds_of(lambda: sleep(0.01) or 7)[0] >= 0.01 and seconds_of(lambda: 7)[1] == 7
    assert median_seconds(lambda: 7, 3)[1] == 7
