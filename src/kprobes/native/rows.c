/*
 * Rows of debug information's line tables that are of some lines of a file: headers are in most of
 * a kernel's 2,000 tables, which have 5 million rows.
 */
#include "native.h"

/* dwarf/rows.py makes it. */
struct rows {
	/*
	 * libdw's dwarf_getsrcfiles, dwarf_filesrc, dwarf_getsrclines, dwarf_onesrcline,
	 * dwarf_lineaddr, dwarf_lineno, dwarf_linesrc, dwarf_linebeginstatement,
	 * dwarf_lineendsequence.
	 */
	i32 (*files)(void *unit, void **files, u64 *count);
	const u8 *(*file)(void *files, u64 number, void *, void *);
	i32 (*lines)(void *unit, void **lines, u64 *count);
	void *(*line)(void *lines, u64 number);
	i32 (*addr)(void *line, u64 *addr);
	i32 (*number)(void *line, i32 *number);
	const u8 *(*source)(void *line, void *, void *);
	i32 (*begins)(void *line, u8 *does);
	i32 (*ends)(void *line, u8 *does);
	/* The end of the file's path, how long that is, and its lines. */
	const u8 *wanted;
	u64 length;
	i64 first, last;
	/* The rows, as many as there is room for; how many there are. */
	struct row { u64 addr; const u8 *file; i64 line; } *found;
	u64 room, count;
};

/* Whether a path ends with the wanted one's parts. */
static INLINE bool is_wanted(const struct rows *rows, const u8 *path)
{
	u64 size = 0;

	if (!path)
		return false;
	while (path[size])
		size++;
	if (size < rows->length || (size > rows->length && path[size - rows->length - 1] != '/'))
		return false;
	for (u64 n = 0; n < rows->length; n++)
		if (path[size - rows->length + n] != rows->wanted[n])
			return false;
	return true;
}

static INLINE bool is_same(const u8 *a, const u8 *b)
{
	for (; a && b && a != b && *a == *b; a++, b++)
		if (!*a)
			return true;
	return a == b;
}

/* Find those of a unit at which a line's code begins. */
i64 rows_find(struct rows *rows, void *unit)
{
	const u8 *before = NULL, *known = NULL;
	bool is_known = false, is_ended = true, has = false;
	i64 line_before = 0;
	void *table;
	u64 count;

	if (rows->files(unit, &table, &count))
		return 0;
	for (u64 n = 0; n < count && !has; n++)
		has = is_wanted(rows, rows->file(table, n, NULL, NULL));
	if (!has || rows->lines(unit, &table, &count))
		return 0;
	for (u64 n = 0; n < count; n++) {
		void *line = rows->line(table, n);
		i32 number = 0;
		u8 begins = 0, ends = 0;

		rows->number(line, &number);
		rows->begins(line, &begins);
		rows->ends(line, &ends);
		const u8 *source = rows->source(line, NULL, NULL);
		if (source != known)
			known = source, is_known = is_wanted(rows, source);
		if (begins && number && !ends && is_known && number >= rows->first && number <= rows->last &&
		    (is_ended || number != line_before || !is_same(source, before))) {
			if (rows->count < rows->room) {
				struct row *row = &rows->found[rows->count];

				rows->addr(line, &row->addr);
				row->file = source, row->line = number;
			}
			rows->count++;
		}
		before = source, line_before = number, is_ended = ends;
	}
	return 0;
}
