"""Values that take long to load: once each, the last few kept."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from pipeline.cache.loaded_once import LoadedOnce


def test_threads_wait_for_one_load_and_others_load_meanwhile():
    both = Barrier(2, timeout=30)  # met only if the loads of "a" and "b" are under way together
    calls = []

    def load(name):
        calls.append(name)
        both.wait()
        return [name]

    held = LoadedOnce(load, 4)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(held, "abababab"))
    assert sorted(calls) == ["a", "b"] and found == [["a"], ["b"]] * 4 and found[0] is found[2]


def test_the_last_used_are_kept():
    calls = []
    held = LoadedOnce(lambda *key: calls.append(key) or key, 2)
    for key in ((1, "x"), (2, "x"), (1, "x"), (3, "x"), (1, "x"), (2, "x")):
        assert held(*key) == key
    assert calls == [(1, "x"), (2, "x"), (3, "x"), (2, "x")]


def test_it_travels_to_another_process_without_its_values():
    held = LoadedOnce(str.upper, 2)
    assert held("a") == "A"
    again = pickle.loads(pickle.dumps(held))  # noqa: S301 - a held value would not pickle
    assert again("a") == "A"


def test_what_failed_is_not_kept():
    answers = iter([OSError("away"), OSError("away")])

    def load():
        if (error := next(answers, None)) is not None:
            raise error
        return 1

    held = LoadedOnce(load, 2)
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            held()
    assert held() == 1
