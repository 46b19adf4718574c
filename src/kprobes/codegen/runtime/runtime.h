/*
 * Guest-side runtime: what its parts share.
 *
 * Each part is compiled to LLVM IR when it is changed (`make runtime`), and that IR is a piece of
 * the module of the code that needs it. Only there the architecture, the kernel and the plan are
 * known: what is declared here and in the parts, and defined nowhere, is defined then, as constants
 * and inlined functions (codegen/runtime.py). So a part has no #ifdef, no
 * sizeof(long), and no number that depends on a target.
 *
 * The code runs in any context, NMIs included, on stacks that have no red zone, and must not call
 * into the guest, use vector registers, or read memory that can fault.
 */
#ifndef RUNTIME_H
#define RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

/* A piece of a probe's straight line. */
#define INLINE __attribute__((always_inline))

/*
 * What a hit seldom comes to: with a convention that keeps the caller's registers, so that they are
 * not saved where it does not. On arm64 the entry code has saved all of them before, and the
 * convention is C's.
 */
#define RARE __attribute__((noinline, preserve_most))

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* Memory that other CPUs change meanwhile: read once, and written whole. */
#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))

/* Read before everything after it: what another CPU has published with it is seen then. */
#define READ_ACQUIRE(x) __atomic_load_n((const volatile __typeof__(x) *)&(x), __ATOMIC_ACQUIRE)

/* Written after everything before it, for readers on other CPUs and for Python. */
#define PUBLISH(x, value) __atomic_store_n(&(x), value, __ATOMIC_RELEASE)

#endif
