"""What a kernel takes of a multiprocessor, and how many blocks of it fit."""

from dataclasses import dataclass

# Of a multiprocessor of compute capability 9.0, from the CUDA C++ Programming Guide.
SM_90_QUARTERS = 4  # of a multiprocessor; a warp's registers are all in one
SM_90_REGISTERS = 16 << 10  # of a quarter
SM_90_SHARED_BYTES = 228 << 10
SM_90_THREADS = 2048
SM_90_BLOCKS = 32
RESERVED_BYTES = 1 << 10  # of shared memory, with each block
REGISTER_UNIT = 256  # registers that a warp gets at a time
SHARED_UNIT = 128


@dataclass(frozen=True)
class KernelResources:
    kernel: str
    registers: int
    local_bytes: int  # stack and spills of a thread
    block_threads: int
    shared_bytes: int  # of a block
    blocks_per_sm: int | None  # as the driver tells; None: the device has no multiprocessors


def expected_blocks(used: KernelResources) -> int:
    """Blocks that fit on a multiprocessor of compute capability 9.0."""
    warps = -(-used.block_threads // 32)
    warp_registers = -(-32 * used.registers // REGISTER_UNIT) * REGISTER_UNIT
    shared = -(-(used.shared_bytes + RESERVED_BYTES) // SHARED_UNIT) * SHARED_UNIT
    by_registers = SM_90_QUARTERS * (SM_90_REGISTERS // warp_registers) // warps
    return min(by_registers, SM_90_SHARED_BYTES // shared, SM_90_THREADS // (32 * warps), SM_90_BLOCKS)
