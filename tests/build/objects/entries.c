/* What tests/build/objects.py has compiled in many ways: entries of functions. */
int other(int);
__attribute__((noinline)) static int leaf(int a) { return a * 3; }
int work(int a) { return other(a) + leaf(a) + 1; }
__attribute__((cold)) int rare(int a) { return other(a) * 7; }
__attribute__((no_instrument_function)) int plain(int a) { return leaf(a) + 2; }
int (*pointer)(int) = work;
