"""The pruning methods, a line each: its name, and the class that it stands for.

Strings, so that ``--help`` lists the methods without importing torch. A method goes into the table of what it looks at,
which its class says too (``Pruner.cacheable``).
"""

from __future__ import annotations

from collections.abc import Mapping

#: Methods that look at the video alone: what they keep can be stored.
OF_A_VIDEO: Mapping[str, str] = {
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
}

#: Methods that look at the question too: they choose anew for each.
OF_A_QUESTION: Mapping[str, str] = {
    "cdpruner": "gstep.pruners.cdpruner:CDPruner",
    "fastv": "gstep.pruners.fastv:FastV",
}

#: All of them.
METHODS: Mapping[str, str] = {**OF_A_VIDEO, **OF_A_QUESTION}
