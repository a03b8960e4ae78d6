"""Arrow files and streams on disk (and Feather), read one record batch at a time.

An uncompressed file is memory-mapped. A compressed batch is decompressed whole, but only the requested columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipeline.errors import ManifestError

_FOOTER_END = struct.Struct("<i6s")  # the length of the footer, and "ARROW1"
_BATCHES_SLOT = 10  # the slot of the field recordBatches in the footer's vtable
_BLOCK_BYTES = 24  # bytes of an entry of recordBatches, which begins with the batch's position in the file


class RecordBatches:
    """The record batches of an Arrow file, or of a stream, which the datasets library writes.

    Attributes:
        lengths: the number of rows of each batch.
    """

    def __init__(self, uri: str) -> None:
        """Map the file, and read the lengths of its batches, but no column.

        Raises:
            ManifestError: ``uri`` is in a store.
            ArrowException: the file is not an Arrow file or stream, or is damaged.
        """
        if "://" in uri:
            raise ManifestError(f"{uri}: an Arrow file is read from disk alone; copy it here, or make it Parquet")
        self._source = pa.memory_map(uri)
        self._starts: list[int] = []  # start of each batch of a stream, or of its dictionaries
        self._has_dictionaries = False
        try:
            self.schema, self._is_stream = pa.ipc.open_file(self._source).schema, False
        except pa.ArrowInvalid:
            self._scan_stream()
        else:
            self.lengths = _read_lengths(self._source)
        self._columns: tuple[int, ...] = ()  # the columns of the open reader
        self._reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader | None = None
        self._next = 0  # the batch that the reader of a stream reads next

    def _scan_stream(self) -> None:
        """Read the messages of a stream, and set ``schema``, ``lengths`` and the position of each batch."""
        self._source.seek(0)
        self.schema, self._is_stream = pa.ipc.open_stream(self._source).schema, True
        self.lengths, start = [], self._source.tell()
        while True:
            try:
                message = pa.ipc.read_message(self._source)
            except EOFError:
                return
            if message.type == "record batch":
                self.lengths.append(_count_rows(message))
                self._starts.append(start)
                start = self._source.tell()
            self._has_dictionaries = self._has_dictionaries or message.type == "dictionary"

    def read(self, piece: int, columns: Sequence[str], at_once: int = 1) -> Iterator[pa.RecordBatch]:
        """Yield the named columns of record batch ``piece``, in file order, in slices of ``at_once`` rows.

        Names that the file lacks are ignored. Without columns, the slices only have a number of rows.

        Raises:
            ArrowException: the batch is damaged.
        """
        numbers = tuple(number for number, name in enumerate(self.schema.names) if name in columns)
        batch = self._read_batch(piece, numbers or (0,))  # a reader without a list of columns reads all columns
        _check_values(batch)
        batch = batch if numbers else batch.select([])
        yield from (batch.slice(start, at_once) for start in range(0, len(batch), at_once))

    def _read_batch(self, piece: int, columns: tuple[int, ...]) -> pa.RecordBatch:
        """Read the columns with these numbers of one batch; the reader is kept while the columns stay the same.

        No other batch is decompressed, except in a stream with dictionaries: there, all batches since the last one are
        read, or after going back or a change of columns, all from the first.
        """
        if self._reader is None or columns != self._columns or (self._has_dictionaries and piece < self._next):
            self._source.seek(0)
            make_reader = pa.ipc.open_stream if self._is_stream else pa.ipc.open_file
            self._reader = make_reader(self._source, options=pa.ipc.IpcReadOptions(included_fields=list(columns)))
            self._columns = columns
            self._next = 0
        if not self._is_stream:
            return self._reader.get_batch(piece)
        # A dictionary may change between batches, so all are read. Otherwise the reader jumps to this batch.
        first = self._next if self._has_dictionaries else piece
        self._source.seek(self._starts[first])
        for _ in range(first, piece):
            self._reader.read_next_batch()
        self._next = piece + 1
        return self._reader.read_next_batch()


def _check_values(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid for values that point outside their buffers, which could crash the process.

    Text that is not UTF-8 is accepted.
    """
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # Arrow checks the text after the offsets
                raise


def _find_batches(source: pa.MemoryMappedFile) -> list[int]:
    """Return the positions of a file's record batches, from its footer, a flatbuffer that pyarrow has validated.

    Raises:
        struct.error: the footer is truncated.
    """
    end = source.size() - _FOOTER_END.size
    length, _ = _FOOTER_END.unpack(source.read_at(_FOOTER_END.size, end))
    footer = source.read_at(length, end - length)

    def read(kind: str, place: int) -> int:
        return int(struct.unpack_from(f"<{kind}", footer, place)[0])

    table = read("I", 0)
    vtable = table - read("i", table)
    if read("H", vtable) <= _BATCHES_SLOT or not (slot := read("H", vtable + _BATCHES_SLOT)):
        return []
    batches = table + slot + read("I", table + slot)
    return [read("q", batches + 4 + _BLOCK_BYTES * number) for number in range(read("I", batches))]


def _read_lengths(source: pa.MemoryMappedFile) -> list[int]:
    """Return the number of rows of each record batch of a file.

    Raises:
        ArrowInvalid: a batch or the footer is damaged.
    """
    lengths = list[int]()
    try:
        for start in _find_batches(source):
            source.seek(start)
            lengths.append(_count_rows(pa.ipc.read_message(source)))
    except (EOFError, struct.error) as error:  # zeros instead of a batch, or a truncated footer
        raise pa.ArrowInvalid(f"record batch {len(lengths)} cannot be read: {error}") from error
    return lengths


def _count_rows(message: pa.Message) -> int:
    """Return the number of rows of a record batch."""
    return int(pa.ipc.read_record_batch(message, pa.schema([])).num_rows)
