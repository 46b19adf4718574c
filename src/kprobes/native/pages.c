/*
 * Records of the kernel's trace rings: what pages have, and each event's together.
 *
 * formats/ftrace.py has the kernel's structs, and says what is wrong with pages that are. Nothing
 * is read that is not of the pages.
 */
#include "native.h"

enum { LONG = 0, PADDING = 29, EXTEND = 30, STAMP = 31 };
#define KIND_BITS 5
#define KIND 31
#define DELTA_BITS 27
#define STAMP_LOW ((1ull << 59) - 1)
#define COMMIT ((1u << 20) - 1)
#define WORD 4

/* formats/ftrace.py makes it, and has its offsets. */
struct pages {
	/* Pages of one size, and how many. */
	const u8 *data;
	u64 size, count;
	/* Where a page has its commit word and its first record. */
	u64 commit, begin;
	/* Bytes of each one's records that are left out. */
	const i64 *skips;
	/* Of each record where its data begins, its size, time and page, and the event's number. */
	i64 *at, *sizes;
	u64 *ts;
	i64 *page;
	u16 *numbers;
};

/* rb_fix_abs_ts(): the top bits are the page's, or one more when they have gone round. */
static INLINE u64 whole_stamp(u64 stamp, u64 page)
{
	u64 whole = (stamp & STAMP_LOW) | (page & ~STAMP_LOW);

	return whole + (((page & ~STAMP_LOW) && whole < page) ? STAMP_LOW + 1 : 0);
}

/* Find the records; return how many, -1 if there are pages that no kernel wrote. */
i64 pages_read(const struct pages *pages)
{
	i64 found = 0;

	for (u64 n = 0; n < pages->count; n++) {
		const u8 *page = pages->data + n * pages->size, *at = page + pages->begin, *end;
		u64 stamp = U64_AT(page), time = stamp, used = U32_AT(page + pages->commit) & COMMIT;
		const u8 *first = at + pages->skips[n];

		if (used > pages->size - pages->begin || used % WORD)
			return -1;
		for (end = at + used; at < end;) {
			u32 head = U32_AT(at), kind = head & KIND;
			u64 delta = head >> KIND_BITS, left = (u64)(end - at), size;
			const u8 *data = at + WORD;

			if (kind >= EXTEND) {
				if (left < 2 * WORD)
					return -1;
				delta += (u64)U32_AT(data) << DELTA_BITS;
				time = kind == STAMP ? whole_stamp(delta, stamp) : time + delta;
				at += 2 * WORD;
				continue;
			}
			time += delta;
			/* A null padding takes what is left of its page. */
			if (head == PADDING)
				break;
			size = kind * WORD;
			if (kind == LONG || kind == PADDING) {
				size = left < 2 * WORD ? 0 : U32_AT(data);
				if (size < WORD || size % WORD)
					return -1;
			}
			if (size > left - WORD)
				return -1;
			if (kind != PADDING && at >= first) {
				u64 head_size = kind == LONG ? WORD : 0;

				pages->at[found] = data + head_size - pages->data;
				pages->sizes[found] = (i64)(size - head_size);
				pages->ts[found] = time;
				pages->page[found] = (i64)n;
				pages->numbers[found++] = size > head_size ? U16_AT(data + head_size) : 0;
			}
			at = data + size;
		}
	}
	return found;
}

/* Where the fixed parts of one event's records go to; ring/ftrace.py has the offsets. */
struct event {
	u8 *rows;
	/* Which of all records each is. */
	i64 *index;
	/* Bytes of a fixed part; of the shortest record. */
	u64 size, least;
};

/* Copy records, each to its event. ``events`` has that of each number; what has no rows is left. */
u64 pages_copy(const u8 *data, const i64 *at, const i64 *sizes, const u16 *numbers, u64 count,
	       const u16 *events, struct event *all)
{
	for (u64 n = 0; n < count; n++) {
		struct event *event = all + events[numbers[n]];
		const u8 *from = data + at[n];
		u64 done = 0;

		*event->index++ = (i64)n;
		if ((u64)sizes[n] < event->least)
			event->least = (u64)sizes[n];
		if (event->least < event->size)
			continue;
		for (; event->size - done >= 8; done += 8)
			((struct any64 *)(event->rows + done))->value = U64_AT(from + done);
		for (; done < event->size; done++)
			event->rows[done] = from[done];
		event->rows += event->size;
	}
	return count;
}

/* Give each row its place among those of its batch; ``next`` is of the batches, and 0 at first. */
u64 pages_places(const u16 *batch, u64 count, u32 *next, u32 *places)
{
	for (u64 n = 0; n < count; n++)
		places[n] = next[batch[n]]++;
	return count;
}
