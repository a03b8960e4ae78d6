"""The page of a whole cache: its numbers by plain loops, its links, and that nothing breaks out of it."""

import re
import shutil
from collections import Counter
from urllib.parse import unquote

import pytest
from markupsafe import escape

from jobs import inspect
from pipeline import TokenCache
from pipeline.errors import UsageError
from pipeline.inspect.cache_page import columns_shown, kept_by_place, kept_over_time, stages_of, write_cache_page
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.damage import flip, say_what_was_committed, shards
from tests.pipeline.pages import FRAMES, SIDE, VIDEO, build


@pytest.fixture
def many(tmp_path):
    """Videos of several lengths and methods' choices, without files."""
    store = write_header(tmp_path / "many", hidden_size=8)
    for number, n_frames in enumerate((1, 3, 7, 40)):
        tokens = random_tokens(number, (n_frames, 16, 8))
        write_shard(store, f"run{number}", encoded(f"<b>{number}</b>", tokens, 0.25, "gstep"))
    return TokenCache(tmp_path / "many")


def test_kept_shares_are_those_of_plain_loops(many):
    kept, whole = Counter(), Counter()
    for video_id in many.video_ids:
        row = many.metadata(video_id)
        for t, count in enumerate(row["kept_per_frame"]):
            part = int((t + 0.5) / row["n_frames"] * 20)
            kept[part] += count
            whole[part] += row["tokens_per_frame"]
    shares = kept_over_time(columns_shown(many))
    assert len(shares) == 20
    assert all(shares[part] == pytest.approx(kept[part] / whole[part]) for part in whole)
    videos = [many.get(video_id) for video_id in many.video_ids]
    places = kept_by_place(videos)
    assert places.shape == (4, 4)
    counted = Counter(int(index) % 16 for video in videos for index in video.index)
    assert [places.reshape(-1)[place] * 51 for place in range(16)] == pytest.approx([counted[p] for p in range(16)])


def test_a_page_leads_to_pages_of_videos_with_pictures(decoded, tmp_path, capsys):
    build(tmp_path / "c", decoded)
    file = tmp_path / "page.html"
    assert inspect.main([str(tmp_path / "c"), "--html", str(file)]) == 0
    assert "1 videos, 1 of them with pages in" in capsys.readouterr().out
    html = file.read_text()
    assert "1 videos · 1 failed" in html and "the file is cut off" in html and "fetch or re-encode the file" in html
    links = re.findall(r'(?:href|src)="([^"]*)"', html)
    assert [link for link in links if not link.startswith("data:image/jpeg;base64,")] == ["page-videos/00.html"]
    assert len(links) == 2 and escape(VIDEO) in (tmp_path / "page-videos/00.html").read_text()
    assert html.count('<rect x="') == SIDE * SIDE
    stages = {stage.name: stage for stage in stages_of(columns_shown(TokenCache(tmp_path / "c")))}
    assert stages["decode"].total_s == stages["decode"].longest_s > 0 and FRAMES


def test_its_links_lead_to_pages_whatever_its_name_is(many, tmp_path):
    file = tmp_path / "a: 100%25 #1?.html"
    write_cache_page(many, file)
    pages = [unquote(link) for link in re.findall(r'href="([^"#?:]*)"', file.read_text())]
    assert len(pages) == 4 and all((tmp_path / page).is_file() for page in pages)


def test_names_are_no_markup_and_nothing_is_fetched(many, tmp_path):
    line, _ = write_cache_page(many, tmp_path / "p.html")
    html = (tmp_path / "p.html").read_text()
    assert "4 videos, 4 of them with pages" in line
    assert "<b>0</b>" not in html and "&lt;b&gt;0&lt;/b&gt;" in html
    assert "http" not in html.replace("http-equiv", "") and "<script" not in html and "default-src 'none'" in html


def test_an_empty_cache_a_damaged_video_and_lost_rows_have_a_page_too(many, tmp_path, capsys):
    empty = TokenCache(write_header(tmp_path / "empty", hidden_size=8).root)
    assert "0 videos" in write_cache_page(empty, tmp_path / "e.html")[0]
    store = LocalStore(shutil.copytree(tmp_path / "many", tmp_path / "damaged"))
    say_what_was_committed(store)
    flip(shards(store)[0], 300)
    assert "4 videos, 3 of them with pages" in write_cache_page(TokenCache(store.root), tmp_path / "d.html")[0]
    shards(store, "videos")[0].unlink()
    assert inspect.main([str(store.root), "--html", str(tmp_path / "l.html")]) == 1
    assert "1 videos were committed and have no row now" in (tmp_path / "l.html").read_text()


def test_a_place_that_cannot_be_written_is_refused(many, tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        write_cache_page(many, tmp_path / "none/p.html")
    (tmp_path / "p-videos").write_text("")
    with pytest.raises(UsageError, match="the folder cannot be made"):
        write_cache_page(many, tmp_path / "p.html")


def test_what_the_summary_remarks_is_on_the_page_and_in_the_terminal(tmp_path, capsys):
    store = write_header(tmp_path / "c", hidden_size=8)
    more = {"decode_warnings": 2, "color_transfer": "smpte2084", "shared_positions": 4, "uneven_positions": 0}
    write_shard(store, "r", encoded("v", random_tokens(0, (3, 16, 8)), 0.25, "gstep", **more))
    file = tmp_path / "page.html"
    assert inspect.main([str(tmp_path / "c"), "--html", str(file)]) == 0
    assert inspect.main([str(tmp_path / "c")]) == 0
    terminal = " ".join(capsys.readouterr().out.split())
    for said in (
        "1 videos decoded with warnings",
        "1 videos in HDR (PQ or HLG)",
        "1 videos whose patches share positions",
    ):
        assert said in terminal and said in file.read_text()
