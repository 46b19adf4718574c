/*
 * Strings of many rows: cut out of the bytes that they stand in, and those that are alike.
 */
#include "native.h"

static INLINE u64 zeros(u64 word)
{
	/* Not 0 when a byte is zero, the lowest bit that of the first one (Hacker's Delight, 6-1). */
	return (word - 0x0101010101010101) & ~word & 0x8080808080808080;
}

/* model/strings.py makes it, and has its offsets. */
struct cut {
	/* Bytes, and how many. */
	const u8 *data;
	u64 size;
	/* Where each string begins and ends, in them; -1 for one that could not be read. */
	const i64 *begins;
	const i32 *lengths;
	u64 count;
	/* Whether NULs are bytes like others; else a string ends at the first one. */
	u64 is_raw;
	/* Room for all of them, and a word; where each begins there, and its length. */
	u8 *blob;
	i64 *starts;
	i32 *kept;
};

/* Copy each string to the end of the one before it; return where all end. */
i64 strings_cut(const struct cut *cut)
{
	i64 at = 0;

	for (u64 row = 0; row < cut->count; row++) {
		const u8 *from = cut->data + cut->begins[row];
		i64 length = cut->lengths[row], done = 0;
		u8 *to = cut->blob + at;

		cut->starts[row] = at;
		/* Whole words as far as there are some: what is too much the next string overwrites. */
		for (i64 left = cut->data + cut->size - from; done < length && left - done >= 8; done += 8) {
			u64 word = U64_AT(from + done), nul = cut->is_raw ? 0 : zeros(word);

			((struct any64 *)(to + done))->value = word;
			if (nul) {
				i64 end = done + __builtin_ctzll(nul) / 8;

				length = end < length ? end : length;
			}
		}
		for (; done < length; done++) {
			if (!cut->is_raw && !from[done]) {
				length = done;
				break;
			}
			to[done] = from[done];
		}
		cut->kept[row] = (i32)length;
		at += length > 0 ? length : 0;
	}
	return at;
}

/* Likewise. */
struct alike {
	const u8 *bytes;
	const i64 *starts;
	const i32 *lengths;
	u64 count;
	/* A hash with open addresses, never more than half full: a code and one, 0 is free. */
	u32 *slots;
	u64 mask;
	/* Of each different string the first row that has it, and of each row its code. */
	i64 *firsts;
	i32 *codes;
};

/* The last up to eight bytes of a string. */
static INLINE u64 tail(const u8 *bytes, i64 length)
{
	u64 word = 0;

	if (length >= 8)
		return U64_AT(bytes + length - 8);
	for (i64 n = 0; n < length; n++)
		word = word << 8 | bytes[n];
	return word;
}

static INLINE u64 hash_of(const u8 *bytes, i64 length)
{
	u64 hash = (u64)length;

	for (i64 n = 0; n + 8 < length; n += 8)
		hash = (hash ^ U64_AT(bytes + n)) * 0x9E3779B97F4A7C15, hash ^= hash >> 32;
	hash = (hash ^ tail(bytes, length)) * 0x9E3779B97F4A7C15;
	return hash ^ hash >> 32;
}

static INLINE bool is_equal(const u8 *a, const u8 *b, i64 length)
{
	for (i64 n = 0; n + 8 < length; n += 8)
		if (U64_AT(a + n) != U64_AT(b + n))
			return false;
	return tail(a, length) == tail(b, length);
}

/* Give rows the codes of their strings; return how many different ones there are. */
u64 strings_code(const struct alike *all)
{
	u64 known = 0;

	for (u64 row = 0; row < all->count; row++) {
		const u8 *bytes = all->bytes + all->starts[row];
		i32 length = all->lengths[row];
		u64 slot = hash_of(bytes, length) & all->mask;

		for (;; slot = (slot + 1) & all->mask) {
			u32 code = all->slots[slot];
			i64 first;

			if (!code) {
				all->firsts[known++] = (i64)row;
				all->slots[slot] = (u32)known;
				all->codes[row] = (i32)known - 1;
				break;
			}
			first = all->firsts[code - 1];
			if (all->lengths[first] == length &&
			    is_equal(all->bytes + all->starts[first], bytes, length)) {
				all->codes[row] = (i32)code - 1;
				break;
			}
		}
	}
	return known;
}
