"""Files of rows that a user wrote: the kinds agree, and what is wrong is said with its place."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError
from pipeline.inputs.manifest import read_manifest
from tests.pipeline.inputs.test_manifest import write_jsonl


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_know_where_their_rows_stand(tmp_path, monkeypatch, size):
    monkeypatch.setattr("pipeline.inputs.tables._PART_ROWS", 8 * size)
    rows = [{"video_id": f"v{i}", "uri": "a.mp4"} for i in range(5)] + [{"video_id": "v5", "uri": " "}]
    with pytest.raises(ManifestError, match="line 6: no uri"):
        read_manifest(str(write_jsonl(tmp_path / "m.jsonl", rows)))
    monkeypatch.setattr("pipeline.inputs.tables._PART_ROWS", size)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="row 5: no uri"):
        read_manifest(str(tmp_path / "m.parquet"))
