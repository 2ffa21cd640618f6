"""Decoded images in memory that the process and its data workers share."""

from __future__ import annotations

import mmap
from zlib import crc32

import numpy as np

HEAD = np.dtype([("crc", np.uint32), ("height", np.uint32), ("width", np.uint32)])


class ImageCache:
    """Pixels (uint8, [height, width, channels]) by image, each decoded once by any process.

    The memory is mapped before workers are forked, which then share it. What a process wrote is
    taken for whole only with its checksum, so that no lock is needed, and a process that dies in
    the middle leaves nothing. Images are kept from the first on, as many as fit into `limit` bytes.
    """

    def __init__(self, sizes: np.ndarray, channels: int, limit: int) -> None:
        """`sizes` are the numbers of pixels of each image at most."""
        ends = np.cumsum(sizes.astype(np.int64) * channels + HEAD.itemsize)
        self.kept = int(np.searchsorted(ends, limit, "right"))  # images
        self.bytes = int(ends[self.kept - 1]) if self.kept else 0
        self.starts, self.channels = np.concatenate([[0], ends]), channels
        # all at once: memory that grew with the steps would look like a leak
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(-1, self.bytes, flags=flags) if self.bytes else b""
        self.pixels = np.frombuffer(self.memory, np.uint8)

    def get(self, index: int) -> np.ndarray | None:
        """A view of the image's pixels, if it was decoded before."""
        if index >= self.kept:
            return None
        start = int(self.starts[index])
        head = self.pixels[start : start + HEAD.itemsize].view(HEAD)[0]
        height, width = int(head["height"]), int(head["width"])
        size = height * width * self.channels
        start += HEAD.itemsize
        if not size or start + size > self.starts[index + 1]:
            return None
        pixels = self.pixels[start : start + size]
        if crc32(pixels.data) != head["crc"]:
            return None
        return pixels.reshape(height, width, self.channels)

    def store(self, index: int, pixels: np.ndarray) -> None:
        """Keep them, if there is room for that image."""
        start = int(self.starts[index]) if index < self.kept else 0
        if index >= self.kept or start + HEAD.itemsize + pixels.size > self.starts[index + 1]:
            return
        flat = np.ascontiguousarray(pixels).reshape(-1)
        self.pixels[start + HEAD.itemsize :][: flat.size] = flat
        head = np.array([(crc32(flat.data), *pixels.shape[:2])], HEAD)
        self.pixels[start : start + HEAD.itemsize] = head.view(np.uint8)
