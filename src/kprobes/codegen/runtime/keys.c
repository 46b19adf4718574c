/*
 * Keys of hist triggers that are texts or stacks: what they have is kept once, and the word of a
 * key says where.
 *
 * Each CPU has an area of its own, after the entries of its table (model/hist.py):
 *
 *	0      8                                     first
 *	+------+---------+---------+-- ... ---------+----------------+-- ... ------+
 *	| used | place 0 | place 1 |  places        | hash size data | hash size   |
 *	+------+---------+---------+-- ... ---------+----------------+-- ... ------+
 *	 bytes after first ^------------------------> an offset from the area's start, or 0
 *
 * The places are a hash with open addresses. Only hits on this CPU come here, one on top of the
 * other: an interrupt may keep a key while another one is looked for. So a place is taken by an
 * exchange, and what has lost it looks at what is there now. Nothing is ever given back.
 */
#include "runtime.h"

struct kept {
	u64 hash;
	u64 size;
	u64 words[];
};

struct area {
	u64 used;
	u64 places[];
};

/* A search that takes longer ends, as one without room does. */
#define MOST_STEPS 64

#define WORDS(size) (((size) + 7) / 8)

/* What is after the last byte does not count. */
static INLINE u64 word_of(const u64 *words, u64 size, u64 n)
{
	u64 left = size - 8 * n;

	return left < 8 ? words[n] & ((1ULL << 8 * left) - 1) : words[n];
}

static INLINE u64 hash_of(const u64 *words, u64 size)
{
	u64 hash = size;

	for (u64 n = 0; n < WORDS(size); n++) {
		hash = (hash ^ word_of(words, size, n)) * 0x9E3779B97F4A7C15;
		hash ^= hash >> 32;
	}
	return hash;
}

static INLINE bool is_same(struct kept *kept, u64 hash, const u64 *words, u64 size)
{
	if (kept->hash != hash || kept->size != size)
		return false;
	for (u64 n = 0; n < WORDS(size); n++)
		if (kept->words[n] != word_of(words, size, n))
			return false;
	return true;
}

/* Return the offset of a copy, or 0 without room. */
static INLINE u64 keep(struct area *area, u64 first, u64 end, struct kept *key, const u64 *words)
{
	u64 size = sizeof(struct kept) + 8 * WORDS(key->size);
	u64 at = first + __atomic_fetch_add(&area->used, size, __ATOMIC_RELAXED);
	struct kept *kept = (struct kept *)((char *)area + at);

	if (unlikely(at + size > end)) {
		__atomic_fetch_sub(&area->used, size, __ATOMIC_RELAXED);
		return 0;
	}
	WRITE_ONCE(kept->hash, key->hash);
	WRITE_ONCE(kept->size, key->size);
	for (u64 n = 0; n < WORDS(key->size); n++)
		WRITE_ONCE(kept->words[n], word_of(words, key->size, n));
	return at;
}

/*
 * Return where these bytes are kept, or 0 without room. There are count places, a power of two;
 * words has whole words, end is that of the area.
 */
__attribute__((noinline))
u64 key_kept(struct area *area, u64 count, u64 end, const u64 *words, u64 size)
{
	struct kept key = { .hash = hash_of(words, size), .size = size };
	u64 mine = 0;

	for (u64 n = 0; n < MOST_STEPS; n++) {
		u64 *place = area->places + ((key.hash + n) & (count - 1)), at = READ_ONCE(*place);

		if (!at) {
			if (!mine)
				mine = keep(area, sizeof(struct area) + 8 * count, end, &key, words);
			if (!mine)
				return 0;
			if (__atomic_compare_exchange_n(place, &at, mine, false, __ATOMIC_SEQ_CST,
							__ATOMIC_RELAXED))
				return mine;
		}
		if (likely(is_same((struct kept *)((char *)area + at), key.hash, words, size)))
			return at;
	}
	return 0;
}
