"""Seeds as a pure function of what they are for, so that nothing random has a history."""

from __future__ import annotations

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def mix(*numbers: int) -> int:
    """One well-mixed 63-bit seed from several whole numbers.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195), folded
    over the numbers, so that neighbouring seeds and steps share nothing.
    """
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E37_79B9_7F4A_7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58_476D_1CE4_E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D0_49BB_1331_11EB & _MASK
        state ^= state >> 31
    return state >> 1
