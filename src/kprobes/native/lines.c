/*
 * Lines of text, made of columns: what a %-format makes of each row, one after the other.
 *
 *	b"%b [%03d] got=%d\n"		the pieces of a line
 *	  | |  |   |    |  |
 *	  | |  |   |    |  literal
 *	  | |  |   |    number: of the row
 *	  | |  |   literal
 *	  | |  number, three digits at least
 *	  | literal
 *	  text: of the row, or of the row's code
 */
#include "native.h"

enum kind { LITERAL, DECIMAL, HEX, TEXT };

/* native/lines.py makes them, and has their offsets. */
struct piece {
	u32 kind;
	/* Of a number: its bytes, whether it has a sign, and how many characters it has at least. */
	u32 size, is_signed, width;
	/* What is in front of one that has fewer: blanks, or zeros after its sign. */
	u32 is_zeroed, unused;
	/* Numbers, or the codes of texts (i32); from one row's to the next one's. NULL: texts of rows. */
	const u8 *rows;
	i64 stride;
	/* All texts, and where each ends; a literal, and its length. */
	const u8 *bytes;
	const i64 *ends;
	i64 length;
};

static INLINE u8 *copy(u8 *to, const u8 *from, i64 length)
{
	for (; length >= 8; length -= 8, from += 8, to += 8)
		((struct any64 *)to)->value = U64_AT(from);
	for (; length > 0; length--)
		*to++ = *from++;
	return to;
}

static INLINE u64 unsigned_at(const u8 *place, u32 size)
{
	switch (size) {
	case 1:
		return *place;
	case 2:
		return U16_AT(place);
	case 4:
		return U32_AT(place);
	default:
		return U64_AT(place);
	}
}

/* The digits of a number, to the left of ``end``; where they begin. */
static INLINE u8 *decimal(u8 *end, u64 number)
{
	while (number >= 10) {
		u64 rest = number / 10;

		*--end = '0' + (u8)(number - rest * 10);
		number = rest;
	}
	*--end = '0' + (u8)number;
	return end;
}

static INLINE u8 *hex(u8 *end, u64 number)
{
	do {
		u8 digit = number & 0xf;

		*--end = digit < 10 ? '0' + digit : 'a' - 10 + digit;
		number >>= 4;
	} while (number);
	return end;
}

/* The longest number is -9223372036854775808. */
#define DIGITS 24

static INLINE u8 *number(u8 *to, const struct piece *piece, u64 row)
{
	u64 value = unsigned_at(piece->rows + (i64)row * piece->stride, piece->size);
	u32 unused = 64 - 8 * piece->size;
	bool is_negative = piece->is_signed && (i64)(value << unused) < 0;
	u8 digits[DIGITS], *begin;
	i64 blanks;

	if (is_negative)
		value = -(u64)((i64)(value << unused) >> unused);
	begin = piece->kind == HEX ? hex(digits + DIGITS, value) : decimal(digits + DIGITS, value);
	blanks = (i64)piece->width - (digits + DIGITS - begin) - is_negative;
	if (!piece->is_zeroed)
		for (; blanks > 0; blanks--)
			*to++ = ' ';
	if (is_negative)
		*to++ = '-';
	for (; blanks > 0; blanks--)
		*to++ = '0';
	return copy(to, begin, digits + DIGITS - begin);
}

static INLINE u8 *text(u8 *to, const struct piece *piece, u64 row)
{
	i64 index = (i64)row, begin;

	if (piece->rows)
		index = (i32)U32_AT(piece->rows + index * piece->stride);
	begin = index ? piece->ends[index - 1] : 0;
	return copy(to, piece->bytes + begin, piece->ends[index] - begin);
}

/* Write a line of each row, and where it ends; return where all end. */
i64 lines_format(const struct piece *pieces, u64 count, u64 rows, u8 *to, i64 *ends)
{
	u8 *at = to;

	for (u64 row = 0; row < rows; row++) {
		for (const struct piece *piece = pieces; piece < pieces + count; piece++) {
			if (piece->kind == LITERAL)
				at = copy(at, piece->bytes, piece->length);
			else if (piece->kind == TEXT)
				at = text(at, piece, row);
			else
				at = number(at, piece, row);
		}
		ends[row] = at - to;
	}
	return at - to;
}

/* Lines that were made by batches. */
struct lines {
	const u8 *bytes;
	const i64 *ends;
	/* How many of them are taken. */
	i64 taken;
};

/* Put lines into an order: of each row, whose next line it is. */
i64 lines_order(struct lines *lines, const u16 *which, u64 rows, u8 *to)
{
	u8 *at = to;

	for (u64 row = 0; row < rows; row++) {
		struct lines *own = lines + which[row];
		i64 begin = own->taken ? own->ends[own->taken - 1] : 0;

		at = copy(at, own->bytes + begin, own->ends[own->taken++] - begin);
	}
	return at - to;
}
