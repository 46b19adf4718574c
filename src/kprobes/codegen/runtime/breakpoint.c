/*
 * Breakpoint notifier: the guest's callback for exceptions, where a hit of ours goes to its detour.
 *
 *	action, regs, ip
 *	  |
 *	  | not a breakpoint's exception, or of user space ---------------------> NOTIFY_DONE
 *	  v
 *	the table has its address -------- ip = the detour ---------------------> NOTIFY_STOP
 *	  | it has not
 *	  v
 *	there is a breakpoint now: the guest's own -----------------------------> NOTIFY_DONE
 *	  | there is none: it was ours, and is gone since this CPU ran into it
 *	  v
 *	ip = the address: what is there instead runs (kprobe_int3_handler()) ---> NOTIFY_STOP
 *
 * The table is a hash with open addresses, never more than half full, so that an empty entry ends
 * every search. It is exchanged in a pause in which no vCPU is in here (guest/arm.py).
 */
#include "runtime.h"

/* include/linux/notifier.h */
#define NOTIFY_DONE 0
#define NOTIFY_STOP 0x8001

struct entry {
	u64 addr;
	u64 detour;
};

/* include/linux/notifier.h; what is after priority is ours. */
struct notifier_block {
	void *notifier_call;
	struct notifier_block *next;
	int priority;
	struct entry *table;
	u64 mask;
};

/* arch/x86/include/asm/kdebug.h */
struct die_args {
	char *regs;
};

/* What the guest's chain calls the exception, and where the instruction pointer is in pt_regs. */
extern const u64 trap_action, ip_offset;
/* The breakpoint's byte; the instruction pointer is after it. */
extern const u64 breakpoint;

int notify(struct notifier_block *block, u64 action, struct die_args *args)
{
	struct entry *entry;
	u64 *ip, addr, n;

	if (action != trap_action)
		return NOTIFY_DONE;
	ip = (u64 *)(args->regs + ip_offset);
	addr = *ip - 1;
	if ((int64_t)addr >= 0)
		return NOTIFY_DONE;
	n = addr * 0x9E3779B97F4A7C15 >> 40;
	do {
		entry = block->table + (n++ & block->mask);
		if (entry->addr == addr) {
			*ip = entry->detour;
			return NOTIFY_STOP;
		}
	} while (entry->addr);
	if (*(u8 *)addr == breakpoint)
		return NOTIFY_DONE;
	*ip = addr;
	return NOTIFY_STOP;
}
