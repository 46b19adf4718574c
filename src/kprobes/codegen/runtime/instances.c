/*
 * Kretprobe instances: the calls of one function that are in progress.
 *
 * A call is known by its slot: where its return address is on its stack (on arm64 the stack pointer
 * at the entry). A slot belongs to one call at a time, and only code that runs on that stack touches
 * its instance, on whatever CPU and in whatever context. So the claim of a free instance is the only
 * race, and nothing waits.
 *
 *	free			slot == 0
 *	  | claim(): compare and exchange of the slot
 *	entered			slot != 0, caller == 0
 *	  | origin, then caller, then the trampoline's address on the stack (instance_take_over())
 *	taken over		slot != 0, caller != 0
 *	  | release(): caller, then slot
 *	free
 *
 * The table is a hash with open addresses. The search for a slot begins at its home and goes on
 * around the end, over all instances: a free one does not end it, since what was claimed after it
 * may be still in use.
 *
 *		     home(A)
 *			|
 *	+--------+------v-+--------+--------+--------+
 *	| 0      | A      | B      | A      | 0      |	slot
 *	|        | taken  | entered| taken  |        |
 *	+--------+--------+--------+--------+--------+
 *		   newest	     older
 *
 * Calls that jump into each other have one slot. Then the newest of its instances comes first in
 * the search: an insertion moves the older ones on (move_on()).
 *
 * Where there is room, a call's instance is at its home. That is a piece of the probe's own code;
 * everything else is in functions of their own.
 */
#include "runtime.h"

/* model/plan.py draws it, too, and has its offsets: guest/stacks.py reads it, and frees it. */
struct instance {
	u64 slot;
	u64 caller;
	u64 origin;
	u64 exit;
	u64 counter;
	u64 generation;
	u64 values[];
};

struct table {
	char *start;
	u64 count;
	u64 stride;
};

/* In front of every trampoline, which begins with its mark. */
struct trampoline_header {
	u64 unused;
	char *start;
	u64 count : 32, stride : 32;
};

/* Of the function that is probed: where its instances are, their number and their bytes. */
char *instance_table(void);
extern char instance_count[];
extern const u64 instance_size;
/* What takes the place of its return addresses. */
extern char trampoline[];

/* The kernel's own text, where nothing of ours is. */
extern const u64 text_start, text_size;
/* What trampolines begin with, and nothing else that is returned to. */
extern const u64 trampoline_mark;
/*
 * Code memory is taken as a module's is, when it is needed: where trampolines are is not known when
 * code is made. They are so near to the text, and so aligned that to look at the mark never touches
 * another page than the first instruction of whoever is returned to: the page after a call that
 * ends a module, and does not return, may be nobody's.
 */
#define TRAMPOLINE_REACH ((u64)4 << 30)
#define TRAMPOLINE_ALIGN 16
#define TRAMPOLINE_OFFSET 8

#define OWN_TABLE ((struct table){ instance_table(), (u64)instance_count, instance_size })

static INLINE u64 home(struct table table, u64 slot)
{
	return ((slot * 0x9E3779B97F4A7C15) >> 32) * table.count >> 32;
}

/* Around the end, once. */
static INLINE struct instance *at(struct table table, u64 place)
{
	u64 index = place < table.count ? place : place - table.count;

	return (struct instance *)(table.start + index * table.stride);
}

static INLINE struct instance *first(u64 slot)
{
	struct table table = OWN_TABLE;
	struct instance *first = (struct instance *)(table.start + home(table, slot) * table.stride);

	__builtin_assume(first);
	return first;
}

static INLINE bool claim(struct instance *instance, u64 slot)
{
	u64 free = 0;

	return __atomic_compare_exchange_n(&instance->slot, &free, slot, false, __ATOMIC_SEQ_CST,
					   __ATOMIC_RELAXED);
}

static INLINE bool is_in_text(u64 addr)
{
	return addr - text_start < text_size;
}

static INLINE bool is_trampoline(u64 addr)
{
	return !is_in_text(addr) && addr % TRAMPOLINE_ALIGN == TRAMPOLINE_OFFSET && addr >> 63 &&
	       addr - (text_start - TRAMPOLINE_REACH) < 2 * TRAMPOLINE_REACH &&
	       READ_ONCE(*(u64 *)addr) == trampoline_mark;
}

/* All but the slot, which is the same. With its caller an instance is whole. */
static INLINE void copy(struct instance *to, struct instance *from, u64 size)
{
	for (u64 word = offsetof(struct instance, origin) / 8; word < size / 8; word++)
		((u64 *)to)[word] = READ_ONCE(((u64 *)from)[word]);
	PUBLISH(to->caller, READ_ONCE(from->caller));
}

/*
 * Every instance of the slot, from the n-th place on, takes the place of the next one, the last a
 * free one's. The last goes first: a reader that has stopped us in between (guest/stacks.py) finds
 * the newest one whole.
 */
static INLINE bool move_on(struct table table, u64 slot, u64 n)
{
	u64 start = home(table, slot), hole = n, from;

	do {
		if (++hole >= table.count)
			return false;
	} while (!claim(at(table, start + hole), slot));
	do {
		from = hole;
		do {
			from--;
		} while (READ_ONCE(at(table, start + from)->slot) != slot);
		copy(at(table, start + hole), at(table, start + from), table.stride);
		hole = from;
	} while (hole != n);
	return true;
}

RARE struct instance *instance_insert_elsewhere(u64 slot, u64 caller)
{
	struct table table = OWN_TABLE;
	u64 start = home(table, slot);

	for (u64 n = 0; likely(n < table.count); n++) {
		struct instance *instance = at(table, start + n);
		u64 word = READ_ONCE(instance->slot);

		if (likely(!word)) {
			if (likely(claim(instance, slot)))
				return instance;
		} else if (unlikely(word == slot)) {
			/*
			 * The outer call was left by a jump if we return to where it will. Else its
			 * task has died, or has left it by another way: it is ours.
			 */
			if (READ_ONCE(instance->caller) && is_trampoline(caller))
				if (!move_on(table, slot, n))
					return NULL;
			instance->caller = 0;
			return instance;
		}
	}
	return NULL;
}

/* Return an instance for the newest call of a slot, not taken over, or NULL: there is no room. */
INLINE struct instance *instance_insert(u64 slot, const u64 *return_address)
{
	struct instance *instance = first(slot);

	if (likely(!READ_ONCE(instance->slot)) && likely(claim(instance, slot)))
		return instance;
	return instance_insert_elsewhere(slot, READ_ONCE(*return_address));
}

static INLINE struct instance *search(struct table table, u64 slot, bool is_taken)
{
	u64 start = home(table, slot);

	for (u64 n = 0; likely(n < table.count); n++) {
		struct instance *instance = at(table, start + n);

		if (likely(READ_ONCE(instance->slot) == slot)) {
			if (is_taken == !!READ_ONCE(instance->caller))
				return instance;
			if (!is_taken)
				return NULL;
		}
	}
	return NULL;
}

RARE struct instance *instance_search_taken(u64 slot)
{
	return search(OWN_TABLE, slot, true);
}

RARE struct instance *instance_search_newest(u64 slot)
{
	return search(OWN_TABLE, slot, false);
}

/* Return the newest instance of a slot whose return was taken over, or NULL. */
INLINE struct instance *instance_find_taken(u64 slot)
{
	struct instance *instance = first(slot);

	if (likely(READ_ONCE(instance->slot) == slot) && likely(READ_ONCE(instance->caller)))
		return instance;
	return instance_search_taken(slot);
}

/*
 * Return the newest instance of a slot, or NULL: where that was taken over, the newest call has
 * none.
 */
INLINE struct instance *instance_find_newest(u64 slot)
{
	struct instance *instance = first(slot);

	if (likely(READ_ONCE(instance->slot) == slot))
		return likely(!READ_ONCE(instance->caller)) ? instance : NULL;
	return instance_search_newest(slot);
}

RARE u64 instance_origin_elsewhere(u64 caller, u64 slot)
{
	struct trampoline_header *header = (struct trampoline_header *)caller - 1;
	struct instance *instance;

	if (!is_trampoline(caller))
		return caller;
	instance = search((struct table){ header->start, header->count, header->stride }, slot, true);
	return instance ? READ_ONCE(instance->origin) : caller;
}

/* Return where a call came from: its return address, or what a trampoline there stands for. */
INLINE u64 instance_origin(u64 caller, u64 slot)
{
	return likely(is_in_text(caller)) ? caller : instance_origin_elsewhere(caller, slot);
}

/*
 * Have a call return to the trampoline. A reader that has stopped us in between (guest/stacks.py)
 * finds the caller in one of the two places, or in both.
 */
INLINE void instance_take_over(struct instance *instance, u64 slot, u64 *return_address)
{
	u64 caller = READ_ONCE(*return_address);

	instance->origin = instance_origin(caller, slot);
	PUBLISH(instance->caller, caller);
	PUBLISH(*return_address, (u64)trampoline);
}

/* Give an instance back. Its words after the slot may have other owners at once. */
INLINE void instance_release(struct instance *instance)
{
	instance->caller = 0;
	PUBLISH(instance->slot, 0);
}
