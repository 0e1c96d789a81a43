"""Text as bytes: reads files, splits them into training and held-out text, and cuts batches."""

import hashlib
import pathlib
import sysconfig

import numpy as np

SEPARATOR = b"\0"  # between files


def read_folder(folder=""):
    """Contents of the text files in ``folder``, sorted by relative path. Files with a zero byte are skipped.

    Without ``folder``, reads the source of the Python standard library. Skips hidden files and installed packages.
    """
    root = pathlib.Path(folder or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise ValueError(f"--data: {str(root)!r} is not a folder")
    skip = {"site-packages", "dist-packages", "__pycache__"}
    contents = {}
    for path in root.rglob("*" if folder else "*.py"):
        name = path.relative_to(root)
        if path.is_file() and not any(part in skip or part.startswith(".") for part in name.parts):
            text = path.read_bytes()
            if b"\0" not in text:
                contents[name.as_posix()] = text
    if len(contents) < 2:
        raise ValueError(f"--data: {len(contents)} text files in {str(root)!r}, expected at least 2")
    return dict(sorted(contents.items()))  # the order of a file system is not deterministic


def split_names(names, heldout):
    """Splits files by a hash of their relative path, so that the side of a file does not depend on other files.

    One exception: if one side would be empty, it gets the file whose hash is nearest to the threshold.

    Returns:
      (training names, held-out names), each in the order of ``names``.
    """

    def fraction(name):
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64

    count = sum(fraction(name) < heldout for name in names)
    held = set(sorted(names, key=fraction)[: min(max(count, 1), len(names) - 1)])
    return [name for name in names if name not in held], [name for name in names if name in held]


def load(folder, heldout, window):
    """(training bytes, held-out bytes), uint8, each at least ``window`` long.

    Raises:
      ValueError: no such folder, or too little text in it.
    """
    contents = read_folder(folder)
    texts = []
    for side, names in zip(("training", "held-out"), split_names(list(contents), heldout), strict=True):
        texts.append(np.frombuffer(SEPARATOR.join(contents[name] for name in names), np.uint8))
        if len(texts[-1]) < window:
            raise ValueError(f"--data: {len(texts[-1])} bytes of {side} text, expected at least {window}")
    return texts


def train_batch(text, batch, window, seed, step):
    """Random windows of the text, (batch, window) int32. They depend only on the arguments, so a resume is exact."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - window + 1, batch)
    return text[starts[:, None] + np.arange(window)].astype(np.int32)


def heldout_batches(text, batch, window, count):
    """Evenly spaced windows of the text, (count, batch, window) int32; equal in each call."""
    starts = np.linspace(0, len(text) - window, count * batch).astype(np.int64)
    return text[starts[:, None] + np.arange(window)].astype(np.int32).reshape(count, batch, window)
