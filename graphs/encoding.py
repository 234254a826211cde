"""Names of files may hold bytes that are no text: they come in as half surrogate pairs, and go nowhere else."""


def is_utf8(text: str) -> bool:
    """Whether `text` can be written into a graph or a manifest, and handed to a library that opens a path itself."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
