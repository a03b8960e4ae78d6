"""A prune run on the driver: what it asks of the cluster, and what it says of what it does not get."""

from pipeline.prune.config import PruneConfig
from pipeline.prune.run import _plan


def test_a_number_of_videos_a_shard_wins_over_its_size():
    def planned(**options):
        cluster = {"CPU": 64.0, "GPU": 8.0}
        return _plan(PruneConfig(**options), cluster, "cuda", 10**5, 11_239_424, 32).videos_per_shard

    assert (planned(), planned(target_shard_mb=1000), planned(target_shard_mb=1)) == (22, 88, 1)
    assert planned(videos_per_shard=3) == planned(videos_per_shard=3, target_shard_mb=1000) == 3
