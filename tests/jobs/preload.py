"""Imports of the server from which tests fork drivers: a fork inherits no state of Ray's random ids."""

from importlib import import_module

from pipeline.runner.cluster.prefork.server import leave_ray_rng_unseeded

with leave_ray_rng_unseeded():
    for module in (
        *("jobs.prune", "pipeline.prune.run", "pipeline.prune.summary", "tests.jobs.faults"),
        "transformers.models.llava_onevision.modeling_llava_onevision",  # the model of most commands
    ):
        import_module(module)
