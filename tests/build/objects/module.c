// A module's parts: what stays, what is only there while it begins, and what each CPU has.
#define INIT __attribute__((section(".init.text"), noinline))
#define PER_CPU __attribute__((section(".data..percpu")))
#define FADES __attribute__((section(".init.data")))

extern int outside(const void *what, int count);

enum state { IDLE, BUSY };

static int limit = 5;
static enum state state = BUSY;
static int start FADES = 7;
static long calls PER_CPU = 1;
static short list[4] = { 1 };
static int grid[2][3] = { { 1 } };

static inline __attribute__((always_inline)) int bounded(int value)
{
	int most = limit;

	while (value > most)
		value = outside(&limit, value);
	return value;
}

int serves(const char *name, int count)
{
	int got = bounded(count);

	calls++;
	state = got & 1;
	return outside(list, grid[0][got & 1]) + outside(name, list[got & 3]);
}

INIT int begins(int count)
{
	return outside(&start, bounded(count));
}
