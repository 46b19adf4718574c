/*
 * Work on many rows at once, for the machine that the tracer runs on: what its parts share.
 *
 * Each part is compiled to LLVM IR when it is changed (`make runtime`); LLVM compiles that for the
 * machine when a part is first asked for (native/library.py). Nothing here allocates or fails: who
 * calls has made room, and has checked all numbers. inlined.c and rows.c call libdw.
 */
#ifndef NATIVE_H
#define NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

#define INLINE __attribute__((always_inline))

/* Numbers that stand anywhere. */
struct any16 { u16 value; } __attribute__((packed));
struct any32 { u32 value; } __attribute__((packed));
struct any64 { u64 value; } __attribute__((packed));

#define U16_AT(place) (((const struct any16 *)(place))->value)
#define U32_AT(place) (((const struct any32 *)(place))->value)
#define U64_AT(place) (((const struct any64 *)(place))->value)

#endif
