"""How many thread blocks of a kernel one SM holds at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one SM (CUDA programming guide, "Technical Specifications per Compute Capability").

    smem, smem_per_block: bytes. Registers are handed out to whole warps, in each of four parts.
    """

    warps: int
    blocks: int
    smem: int
    smem_per_block: int
    registers: int = 65536

    def blocks_of(self, registers: int, warps: int, smem: int) -> int:
        """0 where not even one fits. registers: of a thread; warps, smem: of a block."""
        if smem > self.smem_per_block:
            return 0
        of_a_warp = 32 * _rounded_up(registers, 8)
        warps_by_registers = 4 * (self.registers // 4 // of_a_warp)
        return min(
            self.blocks,
            min(self.warps, warps_by_registers) // warps,
            self.smem // _rounded_up(smem + SMEM_OF_THE_SYSTEM, 128),
        )


SMEM_OF_THE_SYSTEM = 1024  # of every block

# Keys: the machine code that runs there, and the name of the GPUs' compute capability.
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(warps=64, blocks=32, smem=164 << 10, smem_per_block=163 << 10),
    "sm_86": Multiprocessor(warps=48, blocks=16, smem=100 << 10, smem_per_block=99 << 10),
    "sm_90": Multiprocessor(warps=64, blocks=32, smem=228 << 10, smem_per_block=227 << 10),
}


def runs_on(code: str, gpu: str) -> bool:
    """Whether machine code ("sm_80", "sm_90a") runs on a GPU: the same or a later minor version."""
    compiled, capability = (int(name.removeprefix("sm_").rstrip("af")) for name in (code, gpu))
    return compiled // 10 == capability // 10 and compiled <= capability


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
