"""Settings of how hard videos are."""

from dataclasses import fields, replace

import pytest

from pipeline.evaluate.shapes.world import HARDNESS, PLAIN, Hardness


def test_each_setting_but_the_mixed_one_turns_one_knob_or_what_belongs_together():
    turned = {
        name: {item.name for item in fields(Hardness) if getattr(one, item.name) != getattr(PLAIN, item.name)}
        for name, one in HARDNESS.items()
    }
    assert turned.pop("plain") == set()
    assert turned.pop("mixed") == {"name", "size", "contrast", "specks", "pan", "noise"}
    assert turned.pop("needle") == {"name", "kinds", "brief", "standing", "scenes"}
    assert {name: knobs - {"name"} for name, knobs in turned.items()} == {
        "dim": {"contrast"},
        "small": {"size"},
        "clutter": {"specks"},
        "pan": {"pan"},
        "noise": {"noise"},
        "standing": {"standing"},
        "shake": {"shake"},
        "zoom": {"zoom"},
        "fade": {"fade"},
        "cuts": {"scenes", "back"},
    }


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        ({"size": (5, 9)}, r"hardness plain: size must lie in \(6, 24\), got \(5, 9\)"),
        ({"size": (20, 14)}, "size must be a range from 0 upwards"),
        ({"contrast": (0.0, 1.0)}, "contrast must lie in"),
        ({"specks": (-1, 3)}, "specks must be a range from 0 upwards"),
        ({"pan": (0, 9)}, "pan must lie in"),
        ({"brief": (0, 1)}, "brief must lie in"),
        ({"scenes": (1, 9)}, "scenes must lie in"),
        ({"shake": (0, 7)}, "shake must lie in"),
        ({"zoom": (0.8, 1.1)}, "zoom must lie in"),
        ({"fade": (2, 1)}, "fade must be a range"),
        ({"pan": (0, 2), "zoom": (0.8, 1.0)}, "a camera can do one of pan, shake and zoom"),
        ({"standing": 1.5}, "standing must be a share"),
    ],
)
def test_knobs_that_make_no_video_are_refused(knob, said):
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **knob)
