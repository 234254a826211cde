"""cuLaunchKernel's form."""

import ctypes

PTR = ctypes.c_void_p
LAUNCH_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, PTR, *[ctypes.c_uint] * 7, PTR, ctypes.POINTER(PTR), ctypes.POINTER(PTR))
"""A function, its grid, its block, dynamic shared bytes, a stream, argument addresses, no extras; yields an error."""
