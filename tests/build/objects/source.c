// Compiled with debug information: lines, inlined functions, variables and where they live.
struct thing {
	int id;
	char name[16];
};

struct flags {
	unsigned int low : 3;
	int mode;
};

extern int outside(const void *what, unsigned long count);

int counter = 5;

static inline __attribute__((always_inline)) int twice(int value)
{
	int doubled = value * 2;

	return outside(&counter, (unsigned long)doubled) + doubled;
}

int looks(struct thing *thing, const char *text, unsigned short count)
{
	struct flags flags = { .mode = count };
	int sum = thing->id;

	if (outside(&flags, count))
		return -1;
	sum += twice(count);
	for (int at = 0; at < count; at++) {
		sum += outside(text + at, 1);
		sum += outside(thing->name, 2);
	}
	return twice(sum) + flags.mode;
}

int plain(long number)
{
	return (int)number;
}
