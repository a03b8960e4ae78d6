"""The uri of a video: written and read in one place, for names of any kind."""

from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.storage.location import Location

NAMES = st.text(st.sampled_from("#?%&= /\\@:.aé日😀\n\0"), max_size=8)
ARCHIVES = NAMES.map(lambda name: name.replace("#", ""))  # the indexing of archives refuses others


@example("s3://bucket/a.tar?versionId=x", "#", 512)
@example("/a.tar", "", 0)
@given(file=ARCHIVES, member=NAMES, offset=st.integers(0, 2**53))
def test_a_member_is_read_from_its_uri(file, member, offset):
    location = Location(file, member, offset, size=7, mark=2**64 - 1)
    assert location.uri == f"{file}#{member}"
    assert Location.parse(location.uri, location.offset, 7, 2**64 - 1) == location


@example("/videos/a.tar#b.mp4")
@given(file=NAMES)
def test_the_uri_of_a_file_of_its_own_is_its_path(file):
    assert Location(file, size=7).uri == file and Location.parse(file, None, 7) == Location(file, size=7)
