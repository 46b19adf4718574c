/*
 * Codes of keys that repeat: rows of 64-bit words, each different one with a number of its own.
 *
 * A hash with open addresses, never more than half full; a slot has a code and one, 0 is free.
 */
#include "native.h"

struct keys {
	/* Those that are known, by their codes; how many, and for how many there is room. */
	u64 *known;
	u64 count, room;
	u32 *slots;
	u64 mask;
};

static INLINE bool is_same(const u64 *a, const u64 *b, u64 words)
{
	u64 difference = 0;

	for (u64 n = 0; n < words; n++)
		difference |= a[n] ^ b[n];
	return !difference;
}

/* Give rows their codes; new ones become known. Return of how many: of all, or there is no room. */
u64 keys_code(struct keys *keys, const u64 *rows, u64 words, u64 count, i32 *codes)
{
	for (u64 row = 0; row < count; row++, rows += words) {
		u64 hash = 0, slot;

		if (row && is_same(rows, rows - words, words)) {
			codes[row] = codes[row - 1];
			continue;
		}
		for (u64 n = 0; n < words; n++)
			hash = (hash ^ rows[n]) * 0x9E3779B97F4A7C15, hash ^= hash >> 32;
		for (slot = hash & keys->mask;; slot = (slot + 1) & keys->mask) {
			u32 code = keys->slots[slot];

			if (code && !is_same(rows, keys->known + (code - 1) * words, words))
				continue;
			if (!code) {
				if (keys->count == keys->room)
					return row;
				for (u64 n = 0; n < words; n++)
					keys->known[keys->count * words + n] = rows[n];
				code = keys->slots[slot] = (u32)++keys->count;
			}
			codes[row] = (i32)code - 1;
			break;
		}
	}
	return count;
}
