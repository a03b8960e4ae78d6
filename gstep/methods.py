"""The tables of pruning methods: the name and the import path of the class.

Classes are import paths, so that ``--help`` lists the methods without importing torch. A method whose class is
``cacheable`` belongs in VIDEO_METHODS, any other method in QUESTION_METHODS.

Not in the tables:

- KiToke (2604.03414): its official code is not published yet.
- ForestPrune (2603.22911): keeps half of the tokens at most, and of a still video early frames only.
- DART (2502.11494): needs keys and hidden states of the language model, and the question.
- DyCoke (2411.15024): keeps 28 % at least before the language model, and prunes the rest inside it.
- SToP (2604.20937): not a method, but the parameters ``mu_s`` and ``mu_t`` of four methods (gstep.pruners.sinks).
"""

from __future__ import annotations

from collections.abc import Mapping

#: Methods that look at the video alone: their selection can be cached.
VIDEO_METHODS: Mapping[str, str] = {
    "none": "gstep.pruners.none:KeepAll",
    "random": "gstep.pruners.random:Random",
    "uniform": "gstep.pruners.uniform:Uniform",
    "topk": "gstep.pruners.topk:TopK",
    "fps": "gstep.pruners.fps:FPS",
    "gstep": "gstep.pruners.gstep:GSTEP",
    "novelty": "gstep.pruners.novelty:Novelty",
    "divprune": "gstep.pruners.divprune:DivPrune",
    "evs": "gstep.pruners.evs:EVS",
    "vidcom2": "gstep.pruners.vidcom2:VidCom2",
    "vcast": "gstep.pruners.vcast:VCAST",
    "fastvid": "gstep.pruners.fastvid:FastVID",
    "visionzip": "gstep.pruners.visionzip:VisionZip",
    "holitom": "gstep.pruners.holitom:HoliTom",
    "flashvid": "gstep.pruners.flashvid:FlashVID",
    "ottvid": "gstep.pruners.ottvid:OTTVid",
    "tango": "gstep.pruners.tango:Tango",
}

#: Methods that look at the question too: they select again for each question.
QUESTION_METHODS: Mapping[str, str] = {
    "cdpruner": "gstep.pruners.cdpruner:CDPruner",
    "fastv": "gstep.pruners.fastv:FastV",
}

#: All methods.
METHODS: Mapping[str, str] = {**VIDEO_METHODS, **QUESTION_METHODS}

#: Methods that can prune inside vLLM: they look at the video alone, need no evidence of its encoder, merge no tokens,
#: and keep a number of tokens that is known beforehand.
LIVE_METHODS = ("gstep", "novelty", "uniform", "random", "topk", "fps", "divprune", "vcast")
