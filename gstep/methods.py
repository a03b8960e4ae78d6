"""The tables of pruning methods: each name with the import path of its class, so that ``--help`` imports no torch.

These published methods are not included: KiToke (2604.03414), which has no official code yet; ForestPrune (2603.22911),
which keeps at most half of the tokens; DART (2502.11494), which needs keys and hidden states of the language model;
DyCoke (2411.15024), which prunes mostly inside the language model. SToP (2604.20937) is available as the parameters
``mu_s`` and ``mu_t`` of four methods.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Methods whose selection depends only on the video, so that it can be cached.
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

#: Methods whose selection also depends on the question, so that they run for each question.
QUESTION_METHODS: Mapping[str, str] = {
    "cdpruner": "gstep.pruners.cdpruner:CDPruner",
    "fastv": "gstep.pruners.fastv:FastV",
}

#: All methods.
METHODS: Mapping[str, str] = {**VIDEO_METHODS, **QUESTION_METHODS}

#: Methods that can prune inside vLLM: they depend only on the video, need no evidence from its encoder, merge no
#: tokens, and keep a number of tokens that is known in advance.
LIVE_METHODS = ("gstep", "novelty", "uniform", "random", "topk", "fps", "divprune", "vcast")
