"""The custom-op library of domain `chairlift`: C++ sources here, and where the built library lies."""

from pathlib import Path

LIBRARY_NAME = "libchairlift_ops.so"


def library_path() -> Path:
    """The built op library, for `SessionOptions.register_custom_ops_library` and `ctypes.CDLL`.

    Found beside this file or in another folder of this package (an editable install keeps built files apart from the
    sources), else the newest one under `build/` of a source tree. Raises FileNotFoundError when there is none.
    """
    for folder in __path__:
        if (installed := Path(folder) / LIBRARY_NAME).is_file():
            return installed
    root = Path(__file__).resolve().parents[2]
    built = sorted(root.glob(f"build/*/{LIBRARY_NAME}"), key=lambda path: path.stat().st_mtime)
    if built:
        return built[-1]
    raise FileNotFoundError(f"{LIBRARY_NAME} is not built: install the package or run cmake in {Path(__file__).parent}")
