"""Dropout's random bits one entry at a time, in Python integers."""

WORD = 0xFFFFFFFF


def philox4x32(rounds: int, key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Salmon et al. 2011, section 4: two 32x32-bit products per round, then the key moves on."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def random_bits(seed: int, offset: int, batch_head: int, query: int, key: int) -> int:
    """The sixteen bits of one entry of the attention matrix."""
    counter = (
        query // 16 * 8 + query % 8,
        key // 16 * 4 + key % 8 // 2,
        batch_head & WORD,
        offset & WORD,
    )
    words = philox4x32(7, (seed & WORD, (seed >> 32 ^ offset >> 32) & WORD), counter)
    word = words[query // 8 % 2 + 2 * (key // 8 % 2)]
    return word >> 16 if key % 2 else word & 0xFFFF
