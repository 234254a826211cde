"""A function of cuLaunchKernel's form that lets launches from Python wait for their turn on a HostDevice.

Launches from inside a forward pass happen when that pass does, which the device has let wait already.
"""

import ctypes
from collections.abc import Callable, Sequence

from service.errors import ExecutorError
from tests.cuda.host_device import HostDevice

PTR = ctypes.c_void_p
LAUNCH_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, PTR, *[ctypes.c_uint] * 7, PTR, ctypes.POINTER(PTR), ctypes.POINTER(PTR))


class LaunchGate:
    """Hands launches on to `launch`. `device` is where they wait; without one they happen at once."""

    def __init__(self, launch: Callable[..., int], types_of: Callable[[int], Sequence[type]]) -> None:
        """`types_of` yields a function's argument types: the driver copies arguments at the launch, and so do we."""
        self.device: HostDevice | None = None
        self._launch = launch
        self._types_of = types_of
        self._callback = LAUNCH_TYPE(self._arrive)
        self.address = ctypes.cast(self._callback, PTR).value

    def _arrive(self, function, *rest) -> int:
        if self.device is None or self.device.is_running:
            return self._launch(function, *rest)
        if "launch" in self.device.broken:
            return 719
        *dims, stream, arguments, _ = rest
        types = self._types_of(function)
        cells = [
            kind.from_buffer_copy(ctypes.string_at(arguments[i], ctypes.sizeof(kind))) for i, kind in enumerate(types)
        ]

        def happen() -> None:
            addresses = (PTR * len(cells))(*map(ctypes.addressof, cells))
            code = self._launch(function, *dims, stream, addresses, None)
            if code != 0:
                raise ExecutorError(f"a kernel failed: CUDA error {code}")

        self.device.enqueue("launch", happen)
        return 0
