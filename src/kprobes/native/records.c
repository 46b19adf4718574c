/*
 * Records of a ring, as docs/reference/formats/ring.md has them: those that follow each other, by
 * event.
 *
 * Whatever a guest wrote, nothing is read that is not of the chunk.
 */
#include "native.h"

/* model/resolved.py */
#define ALIGN 8
#define EVENT_BITS 16
#define IDS (1 << EVENT_BITS)
enum { COMM = 24, HEADER = 40 };

/* ring/find.py makes it, and has its offsets. */
struct chunk {
	/* Bytes at hand, and commit words that vouch for them. */
	const u8 *data;
	u64 size;
	const u8 *commits;
	u64 commits_size;
	/* How far records begin, and the position of the first. */
	u64 limit, position;
	/* By event: bytes of the fixed part, 0 for nobody's; where a record's own size is, or 0. */
	const i64 *sizes, *size_offsets;
	/* Where it ended, and whether at a record that no writer of ours wrote. */
	u64 end;
	u64 is_damaged;
};

/* The bytes of the record at an offset, 0 for none of ours. */
static INLINE u64 size_of(const struct chunk *chunk, u64 offset, u64 id)
{
	u64 left = chunk->size - offset, size = (u64)chunk->sizes[id];
	u64 own = (u64)chunk->size_offsets[id];

	if (!size || size > left)
		return 0;
	if (!own)
		return size;
	own = U32_AT(chunk->data + offset + own);
	return own >= size && own % ALIGN == 0 && own <= left ? own : 0;
}

/*
 * Find the records from the first on; return how many: up to the limit, to one that is not
 * committed, or to a damaged one. There is room for one of ``HEADER`` bytes after the other.
 */
u64 records_find(struct chunk *chunk, i64 *offsets, i64 *ids)
{
	u64 offset = 0, count = 0;

	chunk->is_damaged = 0;
	while (offset < chunk->limit && chunk->commits_size - offset >= ALIGN) {
		u64 position = (chunk->position + offset) << EVENT_BITS, id, size;

		id = U64_AT(chunk->commits + offset) - position;
		if (id == 0 || id >= IDS)
			break;
		/* From the private copy: the other one may be of another moment. */
		id = chunk->size - offset < HEADER ? 0 : U64_AT(chunk->data + offset) - position;
		size = id < IDS ? size_of(chunk, offset, id) : 0;
		if (!size) {
			chunk->is_damaged = 1;
			break;
		}
		offsets[count] = (i64)offset;
		ids[count++] = (i64)id;
		offset += size;
	}
	chunk->end = offset;
	return count;
}

/* Where the fixed parts of one event's records go to; likewise. */
struct group {
	u8 *rows;
	/* Where each was, or NULL. */
	i64 *starts;
	u64 size;
};

static INLINE u64 before_nul(u64 word)
{
	/* A mask of the bytes before the first zero byte (Hacker's Delight, 6-1). */
	u64 zeros = (word - 0x0101010101010101) & ~word & 0x8080808080808080;

	return zeros ? ((zeros & -zeros) >> 7) - 1 : ~0ull;
}

#define COPY(to, from, at) (((struct any64 *)((to) + (at)))->value = U64_AT((from) + (at)))

/*
 * Copy a record's header. A task that was renamed to a shorter name keeps the end of the old one
 * behind the NUL (strlcpy in __set_task_comm, up to 6.1 at least): that is zeroed.
 */
static INLINE void copy_header(u8 *to, const u8 *from)
{
	u64 low = U64_AT(from + COMM), high = U64_AT(from + COMM + 8), kept = before_nul(low);

	for (u64 at = 0; at < COMM; at += ALIGN)
		COPY(to, from, at);
	((struct any64 *)(to + COMM))->value = low & kept;
	((struct any64 *)(to + COMM + 8))->value = ~kept ? 0 : high & before_nul(high);
}

/* Copy records, each to its event's group. ``groups`` has the group of each event that occurs. */
u64 records_copy(const u8 *data, const i64 *offsets, const i64 *ids, u64 count,
		 const u16 *groups, struct group *all)
{
	for (u64 n = 0; n < count; n++) {
		struct group *group = all + groups[ids[n]];
		const u8 *from = data + offsets[n];

		copy_header(group->rows, from);
		for (u64 at = HEADER; at < group->size; at += ALIGN)
			COPY(group->rows, from, at);
		group->rows += group->size;
		if (group->starts)
			*group->starts++ = offsets[n];
	}
	return count;
}
