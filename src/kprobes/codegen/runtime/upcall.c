/*
 * Upcall: one vCPU asks Python, and waits for the answer.
 *
 * The entry stub has pushed a frame, and calls upcall() with the address of its lowest word:
 *
 *	+----------------------+-------+--------+---------+------------------------
 *	| saved[0] ...         | flags | number | ip      | the probed code's stack
 *	+----------------------+-------+--------+---------+------------------------
 *	 frame                  flags_at                   top
 *
 * saved[] and flags are the registers of UpcallOps.saved, number is the upcall's, ip is where to go
 * on. What is to be loaded afterwards is left there, too.
 *
 * Every CPU has a mailbox slot per context. Preemption and this context's guard bit are held, so it
 * is ours until we have gone on:
 *
 *	guest					Python
 *	request[] = number, task, ...
 *	asked = n + 1	------------------->	polls asked
 *						answer[] = registers
 *	polls answered	<-------------------	answered = n + 1
 *
 *	or, when that takes too long, or Python has gone:
 *
 *	gave_up = n + 1	------------------->	an answer that comes now is not looked at
 *
 * model/upcall.py has the words of the mailbox. Nothing of the guest's is called.
 */
#include "runtime.h"

#define NMI 3

/* Addresses of words, and of rows of them: per upcall (ticks, missed) and per slot. */
extern u64 *const absent, *const present;
extern u64 *const ticks, *const missed;
extern u64 *const asked, *const gave_up, *const answered;
extern char *const requests, *const answers;
/* Bytes of a request, and of an answer. */
extern const u64 room;

/* Where the flags are in the frame: after all other registers. */
extern const u64 flags_at;
/* Whether the stub pops flags and ip from below the stack pointer that is to be: UpcallOps.pops. */
extern const u64 pops;

/* codegen/guard.py: hold preemption and this context's bit, or nothing and return false. */
bool guard_enter(void);
void guard_leave(void);
u64 context_number(void);

/* Of this CPU, which is held. */
u64 cpu(void);
u64 current_task(void);
u64 page_table(void);
u64 counter(void);
void pause(void);

/* Bits of the flags that the entry stub has not saved, as nothing changes them meanwhile. */
u64 other_flags(void);
/* Add one to the u64 at an address, whatever other CPUs do. */
void count(u64 place);

struct slot {
	u64 index;
	u64 seq;
	u64 *request;
	u64 *answer;
};

/* Go on at ip, with these flags, and with the stack pointer at sp. */
static INLINE void return_to(u64 *frame, u64 flags, u64 *sp)
{
	sp[-2] = flags;
	frame[flags_at] = (u64)(sp - 2);
}

static INLINE u64 *top(u64 *frame)
{
	return frame + flags_at + 3;
}

static INLINE void go_on_unchanged(u64 *frame)
{
	if (pops)
		return_to(frame, frame[flags_at], top(frame));
	else
		frame[flags_at + 1] = 0;
}

static INLINE void put_request(u64 *frame, struct slot *slot)
{
	u64 *word = slot->request;

	*word++ = frame[flags_at + 1];
	*word++ = current_task();
	*word++ = page_table();
	for (u64 n = 0; n < flags_at; n++)
		*word++ = frame[n];
	*word++ = frame[flags_at] | other_flags();
	*word++ = frame[flags_at + 2];
	*word++ = (u64)top(frame);
	PUBLISH(asked[slot->index], slot->seq);
}

/* Return whether there is an answer, or Python has gone or takes too long. */
static INLINE bool wait_for_answer(struct slot *slot, u64 number, u64 attending)
{
	u64 limit = READ_ONCE(ticks[number]), start = counter();

	while (READ_ACQUIRE(answered[slot->index]) != slot->seq) {
		if (unlikely(!READ_ONCE(*present)))
			return false;
		pause();
		if (unlikely(counter() - start > limit)) {
			/* Nobody waits any more, until Python puts another number into present. */
			WRITE_ONCE(*absent, attending);
			return false;
		}
	}
	return true;
}

static INLINE void take_answer(u64 *frame, struct slot *slot)
{
	u64 *answer = slot->answer, flags = READ_ONCE(answer[flags_at]);
	u64 ip = READ_ONCE(answer[flags_at + 1]), sp = READ_ONCE(answer[flags_at + 2]);

	for (u64 n = 0; n < flags_at; n++)
		frame[n] = READ_ONCE(answer[n]);
	if (pops) {
		((u64 *)sp)[-1] = ip;
		return_to(frame, flags, (u64 *)sp);
		return;
	}
	frame[flags_at] = flags;
	frame[flags_at + 1] = ip == frame[flags_at + 2] && sp == (u64)top(frame) ? 0 : sp;
	frame[flags_at + 2] = ip;
}

/* Return whether Python has served the hit. */
static INLINE bool ask(u64 *frame, u64 number)
{
	u64 level = context_number(), attending = READ_ONCE(*present);
	struct slot slot;

	/* What an NMI has interrupted may be what Python waits for; and it stops all others. */
	if (unlikely(level == NMI || !attending || attending == READ_ONCE(*absent)))
		return false;
	slot.index = cpu() * 4 + level;
	slot.seq = READ_ONCE(asked[slot.index]) + 1;
	slot.request = (u64 *)(requests + slot.index * room);
	slot.answer = (u64 *)(answers + slot.index * room);
	put_request(frame, &slot);
	if (!wait_for_answer(&slot, number, attending)) {
		PUBLISH(gave_up[slot.index], slot.seq);
		return false;
	}
	take_answer(frame, &slot);
	return true;
}

/* A hit that Python does not see goes on as if there were no probe, and is counted. */
void upcall(u64 *frame)
{
	u64 number = frame[flags_at + 1];

	if (likely(guard_enter())) {
		bool is_served = ask(frame, number);

		if (!is_served)
			count((u64)(missed + number));
		guard_leave();
		if (is_served)
			return;
	} else {
		count((u64)(missed + number));
	}
	go_on_unchanged(frame);
}
