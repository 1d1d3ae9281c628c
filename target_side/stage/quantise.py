"""quantise: rows in the encoding of the view; see common/quantize for what that means."""

from collections.abc import Iterator

from hyades.common.encodings import Encoding
from hyades.common.quantize import decode_rows, encode_rows
from hyades.target_side.stage.blocks import Block
from hyades.target_side.stage.meter import Meter, OperatorCounts


class Quantise:
    """Encodes float32; rows that have the encoding already pass as they are, and are not counted.

    Rows of another 16-bit type are decoded first, which is exact.
    """

    name = "quantise"

    def __init__(self, encoding: Encoding, meter: Meter) -> None:
        self.encoding: Encoding = encoding
        self._meter = meter

    def run(self, index: int, blocks: Iterator[Block]) -> Iterator[Block]:  # noqa: ARG002
        """Return each block in the encoding."""
        for block in blocks:
            if block.encoding == self.encoding:
                yield block
                continue
            with self._meter.span(self.name):
                values = decode_rows(block.data, block.encoding, block.width)
                data, counts = encode_rows(values, self.encoding)
            self._meter.add(
                self.name,
                OperatorCounts(len(data), len(data), block.data.size, data.size, counts),
            )
            yield Block(block.start, block.stop, block.ids, data, self.encoding, block.width)
