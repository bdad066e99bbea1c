"""The exception about files of sparse models."""


class SparseModelError(ValueError):
    """A file cannot be written, or is not a sparse model that this version reads.

    The message is one line that names the file.
    """
