/*
 * Copies of an inlined function in debug information: a kernel's has 300,000 copies of functions
 * among 6 million entries.
 */
#include "native.h"

enum { INLINED = 0x1d, BLOCK = 0x0b, FUNCTION = 0x2e };
/* Of functions in each other and blocks; what is deeper is not looked at. */
enum { DEPTH = 128 };

/* Dwarf_Die of elfutils/libdw.h. */
struct die {
	u64 addr, unit, abbrev, padding;
};

/* dwarf/inlined.py makes it. */
struct search {
	/* libdw's dwarf_child, dwarf_siblingof, dwarf_tag, dwarf_diename. */
	i32 (*child)(struct die *, struct die *);
	i32 (*sibling)(struct die *, struct die *);
	i32 (*tag)(struct die *);
	const u8 *(*name)(struct die *);
	/* The function's name; NULL for all. */
	const u8 *wanted;
	/* Its copies, or the names of all, as many as there is room for; how many there are. */
	struct die *found;
	const u8 **names;
	u64 room, count;
};

static INLINE bool is_same(const u8 *name, const u8 *wanted)
{
	for (; *name == *wanted; name++, wanted++)
		if (!*name)
			return true;
	return false;
}

static INLINE void copy(struct die *to, const struct die *from)
{
	to->addr = from->addr, to->unit = from->unit;
	to->abbrev = from->abbrev, to->padding = from->padding;
}

/* Look through a unit, whose entry is given. */
i64 inlined_find(struct search *search, struct die *unit)
{
	struct die path[DEPTH];
	u64 at = 0;
	i32 end = search->child(unit, path);

	for (;;) {
		struct die *each = &path[at];

		if (end) {
			if (!at)
				return 0;
			at--;
			end = search->sibling(&path[at], &path[at]);
			continue;
		}
		i32 tag = search->tag(each);
		const u8 *name = tag == INLINED ? search->name(each) : NULL;
		if (name && (!search->wanted || is_same(name, search->wanted))) {
			if (search->count < search->room && search->wanted)
				copy(&search->found[search->count], each);
			else if (search->count < search->room)
				search->names[search->count] = name;
			search->count++;
		}
		if ((tag == INLINED || tag == BLOCK || tag == FUNCTION) && at + 1 < DEPTH)
			end = search->child(each, &path[++at]);
		else
			end = search->sibling(each, each);
	}
}
